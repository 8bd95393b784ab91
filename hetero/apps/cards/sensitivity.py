"""What one change would do: one more machine of each kind, targets or a budget half as far again.

Machines and budgets are planned anew by the planner that won, and the plans at hand stay candidates
where they can: nobody has to make use of more. Other targets are left to these. Requests, gaps and
draws of the step times are the same before and after, so that gains are differences of pairs. GPUs
that serve next to nothing at the rate asked for are taken out of a plan first (:func:`lean`).

What binds is found by trying it: each resource is made 10 % better by itself (step times of prefill
or decode shorter, KV caches, links or batches larger) and the goodput is found again with the same
requests and gaps. Where the largest gain is, there the plan binds; the gain over 10 % is the
elasticity of the goodput.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from hetero.apps.cards.card import PART, ChangeEffect, Limit, Limits, Sampled, TriedPlanner
from hetero.apps.cards.contenders import Contender
from hetero.apps.cards.delivery import LATENCIES, CardEffort, difference, goodput, redeployed
from hetero.apps.cards.request import more
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment, KvLink, Replica
from hetero.errors import HeteroError
from hetero.latency.scaled import scaled
from hetero.planners.score import goodput as goodputs
from hetero.plans import Group, Plan
from hetero.question import Load, Question, judged, sustained_rps, sustains
from hetero.routers import Predictive
from hetero.simulator import Run, Slo

STEP = 1.5
"""Factor of one step of a target or a budget."""

_UNUSED = 0.02  # share of the requests below which a kind of GPU is not worth having at a rate
_PICK = 0.02  # precision of the goodputs by which one of several plans is picked

Replan = Callable[[Question], Plan]
"""The planner that won."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a case.

    Attributes
    ----------
    dearest
        Price that plans made before it must not exceed [$/h]; None where all are still allowed.
    like
        Machine of which there is one more, the last of the cluster.
    eases
        Whether what was possible before it stays so.
    """

    what: str
    question: Question
    dearest: float | None = None
    like: Machine | None = None
    eases: bool = True


def machines(question: Question) -> tuple[Machine, ...]:
    """One machine of each kind of a cluster."""
    kinds: dict[tuple[object, ...], Machine] = {}
    for machine in question.cluster.machines:
        key = (machine.gpu.name, machine.count, machine.region, machine.usd_per_h, machine.link)
        kinds.setdefault(key, machine)
    return tuple(kinds.values())


def steps(question: Question) -> Iterator[Step]:
    """The changes of a case: machines, then targets, then the budget."""
    budget = question.budget_usd_per_h
    kinds = machines(question)
    for machine in kinds:
        grown = more(question.cluster, machine)
        paid = None if budget is None else budget + (machine.usd_per_h or 0.0)
        where = f", {machine.region}" if len({m.region for m in kinds}) > 1 else ""
        what = f"one more {machine.count} x {machine.gpu.name}{where}"
        asked = replace(question, cluster=grown, budget_usd_per_h=paid)
        yield Step(what, asked, like=machine)
    for name, field in LATENCIES.items():
        target = getattr(question.slo, field)
        if target is None:
            continue
        for factor in (STEP, 1.0 / STEP):
            slo: Slo = replace(question.slo, **{field: target * factor})
            what = f"{name.upper()} of {_ms(target * factor)}"
            yield Step(what, replace(question, slo=slo), eases=factor > 1.0)
    if budget is not None:
        for factor in (STEP, 1.0 / STEP):
            paid = budget * factor
            changed = replace(question, budget_usd_per_h=paid)
            yield Step(f"budget of {paid:,.4g} $/h", changed, paid, eases=factor > 1.0)


def changes(
    pool: Sequence[Plan],
    question: Question,
    now: Sampled,
    replan: Replan,
    effort: CardEffort,
) -> list[tuple[str, Callable[[], tuple[ChangeEffect, Plan | None]]]]:
    """Each change, and what finds what becomes of the goodput after it, with the plan it is of.

    Parameters
    ----------
    pool
        Plans of the case as it is, the chosen one first.
    now
        Goodput of that one.
    replan
        Plans a changed case.
    """
    return [
        (one.what, partial(_changed, one, pool, now, replan, effort)) for one in steps(question)
    ]


def lean(
    best: Contender, now: Sampled, effort: CardEffort, *, least_rps: float, draws: int | None = None
) -> tuple[Contender, Sampled]:
    """A contender without GPUs that add nothing beyond chance to what it has now, and its goodput.

    It stays as it is where the goodput would fall below ``least_rps``.
    """
    question, score = best.question, best.asked.score
    left, why = without(best.plan, question)
    if left is best.plan or score is None:
        return best, now
    found = goodput(left, question, effort, draws=draws, like=now, near_rps=now.value)
    if found.value < least_rps or difference(found, now).interval()[1] < 0.0:
        return best, now
    said = f"{why}: with them the goodput is {now.value:.3g} requests/s, no change beyond chance."
    left = replace(left, notes=(*left.notes, said))
    few = goodputs(left, question, score.seeds, near_rps=now.value)
    asked = replace(best.asked, plan=left, score=replace(score, plan=left, seeds_rps=few))
    return replace(best, asked=asked), found


def without(plan: Plan, question: Question) -> tuple[Plan, str]:
    """The plan without the kinds of GPU that serve next to nothing at the rate, and which."""
    served = plan.deployment
    if served is None:
        return plan, ""
    run = plan.simulate(question.arrivals(), question.seed)
    # Requests and not tokens: where outputs are short, replicas that only decode have few.
    frame = run.frame()
    counts = Counter([*frame["replica"], *frame["decode_replica"]])
    serves = {one.name: counts[one.name] / len(frame) for one in served.replicas}
    unused = {
        name
        for names in _kinds(plan).values()
        for name in names
        if sum(serves[one] for one in names) < _UNUSED
    }
    if not unused:
        return plan, ""
    left = _left(plan, served, question, unused)
    gone = {name: count - left.gpus.get(name, 0) for name, count in plan.gpus.items()}
    what = ", ".join(f"{count} x {name}" for name, count in gone.items() if count)
    share = 100 * sum(serves[one] for one in unused)
    at = f"of the requests at {question.rate_rps:.3g} requests/s"
    return left, f"Left idle: {what}, which would serve {share:.1f} % {at}"


def _kinds(plan: Plan) -> dict[tuple[str, ...], list[str]]:
    """Replicas by the types of their GPUs."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for group in plan.groups:
        kinds.setdefault(tuple(group.gpus), []).append(group.name)
    return kinds


