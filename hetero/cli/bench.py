"""``hetero bench``: how fast this library is here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Measure how fast hetero is on this machine.")
    group.command("simulate")(simulate)
    # Keeps `simulate` a subcommand while it is the only one.
    group.callback()(lambda: None)
    app.add_typer(group, name="bench")


def simulate(
    largest: Annotated[
        int, typer.Option(min=100, help="Requests of the largest runs.")
    ] = 1_000_000,
    many: Annotated[int, typer.Option(min=8, help="Replicas of the larger fleet.")] = 1_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the best counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the simulator: speed at 70 % load and overload, memory, decisions, start.

    CPU time of one core; the load is a share of the saturation found by simulation. Published
    simulators stand beside it as they were measured on the same trace.
    """
    from hetero.bench.simulator import bench
    from hetero.cli.options import to_json

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = bench(largest=largest, many=many, repeats=repeats, progress=say)
    say("")
    if as_json:
        print(to_json(found.record()), end="")
    else:
        print("\n\n".join(str(table) for table in found.tables()))
