"""Share of the requests that meet their targets, and the search for the largest rate that does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hetero.simulator.metrics import Slo
from hetero.simulator.run import Run

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
