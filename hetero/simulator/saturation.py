"""The largest arrival rate at which a deployment keeps up, or meets targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.engine import state
from hetero.errors import ParameterError
from hetero.routers import Builtin, Predictor, Router
from hetero.simulator.metrics import Slo
from hetero.simulator.replicas import simulate
from hetero.simulator.run import Run
from hetero.workload import Trace

_LEAST_REQUESTS = 100  # fewer say nothing about growth of some percent
_TRIES = 60
_LEAST_SHARE = 1e-3  # of the rate where a search starts, below which it counts as none


def attainment(run: Run, slo: Slo, inside: NDArray[np.bool_] | None = None) -> float:
    """Share of all requests, or of those inside, that met every target; rejected ones did not.

    A reply of one token has no TPOT and cannot miss it.
    """
    good = run.finished.copy()
    if slo.ttft_s is not None:
        good &= run.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        good &= np.isnan(run.tpot_s) | (run.tpot_s <= slo.tpot_s)
    if slo.e2e_s is not None:
        good &= run.e2e_s <= slo.e2e_s
    return float(good.mean() if inside is None else good[inside].mean())


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


def goodput_rps(
    play: Callable[[float], Run],
    slo: Slo,
    *,
    goal: float = 0.9,
    start_rps: float = 1.0,
    precision: float = 0.02,
    most_rps: float = np.inf,
) -> float:
    """Largest offered load at which the goal of attainment is met; 0 if at none.

    Parameters
    ----------
    play
        A run at a rate [requests/s]. It should play the same requests with the same gaps,
        stretched, at every rate (common random numbers).
    goal
        Share of all requests that meet every target.
    start_rps, precision, most_rps
        See :func:`largest_rate`; nothing is tried below a thousandth of the start.

    Raises
    ------
    ParameterError
        If a number is out of range, or no rate is too high for the targets.
    """
    if not (0 < goal <= 1 and precision > 0 and start_rps > 0):
        raise ParameterError(
            f"goal is {goal}, precision {precision}, start_rps {start_rps}.",
            resolve="give a share up to 1, and numbers above 0.",
        )

    found = largest_rate(
        lambda rate_rps: attainment(play(rate_rps), slo) >= goal,
        start_rps,
        precision=precision,
        least_rps=start_rps * _LEAST_SHARE,
        most_rps=most_rps,
    )
    if found == np.inf:
        raise ParameterError(
            "The targets are met at any rate.",
            resolve="give a longer trace, or targets that bind.",
        )
    return found


@dataclass(frozen=True, slots=True)
class Saturation(Shown):
    """Where a deployment with a router saturates.

    Attributes
    ----------
    rate_rps
        Largest rate found to keep up [requests/s].
    growth
        Backlog growth that still counts as keeping up.
    tried
        Rates and the backlog growth at each, by rate.
    """

    name: str
    rate_rps: float
    growth: float
    tried: tuple[tuple[float, float], ...]

    def table(self) -> Table:
        """Every rate that was tried."""
        rows = tuple(
            (rate, 100.0 * grown, "yes" if grown <= self.growth else "no")
            for rate, grown in self.tried
        )
        columns = (
            Column("arrival rate", "requests/s"),
            Column("backlog growth", "% of arrivals"),
            Column("keeps up"),
        )
        return Table(f"{self.name}: {self.rate_rps:.4g} requests/s", columns, rows)


def backlog_growth(run: Run) -> float:
    r"""Growth of the backlog in the second half of the arrivals, as a share of them.

    .. math:: g = \frac{B(t_N) - B(t_{N/2})}{N/2}

    with backlog B(t) the requests arrived and not finished, and :math:`t_n` the n-th arrival of
    the N requests that are not rejected. A deployment that serves at :math:`\mu` what arrives at
    :math:`\lambda > \mu` has :math:`g = 1 - \mu/\lambda`; the first half is there to fill it.
    """
    served = run.requests["status"] != state.REJECTED
    arrivals = np.asarray(run.requests["arrival_s"])[served]
    half = len(arrivals) // 2
    if not half:
        return 0.0
    finishes = np.sort(np.asarray(run.requests["finish_s"])[served])
    middle, end = np.searchsorted(finishes, arrivals[[half - 1, -1]], side="right")
    return float(1.0 - (end - middle) / (len(arrivals) - half))


def saturation(
    deployment: Deployment,
    trace: Trace,
    router: Router | Builtin,
    *,
    growth: float = 0.02,
    precision: float = 0.01,
    predictor: Predictor | None = None,
    seed: int = 0,
) -> Saturation:
    """Bisect for the largest rate at which the backlog does not grow.

    Every rate plays the same requests with the same gaps, stretched (common random numbers), and
    the same draws of the router, so that only the rate differs between two runs.

    Parameters
    ----------
    trace
        Requests; its own rate does not matter, its length does: chance alone lets the backlog
        grow by about the square root of what it holds.
    growth
        Backlog growth that still counts as keeping up, see :func:`backlog_growth`.
    precision
        Width of the last bracket over its lower end.

    Raises
    ------
    ParameterError
        If the trace is too short, or the backlog grows at any rate.

    Examples
    --------
    >>> from hetero.deployment import Engine, Replica
    >>> from hetero.latency.step import StepModel
    >>> from hetero.routers import RoundRobin
    >>> step = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
    >>> engine = Engine(max_step_tokens=100)
    >>> one = Deployment("one", (Replica("a", step, kv_tokens=10_000, engine=engine),))
    >>> even = Trace([float(k) for k in range(1000)], [100] * 1000, [1] * 1000)
    >>> 9.9 < saturation(one, even, RoundRobin()).rate_rps < 10.4
    True
    """
    if len(trace) < _LEAST_REQUESTS:
        raise ParameterError(
            f"{len(trace)} requests do not show where {deployment.name} saturates.",
            resolve=f"give at least {_LEAST_REQUESTS}, better thousands.",
        )
    if not (0 < growth < 1 and 0 < precision < 1):
        raise ParameterError(
            f"Saturation to a growth of {growth} and a precision of {precision} cannot be found.",
            resolve="give shares between 0 and 1.",
        )
    tried: dict[float, float] = {}

    def keeps_up(rate_rps: float) -> bool:
        run = simulate(
            deployment, trace.rescale(rate_rps=rate_rps), router, predictor=predictor, seed=seed
        )
        tried[rate_rps] = backlog_growth(run)
        return tried[rate_rps] <= growth

    offline = simulate(deployment, trace.all_at_once(), router, predictor=predictor, seed=seed)
    if not offline.finished.any():
        raise ParameterError(
            f"{deployment.name} rejects every request of {trace.name}.",
            resolve="use requests that fit its KV cache.",
        )
    rate = largest_rate(keeps_up, len(trace) / offline.span_s, factor=1.5, precision=precision)
    if rate == 0:
        raise ParameterError(
            f"The backlog of {deployment.name} grows even at {min(tried):.3g} requests/s.",
            resolve="use a longer trace, or one whose lengths do not drift.",
        )
    return Saturation(
        f"{deployment.name}, {router.name}", rate, growth, tuple(sorted(tried.items()))
    )
