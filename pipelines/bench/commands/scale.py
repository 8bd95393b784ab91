"""``hetero bench scale``: a day of requests over a large fleet, on one core."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("scale")(scale)


def scale(
    requests: Annotated[int, typer.Option(min=10_000, help="Requests of the day.")] = 10_000_000,
    replicas: Annotated[int, typer.Option(min=2, help="Replicas, of one GPU each.")] = 1_000,
    shards: Annotated[
        int, typer.Option(min=1, help="Shards; a divisor of half the replicas.")
    ] = 10,
    as_json: options.AsJson = False,
) -> None:
    """Measure a sharded replay: CPU time, memory, their slopes, and what 44 million would take."""
    from pipelines.bench.scale import bench

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = bench(count=requests, replicas=replicas, shards=shards, progress=say)
    say("")
    print(options.to_json(found.record()) if as_json else found)
