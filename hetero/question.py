r"""What planners are asked, and the one way to tell what a plan sustains.

A :class:`Question` goes to planners. Its :class:`Load`, the part that a plan is judged by, says
which requests come how fast and what must become of them. :func:`judged` plays a plan under a load
for as long as :mod:`hetero.simulator.sustained` asks for, and :func:`sustained_rps` searches the
largest rate; every goodput that anything prints comes from there. :func:`drawn` gives a plan the
step times that their expected error allows, and :func:`sustained_draws` says with how many of them
it still sustains a load: the one number that answers whether a plan is safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, TypeAlias, cast

import numpy as np

from hetero.arrays import Floats
from hetero.catalog import EngineName, Gpu, Llm
from hetero.catalog.engines import Bits
from hetero.cluster import Cluster
from hetero.deployment import Replica
from hetero.display import Shown, Table
from hetero.engines import EngineSpec
from hetero.errors import CatalogError, ParameterError, require, require_positive
from hetero.latency.calibration.expected import (
    StepError,
    error_of,
    expected_error,
    level_named,
)
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from hetero.plans import Plan
from hetero.simulator import Event, Run, Slo
from hetero.simulator.drivers import MissedError
from hetero.simulator.sustained import (
    ARRIVING,
    LOWER,
    LOWER_PART,
    MOST_OWN,
    Arrivals,
    Judged,
    SustainedRule,
    arrivals,
)
from hetero.simulator.uncertainty import draw_factors
from hetero.streams import stream
from hetero.workload import Trace

MOST_REQUESTS: Final = 30_000
"""Requests that a trace is repeated to at most where planners compare plans."""

Factors: TypeAlias = tuple[float, ...]
"""Of prefill, decode and front-end times."""

DRAWS: Final = 24
"""Draws of step times that say whether a load is sustained."""

_FACTOR = 1.3  # of the first step of a search, at most: the width of its bracket where that is less
_FAR, _FAR_IN_BURSTS = 0.1, 0.4  # below the goal
_LEAST_SHARE = 1e-3  # of the rate where a search starts, below which none is sustained
_MOST_RPS = 1e6


def within_context(trace: Trace, llm: Llm) -> tuple[Trace, tuple[str, ...]]:
    """The requests that the context window of a model holds, and in a sentence what is left out.

    Examples
    --------
    >>> from hetero import catalog
    >>> long = Trace([0.0, 1.0], [100, 9000], [10, 10])
    >>> kept, (said,) = within_context(long, catalog.llm("Llama-3-8B"))
    >>> len(kept), said
    (1, '1 of 2 requests is longer than the context window of Llama-3-8B, 8,192 tokens: left out.')
    """
    fits = trace.input_tokens.astype(np.int64) + trace.output_tokens <= llm.max_position
    left = int((~fits).sum())
    if not left:
        return trace, ()
    window = f"longer than the context window of {llm.name}, {llm.max_position:,} tokens"
    require(
        left < len(trace),
        f"All {left:,} requests of {trace.name} are {window}.",
        resolve="choose a model with a longer window, or shorter requests.",
    )
    are = "is" if left == 1 else "are"
    return trace.take(fits), (f"{left:,} of {len(trace):,} requests {are} {window}: left out.",)


@dataclass(frozen=True, eq=False)
class Load:
    """Requests at a rate, and what must become of them.

    Attributes
    ----------
    trace
        Requests; they come again where a run takes more of them.
    rate_rps
        Arrivals per second.
    slo, goal
        Targets, and the share of the requests that must meet all of them.
    precision
        What the rate is known to, see :mod:`hetero.simulator.sustained`.
    seeds
        Each draws its own requests, arrivals and choices of the router.
    process
        How requests come, see :func:`hetero.simulator.sustained.arrivals`.
    most_rps
        Rate that nothing sustains a larger one than, and that none is looked for above.
    """

    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    precision: float = 0.02
    seeds: tuple[int, ...] = (0, 1, 2)
    process: Arrivals = "poisson"
    most_rps: float = _MOST_RPS

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
        least = min(len(self.trace), MOST_OWN) if self.process == "scaled" else 0
        return max(least, self.rule.requests(self.rate_rps, plan.life_s(self.trace)))

    def arrivals(self, count: int, seed: int) -> Trace:
        """So many of its requests at its rate, see :func:`hetero.simulator.sustained.arrivals`."""
        return arrivals(self.trace, count, self.rate_rps, seed, self.process)

    @property
    def arriving(self) -> str:
        """How requests come, in words."""
        return ARRIVING[self.process]


def judged(
    plan: Plan,
    load: Load,
    seed: int,
    *,
    events: Sequence[Event] = (),
    early: tuple[tuple[float, float], ...] | None = None,
) -> tuple[Run, Judged]:
    """A run of a plan under a load, long enough to be judged by, and what it shows.

    Parameters
    ----------
    early
        Shares as of :class:`~hetero.simulator.drivers.Watch`, by which a run is watched; None for
        runs that go on to their end.

    Raises
    ------
    MissedError
        If the run is watched, and cannot meet its goal.
    """
    bursts_s = plan.life_s(load.trace) if load.process == "scaled" else 0.0

    def play(count: int) -> Run:
        watch = None if early is None else load.rule.watch(count, early)
        return plan.simulate(load.arrivals(count, seed), seed, events=events, watch=watch)

    return load.rule.settled(load.requests(plan), play, bursts_s)


def sustains(plan: Plan, load: Load, seed: int, *, events: Sequence[Event] = ()) -> bool:
    """Whether a plan sustains a load, by a short run alone where that fails by far."""
    few = load.rule.requests(load.rate_rps, life_s=0.0)
    if load.requests(plan) > 2 * few:
        # Far beyond its limit a fleet fails from the beginning, and long runs are slow there. Of a
        # trace with bursts of its own a part says less.
        run = plan.simulate(load.arrivals(few, seed), seed, events=events)
        far = _FAR_IN_BURSTS if load.process == "scaled" else _FAR
        if load.rule.judge(run).attained < load.goal - far:
            return False
    try:
        return judged(plan, load, seed, events=events, early=())[1].sustained
    except MissedError:
        return False


def sustained_rps(
    plan: Plan,
    load: Load,
    seed: int,
    *,
    near_rps: float | None = None,
    known: bool = False,
    bracket: float | None = None,
    events: Sequence[Event] = (),
) -> float:
    """Largest rate that a plan sustains (:mod:`hetero.simulator.sustained`) [requests/s].

    0 if it sustains none. No share of it (:data:`hetero.simulator.sustained.LOWER`) misses the goal
    by more than chance, in short runs; where one does, the rate is below that.

    Parameters
    ----------
    near_rps
        Rate to look around first, that of the load by default; what is found depends on it by no
        more than the bracket.
    known
        Whether a run has shown that it sustains that.
    bracket
        Width of the last bracket over its lower end, by default the load's precision. Plans that
        are compared on the same requests differ by less than either of them is known to.

    Examples
    --------
    >>> from hetero import cluster, catalog, workload
    >>> from hetero.engines import replicated
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
    most_rps = load.most_rps
    if most_rps < _LEAST_SHARE * (near_rps or load.rate_rps):
        return 0.0

    def good(rate_rps: float) -> bool:
        return rate_rps <= most_rps and sustains(plan, load.at(rate_rps), seed, events=events)

    def missed(rate_rps: float) -> bool:
        one = load.at(rate_rps)
        few, whole = math.ceil(LOWER_PART * one.rule.requests(rate_rps, 0.0)), one.requests(plan)
        # Few requests may be the hard ones of the trace, which all of them then show.
        for count in (whole,) if load.process == "scaled" else (few, whole):
            seen = load.rule.judge(plan.simulate(one.arrivals(count, seed), seed, events=events))
            if seen.attained >= 2.0 * load.goal - seen.needed:
                return False
        return True

    low = high = near = min(near_rps or load.rate_rps, most_rps)
    width = 1.0 + (bracket or load.precision)
    step = first = min(_FACTOR, width)  # grows: what is asked for first may be far off
    if known or good(near):
        while low < most_rps and good(high := min(high * step, most_rps)):
            low, step = high, step * step
        if low >= most_rps:
            high = low * width
    while True:
        if low == high:
            step = first
            while not good(low := low / step):
                if low < _LEAST_SHARE * near:
                    return 0.0
                high, step = low, step * step
        while high > low * width * (1.0 + 1e-9):
            middle = float(np.sqrt(low * high))
            low, high = (middle, high) if good(middle) else (low, middle)
        lower = (share * low for share in LOWER) if load.slo != Slo() else ()
        if (failed := next(filter(missed, lower), None)) is None:
            return low
        if failed < _LEAST_SHARE * near:
            return 0.0
        low = high = failed


