"""``hetero sweep``: one notebook over many parameter values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file, as pipelines/sweeps/theta.yaml.")],
    on: Annotated[
        str, typer.Option(help="loky (this machine), dask:ADDRESS or ray:ADDRESS.")
    ] = "loky",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes at once, at least 2 here; 0 takes all.")
    ] = 0,
    output: Annotated[
        Path | None, options.output("Folder; by default results/sweeps/NAME.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run every point that is not finished yet, and collect all of them.

    Each point is a run of the notebook in a folder of its own; a stopped sweep goes on with the
    same command. Points that failed are listed, and tried again by the next call.
    """
    from pipelines.sweep import run

    found = run.sweep(file, on=on, workers=workers, folder=output)
    if as_json:
        rows = found.frame.to_dict("records")
        failed = [{"file": f, "values": v, "why": w} for f, v, w in found.failed]
        print(options.to_json({"planned": found.planned, "points": rows, "failed": failed}), end="")
    else:
        print(found)
    run.check(found)
