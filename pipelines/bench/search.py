"""The search against a plain enumeration of the same designs, which knows no bound and no race.

Random fleets of at most 8 GPUs: three types, models and traces, tight targets and loose ones, the
papers' systems and vLLM. Every division of every machine is counted out here once more, and what
rate a design sustains is decided here once more, from the times of its requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product

import numpy as np
from scipy.stats import binomtest

from hetero import catalog, workload
from hetero.catalog import EngineName
from hetero.cluster import Cluster, Machine, Network
from hetero.costs.cost import CostModel, PipelineStage
from hetero.deployment import Role
from hetero.display import Column, Table
from hetero.engines import EngineSpec
from hetero.errors import HeteroError, InfeasibleError, require
from hetero.planners import ground
from hetero.planners.score import goodput
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.improve import built, layout_of, promising, routers, space
from hetero.search.portfolio import planner
from hetero.search.race import GAIN, OURS, LayoutRace, Race
from hetero.search.space import ReplicaLayout
from hetero.simulator import Slo
from hetero.streams import stream
from pipelines.bench.measured import Measured, Say, silent, stopwatch

_GPUS = ("A100-SXM-80GB", "L40S", "A10G", "L4", "H100-SXM", "A40")
_MODELS = ("Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B")
_TRACES = ("azure2023_conv", "azure2023_code", "sharegpt")
_TARGETS = (Slo(ttft_s=0.5, tpot_s=0.05), Slo(ttft_s=3.0, tpot_s=0.15))
_ENGINES: tuple[EngineName, ...] = ("any", "vllm")
_ROLES: tuple[Role, ...] = ("both", "prefill", "decode")
_BUDGET = 1_000_000  # all designs
_LEAST_RPS = 1e-3
_COUNTED = 2500  # requests at least: 2 % of them is one standard deviation of a Poisson count
_LOWER = (0.1, 0.25, 0.5, 0.8)


@dataclass(frozen=True, slots=True)
class Compared:
    """What both find for a fleet, and their CPU times."""

    fleet: str
    designs: int
    raced: int
    enumerated_rps: float
    found_rps: float
    same: bool
    enumerated_s: float
    found_s: float
    proof: str

    @property
    def percent(self) -> float:
        """What the search finds beyond the enumeration."""
        return 100.0 * (self.found_rps / self.enumerated_rps - 1.0) if self.enumerated_rps else 0.0


@dataclass(frozen=True, slots=True)
class SearchBench(Measured):
    """All fleets."""

    fleets: tuple[Compared, ...]

    def table(self) -> Table:
        """One row per fleet."""
        columns = (
            Column("fleet"),
            Column("designs"),
            Column("raced"),
            Column("enumeration", "requests/s", 4, of="enumerated_rps"),
            Column("search", "requests/s", 4, of="found_rps"),
            Column("more", "%", 2, of="percent"),
            Column("same design", of="same"),
            Column("enumeration", "CPU s", 3, of="enumerated_s"),
            Column("search", "CPU s", 3, of="found_s"),
        )
        return Table.of("Search and enumeration", columns, self.fleets)

    def record(self) -> list[dict[str, object]]:
        """One row per fleet, for JSON."""
        return [asdict(one) for one in self.fleets]


def questions(count: int, *, most: int = 8, seed: int = 0) -> Iterator[tuple[Question, Plan]]:
    """So many questions with a plan to begin with, the same for the same seed."""
    found, k = 0, 0
    while found < count:
        draw = stream(seed, f"searched fleet {k}")
        k += 1
        sizes = draw.choice((1, 2, 4), size=int(draw.integers(2, 4)))
        gpus = draw.choice(_GPUS, size=len(sizes), replace=False)
        machines = tuple(
            Machine(f"m{j}", catalog.gpu(str(gpu)), int(size))
            for j, (gpu, size) in enumerate(zip(gpus, sizes, strict=True))
        )
        trace = workload.load(str(draw.choice(_TRACES))).sample(1000, draw)
        model, targets = str(draw.choice(_MODELS)), _TARGETS[int(draw.integers(2))]
        engine = _ENGINES[int(draw.integers(2))]
        link = catalog.link("Ethernet-100G")
        words = " + ".join(f"{one.count} {one.gpu.name}" for one in machines)
        name = f"{words}, {model}, {trace.name}, {targets.ttft_s:g} s, {engine}"
        question = Question(
            Cluster(name, machines, network=Network(within_region=link)),
            catalog.llm(model), trace, 2.0, targets, engine=EngineSpec(name=engine),
        )  # fmt: skip
        if sum(sizes) > most:
            continue
        try:
            plan = planner("tensor-parallel search").plan(question)
        except InfeasibleError:
            continue
        found += 1
        yield question, plan


def enumerated(question: Question, base: Plan) -> tuple[float, Plan, int]:
    """The best of all designs with our routers, one after the other, and how many there are."""
    costs, best, count = ground.costs(question), (0.0, base), 0
    bits = space(costs, question).bits
    seen = set[object]()
    for divided in product(*(_divided(costs, m) for m in range(len(costs.machines)))):
        kinds = (
            (one.gpu.name, one.count, parts)
            for one, parts in zip(costs.machines, divided, strict=True)
        )
        key = tuple(sorted(kinds, key=repr))
        parts = [(stages, role) for each in divided for stages, role in each]
        roles = {role for _, role in parts}
        if key in seen or not parts or ("prefill" in roles) != ("decode" in roles):
            continue
        seen.add(key)
        made = tuple((costs.pipeline(list(stages)), role) for stages, role in parts)
        for each in bits if "prefill" in roles else bits[:1]:
            layout = ReplicaLayout(made, each)
            if not layout.runs():
                continue
            for ruled in routers(question)[:OURS]:
                count += 1
                try:
                    plan = built(base, layout, *ruled)
                    if _holds(plan, question, GAIN * best[0] or _LEAST_RPS):
                        rate = _most_rps(plan, question, GAIN * best[0] or _LEAST_RPS, best[0])
                        best = max(best, (rate, plan), key=lambda x: x[0])
                except HeteroError:
                    continue
    return *best, count


def _most_rps(plan: Plan, question: Question, low: float, least: float) -> float:
    """Largest rate that a plan holds with its lower shares, within 2 %, where it holds one.

    Nothing at or below a least rate is looked at: 0.
    """
    high = 1.5 * low
    while _holds(plan, question, high):
        low, high = high, 1.5 * high
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _holds(plan, question, middle) else (low, middle)
    short = math.ceil(_COUNTED / 0.75)
    while low > least:
        lower = (share * low for share in _LOWER)
        bad = (rate for rate in lower if not _passes(plan, question, rate, short)[0])
        if (failed := next(bad, 0.0)) == 0.0:
            return low
        low = failed
        while low > least and not _holds(plan, question, low):
            low /= 1.02
    return 0.0


def _holds(plan: Plan, question: Question, rate_rps: float) -> bool:
    """Whether a run of 20 lives at a rate meets the goal beyond chance and leaves no backlog."""
    lives = 20.0 * plan.life_s(question.load().trace) * rate_rps
    return all(_passes(plan, question, rate_rps, math.ceil(max(lives, _COUNTED / 0.75))))


def _passes(plan: Plan, question: Question, rate_rps: float, count: int) -> tuple[bool, bool]:
    """Whether a run of so many requests meets the goal, and whether its backlog stays."""
    run, slo = plan.simulate(question.load(rate_rps).arrivals(count, 0), 0), question.slo
    come_s, done_s = run.requests["arrival_s"], run.requests["finish_s"]
    met = run.finished & (run.ttft_s <= (slo.ttft_s or np.inf))
    met &= ~(run.tpot_s > (slo.tpot_s or np.inf))  # replies of one token have none
    part = slice(int(0.2 * count), count - int(0.05 * count))
    n = len(met[part])
    enough = binomtest(int(met[part].sum()), n, question.goal, alternative="greater").pvalue <= 0.05
    tokens = run.finished * (run.trace.input_tokens.astype(float) + run.trace.output_tokens)
    before, after = (tokens[(come_s <= t) & (done_s > t)] for t in come_s[part][[0, -1]])
    noise = 3.0 * math.sqrt((before**2).sum() + (after**2).sum())
    return enough, after.sum() - before.sum() <= 0.02 * tokens[part].sum() + noise


def _divided(
    costs: CostModel, machine: int
) -> list[tuple[tuple[tuple[PipelineStage, ...], Role], ...]]:
    """All ways to divide a machine: sets of instances that leave no room for one more, and none."""
    count, layers, shapes = costs.machines[machine].count, costs.llm.layers, {}
    for degree in (t for t in (1, 2, 4, 8) if costs.divides(t)):
        for stages in range(1, count // degree + 1):
            cuts = np.rint(np.linspace(0, layers, stages + 1)).astype(int)
            made = tuple(PipelineStage(machine, degree, int(n)) for n in np.diff(cuts))
            try:
                roomy = costs.pipeline(made).kv_tokens >= 16
            except HeteroError:
                continue
            if roomy:
                shapes[made] = degree * stages
                break
    whole = [
        one
        for n in range(1, count + 1)
        for one in combinations_with_replacement(list(product(shapes, _ROLES)), n)
        if count - min(shapes.values()) < sum(shapes[made] for made, _ in one) <= count
    ]
    return [(), *whole]


def bench(*, fleets: int = 60, most: int = 8, seed: int = 0, progress: Say = silent) -> SearchBench:
    """Compare both on random fleets of at most so many GPUs."""
    require(most >= 2, f"No fleet has {most} GPUs.", resolve="give `most` 2 or more.")
    found = []
    for question, plan in questions(fleets, most=most, seed=seed):
        progress(question.cluster.name)
        found.append(compared(question, plan))
        progress(str(found[-1]))
    return SearchBench(tuple(found))


def compared(question: Question, base: Plan) -> Compared:
    """What both find for a question."""
    spent: list[float] = []
    with stopwatch(spent, time.process_time):
        race = Race(question, base, goodput(base, question), seeds=(0,), budget=_BUDGET)
        layouts = space(base.pipelines[0].model, question)
        first = [one for _, one in promising(layouts, question.load(), 24)]  # as plans have it
        search = LayoutRace(race, layouts, built, routers(question)[:OURS])
        proof = search.run([layout_of(base)], first)
    with stopwatch(spent, time.process_time):
        rate, plan, designs = enumerated(question, base)
    made = [sorted((g.stages, g.phase) for g in one.groups) for one in (plan, race.plan)]
    return Compared(
        question.cluster.name,
        designs,
        _BUDGET - race.left,
        rate,
        race.mean_rps,
        made[0] == made[1],
        spent[1],
        spent[0],
        proof,
    )
