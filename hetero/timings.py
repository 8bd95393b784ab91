"""Times that benchmarks measured: data with a machine and a date, as any other measurement.

Results must not change from run to run, so no notebook times anything. Where a published claim is
about time, ``hetero bench NAME --record`` writes what it measured to
``data/measured/timings.csv``, and the notebook reads it from there.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hetero import paths
from hetero.errors import DataError
from hetero.files import writing
from hetero.rows import read_records, read_rows


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured time.

    Attributes
    ----------
    key
        What was timed, such as ``"islands.divider.batch4"``.
    seconds
        The statistic over the repeats [s].
    statistic
        ``"median"``, ``"best"``, ``"worst"`` or ``"single"``.
    repeats
        Number of runs behind it.
    clock
        ``"cpu"`` for the CPU time of the process, ``"wall"`` for elapsed time.
    command
        Command that measured it.
    machine
        Processor and number of cores.
    date
        Day of the measurement, ISO 8601.
    """

    key: str
    seconds: float
    statistic: str
    repeats: int
    clock: str
    command: str
    machine: str
    date: str

    @classmethod
    def here(
        cls,
        key: str,
        seconds: float,
        *,
        command: str,
        statistic: str = "single",
        repeats: int = 1,
        clock: str = "cpu",
    ) -> Timing:
        """A time measured on this machine today.

        Examples
        --------
        >>> Timing.here("example", 0.25, command="hetero bench example").clock
        'cpu'
        """
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(key, seconds, statistic, repeats, clock, command, _machine(), today)

    @property
    def note(self) -> str:
        """How it was measured, as the note of a claim."""
        runs = f"{self.statistic} of {self.repeats} runs" if self.repeats > 1 else "one run"
        return (
            f"{self.clock} time, {runs} of `{self.command}` on {self.machine}, {self.date}; "
            "recorded by the benchmark, not by the notebook"
        )


_COLUMNS = tuple(field.name for field in fields(Timing))


def timings(path: Path | None = None) -> dict[str, Timing]:
    """Every recorded time by its key.

    Raises
    ------
    DataError
        If the file lacks a column or holds a value that is no number.
    """
    file = path if path is not None else paths.data("measured", "timings.csv")
    if (columns := tuple(map(str, read_rows(file).frame))) != _COLUMNS:
        raise DataError(
            f"The columns are {', '.join(columns)}.",
            path=file,
            resolve=f"write {', '.join(_COLUMNS)}, as `hetero bench --record` does.",
        )
    found = {}
    for k, row in enumerate(read_records(file, Timing)):
        if len(row) < len(_COLUMNS):
            what = f"The row needs {len(_COLUMNS)} cells."
            rule = "measure it again with `hetero bench --record`."
            raise DataError(what, path=file, line=k + 2, resolve=rule)
        found[str(row["key"])] = Timing(**row)  # type: ignore[arg-type]
    return found


def timing(key: str) -> Timing:
    """One recorded time.

    Raises
    ------
    DataError
        If nobody recorded it.
    """
    known = timings()
    if key not in known:
        raise DataError(
            f"No time is recorded for '{key}'.",
            path=paths.data("measured", "timings.csv"),
            resolve="run the benchmark that measures it with --record.",
        )
    return known[key]


def record(measured: Iterable[Timing], path: Path | None = None) -> Path:
    """Write times to the file, replacing those of the same keys; returns its path."""
    file = path if path is not None else paths.data("measured", "timings.csv")
    known = timings(file) if file.exists() else {}
    known |= {one.key: one for one in measured}
    with (
        writing(file, force=True) as part,
        part.open("w", encoding="utf-8", newline="") as lines,
    ):
        writer = csv.DictWriter(lines, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for key in sorted(known):
            writer.writerow(asdict(known[key]) | {"seconds": f"{known[key].seconds:.4g}"})
    return file


def _machine() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {count} cores"


def processor() -> str:
    """Model of this machine's processor, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
