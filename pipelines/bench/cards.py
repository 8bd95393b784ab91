"""Plan cards of random fleets against simulations of their plans that are long and independent.

Every fleet is drawn anew: 1 to 4 types of GPUs in 1 to 3 regions, 2 to 64 of them. A card's goodput
and what it says of one change are then played for ten minutes of traffic and 20,000 requests at
least, with seeds that the card has not seen, and counted here without the rule that made the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from hetero import catalog, workload
from hetero.apps.cards import sensitivity
from hetero.apps.cards.answer import answer
from hetero.apps.cards.request import request
from hetero.catalog import Link
from hetero.cluster import Cluster, Machine, Network
from hetero.display import Column, Table
from hetero.errors import InfeasibleError
from hetero.plans import Plan
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.measured import Measured, Say, silent

DENSE = ("Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
EXPERTS = ("Qwen3-30B-A3B", "Mixtral-8x7B")
TRACES = ("azure2023_conv", "azure2023_code", "sharegpt")
LEAST_REQUESTS, LEAST_S = 20_000, 600.0
BELOW, ABOVE = 0.95, 1.10
"""Shares of a card's goodput at which the goal has to be met, and missed."""

_GPUS = ("H100-SXM", "A100-SXM-80GB", "L40S", "A10G", "L4", "MI300X", "H200-SXM", "A40", "T4")
_SIZES = (1, 2, 4, 8)
_TARGETS = ("ttft=500ms,tpot=50ms", "ttft=1s,tpot=60ms", "ttft=2s,tpot=100ms")
_FOUND_TO = 0.01  # of the limit that long runs show
_SEED = 1000  # of the first long run; cards take small ones
_INSIDE = (0.1, 0.95)  # part of a long run that counts


@dataclass(frozen=True, slots=True)
class Draw:
    """One question drawn at random."""

    cluster: Cluster
    model: str
    trace: str
    slo: str


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
        )


def met(plan: Plan, trace: Trace, rate_rps: float, slo: Slo, seed: int) -> float:
    """Share of the requests of a long run that meet every target.

    Requests are drawn from the trace with replacement, gaps are exponential, and neither comes from
    the functions that cards are made with.
    """
    draw = np.random.default_rng(seed)
    count = max(LEAST_REQUESTS, round(LEAST_S * rate_rps))
    picked = trace.all_at_once().take(draw.integers(len(trace), size=count))
    arrival_s = np.cumsum(draw.exponential(1.0 / rate_rps, count))
    load = Trace(arrival_s, picked.input_tokens, picked.output_tokens, name=trace.name)
    run = plan.simulate(load, seed)
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


def limit_rps(plan: Plan, trace: Trace, slo: Slo, goal: float, near_rps: float, seed: int) -> float:
    """Largest rate at which long runs meet the goal [requests/s]."""
    low, high, step = near_rps, near_rps, 1.1
    if met(plan, trace, near_rps, slo, seed) >= goal:
        while met(plan, trace, high := high * step, slo, seed) >= goal:
            low, step = high, step * step
    else:
        while met(plan, trace, low := low / step, slo, seed) < goal:
            high, step = low, step * step
            if low < 1e-3 * near_rps:
                return 0.0
    while high > low * (1.0 + _FOUND_TO):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if met(plan, trace, middle, slo, seed) >= goal else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Checked:
    """A card beside long runs.

    Attributes
    ----------
    goodput_rps, limit_rps
        What the card says, and what long runs show.
    below, above
        Shares that meet the targets at :data:`BELOW` and :data:`ABOVE` of the card's goodput.
    gains
        Of each change: the interval that the card gives of its gain, and the gain of long runs.
    reason
        Why there is no card; empty where there is one.
    """

    fleet: str
    gpus: str
    model: str
    trace: str
    goal: float = 0.9
    goodput_rps: float = 0.0
    limit_rps: float = 0.0
    below: float = 0.0
    above: float = 0.0
    gains: tuple[tuple[str, float, float, float], ...] = ()
    reason: str = ""

    @property
    def error(self) -> float:
        """The card's goodput over the limit of long runs, less 1."""
        return self.goodput_rps / self.limit_rps - 1.0 if self.limit_rps else float("inf")

    @property
    def holds(self) -> bool:
        """Whether the goal is met below and missed above."""
        return self.below >= self.goal > self.above


