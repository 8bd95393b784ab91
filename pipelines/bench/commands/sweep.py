"""``hetero bench sweep``: what a sweep costs beside the notebook it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("sweep")(sweep)


def sweep(
    points: Annotated[int, typer.Option(min=2, help="Points of the sweep over theta.")] = 200,
    alone: Annotated[
        int, typer.Option(min=2, help="Points that one process runs for comparison.")
    ] = 40,
    workers: Annotated[int, typer.Option(min=0, help="Processes at once; 0 takes all cores.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Measure the overhead per point and the speed-up by workers, on the sweep over theta."""
    from pipelines.bench.sweep import bench

    found = bench(points=points, alone=alone, workers=workers)
    print(options.to_json(found.record()) if as_json else found)
