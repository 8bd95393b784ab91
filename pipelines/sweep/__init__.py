"""Sweeps: one notebook over many parameter values, each point kept as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetero import paths
from hetero.errors import require

if TYPE_CHECKING:
    from pipelines.sweep.run import Swept


def load(name: Path | str) -> Swept:
    """What a sweep found when it last ran, by its name in ``pipelines/sweeps`` or by its file.

    Examples
    --------
    >>> from hetero import sweeps
    >>> print(sweeps.load("theta").says[1])
    NVLink, all at once, throughput [tokens/s]: θ = 8 in place of 0 gives +24.8 % (+23.2 to +26.5).
    """
    import pandas as pd

    from pipelines.sweep import run, spec

    file = Path(name)
    file = file if file.suffix else paths.root() / "pipelines" / "sweeps" / f"{file}.yaml"
    found, folder = spec.read(file), paths.results() / "sweeps" / file.stem
    require(
        (folder / "points.csv").is_file(),
        f"Sweep '{file.stem}' has no results in {folder}.",
        resolve=f"run `hetero sweep {file}` first.",
    )
    frame = pd.read_csv(folder / "points.csv")
    return run.Swept(found, file.stem, folder, len(frame), frame)
