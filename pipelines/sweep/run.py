"""Run a sweep file: what is finished is kept, the rest is run, the table and figure are written."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.files import writing
from pipelines import run as stage_run
from pipelines import source
from pipelines.sweep import search, spec, table
from pipelines.sweep.point import Job
from pipelines.sweep.workers import run_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Swept(Shown):
    """Result of a sweep.

    Attributes
    ----------
    frame
        One row per finished point.
    failed
        By point: its parameters and why it failed; the traceback stands in its file.
    """

    spec: spec.Sweep
    name: str
    folder: Path
    planned: int
    frame: pd.DataFrame
    failed: tuple[tuple[str, str, str], ...] = ()

    @property
    def effects(self) -> pd.DataFrame:
        """Mean of every measure over each value of each parameter."""
        return table.effects_frame(self.frame, self.spec)

    @property
    def says(self) -> list[str]:
        """What it supports, a sentence per measure that is compared."""
        return table.sentences(self.effects, self.spec)

    def figure(self) -> Figure:
        """Main effects with their intervals, and below them what they were measured on."""
        from hetero.plots import figures

        drawn, one = table.figure(self.frame, self.spec), self.spec
        told = f"{self.name}: {one.source} traces, {one.profile} profile, {len(self.frame)} points"
        repeats = math.prod(map(len, one.repeat.values()))
        named = f" of {repeats} repeats over {', '.join(one.repeat)}" if one.repeat else ""
        figures.stamp(drawn, told + named)
        return drawn

    def table(self) -> Table:
        """Main effects."""
        effects = self.effects
        columns = (
            Column("parameter"),
            Column("value"),
            Column("measure"),
            Column("mean", "", 5),
            Column("95 % low", "", 5),
            Column("95 % high", "", 5),
            Column("points"),
            *(Column(name, "", 5) for name in effects.columns[7:]),
        )
        notes = [f"{len(self.frame)} of {self.planned} points finished; {self.folder}"]
        notes += self.says
        notes += [
            f"failed: {values}: {why} ({file or 'no traceback'})"
            for file, values, why in self.failed
        ]
        rows = tuple(tuple(row) for row in effects.itertuples(index=False, name=None))
        return Table(f"Sweep {self.name}: main effects", columns, rows, tuple(notes))


def sweep(
    path: Path | str,
    *,
    on: str = "loky",
    workers: int = 0,
    folder: Path | None = None,
    show: bool | None = None,
) -> Swept:
    """Run every point that is not finished, and collect what all of them found.

    Parameters
    ----------
    path
        The sweep file.
    on, workers
        See :func:`pipelines.sweep.workers.run_all`.
    folder
        Where points and tables go; by default ``results/sweeps/NAME`` of the checkout.
    show
        Whether to draw a progress bar; by default where stderr is a terminal.

    Raises
    ------
    SweepError
        If the workers die again and again.
    """
    file = Path(path)
    found = spec.read(file)
    target = (folder or paths.results() / "sweeps" / file.stem).resolve()

    @functools.cache
    def rests_on() -> tuple[Path, str]:
        # Digests of all code and data once, not for every batch of a search.
        return _notebook_and_digest(found)

    def make(points: list[spec.Point]) -> list[Job]:
        return jobs_of(found, points, target, *rests_on())

    if found.search is not None:
        jobs = search.run(found, make, on, workers, show)
    else:
        jobs = make(spec.points(found, file.name))
        run_all(jobs, on=on, workers=workers, show=show)
    return collected(found, file.stem, jobs, target)


def jobs_of(
    found: spec.Sweep, points: list[spec.Point], folder: Path, notebook: Path, rests_on: str
) -> list[Job]:
    """Jobs of points; equal points become one."""
    stage_run.check_names(notebook, found.stage, points[0].parameters)
    jobs = {}
    for point in points:
        key = point.key(rests_on)
        jobs[key] = Job(
            root=str(paths.root()),
            folder=str(folder),
            key=key,
            notebook=str(notebook),
            values=point.parameters | {"profile": found.profile, "source": found.source},
            record={
                "swept": point.swept,
                "repeat": point.repeat,
                "parameters": point.parameters,
                "stage": found.stage,
            },
            limit_s=found.limit_s,
        )
    return list(jobs.values())


def _notebook_and_digest(found: spec.Sweep) -> tuple[Path, str]:
    return source.notebook_path(source.notebook_of(found.stage)), spec.digest(found)


def collected(found: spec.Sweep, name: str, jobs: list[Job], folder: Path) -> Swept:
    """Write the table (Parquet and CSV), the effects and their figure, and return them."""
    frame = table.collect(found, jobs)
    failed = []
    for job in jobs:
        values = json.dumps(job.record["swept"] | job.record["repeat"])
        if job.target.is_dir():
            continue
        try:
            said = json.loads(job.failure.read_text(encoding="utf-8"))
            failed.append((str(job.failure), values, said["why"]))
        except FileNotFoundError:
            failed.append(("", values, "it failed, and another sweep of the folder tries it again"))
    planned = len(jobs) * math.prod(map(len, found.along.values()))
    swept = Swept(found, name, folder, planned, frame, tuple(failed))
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / "points.parquet", force=True) as part:
        frame.to_parquet(part, index=False)
    for content, file in ((frame, "points.csv"), (swept.effects, "effects.csv")):
        with writing(folder / file, force=True) as part:
            content.to_csv(part, index=False, float_format="%.10g", lineterminator="\n")
    with writing(folder / "sentences.txt", force=True) as part:
        part.write_text("".join(f"{line}\n" for line in swept.says), encoding="utf-8")
    if len(frame):
        from hetero.plots import figures

        with (
            writing(folder / "effects.svg", force=True) as svg,
            writing(folder / "effects.png", force=True) as png,
        ):
            figures.save(swept.figure(), svg.with_suffix(""))
            svg.with_suffix(".png").replace(png)
    return swept


def check(found: Swept) -> None:
    """Exit with an error if points failed."""
    if found.failed:
        file, values, why = found.failed[0]
        raise ParameterError(
            f"{len(found.failed)} of {found.planned} points failed, the first with {values}: {why}",
            resolve=(f"read {file} for its traceback, and " if file else "")
            + "run the same command again; finished points are kept.",
        )