def parts(best: Contender) -> Iterator[TriedPlanner]:
    """What a plan carries with one kind of its replicas only, and without each of them."""
    plan, question, score, kinds = best.plan, best.question, best.asked.score, _kinds(best.plan)
    served = plan.deployment
    if served is None or score is None or {"both"} != {group.phase for group in plan.groups}:
        return
    every = frozenset(name for own in kinds.values() for name in own)
    taken = {frozenset(each) for own in kinds.values() for each in (own, every - {*own})}
    for names in sorted(taken - {every, frozenset()}, key=sorted):
        left = _left(plan, served, question, names)
        rate, bits = np.mean(goodputs(left, question, score.seeds)), question.engine.precision
        yield TriedPlanner(PART, bits, float(rate), left.usd_per_h, None, "", left.gpus)


def _left(plan: Plan, served: Deployment, question: Question, unused: Set[str]) -> Plan:
    """The plan without replicas of such names."""
    replicas = tuple(one for one in served.replicas if one.name not in unused)
    links = tuple(one for one in served.links if unused.isdisjoint(one[:2]))
    groups = [one for one in plan.groups if one.name not in unused]
    left = _routed(plan, replace(served, replicas=replicas, links=links), groups)
    price = {one.name: (one.usd_per_h or 0.0) / one.count for one in question.cluster.machines}
    saved = [
        count * price[machine]
        for one in plan.groups
        for machine, _, count, _ in one.stages
        if one.name in unused
    ]
    price_usd = None if plan.usd_per_h is None else plan.usd_per_h - math.fsum(saved)
    return replace(left, usd_per_h=price_usd)


def _routed(plan: Plan, deployment: Deployment, groups: Sequence[Group]) -> Plan:
    """The plan with other replicas, by predicted cost: shares were made for those it had."""
    return replace(
        plan,
        groups=tuple(replace(g, share=float("nan")) for g in groups),
        serving=deployment,
        router=plan.router if (kept := isinstance(plan.router, Predictive)) else Predictive(),
        routing=plan.routing if kept else "hetero",
        pipelines=(),
    )


