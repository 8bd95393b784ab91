"""Islands for mixtures of experts: the exact layout, and the Bayesian search (Rignall).

Islands of equal GPUs with expert parallelism prefill or decode ranges of lengths. Step times are
those of the thesis's latency model at FP8, which no other planner has: they are for
:func:`~hetero.planners.ground.analytic` questions alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, planner
from hetero.planners.rignall import replay
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.model import (
    SMALLEST_ISLAND,
    IslandModel,
    island_inventory,
    island_model,
)
from hetero.planners.rignall.parallelism import Benchmark
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase
from hetero.planners.rignall.search import Objective, search
from hetero.plans import Group, Plan
from hetero.question import Question

_BATCH = 8  # layouts that the Bayesian search proposes at a time


def _unfit(question: Question) -> str | None:
    """Dense models have no experts to divide, and GPUs need figures of the latency model."""
    if not question.llm.experts:
        return f"{question.llm.name} is dense: it has no experts for islands to divide."
    if not ground.analytic(question):
        return (
            f"Islands have step times of an analytic model, and plans of {question.llm.name} "
            f"for {question.engine.serving.title} are judged by the roofline's."
        )
    if question.engine.precision not in ("fp16", "fp8"):
        return f"Islands serve {question.llm.name} in FP8, not in {question.engine.precision}."
    if not island_inventory(question):
        return (
            f"The latency model of islands has no figures for "
            f"{', '.join(question.cluster.gpu_types)}, or fewer than {SMALLEST_ISLAND} of each."
        )
    return ground.unfit_budget(question)


def _unfit_bayes(question: Question) -> str | None:
    if (reason := _unfit(question)) is None and find_spec("ax") is None:
        return "Bayesian search needs the package ax-platform, which is not installed."
    return reason


@planner("islands exact", _unfit)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """The best layout of all islands of 2, 4, 8, ... GPUs, proven."""
    held, model = island_inventory(question), island_model(question)
    classes = [(gpu, 2**k) for gpu, n in held.items() for k in range(1, 8) if 2**k <= n]
    found = exact(model.rates(classes), held, minimum=SMALLEST_ISLAND)
    return _entry(question, model, found, plan.name, exact_layout=True)


@planner("islands by BO", _unfit_bayes)
def bayes(question: Question, effort: Effort = NORMAL) -> Plan:
    """The thesis's search over layouts by its divider."""
    held, model = island_inventory(question), island_model(question)
    every = range(SMALLEST_ISLAND, max(held.values()) + 1)
    rates = model.rates([(gpu, s) for gpu, n in held.items() for s in every if s <= n])
    found = search(
        Divider(held, minimum=SMALLEST_ISLAND),
        Objective(rates),
        "bo",
        batch=_BATCH,
        iterations=max(1, effort.layouts // _BATCH),
        seed=question.seed,
    ).best
    if found is None:
        raise InfeasibleError(
            f"None of {effort.layouts} layouts of {question.cluster.name} serves "
            f"{question.llm.name}.",
            resolve="ask for the exact layout, or raise the effort.",
        )
    return _entry(question, model, found, bayes.name, exact_layout=False)


def _entry(
    question: Question, model: IslandModel, assigned: Assignment, name: str, *, exact_layout: bool
) -> Plan:
    made = replay.deployment(model, assigned, name=f"{name} on {question.cluster.name}")
    prices = _prices(question)
    priced = (
        replace(one, usd_per_h=_price(prices, one.gpu.name if one.gpu else "", one.gpus))
        for one in made.replicas
    )
    groups: list[Group] = []
    seen: Counter[tuple[Phase, IslandClass]] = Counter()
    for phase in PHASES:
        for one, flow in zip(assigned.of(phase), assigned.flow_rps(phase), strict=True):
            if not one.share.any():
                continue
            share = float(flow.sum()) / max(assigned.served_rps, 1e-300) / one.count
            for _ in range(one.count):
                seen[phase, one.island] += 1
                size, gpu = one.island.size, one.island.gpu
                label = f"{phase} {size}x{gpu} {seen[phase, one.island]}"
                found = model.benchmark(gpu, size, phase)
                stages = (("", gpu, size, question.llm.layers),)
                tensor = int(found.tp[found.chosen])
                groups.append(Group(label, phase, stages, share, _words(found, size), tensor))
    used: Counter[str] = Counter()
    for group in groups:
        used.update(group.gpus)
    idle = {name: n - used.get(name, 0) for name, n in question.cluster.gpu_counts.items()}
    left = [f"{n} x {name}" for name, n in idle.items() if n]
    total = [_price(prices, name, n) for name, n in used.items()]
    return Plan(
        planner=name,
        groups=tuple(groups),
        routing="by length of the input, to islands in the plan's shares",
        usd_per_h=None if None in total else sum(p for p in total if p is not None),
        bound_rps=assigned.bound if exact_layout else None,
        bound="largest rate of any layout, by its program" if exact_layout else "",
        serving=replace(made, replicas=tuple(priced)),
        router=replay.router(model, assigned),
        notes=(
            f"{assigned.served_rps:.4g} requests/s by the planner's own account. "
            f"{assigned.rates.reading}",
            "Step times of the analytic model of mixtures of experts, weights in FP8; islands "
            "take GPUs of a type wherever they stand.",
            *((f"Idle: {', '.join(left)}.",) if left else ()),
        ),
        evidence=assigned,
    )


def _words(chosen: Benchmark, gpus: int) -> str:
    """Degrees of attention, whose product is the number of GPUs, and of the experts."""
    tp, groups = int(chosen.tp[chosen.chosen]), int(chosen.dp[chosen.chosen])
    experts = f", EP {gpus // groups}" if chosen.phase == "decode" else ""
    return f"TP {tp} x DP {gpus // tp}{experts}"


def _prices(question: Question) -> dict[str, float]:
    """Mean price of a GPU of each type [$/h], of types whose machines all have one."""
    found: dict[str, float] = {}
    for name, count in question.cluster.gpu_counts.items():
        prices = [m.usd_per_h for m in question.cluster.machines if m.gpu.name == name]
        if None not in prices:
            found[name] = sum(p for p in prices if p is not None) / count
    return found


def _price(prices: dict[str, float], gpu: str, count: int) -> float | None:
    return prices[gpu] * count if gpu in prices else None
