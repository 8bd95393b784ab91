"""``hetero bench live``: real engines behind every router, beside the simulator."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("live")(live)


def live(
    repeats: Annotated[int, typer.Option(min=2, help="Runs per router.")] = 5,
    requests: Annotated[int, typer.Option(min=12, help="Requests per run.")] = 80,
    load: Annotated[
        float, typer.Option(help="Arrival rate over what both engines are planned to carry.")
    ] = 1.5,
    alone: Annotated[int, typer.Option(min=2, help="Runs of each engine alone.")] = 3,
    max_minutes: Annotated[
        float, typer.Option(help="No repeat begins that would end later [minutes].")
    ] = 7.5,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="Write data/measured/live.csv and live_profile.csv."),
    ] = False,
) -> None:
    """Profile, plan, serve and replay on two real engines on this machine's processor.

    Starts two Llamas with random weights behind `transformers serve`, each on a core of its own,
    fits their step times, and sends more requests than they carry through `hetero serve` with each
    router; the simulator gets the same requests. Takes up to eight minutes and two idle cores.
    """
    from pipelines.bench.live import bench
    from pipelines.studies import live_data

    found = bench(
        repeats=repeats,
        requests=requests,
        load=load,
        alone=alone,
        max_minutes=max_minutes,
        seed=seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if record:
        live_data.record(found.runs, found.rounds)
    if as_json:
        print(options.to_json(found.runs.to_dict("records")), end="")
    else:
        print(found)
