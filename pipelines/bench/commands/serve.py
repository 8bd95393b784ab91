"""``hetero bench serve``: what the live dispatcher adds to a request."""

from __future__ import annotations

import sys
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
    soak: Annotated[
        int | None,
        typer.Option(min=100, help="Only send so many requests and watch the dispatcher's memory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    record: Annotated[
        bool, typer.Option(help="Write the times to data/measured/timings.csv.")
    ] = False,
) -> None:
    """Measure time and processor that the dispatcher adds, paired against the engine itself.

    Takes about a minute on two idle cores: CPU per request and per streamed chunk, added median and
    P99 of the time to the first token, between tokens and to the end, streams held at once, and
    memory. --soak 100000 instead sends so many requests and prints the memory on the way.
    """
    from hetero import timings
    from hetero.apps.cli.options import to_json
    from pipelines.bench import serve as benches

    if soak is not None:
        found = benches.soak(soak, progress=lambda line: print(line, file=sys.stderr, flush=True))
    else:
        found = benches.bench(
            rate_rps=rate, seconds=seconds, tokens=tokens, streams=streams, requests=requests
        )
    if record:
        timings.record(found.timings)
    print(to_json(found.record()) if as_json else found, end="" if as_json else "\n")
