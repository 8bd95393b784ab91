"""Serving metrics: one definition each.

Glossary
--------
TTFT
    Time to first token: from arrival to the first output token.
TPOT
    Time per output token of a request after its first: (finish - first token) / (outputs - 1).
Inter-token time
    Time between two consecutive tokens of a request, over all tokens of the run.
E2E
    From arrival to the last output token.
Throughput
    Tokens (inputs, outputs, both) or requests finished inside the window, over its length.
SLO attainment
    Share of the requests that arrived inside the window and met a target; rejected ones did not.
Requests within targets
    Requests that arrived inside the window and met every target, per second until the last arrival.
Imbalance
    Largest over smallest completion time of the replicas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.encoding import finite
from hetero.engine.gaps import gap_edges
from hetero.errors import ParameterError, require
from hetero.simulator.run import Run

PERCENTILES = (50, 90, 95, 99)
METRIC_COLUMNS = (Column("metric"), Column("value"), Column("unit"))

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_TARGET = re.compile(r"\s*(ttft|tpot|e2e)\s*=\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s|min)\s*")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of a service; None where there is none.

    Examples
    --------
    >>> Slo(ttft_s=0.5)
    Slo(ttft_s=0.5, tpot_s=None, e2e_s=None)
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"The target {name} is {value}.",
                resolve="give a time above 0 s, or none.",
            )

    @classmethod
    def read(cls, text: str, where: str = "slo") -> Slo:
        """Targets of a text such as ``ttft=500ms,tpot=50ms`` (us, ms, s, min), or none if empty.

        Parameters
        ----------
        where
            What the text belongs to, for errors.

        Examples
        --------
        >>> Slo.read("ttft=500ms, tpot=0.05s")
        Slo(ttft_s=0.5, tpot_s=0.05, e2e_s=None)
        """
        found: dict[str, float] = {}
        for part in text.split(",") if text else ():
            match = _TARGET.fullmatch(part)
            if match is None:
                raise ParameterError(
                    f"{where} cannot read '{part.strip()}'.",
                    resolve="write targets with their unit, such as ttft=500ms,tpot=50ms,e2e=30s.",
                )
            try:
                value_s = float(match[2]) * _UNITS_S[match[3]]
            except ValueError:
                raise ParameterError(
                    f"{where}: '{match[2]}' is no number.", resolve="write one, such as 0.5."
                ) from None
            require(
                f"{match[1]}_s" not in found,
                f"{where} gives {match[1]} twice.",
                resolve="give each target once.",
            )
            found[f"{match[1]}_s"] = value_s
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Metrics(Shown):
    """Metrics of a run inside a window; see the glossary of this module.

    Attributes
    ----------
    percentiles
        By quantity (``ttft_s``, ``tpot_s``, ``e2e_s``, ``gap_s``) and percentile.
    within_targets_rps
        :math:`n / (a - t)`: n arrived inside the window and met all targets, t is its beginning, a
        the last arrival in it (its end, where all come at once). vLLM's request goodput divides by
        the whole run; the drain, in which nothing comes, can turn the order of short ones.
    attainment
        By target (``ttft``, ``tpot``, ``e2e``) and ``joint``; empty without targets.
    """

    name: str
    window_s: tuple[float, float]
    arrived: int
    finished: int
    rejected: int
    preemptions: int
    input_tps: float
    output_tps: float
    requests_per_s: float
    within_targets_rps: float | None
    attainment: dict[str, float]
    percentiles: dict[str, dict[int, float]]
    means: dict[str, float]
    imbalance: float
    utilisation: float
    usd_per_mtok: float | None
    slo: Slo = field(default_factory=Slo)

    @property
    def total_tps(self) -> float:
        """Input and output tokens per second."""
        return self.input_tps + self.output_tps

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what is not a number becomes null."""
        found: dict[str, Any] = finite(asdict(self) | {"total_tps": self.total_tps})
        return found

    def table(self) -> Table:
        """Quantities with their units."""
        rows: list[tuple[object, ...]] = [
            ("requests arrived", self.arrived, ""),
            ("requests finished", self.finished, ""),
            ("requests rejected", self.rejected, ""),
            ("preemptions", self.preemptions, ""),
            ("throughput, inputs", self.input_tps, "tokens/s"),
            ("throughput, outputs", self.output_tps, "tokens/s"),
            ("throughput", self.requests_per_s, "requests/s"),
        ]
        rows += percentile_rows(self.percentiles)
        for key, share in self.attainment.items():
            rows.append((f"SLO attainment, {key}", 100 * share, "%"))
        if self.within_targets_rps is not None:
            rows.append(("requests within targets", self.within_targets_rps, "requests/s"))
        rows += [
            ("completion imbalance", self.imbalance, "largest/smallest"),
            ("mean time in steps", 100 * self.utilisation, "%"),
        ]
        if self.usd_per_mtok is not None:
            rows.append(("cost", self.usd_per_mtok, "$ per 10^6 tokens"))
        return Table(self.name, METRIC_COLUMNS, tuple(rows))


