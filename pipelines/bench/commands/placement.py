"""``hetero bench placement``: how long plans of layers take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("placement")(placement)


def placement(
    random: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Also plan a random cluster of so many nodes in several regions."),
    ] = None,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the planner of layer placements on Helix's clusters: flow, bound, elapsed time."""
    from hetero import timings
    from pipelines.bench import placement as module

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = module.bench(tuple(random or ()), say)
    say("")
    if record:
        timings.record(time for one in found for time in one.timings())
    print(options.to_json(module.record(found)) if as_json else module.table(found), end="")
    if not as_json:
        print()
