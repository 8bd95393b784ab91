r"""The best plan near those of all planners and over all layouts of the fleet.

Layouts, phases, KV data types and routers are raced (:mod:`hetero.search.race`); where none
is better, so are sizes of steps. Everything is tried in a fixed order and counted, so that the same
case gives the same plan.

Which layouts to race first is estimated: mean requests on the best steps, over links never idle.

A replica serves at most so many requests/s of I prompt and S decode tokens, x of them cached in the
mean step,

.. math::
    c = \max_b \frac{b}{S\,T}, \qquad T = T(b + m, b, b\,x) \le \tau, \quad b\,x \le KV,
    \quad m = b\,I / S

where it serves both phases, as many without m where it decodes, and p where it takes prompts alone.
Machines i with the sums :math:`c_i, p_i, d_i` hand over inside as much as they can and the rest
over their links, on which a request takes :math:`l_i` seconds out and :math:`l'_i` in:

.. math::
    \lambda = \sum_i \big(c_i + h_i\big) + \min\Big(
        \sum_i \min(p_i - h_i, 1 / l_i),\; \sum_i \min(d_i - h_i, 1 / l'_i)\Big),
    \qquad h_i = \min(p_i, d_i)

No bound: that is :mod:`hetero.search.space`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from hetero.arrays import Floats
from hetero.costs.cost import CostModel
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica, split
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Replica, Role
from hetero.planners import ground
from hetero.planners.base import plan_of
from hetero.planners.bound import goodput_bound
from hetero.planners.score import goodput
from hetero.plans import Plan
from hetero.question import Load, Question
from hetero.routers import Builtin, Predictive, factories
from hetero.search.race import LayoutRace, Race, Ruled
from hetero.search.space import Parts, ReplicaLayout, ReplicaSpace, WorkPrices, best_first, contents

_MARGIN = 0.9  # of the target for the time per token
_SHARES = np.linspace(0.0, 1.0, 11)  # of the price of a request that its prefill is worth
_EACH = 300  # layouts that are looked at for each of them
_STEP_TOKENS = 4096.0  # of prompts that are prefilled together, where they are not cut


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """Prompt tokens, their pairs, decode tokens, and cached tokens that one of them reads."""

    inputs: float
    pairs: float
    steps: float
    cached: float
    tpot_s: float

    @classmethod
    def of(cls, load: Load) -> MeanRequest:
        """The mean request of a load, and its target."""
        inputs = load.trace.input_tokens.astype(np.float64)
        steps = np.maximum(load.trace.output_tokens.astype(np.float64) - 1.0, 0.0)
        cached = float((steps * inputs + steps * (steps - 1.0) / 2.0).sum() / max(steps.sum(), 1.0))
        pairs, tpot_s = float((inputs**2).mean() / 2.0), load.slo.tpot_s or np.inf
        most_s = _MARGIN * tpot_s
        return cls(float(inputs.mean()), pairs, max(float(steps.mean()), 1e-9), cached, most_s)

    def rates(self, replica: Replica) -> Floats:
        """c, p and d of a replica [requests/s], shape (3,): one of them is not 0.

        Examples
        --------
        >>> from hetero.latency.step import StepModel
        >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
        >>> one = MeanRequest(1000.0, 0.0, 100.0, 1050.0, np.inf)
        >>> roles = "both", "prefill", "decode"
        >>> found = [one.rates(Replica("a", step, 50_000, role=role)) for role in roles]
        >>> [round(float(each.sum()), 1) for each in found]
        [6.0, 9.5, 15.9]
        """
        engine, step = replica.engine, replica.step
        chunked = engine.batching == "chunked"
        most = max(float(engine.max_step_tokens) if chunked else _STEP_TOKENS, self.inputs)
        count = most / self.inputs
        alone = count / float(np.asarray(step.seconds(most, 0, 0.0, count * self.pairs)))
        if replica.role == "prefill":
            return np.array([0.0, alone, 0.0])
        room = replica.kv_tokens // max(self.cached, 1.0)
        b = np.unique(np.floor(np.geomspace(1.0, max(1.0, min(engine.max_batch, room)), 40)))
        b = b[b <= room]
        begun = b / self.steps if replica.role == "both" else 0.0 * b
        if chunked:
            parts = b + begun * self.inputs, b, b * self.cached, begun * self.pairs
            seconds = np.asarray(step.seconds(*parts))
        else:
            seconds = np.asarray(step.seconds(b, b, b * self.cached, 0.0 * b)) + begun / alone
        good = seconds <= self.tpot_s
        served = float((b[good] / seconds[good]).max(initial=0.0)) / self.steps
        return np.array([served, 0.0, 0.0] if replica.role == "both" else [0.0, 0.0, served])


def promising(space: ReplicaSpace, load: Load, count: int) -> list[tuple[float, ReplicaLayout]]:
    """So many layouts at most that should serve the most, the best first, and how much [req/s]."""
    mean, found = MeanRequest.of(load), dict[tuple[Bits, tuple[int, ...]], float]()
    known: dict[tuple[Pipeline, Role], Floats] = {}

    def rates(pipeline: Pipeline, role: Role) -> Floats:
        if (pipeline, role) not in known:
            known[pipeline, role] = mean.rates(space.replica(pipeline, "", role))
        return known[pipeline, role]

    order = [(kind, m) for kind, numbers in enumerate(space.kinds) for m in numbers]
    for bits in space.bits:
        held = _held_s(space, bits, mean.inputs)
        worth = []
        for kind, numbers in enumerate(space.kinds):
            parts = (space.parts(numbers[0], one) for _, one in space.divisions[kind])
            sums = np.array([sum((rates(*part) for part in one), np.zeros(3)) for one in parts])
            both, prefill, decode = sums.T
            inside, (out_s, in_s) = np.minimum(prefill, decode), held[kind]
            sent = np.minimum(prefill - inside, 1.0 / out_s)
            worth.append(
                np.stack([both + inside, sent, np.minimum(decode - inside, 1.0 / in_s)], axis=1)
            )
        for share in _SHARES:
            values = [one @ np.array([1.0, share, 1.0 - share]) for one in worth]
            ranked = [np.argsort(-one, kind="stable") for one in values]
            lines = [one[at].tolist() for one, at in zip(values, ranked, strict=True)]
            for _, state in islice(best_first(lines, [kind for kind, _ in order]), _EACH):
                # Among machines of a kind it makes no difference which is divided in which way.
                own = zip(order, state, strict=True)
                chosen = sorted((k, int(ranked[k][i])) for (k, _), i in own)
                alone, sent, taken = np.sum([worth[k][i] for k, i in chosen], axis=0)
                found[bits, tuple(i for _, i in chosen)] = float(alone + min(sent, taken))
    layouts = []
    for bits, state in sorted(found, key=lambda one: (-found[one], one)):
        pairs = zip(order, state, strict=True)
        whole = [part for (k, m), i in pairs for part in space.parts(m, space.divisions[k][i][1])]
        layout = ReplicaLayout(tuple(whole), bits)
        if (layout.split or bits == space.bits[0]) and layout.runs():
            layouts.append((found[bits, state], layout))
        if len(layouts) == count:
            break
    return layouts


def _held_s(space: ReplicaSpace, bits: Bits, tokens: float) -> list[tuple[float, float]]:
    """By kind how long a prompt takes the link out of a machine, and the one into it, in mean."""
    transfer, ends = KvTransfer(bits=bits), list[tuple[int, Pipeline]]()
    for numbers, ways in zip(space.kinds, space.divisions, strict=True):
        whole = next((one for _, one in ways if one), ())
        ends += [(m, space.parts(m, whole)[0][0]) for m in (numbers if whole else ())]
    found = []
    for numbers in space.kinds:
        own = [one for m, one in ends if m == numbers[0]]
        others = [one for m, one in ends if m != numbers[0]]
        out = [transfer.seconds(a, b)[1] for a in own for b in others]
        into = [transfer.seconds(b, a)[1] for a in own for b in others]
        mean_s = [max(1e-9, tokens * float(np.mean(one or [0.0]))) for one in (out, into)]
        found.append((mean_s[0], mean_s[1]))
    return found


_PROMISING = 24  # layouts that are raced before what is near the planners' plans
_PART = 16  # GPUs of a part of a fleet that is searched by itself, at least
_PARTS = 4  # in a fleet at least; links hold smaller ones back less
_PART_DESIGNS = 300  # raced for a part at most
_IN_CELLS = ", cells: "
_LIMITS = ("max_step_tokens", "max_batch")
_CELL = 4  # decode replicas of a cell at least
_MUCH = 1.05  # times what a part served, from which on the whole fleet is tried again

Start = tuple[Plan, Sequence[float]]
"""A plan, and the rate that it sustains with the arrivals of each seed."""


@dataclass(frozen=True, slots=True, eq=False)
class Improved:
    """What is left when nothing is better, or no design may be raced any more.

    Attributes
    ----------
    goodput_rps
        Load that the plan carries with the arrivals of each seed.
    changes
        Those that were kept, in order.
    proof
        What that shows of all layouts, in a sentence; empty where the plan has none.
    """

    plan: Plan
    goodput_rps: tuple[float, ...]
    changes: tuple[str, ...]
    proof: str = ""


def improve(
    starts: Sequence[Start],
    question: Question,
    *,
    seeds: Sequence[int],
    designs: int,
    say: Callable[[int], None] = lambda left: None,
) -> Improved:
    """The best plan of those near the given ones and, as far as so many designs go, of all.

    Parameters
    ----------
    starts
        Plans, the best first.
    designs
        That are raced at most; more of them never find less.
    say
        Called before a design is raced, with how many more may be.
    """
    race = Race(question, *starts[0], seeds=seeds, budget=designs, say=say)
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
        search = LayoutRace(race, whole, built, known, _polish, most_rps)
        _times_part(search, layouts)
        proof = search.run(layouts, first_raced)
    else:
        _steps(race)
    return Improved(race.plan, race.goodput_rps, tuple(race.changes), proof)


def _times_part(search: LayoutRace, layouts: Sequence[ReplicaLayout]) -> None:
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
    rates = goodput(plan, asked, race.seeds)
    say = lambda left: race.say(race.left - (most - left) // times**2)  # noqa: E731
    inner = Race(asked, plan, rates, seeds=race.seeds, budget=most, say=say)
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
    LayoutRace(inner, part, built, search.routers, polished).run(starts, first)
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