def _changed(
    step: Step, pool: Sequence[Plan], now: Sampled, replan: Replan, effort: CardEffort
) -> tuple[ChangeEffect, Plan | None]:
    draws = effort.draws // 2
    candidates = [(one, "same plan" if k == 0 else "another plan") for k, one in enumerate(pool)]
    if step.dearest is not None:
        price = step.dearest
        candidates = [
            (one, how)
            for one, how in candidates
            if one.usd_per_h is not None and one.usd_per_h <= price
        ]
    if step.like is not None:
        grown = extended(pool[0], step.like, step.question.cluster)
        candidates += [(grown, "the same on it")] if grown else []
    reason = ""
    if step.like is not None or step.dearest is not None:
        try:
            candidates.append((replan(step.question), "planned anew"))
        except HeteroError as error:
            reason = error.what
    if not candidates:
        none = Sampled.of([0.0] * len(now.seeds), [0.0] * draws)
        return ChangeEffect(step.what, none, difference(none, now), None, reason), None
    number, quick = _pick([one for one, _ in candidates], step.question, now.value)
    best, how = candidates[number]
    if best is pool[0] and step.like is not None:
        found = replace(now, draws=now.draws[:draws])  # whatever stays idle changes nothing
    else:
        found = goodput(best, step.question, effort, draws=draws, like=now, near_rps=quick)
    if step.eases:  # the plan at hand stays possible, and meets easier targets
        pairs = ((found.seeds, now.seeds), (found.draws, now.draws))
        found = Sampled.of(*([max(p) for p in zip(a, b, strict=False)] for a, b in pairs))
    return ChangeEffect(step.what, found, difference(found, now), best.usd_per_h, how), best


def _pick(plans: Sequence[Plan], question: Question, near_rps: float) -> tuple[int, float]:
    """The plan of the highest goodput with one seed, and that; of equals the first stays."""
    load, seed = question.load(precision=_PICK), question.seed
    best, most = 0, 0.0
    for k, one in enumerate(plans):
        # Most cannot reach the best so far: one run shows it.
        if most > 0 and not sustains(one, load.at(most * (1.0 + _PICK)), seed):
            continue
        found = sustained_rps(one, load, seed, near_rps=(most or near_rps) or None)
        if found > most:
            best, most = k, found
    return best, most


def _places(group: Group) -> set[str]:
    return {machine for machine, *_ in group.stages}


def extended(plan: Plan, like: Machine, cluster: Cluster) -> Plan | None:
    """The plan with what stands on a machine alone once more, on the last of the cluster, alike.

    Requests then go by predicted cost, since shares were made for the replicas there were. None
    where a plan is none of replicas, or no machine of the kind holds replicas of its own.
    """
    served, name = plan.deployment, cluster.machines[-1].name
    if served is None:
        return None
    alike = (m.name for m in cluster.machines if replace(m, name="") == replace(like, name=""))
    found = ([g for g in plan.groups if _places(g) == {one}] for one in alike)
    own = next(filter(None, found), [])
    if not own:
        return None
    twins = {group.name: f"{group.name} on {name}" for group in own}
    ends = {one.name: [one.name, *filter(None, [twins.get(one.name)])] for one in served.replicas}
    deployment = replace(
        served,
        replicas=(
            *served.replicas,
            *(replace(r, name=twins[r.name]) for r in served.replicas if r.name in twins),
        ),
        links=tuple((a, b, link) for x, y, link in served.links for a in ends[x] for b in ends[y]),
    )
    groups = [
        replace(
            g,
            name=twins[g.name],
            stages=tuple((name, gpu, n, held) for _, gpu, n, held in g.stages),
        )
        for g in own
    ]
    price = None
    if plan.usd_per_h is not None and like.usd_per_h is not None:
        price = plan.usd_per_h + like.usd_per_h
    return replace(_routed(plan, deployment, (*plan.groups, *groups)), usd_per_h=price)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms" if seconds < 10 else f"{seconds:,.4g} s"


BETTER = 1.1
"""How much better each thing is made."""

_LEAST_PERCENT = 1.0  # gains below this are within the precision of a goodput
_BRACKET = 0.002  # around the goodputs that are compared

