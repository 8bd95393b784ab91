"""``hetero bench islands``: times of the island planners."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("islands")(islands)


def islands(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the median counts.")] = 5,
    iterations: Annotated[int, typer.Option(min=2, help="Batches of each search.")] = 4,
    ax: Annotated[bool, typer.Option(help="Time Ax as well; takes minutes.")] = False,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the island planners: inner program, exact layout, searches by batch size."""
    from hetero import timings
    from pipelines.bench.islands import bench

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = bench(repeats=repeats, iterations=iterations, ax=ax, progress=say)
    say("")
    if record:
        timings.record(timing for _, _, timing in found.rows)
    print(options.to_json(found.record()) if as_json else found, end="" if as_json else "\n")