# The error of step times -----------------------------------------------------------------------


def step_error(
    gpu: Gpu, level: str = "", engine: EngineName = "vllm", *, experts: bool = False
) -> StepError:
    """Expected error of step times on a GPU; one's own counts as never measured.

    Parameters
    ----------
    level
        Of the step model; empty for the roofline that is known for the GPU.
    engine, experts
        Engine that serves, and whether a mixture of experts.
    """
    if not level:
        try:
            level = expected_error(gpu.name).level
        except CatalogError:
            level = "carried"
    return error_of(level_named(level), engine, gpu.vendor, experts=experts)


def drawable(plan: Plan) -> bool:
    """Whether the step times of a plan can be drawn: it has replicas on known GPUs."""
    return bool(_weights(plan))


def _weights(plan: Plan) -> dict[str, dict[str, float]]:
    """Share of the layers on each GPU type by replica; empty where a replica's are not known."""
    if plan.deployment is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for group in plan.groups:
        layers = sum(held for *_, held in group.stages)
        if layers:
            own = found.setdefault(group.name, {})
            for _, gpu, _, held in group.stages:
                own[gpu] = own.get(gpu, 0.0) + held / layers
    for replica in plan.deployment.replicas:
        if replica.gpu is not None:
            found.setdefault(replica.name, {replica.gpu.name: 1.0})
    names = [replica.name for replica in plan.deployment.replicas]
    return {name: found[name] for name in names} if set(names) <= found.keys() else {}