Better: TypeAlias = Callable[[Deployment], Deployment]


def _each(better: Callable[[Replica], Replica]) -> Better:
    return lambda deployment: replace(
        deployment, replicas=tuple(better(replica) for replica in deployment.replicas)
    )


def _links(deployment: Deployment) -> Deployment:
    def faster(link: KvLink) -> KvLink:
        return replace(link, bandwidth_gbs=BETTER * link.bandwidth_gbs)

    default = deployment.default_link
    return replace(
        deployment,
        links=tuple((a, b, faster(link)) for a, b, link in deployment.links),
        default_link=None if default is None else faster(default),
    )


PREFILL, DECODE, CACHE = "compute of prefill", "bandwidth of decode", "memory for KV cache"
BATCH, LINKS, BUDGET = "batch limit", "links between machines", "budget"

_BETTER: dict[str, Better] = {
    PREFILL: _each(lambda r: replace(r, step=scaled(r.step, 1.0 / BETTER, 1.0))),
    DECODE: _each(lambda r: replace(r, step=scaled(r.step, 1.0, 1.0 / BETTER))),
    CACHE: _each(lambda r: replace(r, kv_tokens=round(BETTER * r.kv_tokens))),
    BATCH: _each(
        lambda r: replace(r, engine=replace(r.engine, max_batch=round(BETTER * r.engine.max_batch)))
    ),
    LINKS: _links,
}


def limits(
    plan: Plan, question: Question, goodput: Sampled, effort: CardEffort, *, unaffordable: str = ""
) -> Limits:
    """What binds a plan at the largest rate that it carries.

    Parameters
    ----------
    goodput
        Of the plan, seed by seed.
    unaffordable
        Machine that the budget leaves idle; empty where the budget leaves none.
    """
    load = question.load(BETTER * goodput.value, precision=effort.precision)
    run, _ = judged(plan, load, question.seed)
    missed = first_missed(run, question)
    rows = _gains(plan, load, goodput, question) if plan.deployment is not None else []
    target = f"{missed.upper()} is the target missed first" if missed else ""
    binding, text = "", "no single thing binds: 10 % more of any carries less than 1 % more"
    if unaffordable:
        binding = BUDGET
        text = f"the budget binds: it does not pay for {unaffordable}, which stays idle"
    elif rows and rows[0].gain_percent >= _LEAST_PERCENT:
        binding, gain = rows[0].name, rows[0].gain_percent
        text = f"{binding} binds: 10 % more of it carries {gain:.1f} % more"
    said = "; ".join(filter(None, [text if binding or rows else "", target]))
    return Limits(binding, f"{said[0].upper()}{said[1:]}." if said else "", missed, tuple(rows))


def _gains(plan: Plan, load: Load, goodput: Sampled, question: Question) -> list[Limit]:
    """What the goodput gains by 10 % more of each thing, the most first."""
    rows = list[Limit]()
    assert plan.deployment is not None

    def finely(plan: Plan, seed: int, near_rps: float) -> float:
        return sustained_rps(plan, load, seed, near_rps=near_rps, bracket=_BRACKET)

    seeds = [(question.seed + k, rate) for k, rate in enumerate(goodput.seeds) if rate > 0]
    now = [finely(plan, seed, rate) for seed, rate in seeds]
    for name, better in _BETTER.items():
        if name == LINKS and not (plan.deployment.links or plan.deployment.default_link):
            continue
        other = redeployed(plan, better(plan.deployment))
        pairs = zip(seeds, now, strict=True)
        gains = [finely(other, seed, rate) / rate - 1.0 for (seed, _), rate in pairs]
        gain = max(0.0, float(np.mean(gains)))  # less is noise
        rows.append(Limit(name, 100.0 * gain))
    return sorted(rows, key=lambda row: -row.gain_percent)


def first_missed(run: Run, question: Question) -> str:
    """Target that most of the requests miss; empty without a miss."""
    misses = {}
    for name, quantity in LATENCIES.items():
        target = getattr(question.slo, quantity)
        if target is not None:
            misses[name] = float(((getattr(run, quantity) > target) | (~run.finished)).mean())
    worst = max(misses, key=lambda name: misses[name], default="")
    return worst if worst and misses[worst] > 0 else ""
