"""Saturation: the largest arrival rate at which a deployment and its router keep up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.fleet import state
from hetero.routers import Builtin, Predictor, Router
from hetero.simulator.replicas import simulate
from hetero.simulator.run import Run
from hetero.workload import Trace

_LEAST_REQUESTS = 100  # fewer say nothing about growth of some percent
_TRIES = 60


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
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> from hetero.routers import RoundRobin
    >>> step = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
    >>> one = Deployment("one", (Replica("a", step, kv_tokens=10_000),))
    >>> even = Trace([float(k) for k in range(1000)], [100] * 1000, [1] * 1000)
    >>> limited = one.with_engine(one.replicas[0].engine.__class__(max_step_tokens=100))
    >>> 9.9 < saturation(limited, even, RoundRobin()).rate_rps < 10.4
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
    low = high = len(trace) / offline.span_s
    for _ in range(_TRIES):
        if keeps_up(low):
            break
        high, low = low, low / 1.5
    else:
        raise ParameterError(
            f"The backlog of {deployment.name} grows even at {low:.3g} requests/s.",
            resolve="use a longer trace, or one whose lengths do not drift.",
        )
    while high == low or keeps_up(high):
        low, high = high, high * 1.5
    while high > low * (1.0 + precision):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return Saturation(
        f"{deployment.name}, {router.name}", low, growth, tuple(sorted(tried.items()))
    )
