"""What ``hetero bench live`` measured: real engines behind every router, beside the simulator.

``data/measured/live.csv`` has one row per run, measured or simulated, and
``data/measured/live_profile.csv`` the rounds of the profiles that the simulator's step times are
fitted to. Notebooks read both, so that no notebook times anything.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero import latency, paths
from hetero.apps import profiling
from hetero.errors import DataError, EndpointError
from hetero.files import writing
from hetero.intervals import interval

PERCENTILES: Final = (10, 25, 50, 75, 90, 99)
COLUMNS: Final = (
    *("case", "kind", "repeat", "origin", "requests", "span_s", "output_tps", "requests_per_s"),
    *(f"ttft_p{p}_s" for p in PERCENTILES),
    *(f"tpot_p{p}_s" for p in PERCENTILES),
    *("first_engine_share", "engine_cpu_share", "host_cpu_share", "other_cpu_share"),
    *("machine", "date"),
)
PROFILE_EXTRA: Final = ("engine", "parameters")
_COMMAND = "hetero bench live --record"


def runs_frame(path: Path | None = None) -> pd.DataFrame:
    """Rows of ``live.csv``.

    Columns: the case (a router, or an engine alone), its kind (``router`` or ``alone``), the
    repeat, the origin (``real`` or ``simulated``), requests, first arrival to last finish [s],
    output tokens and requests per second of that time, percentiles of TTFT and TPOT [s], share of
    the requests at the first engine; and, where it is real, CPU time of both engines over twice
    the span, that of dispatcher and client, and that of everything else on these two cores.

    Raises
    ------
    DataError
        If the file is missing or has other columns.
    """
    return _read(path or paths.data("measured", "live.csv"), COLUMNS)


def profiles_frame(path: Path | None = None) -> pd.DataFrame:
    """Rows of ``live_profile.csv``: rounds of ``hetero profile`` with the engine they are of.

    Raises
    ------
    DataError
        If the file is missing or lacks the columns of the engine.
    """
    return _read(path or paths.data("measured", "live_profile.csv"), PROFILE_EXTRA)


def record(found: pd.DataFrame, rounds: pd.DataFrame) -> tuple[Path, Path]:
    """Write both files; returns their paths."""
    files = paths.data("measured", "live.csv"), paths.data("measured", "live_profile.csv")
    for file, frame in zip(files, (found, rounds), strict=True):
        with writing(file, force=True) as part:
            frame.to_csv(part, index=False, lineterminator="\n", float_format="%.6g")
    return files


def cases_frame(
    found: pd.DataFrame, kind: str = "router", quantity: str = "output_tps"
) -> pd.DataFrame:
    """Mean of a quantity over the repeats per case, real and simulated, with 95 % intervals.

    Columns: the case, repeats, means and ends of the intervals, and the error of the simulation of
    the mean [%].
    """
    rows = []
    for case, of in found[found["kind"] == kind].groupby("case", sort=False):
        both = of.pivot_table(index="repeat", columns="origin", values=quantity)
        real, simulated = both["real"].to_numpy(), both["simulated"].to_numpy()
        means = (real.mean(), *interval(real), simulated.mean(), *interval(simulated))
        rows.append((case, len(real), *means, 100.0 * (simulated.mean() / real.mean() - 1.0)))
    ends = [f"{origin}{end}" for origin in ("real", "simulated") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["case", "repeats", *ends, "error_percent"])


def gains_frame(found: pd.DataFrame, baseline: str, quantity: str = "output_tps") -> pd.DataFrame:
    """Ratio of each other router to a baseline, paired by repeat, with 95 % intervals."""
    rows = []
    part = found[found["kind"] == "router"]
    table = part.pivot_table(index="repeat", columns=["origin", "case"], values=quantity)
    for origin in ("real", "simulated"):
        for case in dict.fromkeys(part["case"]):
            if case != baseline:
                ratio = (table[origin][case] / table[origin][baseline]).to_numpy()
                rows.append((case, origin, ratio.mean(), *interval(ratio)))
    return pd.DataFrame(rows, columns=["case", "origin", "ratio", "low", "high"])


def pairs_frame(found: pd.DataFrame, quantity: str = "output_tps") -> pd.DataFrame:
    """Every pair of routers: which one the engines and the simulator put first.

    Columns: both names, real and simulated mean of the first over the second less one [%],
    whether the repeats tell the real pair apart (95 % interval of the paired differences), and
    whether the simulator has the same order.
    """
    real, simulated = samples(found, "real", quantity), samples(found, "simulated", quantity)
    rows = []
    for a, b in combinations(real, 2):
        low, high = interval(real[a] - real[b])
        gaps = [100.0 * (float(one[a].mean() / one[b].mean()) - 1.0) for one in (real, simulated)]
        rows.append((a, b, *gaps, not low <= 0.0 <= high, gaps[0] * gaps[1] > 0))
    columns = ["first", "second", "real_percent", "simulated_percent", "told_apart", "same_order"]
    return pd.DataFrame(rows, columns=columns)


def fits(rounds: pd.DataFrame) -> dict[str, profiling.Fitted]:
    """Step times fitted to the rounds of each engine, as ``hetero profile --fit`` fits them."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            str(name): profiling.fitted(_own(rounds, name, folder))
            for name in dict.fromkeys(rounds["engine"])
        }


