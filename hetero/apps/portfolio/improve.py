"""The best plan near those of all planners and over all layouts of the fleet.

Layouts, phases, KV data types and routers are raced (:mod:`hetero.apps.portfolio.race`); where none
is better, so are sizes of steps. Everything is tried in a fixed order and counted, so that the same
case gives the same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetero.apps.portfolio import assumptions
from hetero.apps.portfolio.bound import goodput_bound
from hetero.apps.portfolio.build import plan_of
from hetero.apps.portfolio.race import Change, LayoutRace, Race, Ruled
from hetero.costs.cost import CostModel
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import split
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Role
from hetero.planners.search.estimates import promising
from hetero.planners.search.prices import WorkPrices
from hetero.planners.search.space import ReplicaLayout, ReplicaSpace
from hetero.plans import Plan
from hetero.question import Question
from hetero.routers import Builtin, Predictive
from hetero.routers.named import factories

_PROMISING = 24  # layouts that are raced before what is near the planners' plans

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
        most_rps = goodput_bound(question) or math.inf
        search = LayoutRace(race, whole, built, known, _steps, most_rps, jobs)
        proof = search.run(layouts, first_raced)
    else:
        _steps(race)
    return Improved(race.plan, race.carried_rps, tuple(race.changes), designs - race.left, proof)


def space(costs: CostModel, question: Question) -> ReplicaSpace:
    """All layouts of whole replicas on the machines of a case, or of a part of it.

    Examples
    --------
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv")
    >>> one = Question(cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B"), chats, 2.0)
    >>> space(assumptions.costs(one), one).count
    10
    """
    rates = [costs.rates(m, 1) for m in range(len(costs.machines))]
    cached = question.trace.prefix_ids is not None and assumptions.engine(question).prefix_cache
    prices = WorkPrices.of(
        question.load(),
        pairs=float(np.mean([one.pair_s / one.product_s for one in rates])),
        prompts=not cached,
    )
    least: tuple[Bits, ...] = (question.transfer_bits,)
    bits = least if question.kv_transfer_bits or least == (16,) else (*least, 16)
    return ReplicaSpace(costs, bits, prices, assumptions.replica, question.split)


def layout_of(plan: Plan) -> ReplicaLayout:
    """Layout of a plan of costed replicas."""
    assert plan.deployment is not None
    nodes = plan.deployment.replicas
    parts = tuple((one, node.role) for one, node in zip(plan.pipelines, nodes, strict=True))
    ratio = min((link.compression for *_, link in plan.deployment.links), default=1.0)
    return ReplicaLayout(parts, 4 if ratio <= 0.25 else 8 if ratio <= 0.5 else 16)


def built(base: Plan, layout: ReplicaLayout, routing: str, router: Builtin) -> Plan:
    """The plan of a layout and a router, by the names of another and with steps of its sizes."""
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
    known = ((one.gpu, one.engine.max_step_tokens) for one in base.deployment.replicas)
    return _sized(plan, {gpu.name: tokens for gpu, tokens in known if gpu is not None})


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


def _steps(race: Race) -> None:
    """Try steps of half and of twice as many tokens, one GPU type after the other.

    Large ones prefill more at once, small ones keep those that decode waiting for less.
    """
    made = race.plan.deployment
    if made is None or made.replicas[0].engine.batching != "chunked":
        return
    if race.question.max_step_tokens is not None:
        return
    known = {one.gpu: one.engine.max_step_tokens for one in made.replicas if one.role != "decode"}
    for gpu, tokens in known.items():
        for factor in (0.5, 2.0):
            size = round(factor * tokens)
            while gpu is not None and size in assumptions.STEP_TOKENS:
                what = f"steps of {size:,} tokens on {gpu.name}"
                if race.attempt(what, partial(_sized, race.plan, {gpu.name: size})) <= 0:
                    break
                size = round(factor * size)


def _sized(plan: Plan, sizes: dict[str, int]) -> Plan:
    """The plan with steps of so many tokens by GPU type."""
    made = plan.deployment
    assert made is not None
    nodes = tuple(
        replace(one, engine=replace(one.engine, max_step_tokens=sizes[one.gpu.name]))
        if one.gpu is not None and one.gpu.name in sizes
        else one
        for one in made.replicas
    )
    return replace(plan, serving=replace(made, replicas=nodes))
