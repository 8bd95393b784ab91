"""``hetero bench placement``: how long plans of layers take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("placement")(placement)


def placement(
    random: Annotated[
        list[int] | None,
        typer.Option(help="Also plan a random cluster of so many nodes in several regions."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    record: Annotated[
        bool, typer.Option(help="Write the times to data/measured/timings.csv.")
    ] = False,
) -> None:
    """Measure the planner of layer placements on Helix's clusters: flow, bound, elapsed time."""
    from hetero import timings
    from hetero.bench import placement as module
    from hetero.cli.options import to_json

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = module.bench(tuple(random or ()), say)
    say("")
    if record:
        timings.record(time for one in found for time in one.timings())
    print(to_json(module.record(found)) if as_json else module.table(found), end="")
    if not as_json:
        print()