def _own(rounds: pd.DataFrame, name: str, folder: str) -> Path:
    """The rounds of one engine as a file of their own."""
    file = Path(folder) / f"{name}.csv"
    rounds[rounds["engine"] == name].drop(columns=list(PROFILE_EXTRA)).to_csv(file, index=False)
    return file


def step_errors_frame(rounds: pd.DataFrame) -> pd.DataFrame:
    """Every measured step beside its fitted time.

    Columns: engine, phase, batch, tokens per request, measured and fitted time [s].
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, fit in fits(rounds).items():
            measured = latency.read_csv(_own(rounds, name, folder))
            for phase in ("prefill", "decode"):
                part = measured.phase(phase)
                total = part.batch * part.length_tokens
                if phase == "prefill":
                    times = fit.step.seconds(total, 0, 0.0, total * part.length_tokens / 2)
                else:
                    times = fit.step.seconds(part.batch, part.batch.astype(int), total, 0.0)
                each = zip(part.batch, part.length_tokens, part.seconds, times, strict=True)
                rows += [(name, phase, *row) for row in each]
    columns = ["engine", "phase", "batch", "tokens", "measured_s", "fitted_s"]
    return pd.DataFrame(rows, columns=columns)


def measure() -> None:
    """Run ``hetero bench live --record``, which takes up to eight minutes and two idle cores.

    Raises
    ------
    EndpointError
        If it fails; its own words stand above.
    """
    run = [sys.executable, "-c", "from hetero.apps.cli import main; main()", *_COMMAND.split()[1:]]
    if subprocess.run(run, check=False).returncode:
        raise EndpointError(
            f"`{_COMMAND}` failed.", resolve="run it in a terminal and read what it says."
        )


def samples(
    found: pd.DataFrame, origin: str, quantity: str = "output_tps"
) -> dict[str, NDArray[np.float64]]:
    """Values over the repeats by router, as :func:`hetero.intervals.ranking` takes them."""
    ordered = found[(found["kind"] == "router") & (found["origin"] == origin)].sort_values("repeat")
    return {str(case): np.asarray(of[quantity]) for case, of in ordered.groupby("case", sort=False)}


def _read(file: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    if not file.is_file():
        raise DataError("The file is missing.", path=file, resolve=f"measure it with `{_COMMAND}`.")
    found = pd.read_csv(file)
    if missing := [name for name in columns if name not in found]:
        raise DataError(
            f"The column '{missing[0]}' is missing.",
            path=file,
            resolve=f"measure it again with `{_COMMAND}`.",
        )
    return found