def rescaled(plan: Plan, factors: Mapping[str, Factors]) -> Plan:
    """The plan with prefill, decode and front-end times of each replica multiplied.

    A fourth factor is of what its engine holds: its logarithm counts the deviations.
    """
    assert plan.deployment is not None
    # Replicas often share a step model: one scaled copy serves them all.
    known: dict[tuple[float, ...], StepModel] = {}
    replicas = []
    for replica in plan.deployment.replicas:
        times, more = factors[replica.name][:3], factors[replica.name][3:]
        key = (id(replica.step), *times)
        if key not in known:
            known[key] = scaled(replica.step, *times)
        left = held_tokens(replica, *more)
        replicas.append(replace(replica, step=known[key], kv_tokens=left))
    return plan.on(replace(plan.deployment, replicas=tuple(replicas)))


def held_tokens(replica: Replica, factor: float = 1.0) -> int:
    """KV cache of a replica whose engine holds more than expected; at least a block."""
    left = replica.kv_tokens - round(replica.kv_error_tokens * math.log(factor))
    return max(left, min(replica.kv_tokens, replica.engine.block_tokens))


def _factors(
    plan: Plan,
    gpus: Mapping[str, Gpu],
    draws: int,
    seed: int,
    engine: EngineName,
    experts: bool,
) -> list[dict[str, Factors]]:
    """Factors of the prefill, decode and front-end times of each replica and its room, by draw."""
    if draws < 1 or not drawable(plan):
        return []
    assert plan.deployment is not None
    weights = _weights(plan)
    levels = {one.name: one.step.level for one in plan.deployment.replicas}
    errs = {one.name: one.kv_error_tokens > 0 for one in plan.deployment.replicas}

    @cache
    def logs(gpu: str, level: str) -> Floats:
        # A type draws the same numbers whatever is known of its steps, only scaled.
        error = step_error(gpus[gpu], level, engine, experts=experts)
        times = np.log(draw_factors({gpu: error}, draws, seed=seed)[gpu])
        return np.column_stack([times, stream(seed, f"memory of {gpu}").standard_normal(draws)])

    found: list[dict[str, Factors]] = []
    for d in range(draws):
        found.append({})
        for name, own in weights.items():
            drawn = (share * logs(gpu, levels[name])[d] for gpu, share in own.items())
            prefill, decode, front, held = np.exp(sum(drawn))
            held = held if errs[name] else 1.0
            found[-1][name] = (float(prefill), float(decode), float(front), float(held))
    return found


def drawn(plan: Plan, question: Question, draws: int) -> Iterator[Plan]:
    """The plan with the step times of each draw, the same for every plan of a question.

    A pipeline over several GPU types errs by the mean of their errors, weighted by layers.
    """
    gpus, experts = question.cluster.gpu_types, bool(question.llm.experts)
    for factors in _factors(plan, gpus, draws, question.seed, question.engine.name, experts):
        yield rescaled(plan, factors)


def fit_draws(plan: Plan, question: Question, draws: int) -> tuple[bool, ...]:
    """Whether every replica holds the longest request with the memory of each draw."""
    gpus, experts = question.cluster.gpu_types, bool(question.llm.experts)
    rows = _factors(plan, gpus, draws, question.seed, question.engine.name, experts)
    if plan.deployment is None:
        return ()
    longest = int((question.trace.input_tokens + question.trace.output_tokens).max())
    replicas = plan.deployment.replicas
    return tuple(
        all(held_tokens(one, row[one.name][3]) >= longest for one in replicas) for row in rows
    )


