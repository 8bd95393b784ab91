"""The best plan near those of all planners and over all layouts of the fleet.

Layouts, phases, KV data types and routers are raced (:mod:`hetero.search.race`); where none
is better, so are sizes of steps. Everything is tried in a fixed order and counted, so that the same
case gives the same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hetero.costs.cost import CostModel
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica, split
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Role
from hetero.planners import ground
from hetero.planners.base import plan_of
from hetero.planners.bound import goodput_bound
from hetero.planners.score import goodput
from hetero.plans import Plan
from hetero.question import Question
from hetero.routers import Builtin, Predictive, factories
from hetero.search.estimates import promising
from hetero.search.race import Change, LayoutRace, Race, Ruled
from hetero.search.space import Parts, ReplicaLayout, ReplicaSpace, WorkPrices, contents

_PROMISING = 24  # layouts that are raced before what is near the planners' plans
_PART = 16  # GPUs of a part of a fleet that is searched by itself, at least
_PARTS = 4  # in a fleet at least; links hold smaller ones back less
_PART_DESIGNS = 300  # raced for a part at most
_IN_CELLS = ", cells: "
_LIMITS = ("max_step_tokens", "max_batch")
_CELL = 4  # decode replicas of a cell at least
_MUCH = 1.05  # times what a part carried, from which on the whole fleet is tried again

Start = tuple[Plan, Sequence[float]]
"""A plan, and the rate that it sustains with the arrivals of each seed."""


@dataclass(frozen=True, slots=True, eq=False)
class Improved:
    """What is left when nothing is better, or no design may be raced any more.

    Attributes
    ----------
    carried_rps
        Load that the plan carries with the arrivals of each seed.
    changes
        Those that were kept, in order.
    played
        Designs that were raced.
    proof
        What that shows of all layouts, in a sentence; empty where the plan has none.
    """

    plan: Plan
    carried_rps: tuple[float, ...]
    changes: tuple[Change, ...]
    played: int
    proof: str = ""


def improve(
    starts: Sequence[Start],
    question: Question,
    *,
    seeds: Sequence[int],
    designs: int,
    jobs: int = 1,
) -> Improved:
    """The best plan of those near the given ones and, as far as so many designs go, of all.

    Parameters
    ----------
    starts
        Plans, the best first.
    designs
        That are raced at most; more of them never find less.
    jobs
        Processes; what is found is the same for any number.
    """
    race = Race(question, *starts[0], seeds=seeds, budget=designs)
    known, proof = routers(question), ""

    first = starts[0][0]
    for routing, router in known if first.deployment and not first.pipelines else ():
        race.attempt(f"routing: {routing}", partial(_rerouted, first, router, routing))
    if first.pipelines and designs:
        costs = first.pipelines[0].model
        layouts = [
            layout_of(plan)
            for plan, _ in starts
            if plan.pipelines and plan.pipelines[0].model.cluster == costs.cluster
        ]
        whole = space(costs, question)
        first_raced = [one for _, one in promising(whole, question.load(), _PROMISING)]
        limit = goodput_bound(question)
        most_rps = min(limit, whole.most_rps(question.load())) if limit else math.inf
        search = LayoutRace(race, whole, built, known, _polish, most_rps, jobs)
        _times_part(search, layouts, jobs)
        proof = search.run(layouts, first_raced)
    else:
        _steps(race)
    return Improved(race.plan, race.carried_rps, tuple(race.changes), designs - race.left, proof)


def _times_part(search: LayoutRace, layouts: Sequence[ReplicaLayout], jobs: int) -> None:
    """Race what is best for a part of a large fleet, as many times as the fleet holds the part.

    A part takes so much less to simulate, about as the square of its GPUs, that many more designs
    can be raced for it.
    """
    race, whole = search.race, search.space
    costs, question = whole.costs, race.question
    times = sum(one.count for one in costs.machines) // _PART
    layouts = [one for one in layouts if all(len(set(p.machines)) == 1 for p, _ in one.parts)]
    if times < _PARTS or not layouts:
        return
    # Machines that are alike and do the same are neighbours; one of as many as parts stays.
    ranked = [sorted(of, key=lambda m: str(contents(layouts[0], m))) for of in whole.kinds]
    kept = [of[times // 2 :: times] or of[:1] for of in ranked]
    cluster = costs.cluster.part([costs.cluster.machines[m] for of in kept for m in of])
    rate_rps = question.rate_rps / times
    asked = replace(question, cluster=cluster, rate_rps=rate_rps, budget_usd_per_h=None)
    part = space(ground.costs(asked), asked)
    names = {one.name: m for m, one in enumerate(part.costs.machines)}
    place = {m: names[costs.machines[m].name] for of in kept for m in of}

    def moved(parts: Parts, onto: Mapping[int, Sequence[int]], costs: CostModel) -> Parts:
        """Replicas on machines of another fleet, as often as it has them, one after the other."""
        return tuple(
            (costs.pipeline([replace(stage, machine=m) for stage in one.stages]), role)
            for k in range(max(map(len, onto.values())))
            for one, role in parts
            for m in onto.get(one.stages[0].machine, ())[k : k + 1]
        )

    within = {m: [k] for m, k in place.items()}
    starts = [ReplicaLayout(moved(one.parts, within, part.costs), one.bits) for one in layouts]
    if not (starts := [one for one in starts if one.runs()]):
        return
    onto = {
        place[m]: of[k :: len(some)]
        for of, some in zip(ranked, kept, strict=True)
        for k, m in enumerate(some)
    }
    plan = built(race.plan, starts[0], *search.routers[0])
    most = min(_PART_DESIGNS, times**2 * race.left)
    inner = Race(asked, plan, goodput(plan, asked, race.seeds), seeds=race.seeds, budget=most)
    charged, raced_rps, won = 0, 0.0, None

    def polished(of: Race) -> None:
        """Steps as well, and the whole fleet as soon as a part gets much better."""
        _polish(of)
        if of.mean_rps > _MUCH * raced_rps:
            expand(of)

    def expand(of: Race) -> None:
        nonlocal charged, raced_rps, won
        used = -(-(most - of.left) // times**2)
        race.left, charged, raced_rps = max(0, race.left - used + charged), used, of.mean_rps
        found, words = layout_of(of.plan), of.plan.routing.partition(_IN_CELLS)[0]
        best = ReplicaLayout(moved(found.parts, onto, costs), found.bits)
        ruled = next(one for one in search.routers if one[0] == words)
        what = f"{times} times what is best for {len(place)} of the machines, routing: {words}"
        base = _celled(of.plan, times * _cells(of.plan))
        if race.attempt(what, partial(built, base, best, *ruled)) > 0:
            won = best, ruled

    first = [one for _, one in promising(part, asked.load(), _PROMISING)]
    LayoutRace(inner, part, built, search.routers, polished, jobs=jobs).run(starts, first)
    # Where the budget ends here a larger one would go on from another plan.
    if inner.left or most == _PART_DESIGNS:
        expand(inner)
    race.left = max(0, race.left - (-(-(most - inner.left) // times**2) - charged))
    if won:
        search.settle(won[0], [won[1]])


def space(costs: CostModel, question: Question) -> ReplicaSpace:
    """All layouts of whole replicas on the machines of a case, or of a part of it.

    Examples
    --------
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv")
    >>> one = Question(cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B"), chats, 2.0)
    >>> space(ground.costs(one), one).count
    10
    """
    rates = [costs.rates(m, 1) for m in range(len(costs.machines))]
    cached = ground.shares_prefixes(question)
    prices = WorkPrices.of(
        question.load(),
        pairs=float(np.mean([one.pair_s / one.product_s for one in rates])),
        prompts=not cached,
    )
    least: tuple[Bits, ...] = (question.transfer_bits,)
    bits = least if question.kv_transfer_bits or least == (16,) else (*least, 16)
    return ReplicaSpace(costs, bits, prices, compared_replica, question.split)


def layout_of(plan: Plan) -> ReplicaLayout:
    """Layout of a plan of costed replicas."""
    assert plan.deployment is not None
    nodes = plan.deployment.replicas
    parts = tuple((one, node.role) for one, node in zip(plan.pipelines, nodes, strict=True))
    ratio = min((link.compression for *_, link in plan.deployment.links), default=1.0)
    return ReplicaLayout(parts, 4 if ratio <= 0.25 else 8 if ratio <= 0.5 else 16)


def built(base: Plan, layout: ReplicaLayout, routing: str, router: Builtin) -> Plan:
    """The plan of a layout and a router, by the names of another, with its steps and cells."""
    count: Counter[str] = Counter()
    parts: list[tuple[str, Pipeline, Role]] = []
    for pipeline, role in layout.parts:
        where = "+".join(
            dict.fromkeys(pipeline.model.machines[stage.machine].name for stage in pipeline.stages)
        )
        label = where if role == "both" else f"{where} {role}"
        parts.append((f"{label}/{count[label]}", pipeline, role))
        count[label] += 1
    assert base.deployment is not None
    plan = plan_of(
        base.planner,
        split(layout.parts[0][0].model.cluster.name, parts, KvTransfer(bits=layout.bits)),
        [pipeline for pipeline, _ in layout.parts],
        router,
        routing,
        bound_rps=base.bound_rps,
        bound=base.bound,
        options=base.options,
    )
    known = (
        (
            one.gpu.name,
            {name: getattr(one.engine, name) for name in ("max_step_tokens", "max_batch")},
        )
        for one in base.deployment.replicas
        if one.gpu is not None
    )
    plan = _sized(plan, dict(known))
    return _celled(plan, _cells(base) if layout.split else 1)


def routers(question: Question) -> tuple[Ruled, ...]:
    """Every router of whole replicas in words, ours first, with and without the targets."""
    made, first_s = factories(), question.slo.ttft_s or question.slo.e2e_s
    tpot_s = 0.9 * question.slo.tpot_s if question.slo.tpot_s else None
    ours: list[Ruled] = [("hetero", Predictive(tpot_s=tpot_s))]
    if first_s is not None:
        router = Predictive(target_s=0.9 * first_s, tpot_s=tpot_s)
        ours.append((f"hetero, first token within {router.target_s:g} s", router))
    others = ((name, make) for name, make in made.items() if make is not Predictive)
    return (*ours, *((name.replace("-", " "), make()) for name, make in others))


def _rerouted(plan: Plan, router: Builtin, routing: str) -> Plan:
    assert plan.deployment is not None
    return replace(
        plan,
        routing=routing,
        router=router,
        groups=tuple(replace(group, share=float("nan")) for group in plan.groups),
    )


def _cells(plan: Plan) -> int:
    return plan.router.cells if isinstance(plan.router, Predictive) else 1


def _celled(plan: Plan, cells: int) -> Plan:
    """The plan with so many cells that KV caches do not leave; as it is with another router."""
    if not isinstance(plan.router, Predictive) or plan.router.cells == cells:
        return plan
    words = plan.routing.partition(_IN_CELLS)[0] + (f"{_IN_CELLS}{cells}" if cells > 1 else "")
    return replace(plan, router=replace(plan.router, cells=cells), routing=words)


def _polish(race: Race) -> None:
    """Try twice and half as many cells, then sizes of steps and batches."""
    made = race.plan.deployment
    most = sum(one.role == "decode" for one in made.replicas) // _CELL if made else 0
    for factor in (2.0, 0.5):
        while isinstance(race.plan.router, Predictive):
            cells = round(factor * race.plan.router.cells)
            change = partial(_celled, race.plan, cells)
            if not 1 <= cells <= most or race.attempt(f"{cells} cells", change) <= 0:
                break
    _steps(race)


def _steps(race: Race) -> None:
    """Try half and twice as many tokens of a step, and fewer requests of a batch, by GPU type.

    Large steps prefill more at once, small ones keep those that decode waiting for less; small
    batches let requests wait for their first token, and no longer for each that follows.
    """
    made, asked = race.plan.deployment, race.question.engine
    if made is None or made.replicas[0].engine.batching != "chunked":
        return
    tokens = {one.gpu: one.engine.max_step_tokens for one in made.replicas if one.role != "decode"}
    for gpu, now in tokens.items() if asked.max_step_tokens is None else ():
        for factor in (0.5, 2.0):
            size = round(factor * now)
            while gpu is not None and size in ground.STEP_TOKENS:
                what = f"steps of {size:,} tokens on {gpu.name}"
                change = partial(_sized, race.plan, {gpu.name: {"max_step_tokens": size}})
                if race.attempt(what, change) <= 0:
                    break
                size = round(factor * size)
    gpus = {one.gpu for one in made.replicas if one.role != "prefill" and one.gpu is not None}
    for gpu in sorted(gpus if asked.max_batch is None else (), key=lambda one: one.name):
        # Bounds know no batches above the engine's own.
        for size in (n for n in ground.BATCHES if n < asked.limits(gpu).max_batch):
            change = partial(_sized, race.plan, {gpu.name: {"max_batch": size}})
            race.attempt(f"batches of {size:,} requests on {gpu.name}", change)


def _sized(plan: Plan, sizes: Mapping[str, Mapping[str, Any]]) -> Plan:
    """The plan with other limits of the engines on GPU types."""
    made = plan.deployment
    assert made is not None
    nodes = tuple(
        replace(one, engine=replace(one.engine, **sizes[one.gpu.name]))
        if one.gpu is not None and one.gpu.name in sizes
        else one
        for one in made.replicas
    )
    return replace(plan, serving=replace(made, replicas=nodes))
