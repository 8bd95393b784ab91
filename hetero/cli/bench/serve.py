"""``hetero bench serve``: what the live dispatcher adds to a request."""

from __future__ import annotations

from typing import Annotated

import typer


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("serve")(serve)


def serve(
    rate: Annotated[float, typer.Option(help="Requests per second each way.")] = 100.0,
    seconds: Annotated[float, typer.Option(help="Length of the paired run [s].")] = 10.0,
    tokens: Annotated[int, typer.Option(min=2, help="Streamed tokens per request.")] = 32,
    streams: Annotated[int, typer.Option(min=1, help="Streams held at once.")] = 1000,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the memory test.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    record: Annotated[
        bool, typer.Option(help="Write the times to data/measured/timings.csv.")
    ] = False,
) -> None:
    """Measure time and processor that the dispatcher adds, paired against the engine itself."""
    from hetero import timings
    from hetero.bench.serve import bench
    from hetero.cli.options import to_json

    found = bench(rate_rps=rate, seconds=seconds, tokens=tokens, streams=streams, requests=requests)
    if record:
        timings.record(found.timings)
    print(to_json(found.record()) if as_json else found, end="" if as_json else "\n")