def sustained_draws(
    plan: Plan,
    gpus: Mapping[str, Gpu],
    load: Load,
    *,
    draws: int = DRAWS,
    events: Sequence[Event] = (),
    engine: EngineName = "vllm",
    experts: bool = False,
) -> tuple[bool, ...]:
    """Whether a plan sustains a load with the step times of each draw; empty where none are drawn.

    The draws are those of :func:`drawn`, all with the arrivals of the load's first seed. A draw
    whose steps all take as long as those of one that fails, or longer, is not simulated but fails;
    and the reverse.

    Parameters
    ----------
    gpus
        GPU types by name.
    engine, experts
        Engine whose errors are drawn, and whether of a mixture of experts.

    Examples
    --------
    >>> from hetero import cluster, catalog, workload
    >>> from hetero.engines import replicated
    >>> from hetero.routers import Predictive
    >>> fleet = cluster.cluster("thunderserve-a5000-pair")
    >>> pair = replicated(fleet, catalog.llm("Llama-3-8B"), {"a5000-1": 1, "a5000-2": 1})
    >>> plan = Plan("by hand", (), pair, Predictive(), "hetero", None)
    >>> load = Load(workload.load("azure2023_conv"), 1.0, Slo(ttft_s=2.0), precision=0.05)
    >>> all(sustained_draws(plan, fleet.gpu_types, load, draws=4))
    True
    """
    seed = load.seeds[0]
    factors = _factors(plan, gpus, draws, seed, engine, experts)
    times = np.array([np.ravel([*one.values()]) for one in factors])
    left = sorted(range(len(factors)), key=lambda d: float(np.log(times[d]).sum()))
    found: dict[int, bool] = {}
    while left:
        d = left[len(left) // 2]
        good = sustains(rescaled(plan, factors[d]), load, seed, events=events)
        sure = times <= times[d] if good else times >= times[d]
        found |= {e: good for e in left if sure[e].all()}
        left = [e for e in left if e not in found]
    return tuple(found[d] for d in sorted(found))


def in_draws(found: Sequence[bool]) -> str:
    """In how many draws something holds, in words.

    Examples
    --------
    >>> in_draws((True, True, False, True))
    '75 % of 4 draws of step times'
    """
    return f"{100 * float(np.mean(found)):.0f} % of {len(found)} draws of step times"


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
    least_s
        Time that arrivals last at least where planners compare plans: the requests of the trace
        come again, in their order, until they do.
    seed
        Of everything random.
    drawn_from
        Requests that ``trace`` was drawn from, by which plans are judged; None where it was not.
    whole
        One's own log with what follows them and is kept from planners; None where nothing is.
    engine
        Engine that has to be able to run the plan; by default vLLM as it starts.
    kv_transfer_bits
        Bits per value in which KV caches may travel; None for what the engine sends.
    process
        How requests come, see :func:`hetero.simulator.sustained.arrivals`.
    split
        Whether prefill and decode may be served apart.
    spans
        Whether pipelines may run over machines of which one holds the model alone; no measured run
        says yet what such a pipeline costs.
    """

    cluster: Cluster
    llm: Llm
    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    budget_usd_per_h: float | None = None
    least_s: float = 60.0
    seed: int = 0
    drawn_from: Trace | None = None
    whole: Trace | None = None
    engine: EngineSpec = field(default_factory=EngineSpec)
    kv_transfer_bits: Bits | None = None
    process: Arrivals = "poisson"
    split: bool = True
    spans: bool = True

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
        own, given = self.engine.serving, self.kv_transfer_bits
        require(
            given in (None, 16, 8, 4) and (given or 16) >= own.transfer_bits,
            f"KV caches travel in {own.transfer_bits} bits or more between engines of "
            f"{own.title}, not in {given}.",
            resolve="leave the bits out, or plan for the engine 'any'.",
        )

    @property
    def transfer_bits(self) -> Bits:
        """Bits per value in which KV caches travel between prefill and decode."""
        return self.kv_transfer_bits or cast(Bits, self.engine.serving.transfer_bits)

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
        whole: bool = False,
    ) -> Load:
        """What plans are judged by, or the whole log, at the rate asked for or another."""
        trace = (self.whole if whole else None) or self.drawn_from or self.trace
        chosen = (self.seed,) if seeds is None else tuple(seeds)
        rate = rate_rps or self.rate_rps
        return Load(trace, rate, self.slo, self.goal, precision, chosen, self.process)

    def arrivals(self, rate_rps: float | None = None, *, seed: int | None = None) -> Trace:
        """Requests to compare plans by, with the same gaps at every rate, only stretched.

        As many as the trace has or, where they last less than ``least_s``, as last that long, at
        most :data:`MOST_REQUESTS` for that.
        """
        chosen = self.seed if seed is None else seed
        rate = rate_rps or self.rate_rps
        wanted = max(len(self.trace), min(math.ceil(rate * self.least_s), MOST_REQUESTS))
        if self.process != "poisson":
            return arrivals(self.drawn_from or self.trace, wanted, rate, chosen, self.process)
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
            ("precision", self.engine.precision, ""),
            *((("engine", self.engine.name, ""),) if self.engine.name != "any" else ()),
            ("seed", self.seed, ""),
        )
        if self.budget_usd_per_h is None:
            return found
        return replace(found, rows=(*found.rows, ("budget", self.budget_usd_per_h, "$/h")))
