"""What a sweep costs beside the notebook it runs: overhead per point, and speed-up by workers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero.display import Table
from hetero.errors import HeteroError
from pipelines.bench.measured import Measured, stopwatch
from pipelines.sweep import point, run

_THETAS = 20
# A new process, as a worker is; its first point pays for the imports, and is not counted.
_CHILD = "import sys; from pipelines.bench import sweep; sweep.alone(*sys.argv[1:])"


@dataclass(frozen=True, slots=True, repr=False)
class SweepBench(Measured):
    """Cost of a sweep.

    Attributes
    ----------
    points, alone
        Points of the sweep, and how many of them one warm process ran for comparison.
    notebook_s, overhead_s
        Mean time per point inside the notebook's cells, and beside them: papermill, folders,
        parameters [s].
    elapsed_s, workers
        Whole sweep, start of the workers included [s], and their number.
    """

    points: int
    alone: int
    notebook_s: float
    overhead_s: float
    elapsed_s: float
    workers: int

    @property
    def speed_up(self) -> float:
        """Time of one warm process for all points, over the time of the sweep."""
        return self.points * (self.notebook_s + self.overhead_s) / self.elapsed_s

    def record(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self) | {"speed_up": self.speed_up}

    def table(self) -> Table:
        """Figures with their units."""
        return Table.figures(
            "Sweep over theta (notebook 04)",
            ("points", self.points, ""),
            ("notebook cells, per point", self.notebook_s, "s"),
            ("overhead, per point", self.overhead_s, "s"),
            (f"sweep on {self.workers} workers", self.elapsed_s, "s"),
            ("speed-up over one warm process", self.speed_up, "x"),
            notes=[f"One process ran {self.alone} points for comparison; elapsed times."],
        )


def bench(*, points: int = 200, alone: int = 40, workers: int = 0) -> SweepBench:
    """Run a sweep over theta and seeds, and some of its points in one process.

    Parameters
    ----------
    points
        Points of the sweep: values of theta times seeds.
    alone
        Points that one process runs.
    workers
        As of :func:`pipelines.sweep.run.sweep`.
    """
    seeds = -(-points // _THETAS)
    thetas = [round(0.4 * k, 3) for k in range(min(points, _THETAS))]
    sweep = {
        "stage": "request_scheduling",
        "profile": "smoke",
        "grid": {"thetas": thetas},
        "repeat": {"seeds": list(range(seeds))},
        "measures": {
            "throughput": {
                "table": "theta",
                "column": "throughput [tokens/s]",
                "where": {"predictor": "normal (paper)"},
            }
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        file.write_text(json.dumps(sweep), encoding="utf-8")
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(file), str(Path(folder) / "alone"), str(alone)],
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise HeteroError(
                f"The comparison did not run: {child.stderr.strip()[-300:]}",
                resolve="run `hetero sweep pipelines/sweeps/theta.yaml` to see whether it does.",
            )
        compared = json.loads(child.stdout.splitlines()[-1])
        elapsed: list[float] = []
        with stopwatch(elapsed, time.perf_counter):
            swept = run.sweep(file, workers=workers, folder=Path(folder) / "all", show=None)
        run.check(swept)
    return SweepBench(
        len(swept.frame),
        alone,
        compared["notebook_s"],
        compared["overhead_s"],
        elapsed[0],
        max(workers or os.cpu_count() or 1, 2),
    )


def alone(file: str, folder: str, count: str) -> None:
    """Run some points in this process, and print the mean times inside and beside the cells."""
    from pipelines.sweep import spec

    jobs = run.jobs(spec.read(Path(file)), Path(folder))[: int(count) + 1]
    inside: list[float] = []
    whole: list[float] = []
    for part in ("points", "failed", "own"):
        (Path(folder) / part).mkdir(parents=True)
    with _cells(inside):
        for job in jobs:
            with stopwatch(whole, time.perf_counter):
                done = point.run(job, str(Path(folder) / "own"))
            if done != "done":
                raise HeteroError(job.failure.read_text(encoding="utf-8"), resolve="mend it.")
            if len(whole) == 1:  # paid for the imports
                inside.clear()
    notebook_s = sum(inside) / (len(jobs) - 1)
    overhead_s = sum(whole[1:]) / (len(jobs) - 1) - notebook_s
    print(json.dumps({"notebook_s": notebook_s, "overhead_s": overhead_s}))


@contextlib.contextmanager
def _cells(seconds: list[float]) -> Iterator[None]:
    """Note how long every cell runs."""
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell
    run_cell = shell.run_cell

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return run_cell(*args, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    shell.run_cell = timed
    try:
        yield
    finally:
        shell.run_cell = run_cell