def checked(asked: Draw, *, effort: str = "quick", changes: bool = True) -> Checked:
    """A card for a question, and what long runs say to it."""
    about = (
        asked.cluster.name,
        ", ".join(f"{n} {gpu}" for gpu, n in asked.cluster.gpu_counts.items()),
        asked.model,
        asked.trace,
    )
    trace = workload.load(asked.trace, "twin")
    made = request(asked.cluster, model=asked.model, trace=trace, slo=asked.slo, effort=effort)
    try:
        card, plans = answer(made)
    except InfeasibleError as error:
        return Checked(*about, reason=error.what)
    slo, goal, rate = made.question.slo, card.question.goal, card.goodput_rps.value
    limit = limit_rps(card.plan, trace, slo, goal, rate, _SEED)
    below, above = (met(card.plan, trace, f * rate, slo, _SEED + 1) for f in (BELOW, ABOVE))
    steps = {one.what: one.question.slo for one in sensitivity.steps(made.question)}
    gains = []
    for one, plan in zip(card.changes, plans if changes else (), strict=False):
        if plan is not None and one.what in steps:
            near = one.goodput_rps.value or limit
            after = limit_rps(plan, trace, steps[one.what], goal, near, _SEED)
            gains.append((one.what, *one.gain_rps.interval(), after - limit))
    return Checked(*about, goal, rate, limit, below, above, tuple(gains))


@dataclass(frozen=True, slots=True, repr=False)
class CardsBench(Measured):
    """Every fleet that was drawn, with its card beside long runs."""

    rows: tuple[Checked, ...]

    @property
    def answered(self) -> tuple[Checked, ...]:
        """Those with a card."""
        return tuple(one for one in self.rows if not one.reason)

    @property
    def covered(self) -> tuple[int, int]:
        """Gains that lie in the card's interval, to the width that limits are found to; of all."""
        inside = of = 0
        for one in self.answered:
            slack = 2.0 * _FOUND_TO * one.limit_rps
            of += len(one.gains)
            inside += sum(low - slack <= true <= high + slack for _, low, high, true in one.gains)
        return inside, of

    def record(self) -> object:
        """The same as JSON values."""
        return {"covered": self.covered, "fleets": [asdict(one) for one in self.rows]}

    def table(self) -> Table:
        """One row per fleet."""
        errors = np.array([one.error for one in self.answered])
        held = sum(one.holds for one in self.answered)
        inside, of = self.covered
        notes = [f"{held} of {len(errors)} cards hold at {BELOW:g} and fail at {ABOVE:g} times."]
        if len(errors):
            notes.append(
                f"Distance to long runs: median {100 * np.median(abs(errors)):.1f} %, worst "
                f"{100 * errors[abs(errors).argmax()]:+.1f} %."
            )
        if of:
            notes.append(f"{inside} of {of} gains lie in their 90 % interval.")
        refused = len(self.rows) - len(errors)
        notes += [f"{refused} fleets have no plan."] if refused else []
        columns = (
            Column("fleet", of="fleet"),
            Column("GPUs", of="gpus"),
            Column("model", of="model"),
            Column("trace", of="trace"),
            Column("card", "requests/s", of="goodput_rps"),
            Column("long runs", "requests/s", of="limit_rps"),
            Column("error", "%", 2, lambda one: 100.0 * one.error),
            Column(f"met at {BELOW:g}", "%", 3, lambda one: 100.0 * one.below),
            Column(f"met at {ABOVE:g}", "%", 3, lambda one: 100.0 * one.above),
        )
        return Table.of("Cards beside long runs", columns, self.answered, *notes)


def bench(
    *, fleets: int = 40, seed: int = 0, effort: str = "quick", changes: bool = True,
    progress: Say = silent,
) -> CardsBench:  # fmt: skip
    """Cards of so many random fleets beside long runs of their plans."""
    found = []
    for asked in draws(fleets, seed):
        progress(f"{asked.cluster.name}: {asked.model} on {asked.cluster.gpus} GPUs")
        found.append(checked(asked, effort=effort, changes=changes))
    return CardsBench(tuple(found))
