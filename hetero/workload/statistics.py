"""What describes a request trace: quantiles, correlation, rate and burstiness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import require_positive

if TYPE_CHECKING:
    from hetero.workload.trace import Trace


#: Levels of the quantiles that a description shows.
LEVELS = (0.1, 0.5, 0.9, 0.99)
#: Windows of the Fano factors that a description shows [s].
FANO_WINDOWS_S = (1.0, 10.0, 60.0)


def rate_rps(arrival_s: ArrayLike) -> float:
    """Mean arrival rate [requests/s]: one over the mean gap, infinite if all arrive at once.

    Examples
    --------
    >>> rate_rps([0.0, 1.0, 4.0])
    0.5
    """
    arrival = np.asarray(arrival_s, dtype=np.float64)
    span = float(arrival[-1] - arrival[0])
    return (len(arrival) - 1) / span if span > 0 else float("inf")


def gap_cv(arrival_s: ArrayLike) -> float:
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, above 1 for bursts.

    NaN where it is not defined: fewer than two gaps, or no time passes.

    Examples
    --------
    >>> gap_cv([0.0, 1.0, 2.0, 3.0])
    0.0
    """
    gaps = np.diff(np.asarray(arrival_s, dtype=np.float64))
    return float("nan") if len(gaps) < 2 or gaps.sum() == 0 else float(gaps.std() / gaps.mean())


def counts(arrival_s: ArrayLike, window_s: float) -> NDArray[np.int64]:
    """Arrivals in each window of ``window_s`` seconds from the first arrival on.

    The last entry is the window that the last arrival falls into, usually cut off by the end.

    Examples
    --------
    >>> counts([0.0, 0.5, 2.1], 1.0)
    array([2, 0, 1])
    """
    require_positive(window_s=window_s)
    arrival = np.asarray(arrival_s, dtype=np.float64)
    return np.bincount(((arrival - arrival[0]) / window_s).astype(np.int64)).astype(np.int64)


def fano(arrival_s: ArrayLike, window_s: float) -> float:
    """Fano factor, the variance over the mean of the counts per window: 1 for Poisson.

    Only whole windows count: the cut-off last one would pass for a lull. NaN with fewer than two.

    Examples
    --------
    >>> fano([0.0, 0.5, 1.0, 1.5, 2.0], 1.0)
    0.0
    """
    arrival = np.asarray(arrival_s, dtype=np.float64)
    whole = counts(arrival, window_s)[: int((arrival[-1] - arrival[0]) // window_s)]
    return float("nan") if len(whole) < 2 or whole.sum() == 0 else float(whole.var() / whole.mean())


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson correlation of two equally long sequences; NaN where one of them is constant."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Rank correlation (Spearman's rho) with mid-ranks for ties; NaN where one is constant.

    Examples
    --------
    >>> round(spearman([1, 2, 3, 4], [1, 4, 9, 16]), 9)
    1.0
    """
    from scipy.stats import rankdata

    return pearson(rankdata(np.asarray(a)), rankdata(np.asarray(b)))


def ks_distance(a: ArrayLike, b: ArrayLike) -> float:
    """Largest distance between two empirical distribution functions (Kolmogorov-Smirnov).

    Examples
    --------
    >>> ks_distance([1, 2, 3, 4], [3, 4, 5, 6])
    0.5
    """
    x, y = np.sort(np.asarray(a)), np.sort(np.asarray(b))
    # scipy's ks_2samp computes a p-value with every call; twins need the distance alone, often.
    at = np.concatenate([x, y])
    below_x = np.searchsorted(x, at, side="right") / len(x)
    return float(np.abs(below_x - np.searchsorted(y, at, side="right") / len(y)).max())


def count_error(real_s: ArrayLike, other_s: ArrayLike, window_s: float = 60.0) -> float:
    """Share of arrivals in the wrong window: sum of ``|difference of counts|`` over the real count.

    Known as the weighted absolute percentage error; windows start at each trace's first arrival.

    Examples
    --------
    >>> count_error([0.0, 1.0, 61.0, 62.0], [0.0, 1.0, 2.0, 61.0])
    0.5
    """
    real, other = counts(real_s, window_s), counts(other_s, window_s)
    difference = np.zeros(max(len(real), len(other)), np.int64)
    difference[: len(real)] += real
    difference[: len(other)] -= other
    return float(np.abs(difference).sum() / real.sum())


@dataclass(frozen=True, slots=True)
class Description(Shown):
    """Statistics of one trace, as :func:`describe` finds them.

    Attributes
    ----------
    quantiles
        For "input" and "output", the lengths [tokens] at :data:`LEVELS`.
    fano
        Fano factor of the counts in each window of :data:`FANO_WINDOWS_S`.
    """

    name: str
    source: str
    requests: int
    span_s: float
    rate_rps: float
    gap_cv: float
    fano: tuple[float, ...]
    input_mean_tokens: float
    output_mean_tokens: float
    input_max_tokens: int
    output_max_tokens: int
    quantiles: dict[str, tuple[float, ...]]
    pearson: float
    spearman: float

    def table(self) -> Table:
        """Every statistic with its unit."""
        rows: list[tuple[object, ...]] = [
            ("requests", "", self.requests),
        ]
        if self.span_s > 0:
            rows += [
                ("span", "s", self.span_s),
                ("rate (1 / mean gap)", "requests/s", self.rate_rps),
                ("burstiness (CV of the gaps, Poisson 1)", "", self.gap_cv),
            ]
            rows += [
                (f"Fano factor of counts in {window:g} s (Poisson 1)", "", value)
                for window, value in zip(FANO_WINDOWS_S, self.fano, strict=True)
            ]
        for side, mean, top in (
            ("input", self.input_mean_tokens, self.input_max_tokens),
            ("output", self.output_mean_tokens, self.output_max_tokens),
        ):
            rows.append((f"{side} mean", "tokens", mean))
            rows += [
                (f"{side} p{100 * level:g}", "tokens", value)
                for level, value in zip(LEVELS, self.quantiles[side], strict=True)
            ]
            rows.append((f"{side} maximum", "tokens", top))
        rows += [
            ("correlation of input and output (Pearson)", "", self.pearson),
            ("rank correlation of input and output (Spearman)", "", self.spearman),
        ]
        return Table(
            f"{self.name} ({self.source})" if self.source else self.name,
            (Column("statistic"), Column("unit"), Column("value", digits=5)),
            tuple(rows),
            () if self.span_s > 0 else ("All requests arrive at once: lengths only.",),
        )


def describe(trace: Trace) -> Description:
    """Statistics of a trace: lengths, their correlation, rate and burstiness.

    Fano factors are left out (NaN) for windows that the trace does not span twice.
    """
    arrival = trace.arrival_s
    sides = {"input": trace.input_tokens, "output": trace.output_tokens}
    return Description(
        name=trace.name,
        source=trace.source,
        requests=len(trace),
        span_s=float(arrival[-1] - arrival[0]),
        rate_rps=rate_rps(arrival),
        gap_cv=gap_cv(arrival),
        fano=tuple(fano(arrival, window) for window in FANO_WINDOWS_S),
        input_mean_tokens=float(sides["input"].mean()),
        output_mean_tokens=float(sides["output"].mean()),
        input_max_tokens=int(sides["input"].max()),
        output_max_tokens=int(sides["output"].max()),
        quantiles={
            side: tuple(float(q) for q in np.quantile(tokens, LEVELS))
            for side, tokens in sides.items()
        },
        pearson=pearson(sides["input"], sides["output"]),
        spearman=spearman(sides["input"], sides["output"]),
    )
