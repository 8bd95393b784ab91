"""Plan cards of random fleets against simulations of their plans that are long and independent.

Every fleet is drawn anew: 1 to 4 types of GPUs in 1 to 3 regions, 2 to 64 of them. What a card
promises is then simulated with requests that it has not seen, in their order, for ten minutes of
traffic and 20,000 requests at least, and counted here without the rule that made the card. Every
fifth fleet has a log of its own with bursts: the card sees the first half of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from hetero import catalog, workload
from hetero.apps.cards.answer import best_plan
from hetero.apps.cards.request import request
from hetero.catalog import Link
from hetero.cluster import Cluster, Machine, Network
from hetero.display import Column, Table
from hetero.errors import InfeasibleError
from hetero.plans import Plan
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace
from hetero.workload.statistics import rate_rps as mean_rps
from pipelines.bench.measured import Measured, Say, silent

DENSE = ("Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
EXPERTS = ("Qwen3-30B-A3B", "Mixtral-8x7B")
TRACES = ("azure2023_conv", "azure2023_code", "sharegpt")
LEAST_REQUESTS, LEAST_S = 20_000, 600.0
RUNS, HOLDING = 5, 4
"""Long runs of a plan, and how many of them have to meet the goal."""
ABOVE = 1.20
"""Share of what a card promises at which most should miss it."""

_GPUS = ("H100-SXM", "A100-SXM-80GB", "L40S", "A10G", "L4", "MI300X", "H200-SXM", "A40", "T4")
_SIZES = (1, 2, 4, 8)
_TARGETS = ("ttft=500ms,tpot=50ms", "ttft=1s,tpot=60ms", "ttft=2s,tpot=100ms")
_FOUND_TO = 0.01  # of the limit that long runs show
_SEED = 1000  # of the first long run; cards take small ones
_INSIDE = (0.1, 0.95)  # part of a long run that counts
_LOGS, _BURST, _BUSY = 5, 400, (0.6, 2.2)  # every so many; requests of a burst; speeds


@dataclass(frozen=True, slots=True)
class Draw:
    """One question drawn at random."""

    cluster: Cluster
    model: str
    trace: str
    slo: str
    log: bool = False

    def requests(self, seed: int) -> Trace:
        """Requests of a seed in their order, in bursts that are as long as lulls where logged."""
        trace = workload.load(self.trace, "twin", seed=seed)
        draw, of = stream(seed, "bursts"), len(trace)
        if not self.log:
            return trace
        busy = np.repeat(np.arange(of) % 2, draw.geometric(1.0 / _BURST, of))[:of]
        gaps = draw.exponential(1.0 / np.take(_BUSY, busy))
        own = Trace(np.cumsum(gaps), trace.input_tokens, trace.output_tokens, name="log")
        return replace(own, source="file:log.csv")


def draws(count: int, seed: int = 0) -> Iterator[Draw]:
    """So many questions, the same for the same seed; every sixth asks for a mixture of experts."""
    for k in range(count):
        draw = stream(seed, f"fleet {k}")
        chosen = draw.choice(_GPUS, size=int(draw.integers(1, 5)), replace=False)
        regions = [f"r{n}" for n in range(int(draw.integers(1, 4)))]
        # Machines of a type are alike and stand together.
        kinds = [(catalog.gpu(name), int(draw.choice(_SIZES))) for name in chosen]
        places = [str(draw.choice(regions)) for _ in kinds]
        left, machines = int(draw.integers(2, 65)), list[Machine]()
        while left > 0:
            number = int(draw.integers(len(kinds)))
            (gpu, size), region = kinds[number], places[number]
            size = min(size, 2 ** int(math.log2(left)))
            price = size * (gpu.usd_per_h or 2.0)
            machines.append(Machine(f"m{len(machines)}", gpu, size, region, usd_per_h=price))
            left -= size
        network = Network(
            within_region=Link(name="inside", bandwidth_gbs=12.5, latency_s=1e-4),
            between_regions=Link(
                name="between", bandwidth_gbs=float(draw.choice([0.1, 0.6, 1.2])), latency_s=0.04
            ),
            coordinator_region=machines[0].region,
        )
        yield Draw(
            Cluster(f"fleet-{k}", tuple(machines), network),
            str(draw.choice(EXPERTS if k % 6 == 5 else DENSE)),
            str(draw.choice(TRACES)),
            str(draw.choice(_TARGETS)),
            k % _LOGS == _LOGS - 1,
        )


def met(
    plan: Plan, trace: Trace, rate_rps: float, slo: Slo, seed: int, own_rps: float = 0.0
) -> float:
    """Share of the requests of a long run that meet every target.

    Requests come in their order from any of them on and gaps are exponential, neither by the
    functions that cards are made with; or a log is simulated with its gaps, so that ``own_rps`` of
    it are the rate.
    """
    draw = np.random.default_rng(seed)
    if own_rps:
        load = replace(trace, arrival_s=(trace.arrival_s - trace.arrival_s[0]) * own_rps / rate_rps)
    else:
        count = max(LEAST_REQUESTS, round(LEAST_S * rate_rps))
        order = (np.arange(count) + draw.integers(len(trace))) % len(trace)
        arrival_s = np.cumsum(draw.exponential(1.0 / rate_rps, count))
        taken = trace.input_tokens[order], trace.output_tokens[order]
        load = Trace(arrival_s, *taken, name=trace.name)
    run, count = plan.simulate(load, seed), len(load)
    inside = slice(round(_INSIDE[0] * count), round(_INSIDE[1] * count))
    good = np.array(run.finished[inside])
    for seen, target in (
        (run.ttft_s, slo.ttft_s),
        (run.tpot_s, slo.tpot_s),
        (run.e2e_s, slo.e2e_s),
    ):
        if target is not None:
            good &= ~(seen[inside] > target)
    return float(good.mean())


def limit_rps(
    plan: Plan,
    trace: Trace,
    slo: Slo,
    goal: float,
    near_rps: float,
    seed: int,
    own_rps: float = 0.0,
) -> float:
    """Largest rate at which long runs meet the goal [requests/s]."""
    low, high, step = near_rps, near_rps, 1.1

    def good(rate_rps: float) -> bool:
        return met(plan, trace, rate_rps, slo, seed, own_rps) >= goal

    if good(near_rps):
        while good(high := high * step):
            low, step = high, step * step
    else:
        while not good(low := low / step):
            high, step = low, step * step
            if low < 1e-3 * near_rps:
                return 0.0
    while high > low * (1.0 + _FOUND_TO):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Checked:
    """A card beside long runs.

    Attributes
    ----------
    promised_rps, goodput_rps, limit_rps
        What the card promises, its mean, and what the first long run shows.
    at, above
        Shares that meet the targets in each long run at the promise and at :data:`ABOVE` of it.
    reason
        Why there is no card; empty where there is one.
    """

    fleet: str
    gpus: str
    model: str
    trace: str
    goal: float = 0.9
    promised_rps: float = 0.0
    goodput_rps: float = 0.0
    limit_rps: float = 0.0
    at: tuple[float, ...] = ()
    above: tuple[float, ...] = ()
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the goal is met in as many long runs as have to."""
        return sum(share >= self.goal for share in self.at) >= HOLDING

    @property
    def misses(self) -> bool:
        """Whether most long runs miss it above the promise."""
        return sum(share < self.goal for share in self.above) > RUNS // 2


