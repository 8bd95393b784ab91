"""``hetero bench pipelines``: simulated seconds per second over layers."""

from __future__ import annotations

from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("pipelines")(pipelines)


def pipelines(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the pipeline simulator: 660 s of Helix's clusters, kept full by its scheduler.

    CPU time of one core, placement and requests at hand, kernels compiled.
    """
    from hetero import timings
    from pipelines.bench.pipelines import bench

    found = bench(repeats=repeats)
    if record:
        timings.record(
            timings.Timing.here(
                f"pipelines.{row.setting}",
                row.seconds,
                command="hetero bench pipelines --record",
                statistic="best",
                repeats=repeats,
                clock="cpu",
            )
            for row in found.rows
        )
    if as_json:
        print(options.to_json(found.record()), end="")
    else:
        print(found.table())
