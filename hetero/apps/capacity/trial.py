"""Trials: what a deployment makes of a load, by simulation over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.intervals import interval
from hetero.routers import Builtin, Predictive, Router
from hetero.simulator import Event, Run, Slo, simulate
from hetero.simulator.saturation import attainment, backlog_growth
from hetero.streams import stream
from hetero.workload import Trace

_GROWTH = 0.05  # of the backlog; chance alone moves it by a percent in ten minutes
_SPAN_S = 600.0  # ten minutes show whether queues grow, and bursts of a minute
_LEAST, _MOST = 1000, 60_000
_MARGIN = 0.9  # of the target for the first token, which leaves room for what is not predicted


@dataclass(frozen=True)
class Load:
    """Requests at a rate, and what must become of them.

    Attributes
    ----------
    trace
        Requests whose lengths are drawn from.
    rate_rps
        Arrivals per second, as a Poisson process.
    goal
        Share of the requests that must meet the targets.
    requests
        Requests that are played per seed; by default those of ten minutes, from 1,000 to 60,000.
    seeds
        Each draws its own requests and arrivals.
    """

    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    requests: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not (0 < self.rate_rps < float("inf") and 0 < self.goal <= 1):
            raise ParameterError(
                f"A rate of {self.rate_rps:g} requests/s with a goal of {self.goal:g} cannot be "
                "planned for.",
                resolve="give a rate above 0, and a goal above 0 and up to 1.",
            )
        if not self.seeds or self.count < 100:
            raise ParameterError(
                f"{self.count} requests over {len(self.seeds)} seeds show nothing.",
                resolve="give 100 requests or more and one seed or more.",
            )

    @property
    def count(self) -> int:
        """Requests that are played per seed."""
        if self.requests is not None:
            return self.requests
        return int(min(max(_SPAN_S * self.rate_rps, _LEAST), _MOST))

    def at(self, rate_rps: float) -> Load:
        """The same requests at another rate."""
        return replace(self, rate_rps=rate_rps)

    def arrivals(self, seed: int) -> Trace:
        """The requests of one seed: the same gaps at every rate, only stretched."""
        drawn = stream(seed, "requests").integers(len(self.trace), size=self.count)
        return self.trace.all_at_once().take(drawn).poisson(self.rate_rps, stream(seed, "arrivals"))

    def router(self) -> Predictive:
        """The dispatcher: by predicted first tokens, with the target where there is one."""
        target = self.slo.ttft_s
        return Predictive(target_s=None if target is None else _MARGIN * target)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a deployment made of a load, one value per seed.

    Attributes
    ----------
    attained
        Share of the requests that met every target.
    goodput_rps
        That share times the rate.
    growth
        Growth of the backlog, see :func:`hetero.simulator.saturation.backlog_growth`.
    tokens_per_s
        Input and output tokens served.
    """

    attained: tuple[float, ...]
    goodput_rps: tuple[float, ...]
    growth: tuple[float, ...]
    tokens_per_s: tuple[float, ...]

    def carries(self, load: Load) -> bool:
        """Whether every seed met the goal.

        Where no target bounds the time that requests wait, the backlog must not grow either.
        """
        return min(self.attained) >= load.goal and self.bounded(load)

    def bounded(self, load: Load) -> bool:
        """Whether a target bounds the time that requests wait, or the backlog does not grow."""
        waits = load.slo.ttft_s is None and load.slo.e2e_s is None
        return not waits or max(self.growth) <= _GROWTH

    @property
    def attained_interval(self) -> tuple[float, float]:
        """95 % interval of the attainment."""
        low, high = interval(self.attained)
        return max(low, 0.0), min(high, 1.0)

    @property
    def mean(self) -> float:
        """Mean attainment."""
        return float(np.mean(self.attained))


def outcome(
    deployment: Deployment,
    load: Load,
    *,
    router: Router | Builtin | None = None,
    events: Sequence[Event] = (),
    stop_below: float = 0.0,
) -> Outcome:
    """Play a load on a deployment.

    Parameters
    ----------
    router
        By default :meth:`Load.router`.
    stop_below
        Leave the remaining seeds out once one attains less: it is known to fail then.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> one = Deployment("one", (Replica("a", step, kv_tokens=50_000),))
    >>> chats = workload.load("azure2023_conv")
    >>> easy = Load(chats, 1.0, Slo(ttft_s=2.0), requests=500, seeds=(0,))
    >>> outcome(one, easy).carries(easy), outcome(one, easy.at(50.0)).carries(easy)
    (True, False)
    """
    runs: list[tuple[float, float, float, float]] = []
    for seed in load.seeds:
        run = simulate(
            deployment, load.arrivals(seed), router or load.router(), events=events, seed=seed
        )
        runs.append(values(run, load))
        if runs[-1][0] < stop_below:
            break
    return Outcome(*(tuple(each) for each in zip(*runs, strict=True)))


def values(run: Run, load: Load) -> tuple[float, float, float, float]:
    """Attainment, goodput, backlog growth and throughput of a run, as in :class:`Outcome`."""
    share = attainment(run, load.slo)
    done = run.finished
    tokens = run.requests["input_tokens"][done].sum() + run.requests["output_tokens"][done].sum()
    return share, share * load.rate_rps, backlog_growth(run), float(tokens) / max(run.span_s, 1e-9)