def percentile_rows(percentiles_s: dict[str, dict[int, float]]) -> list[tuple[object, ...]]:
    """A row of a table per quantity and percentile."""
    labels = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "gap_s": "inter-token time"}
    return [
        (f"{label} P{p}", 1e3 * value, "ms")
        for key, label in labels.items()
        for p, value in percentiles_s[key].items()
    ]


def metrics(
    run: Run,
    slo: Slo | None = None,
    *,
    warmup_s: float = 0.0,
    until_s: float | None = None,
    priority: int | None = None,
) -> Metrics:
    """Metrics of a run.

    Parameters
    ----------
    slo
        Targets for attainment, and for requests within them per second.
    warmup_s, until_s
        Window, counted from the first arrival [s]; by default the whole run.
    priority
        Count the requests of this class alone, which has no cost of its own; times between tokens,
        imbalance and utilisation remain those of all.
    """
    slo = slo or Slo()
    r = run.requests
    start = float(r["arrival_s"][0])
    end = start + (run.span_s if until_s is None else until_s)
    begin = start + warmup_s
    require(
        end > begin or not run.finished.any(),
        f"The window from {warmup_s} s to {end - start:g} s is empty.",
        resolve="shorten the warm-up, or simulate a longer trace.",
    )
    arrived = (r["arrival_s"] >= begin) & (r["arrival_s"] <= end)
    coming_s = float(r["arrival_s"][arrived].max(initial=begin)) - begin
    inside = run.finished & (r["finish_s"] >= begin) & (r["finish_s"] <= end)
    if priority is not None:
        arrived, inside = (one & (r["priority"] == priority) for one in (arrived, inside))
    length = max(end - begin, math.ulp(1.0))
    input_tps = float(r["input_tokens"][inside].sum()) / length
    output_tps = float(r["output_tokens"][inside].sum()) / length
    values = {"ttft_s": run.ttft_s, "tpot_s": run.tpot_s, "e2e_s": run.e2e_s}
    percentiles = {key: _percentiles(value[arrived]) for key, value in values.items()}
    percentiles["gap_s"] = gap_percentiles(run.gap_counts)
    means = {key: _mean(value[arrived]) for key, value in values.items()}
    attainment, within = _attainment(run, slo, arrived, coming_s or length)
    ends = run.completion_s()
    ends = ends[np.isfinite(ends)]
    hourly = run.deployment.usd_per_h
    per_token = None
    if hourly is not None and priority is None and input_tps + output_tps > 0:
        per_token = hourly / 3600.0 / (input_tps + output_tps) * 1e6
    return Metrics(
        name=f"{run.deployment.name}, {run.router}, {run.trace.source}",
        window_s=(warmup_s, end - start),
        arrived=int(arrived.sum()),
        finished=int(inside.sum()),
        rejected=int((arrived & ~run.finished).sum()),
        preemptions=int(r["preemptions"][arrived].sum()),
        input_tps=input_tps,
        output_tps=output_tps,
        requests_per_s=float(inside.sum()) / length,
        within_targets_rps=within,
        attainment=attainment,
        percentiles=percentiles,
        means=means,
        imbalance=float(ends.max() / ends.min()) if len(ends) and ends.min() > 0 else math.nan,
        utilisation=float(run.utilisation().mean()),
        usd_per_mtok=per_token,
        slo=slo,
    )