def checked(asked: Draw, *, effort: str = "quick") -> Checked:
    """A card for a question, and what long runs say to it."""
    about = (
        asked.cluster.name,
        ", ".join(f"{n} {gpu}" for gpu, n in asked.cluster.gpu_counts.items()),
        asked.model,
        f"log of {asked.trace}" if asked.log else asked.trace,
    )
    trace, own_rps = asked.requests(0), 0.0
    if asked.log:
        trace = trace.take(np.arange(len(trace) // 2))
        own_rps = mean_rps(trace.arrival_s)
    made = request(asked.cluster, model=asked.model, trace=trace, slo=asked.slo, effort=effort)
    try:
        card = best_plan(made)
    except InfeasibleError as error:
        return Checked(*about, reason=error.what)
    slo, goal = made.question.slo, made.question.goal
    plan, rate = card.best.plan, card.promised_rps
    if rate <= 0:
        return Checked(*about, goal, 0.0, card.goodput_rps.value, reason="Nothing is promised.")
    fresh = [asked.requests(0 if asked.log and not k else _SEED + k) for k in range(RUNS)]
    if asked.log:
        fresh = [one.take(np.arange(len(one) // 2, len(one))) for one in fresh]
    limit = limit_rps(plan, fresh[0], slo, goal, rate, _SEED, own_rps)
    at, above = (
        tuple(met(plan, one, f * rate, slo, _SEED + k, own_rps) for k, one in enumerate(fresh))
        for f in (1.0, ABOVE)
    )
    return Checked(*about, goal, rate, card.goodput_rps.value, limit, at, above)


@dataclass(frozen=True, slots=True, repr=False)
class CardsBench(Measured):
    """Every fleet that was drawn, with its card beside long runs."""

    rows: tuple[Checked, ...]

    @property
    def answered(self) -> tuple[Checked, ...]:
        """Those with a card."""
        return tuple(one for one in self.rows if not one.reason)

    def record(self) -> object:
        """The same as JSON values."""
        return {"fleets": [asdict(one) for one in self.rows]}

    def table(self) -> Table:
        """One row per fleet."""
        of, refused = len(self.answered), [one for one in self.rows if one.reason]
        held, missed = (sum(getattr(one, x) for one in self.answered) for x in ("holds", "misses"))
        notes = [
            f"{held} of {of} promises hold in at least {HOLDING} of {RUNS} long runs; {missed} of "
            f"{of} fleets miss the goal in most of them at {ABOVE:g} times.",
            *(f"{one.fleet} has no plan: {one.reason}" for one in refused),
        ]
        columns = (
            Column("fleet", of="fleet"),
            Column("GPUs", of="gpus"),
            Column("model", of="model"),
            Column("trace", of="trace"),
            Column("promised", "requests/s", of="promised_rps"),
            Column("mean", "requests/s", of="goodput_rps"),
            Column("long run", "requests/s", of="limit_rps"),
            Column("runs that hold", of=lambda one: sum(share >= one.goal for share in one.at)),
            Column("least met", "%", 3, lambda one: 100.0 * min(one.at)),
            Column(f"met at {ABOVE:g}", "%", 3, lambda one: 100.0 * float(np.mean(one.above))),
        )
        return Table.of("Cards beside long runs", columns, self.answered, *notes)


def bench(
    *, fleets: int = 20, seed: int = 0, effort: str = "quick", progress: Say = silent
) -> CardsBench:
    """Cards of so many random fleets beside long runs of their plans."""
    found = []
    for asked in draws(fleets, seed):
        progress(f"{asked.cluster.name}: {asked.model} on {asked.cluster.gpus} GPUs")
        found.append(checked(asked, effort=effort))
    return CardsBench(tuple(found))
