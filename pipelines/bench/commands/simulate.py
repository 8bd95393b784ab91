"""``hetero bench simulate``: requests per CPU second."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("simulate")(simulate)


def simulate(
    largest: Annotated[
        int, typer.Option(min=100, help="Requests of the largest runs.")
    ] = 1_000_000,
    many: Annotated[int, typer.Option(min=8, help="Replicas of the larger fleet.")] = 1_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the simulator: speed at 70 % load and overload, memory, decisions, start.

    CPU time of one core; the load is a share of the saturation found by simulation. Published
    simulators stand beside it as they were measured on the same trace.
    """
    from hetero import timings
    from pipelines.bench.simulator import bench

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = bench(largest=largest, many=many, repeats=repeats, progress=say)
    say("")
    if record:
        timings.record(
            timings.Timing.here(
                f"routers.decision.{router}",
                micros * 1e-6,
                command="hetero bench simulate --record",
                statistic="median",
                repeats=repeats,
                clock="wall",
            )
            for router, micros in found.decision_us.items()
        )
    if as_json:
        print(options.to_json(found.record()), end="")
    else:
        print("\n\n".join(str(table) for table in found.tables()))