def _attainment(
    run: Run, slo: Slo, arrived: NDArray[np.bool_], length_s: float
) -> tuple[dict[str, float], float | None]:
    if slo == Slo() or not arrived.any():
        return {}, None
    targets = {key: value for key, value in asdict(slo).items() if value is not None}
    shares = {key[:-2]: attainment(run, Slo(**{key: targets[key]}), arrived) for key in targets}
    good = met(run, slo)[arrived]
    return shares | {"joint": float(good.mean())}, float(good.sum()) / length_s


def _mean(values: Floats) -> float:
    good = values[np.isfinite(values)]
    return float(good.mean()) if len(good) else math.nan


def _percentiles(values: Floats) -> dict[int, float]:
    good = values[np.isfinite(values)]
    if not len(good):
        return dict.fromkeys(PERCENTILES, math.nan)
    return {p: float(v) for p, v in zip(PERCENTILES, np.percentile(good, PERCENTILES), strict=True)}


def gap_percentiles(
    counts: NDArray[np.int64], percentiles: tuple[int, ...] = PERCENTILES
) -> dict[int, float]:
    """Percentiles of a histogram of inter-token times, linear inside a bin: within 3.2 %."""
    total = int(counts.sum())
    if not total:
        return dict.fromkeys(percentiles, np.nan)
    edges, filled = gap_edges(), np.flatnonzero(counts)
    upto = np.cumsum(counts)[filled]
    shares = np.column_stack([upto - counts[filled], upto]).ravel() / total
    sides = np.column_stack([edges[filled], edges[filled + 1]]).ravel()
    values = np.interp(np.array(percentiles) / 100.0, shares, sides)
    return dict(zip(percentiles, values.tolist(), strict=True))


_TRIES = 60


def attainment(run: Run, slo: Slo, inside: NDArray[np.bool_] | None = None) -> float:
    """Share of all requests, or of those inside, that met every target."""
    return float(met(run, slo)[slice(None) if inside is None else inside].mean())


def met(run: Run, slo: Slo) -> NDArray[np.bool_]:
    """Which requests met every target: a rejected one did not, and one token misses no TPOT."""
    good = run.finished.copy()
    if slo.ttft_s is not None:
        good &= run.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        good &= np.isnan(run.tpot_s) | (run.tpot_s <= slo.tpot_s)
    if slo.e2e_s is not None:
        good &= run.e2e_s <= slo.e2e_s
    return good


def largest_rate(
    good: Callable[[float], bool],
    start_rps: float,
    *,
    factor: float = 2.0,
    precision: float = 0.02,
    least_rps: float = 0.0,
    most_rps: float = np.inf,
) -> float:
    """Bisect for the largest rate that is good; 0 if none is, infinity if all are.

    Parameters
    ----------
    start_rps
        Where to look first; from there the rate goes down or up by ``factor`` until the largest
        good one is enclosed.
    precision
        Width of the last bracket over its lower end.
    least_rps, most_rps
        Rates below and above which nothing is tried.

    Examples
    --------
    >>> round(largest_rate(lambda rate: rate < 3.0, 1.0, precision=1e-3), 2)
    3.0
    """
    low = high = min(start_rps, most_rps)
    for _ in range(_TRIES):
        if good(low):
            break
        high, low = low, low / factor
        if low < least_rps:
            return 0.0
    else:
        return 0.0
    tries = 0
    while low == high:
        if high >= most_rps:
            return most_rps
        high, tries = min(high * factor, most_rps), tries + 1
        if tries > _TRIES:
            return np.inf
        if good(high):
            low = high
    while high > low * (1.0 + precision):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
