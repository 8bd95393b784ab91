"""``hetero bench arena``: what one plan takes every planner."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("arena")(arena)


def arena(
    effort: Annotated[
        Literal["quick", "normal", "thorough"], typer.Option(help="How much planners may try.")
    ] = "quick",
    repeats: Annotated[int, typer.Option(min=1, help="Plans of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the planners of the arena: wall clock of one plan on fleets of 8 to 256 GPUs."""
    from hetero import timings
    from hetero.errors import ParameterError
    from pipelines.bench.arena import bench

    if record and effort != "quick":
        raise ParameterError(
            f"Times of the effort '{effort}' are not recorded, as the arena's notebook reads those "
            "of 'quick'.",
            resolve="leave out --record, or --effort.",
        )

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = bench(effort=effort, repeats=repeats, progress=say)
    say("")
    if record:
        timings.record(one for *_, one in found.rows)
    if as_json:
        print(options.to_json(found.record()), end="")
    else:
        print(found)
