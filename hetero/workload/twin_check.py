"""How close traces drawn from a twin come to the real trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.workload import statistics
from hetero.workload.trace import Trace

#: Measures that a twin must keep, and the largest mean error over the draws.
BARS = {
    "KS distance of input lengths": 0.01,
    "KS distance of output lengths": 0.01,
    "rank correlation of input and output": 0.01,
    "CV of the gaps": 0.03,
    "arrivals per minute": 0.06,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One statistic of the real trace and of the drawn ones.

    Attributes
    ----------
    real
        Value of the real trace; None where the measure is itself a distance to it.
    drawn, drawn_sd
        Mean and standard deviation over the draws.
    error
        Mean over the draws of the absolute error: absolute for correlations, relative otherwise.
    """

    name: str
    unit: str
    real: float | None
    drawn: float
    drawn_sd: float
    error: float

    @property
    def bar(self) -> float | None:
        """Largest error that is accepted, None where none is set."""
        return BARS.get(self.name)

    @property
    def holds(self) -> bool | None:
        """Whether the error keeps within the bar."""
        return None if self.bar is None else self.error <= self.bar


@dataclass(frozen=True, slots=True)
class TwinCheck(Shown):
    """Comparison of a twin with its trace, one row per measure."""

    name: str
    draws: int
    measures: tuple[Measure, ...]

    @property
    def holds(self) -> bool:
        """Whether every measure that has a bar keeps within it."""
        return all(measure.holds is not False for measure in self.measures)

    def error(self, name: str) -> float:
        """Mean error of one measure."""
        return next(measure.error for measure in self.measures if measure.name == name)

    def table(self) -> Table:
        """Real value, mean of the draws, error, bar and whether it holds."""
        columns = (
            Column("measure", of="name"),
            Column("unit"),
            Column("real"),
            Column("twin", of="drawn"),
            Column("sd over draws", of="drawn_sd"),
            Column("mean error", of="error"),
            Column("bar"),
            Column("holds"),
        )
        title = f"Twin of {self.name} against the real trace, mean of {self.draws} draws"
        note = "Errors are absolute for correlations, relative to the real value otherwise."
        return Table.of(title, columns, self.measures, note)

    def to_frame(self) -> pd.DataFrame:
        """One row per measure, as committed in data/twins/checks.csv."""
        frame = pd.DataFrame(
            [asdict(m) | {"bar": m.bar, "holds": m.holds} for m in self.measures]
        ).rename(columns={"name": "measure"})
        frame.insert(0, "twin", self.name)
        frame.insert(1, "draws", self.draws)
        return frame


Value = tuple[str, str, Callable[[Trace], float]]  # name, unit, statistic of one trace
Distance = tuple[str, Callable[[Trace, Trace], float]]  # name, distance of two traces

_CORRELATION = "rank correlation of input and output"

_LENGTH_DISTANCES: tuple[Distance, ...] = (
    (
        "KS distance of input lengths",
        lambda a, b: statistics.ks_distance(a.input_tokens, b.input_tokens),
    ),
    (
        "KS distance of output lengths",
        lambda a, b: statistics.ks_distance(a.output_tokens, b.output_tokens),
    ),
)
_LENGTH_VALUES: tuple[Value, ...] = (
    (_CORRELATION, "", lambda t: statistics.spearman(t.input_tokens, t.output_tokens)),
    ("mean input", "tokens", lambda t: float(t.input_tokens.mean())),
    ("mean output", "tokens", lambda t: float(t.output_tokens.mean())),
    ("p99 input", "tokens", lambda t: float(np.quantile(t.input_tokens, 0.99))),
    ("p99 output", "tokens", lambda t: float(np.quantile(t.output_tokens, 0.99))),
)
_ARRIVAL_VALUES: tuple[Value, ...] = (
    ("CV of the gaps", "", lambda t: statistics.gap_cv(t.arrival_s)),
    ("Fano factor in 1 s", "", lambda t: statistics.fano(t.arrival_s, 1.0)),
    ("Fano factor in 10 s", "", lambda t: statistics.fano(t.arrival_s, 10.0)),
    ("Fano factor in 60 s", "", lambda t: statistics.fano(t.arrival_s, 60.0)),
)
_ARRIVAL_DISTANCES: tuple[Distance, ...] = (
    ("arrivals per minute", lambda a, b: statistics.count_error(a.arrival_s, b.arrival_s)),
    (
        "KS distance of the gaps",
        lambda a, b: statistics.ks_distance(np.diff(a.arrival_s), np.diff(b.arrival_s)),
    ),
    ("input tokens per minute", lambda a, b: _load_error(a, b)),
)


def compare(draw: Callable[[int], Trace], real: Trace, draws: int) -> TwinCheck:
    """Compare the traces ``draw(0)``, ``draw(1)``, ... with the real one."""
    if draws < 1:
        raise ParameterError(f"{draws} draws compare nothing.", resolve="pass draws >= 1.")
    drawn = [draw(seed) for seed in range(draws)]
    timed = bool(real.arrival_s[-1] > real.arrival_s[0])
    if timed != bool(drawn[0].arrival_s[-1] > drawn[0].arrival_s[0]):
        raise ParameterError(
            f"Of {real.name} and its twin only one has arrivals.",
            resolve="compare the twin with the trace that it was fitted to.",
        )
    distances = _LENGTH_DISTANCES + (_ARRIVAL_DISTANCES if timed else ())
    values = _LENGTH_VALUES + (_ARRIVAL_VALUES if timed else ())
    measures = [
        _measure(name, "", None, np.array([distance(real, one) for one in drawn]))
        for name, distance in distances
    ] + [
        _measure(name, unit, value(real), np.array([value(one) for one in drawn]))
        for name, unit, value in values
    ]
    # Those with a bar first.
    return TwinCheck(real.name, draws, tuple(sorted(measures, key=lambda m: m.bar is None)))


def _measure(name: str, unit: str, real: float | None, drawn: NDArray[np.float64]) -> Measure:
    errors = drawn
    if real is not None:
        errors = np.abs(drawn - real)
        if name != _CORRELATION and real != 0:
            errors = errors / abs(real)
    spread = float(drawn.std()) if np.ptp(drawn) > 0 else 0.0  # else rounding makes it 1e-15
    return Measure(name, unit, real, float(drawn.mean()), spread, float(errors.mean()))


def _load_error(real: Trace, drawn: Trace) -> float:
    """Share of input tokens that arrive in the wrong minute."""
    loads = []
    for trace in (real, drawn):
        minute = ((trace.arrival_s - trace.arrival_s[0]) / 60.0).astype(np.int64)
        loads.append(np.bincount(minute, weights=trace.input_tokens))
    size = max(map(len, loads))
    padded = [np.pad(load, (0, size - len(load))) for load in loads]
    return float(np.abs(padded[1] - padded[0]).sum() / padded[0].sum())
