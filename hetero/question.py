r"""What planners are asked, and the one way to tell what a plan sustains.

A :class:`Question` goes to planners. Its :class:`Load`, the part that a plan is judged by, says
which requests come how fast and what must become of them. :func:`judged` plays a plan under a load
for as long as :mod:`hetero.simulator.sustained` asks for, and :func:`sustained_rps` searches the
largest rate; every goodput that anything prints comes from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import numpy as np

from hetero.catalog import EngineName, Llm, serving_engine
from hetero.catalog.engines import Bits
from hetero.cluster import Cluster
from hetero.display import Shown, Table
from hetero.errors import ParameterError, require, require_positive
from hetero.plans import Plan
from hetero.simulator import Event, Run, Slo
from hetero.simulator.sustained import Judged, SustainedRule, arrivals
from hetero.streams import stream
from hetero.workload import Trace

MOST_REQUESTS: Final = 30_000
"""Requests that a trace is repeated to at most where planners compare plans."""

_FACTOR, _BRACKETS = 1.3, 4  # of the first step of a search, and brackets that it holds at most
_FAR = 0.1  # below the goal
_LEAST_SHARE = 1e-3  # of the rate where a search starts, below which none is sustained
_MOST_RPS = 1e6


@dataclass(frozen=True, eq=False)
class Load:
    """Requests at a rate, and what must become of them.

    Attributes
    ----------
    trace
        Requests; they come again where a run takes more of them.
    rate_rps
        Arrivals per second, as a Poisson process.
    slo, goal
        Targets, and the share of the requests that must meet all of them.
    precision
        What the rate is known to, see :mod:`hetero.simulator.sustained`.
    seeds
        Each draws its own requests, arrivals and choices of the router.
    """

    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    precision: float = 0.02
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not (0 < self.rate_rps < math.inf and 0 < self.goal <= 1):
            raise ParameterError(
                f"A rate of {self.rate_rps:g} requests/s with a goal of {self.goal:g} cannot be "
                "planned for.",
                resolve="give a rate above 0, and a goal above 0 and up to 1.",
            )
        require(bool(self.seeds), "No seed is given.", resolve="give one or more seeds.")

    @property
    def rule(self) -> SustainedRule:
        """The rule that a run is judged by."""
        return SustainedRule(self.slo, self.goal, self.precision)

    def at(self, rate_rps: float) -> Load:
        """The same requests at another rate."""
        return replace(self, rate_rps=rate_rps)

    def requests(self, plan: Plan) -> int:
        """How many requests a run of a plan has to hold."""
        return self.rule.requests(self.rate_rps, plan.life_s(self.trace))

    def arrivals(self, count: int, seed: int) -> Trace:
        """So many of its requests at its rate, see :func:`hetero.simulator.sustained.arrivals`."""
        return arrivals(self.trace, count, self.rate_rps, seed)


def judged(
    plan: Plan, load: Load, seed: int, *, events: Sequence[Event] = ()
) -> tuple[Run, Judged]:
    """A run of a plan under a load, long enough to be judged by, and what it shows."""
    run = plan.simulate(load.arrivals(load.requests(plan), seed), seed, events=events)
    return run, load.rule.judge(run)


def sustained_rps(
    plan: Plan,
    load: Load,
    seed: int,
    *,
    near_rps: float | None = None,
    bracket: float | None = None,
    events: Sequence[Event] = (),
) -> float:
    """Largest rate that a plan sustains (:mod:`hetero.simulator.sustained`) [requests/s].

    0 if it sustains none.

    Parameters
    ----------
    near_rps
        Rate to look around first, that of the load by default; what is found depends on it by no
        more than the bracket.
    bracket
        Width of the last bracket over its lower end, by default the load's precision. Plans that
        are compared on the same requests differ by less than either of them is known to.

    Examples
    --------
    >>> from hetero import cluster, catalog, workload
    >>> from hetero.planners.replicated import replicated
    >>> from hetero.routers import Predictive
    >>> fleet = cluster.cluster("thunderserve-a5000-pair")
    >>> pair = replicated(fleet, catalog.llm("Llama-3-8B"), {"a5000-1": 1, "a5000-2": 1})
    >>> plan = Plan("by hand", (), pair, Predictive(), "hetero", None)
    >>> load = Load(workload.load("azure2023_conv"), 1.0, Slo(ttft_s=2.0), precision=0.05)
    >>> most = sustained_rps(plan, load, seed=0)
    >>> judged(plan, load.at(most), 0)[1].sustained
    True
    >>> judged(plan, load.at(1.06 * most), 0)[1].sustained
    False
    """

    def good(rate_rps: float) -> bool:
        at = load.at(rate_rps)
        few = load.rule.requests(rate_rps, life_s=0.0)
        if at.requests(plan) > 2 * few:
            # Far beyond its limit a fleet fails from the beginning, and long runs are slow there.
            run = plan.simulate(at.arrivals(few, seed), seed, events=events)
            if load.rule.judge(run).attained < load.goal - _FAR:
                return False
        return judged(plan, at, seed, events=events)[1].sustained

    low = high = near = near_rps or load.rate_rps
    width = 1.0 + (bracket or load.precision)
    step = min(_FACTOR, width**_BRACKETS)  # grows: what is asked for first may be far off
    if good(near):
        while good(high := min(high * step, _MOST_RPS)):
            if high >= _MOST_RPS:
                return _MOST_RPS
            low, step = high, step * step
    else:
        while not good(low := low / step):
            if low < _LEAST_SHARE * near:
                return 0.0
            high, step = low, step * step
    while high > low * width * (1.0 + 1e-9):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


@dataclass(frozen=True, eq=False, repr=False)
class Question(Shown):
    """One question, the same for every planner.

    Attributes
    ----------
    cluster
        GPUs that may be used, with prices where they are known.
    llm
        The model.
    trace
        Requests that planners plan with and compare plans by.
    rate_rps
        Offered load that plans are made for [requests/s].
    slo
        Targets; goodput counts the requests that meet all of them.
    goal
        Share of the requests that must meet the targets for a rate to count as sustained.
    budget_usd_per_h
        What may be spent; None where the whole cluster may be used.
    precision
        Data type of weights, such as ``"fp16"`` or ``"fp8"``.
    least_s
        Time that arrivals last at least where planners compare plans: the requests of the trace
        come again, in their order, until they do.
    seed
        Of everything random.
    drawn_from
        Requests that ``trace`` was drawn from, by which plans are judged; None where it was not.
    engine
        Engine that has to be able to run the plan, see :mod:`hetero.catalog.engines`.
    kv_transfer_bits
        Bits per value in which KV caches may travel; None for what the engine sends.
    """

    cluster: Cluster
    llm: Llm
    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    budget_usd_per_h: float | None = None
    precision: str = "fp16"
    least_s: float = 60.0
    seed: int = 0
    drawn_from: Trace | None = None
    engine: EngineName = "any"
    kv_transfer_bits: Bits | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise ParameterError(
                f"A rate of {self.rate_rps:g} requests/s cannot be planned for.",
                resolve="give a number above 0.",
            )
        if not 0 < self.goal <= 1:
            raise ParameterError(
                f"A goal of {self.goal:g} is no share of the requests.",
                resolve="give a number above 0, and 1 at most.",
            )
        if self.budget_usd_per_h is not None:
            require_positive(budget_usd_per_h=self.budget_usd_per_h)
        own, given = serving_engine(self.engine), self.kv_transfer_bits
        require(
            given in (None, 16, 8, 4) and (given or 16) >= own.transfer_bits,
            f"KV caches travel in {own.transfer_bits} bits or more between engines of "
            f"{own.title}, not in {given}.",
            resolve="leave the bits out, or plan for the engine 'any'.",
        )

    @property
    def transfer_bits(self) -> Bits:
        """Bits per value in which KV caches travel between prefill and decode."""
        own = serving_engine(self.engine).transfer_bits
        return self.kv_transfer_bits or cast(Bits, own)

    @property
    def name(self) -> str:
        """Model, cluster and workload in words."""
        return f"{self.llm.name} on {self.cluster.name}, {self.trace.name}"

    def load(
        self,
        rate_rps: float | None = None,
        *,
        precision: float = 0.02,
        seeds: Sequence[int] | None = None,
    ) -> Load:
        """What plans are judged by, at the rate that is asked for or another."""
        trace = self.drawn_from or self.trace
        chosen = (self.seed,) if seeds is None else tuple(seeds)
        return Load(trace, rate_rps or self.rate_rps, self.slo, self.goal, precision, chosen)

    def arrivals(self, rate_rps: float | None = None, *, seed: int | None = None) -> Trace:
        """Requests to compare plans by, with the same gaps at every rate, only stretched.

        As many as the trace has or, where they last less than ``least_s``, as last that long, at
        most :data:`MOST_REQUESTS` for that.
        """
        chosen = self.seed if seed is None else seed
        rate = rate_rps or self.rate_rps
        wanted = max(len(self.trace), min(math.ceil(rate * self.least_s), MOST_REQUESTS))
        trace = self.trace
        if wanted != len(trace):
            trace = trace.all_at_once().take(np.arange(wanted) % len(trace))
        return trace.poisson(rate, stream(chosen, "arrivals"))

    def table(self) -> Table:
        """What is asked."""
        targets = {"TTFT": self.slo.ttft_s, "TPOT": self.slo.tpot_s, "E2E": self.slo.e2e_s}
        found = Table.figures(
            self.name,
            ("requests", len(self.trace), ""),
            ("offered load", self.rate_rps, "requests/s"),
            *((f"target {name}", value, "s") for name, value in targets.items() if value),
            ("goal", 100 * self.goal, "% of requests within all targets"),
            ("precision", self.precision, ""),
            *((("engine", self.engine, ""),) if self.engine != "any" else ()),
            ("seed", self.seed, ""),
        )
        if self.budget_usd_per_h is None:
            return found
        return replace(found, rows=(*found.rows, ("budget", self.budget_usd_per_h, "$/h")))
