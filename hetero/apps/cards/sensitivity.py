"""What one change would do: one more machine of each kind, targets or a budget half as far again.

Machines and budgets are planned anew by the planner that won, and the plans at hand stay candidates
where they can: nobody has to make use of more. Other targets are left to these. Requests, gaps and
draws of the step times are the same before and after, so that gains are differences of pairs. GPUs
that serve next to nothing at the rate asked for are taken away: a plan that carries most may hold
some for the last requests only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetero.apps.cards.card import ChangeEffect, Sampled
from hetero.apps.cards.delivery import LATENCIES, CardEffort, difference, goodput
from hetero.apps.cards.request import more
from hetero.apps.cards.sections import WITHOUT
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment
from hetero.errors import HeteroError
from hetero.plans import Group, Plan
from hetero.question import Question, sustained_rps, sustains
from hetero.routers import Predictive
from hetero.simulator import Slo

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
    like, added
        Machine of which there is one more, and the name of that one.
    """

    what: str
    question: Question
    dearest: float | None = None
    like: Machine | None = None
    added: str = ""


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
        yield Step(what, asked, like=machine, added=grown.machines[-1].name)
    for name, field in LATENCIES.items():
        target = getattr(question.slo, field)
        if target is None:
            continue
        for factor in (STEP, 1.0 / STEP):
            slo: Slo = replace(question.slo, **{field: target * factor})
            yield Step(f"{name.upper()} of {_ms(target * factor)}", replace(question, slo=slo))
    if budget is not None:
        for factor in (STEP, 1.0 / STEP):
            changed = replace(question, budget_usd_per_h=budget * factor)
            yield Step(f"budget of {budget * factor:,.4g} $/h", changed, budget * factor)


def changes(
    pool: Sequence[Plan],
    question: Question,
    now: Sampled,
    replan: Replan,
    effort: CardEffort,
) -> tuple[tuple[ChangeEffect, Plan | None], ...]:
    """What becomes of the goodput after each change, with the plan that it is of.

    Parameters
    ----------
    pool
        Plans of the case as it is, the chosen one first.
    now
        Goodput of that one.
    replan
        Plans a changed case.
    """
    spared = without(pool[0], question, now, effort)
    return (*spared, *(_changed(step, pool, now, replan, effort) for step in steps(question)))


def without(
    plan: Plan, question: Question, now: Sampled, effort: CardEffort
) -> tuple[tuple[ChangeEffect, Plan], ...]:
    """The plan without the kinds of GPU that serve next to nothing at the rate asked for."""
    served = plan.deployment
    if served is None:
        return ()
    run = plan.simulate(question.arrivals(), question.seed)
    # Requests and not tokens: where outputs are short, replicas that only decode have few.
    frame = run.frame()
    counts = Counter([*frame["replica"], *frame["decode_replica"]])
    serves = {one.name: counts[one.name] / len(frame) for one in served.replicas}
    kinds: dict[tuple[str, ...], list[str]] = {}
    for group in plan.groups:
        kinds.setdefault(tuple(group.gpus), []).append(group.name)
    unused = {
        name
        for names in kinds.values()
        for name in names
        if sum(serves[one] for one in names) < _UNUSED
    }
    if not unused:
        return ()
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
    if plan.usd_per_h is not None:
        left = replace(left, usd_per_h=plan.usd_per_h - math.fsum(saved))
    gone = {name: count - left.gpus.get(name, 0) for name, count in plan.gpus.items()}
    what = WITHOUT + ", ".join(f"{count} x {name}" for name, count in gone.items() if count)
    found = goodput(left, question, effort, draws=effort.draws // 2, like=now)
    how = f"they serve {100 * sum(serves[one] for one in unused):.1f} % now"
    return ((ChangeEffect(what, found, difference(found, now), left.usd_per_h, how), left),)


def _routed(plan: Plan, deployment: Deployment, groups: Sequence[Group]) -> Plan:
    """The plan with other replicas, by predicted cost: shares were made for those it had."""
    return replace(
        plan,
        groups=tuple(replace(g, share=float("nan")) for g in groups),
        serving=deployment,
        router=plan.router if isinstance(plan.router, Predictive) else Predictive(),
        routing="hetero",
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
        grown = extended(pool[0], step.like, step.question.cluster, step.added)
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
    if step.like is not None:  # the plan without the machine stays possible
        pairs = ((found.seeds, now.seeds), (found.draws, now.draws))
        found = Sampled.of(*([max(p) for p in zip(a, b, strict=False)] for a, b in pairs))
    gain, price_usd = difference(found, now), best.usd_per_h
    if step.like is not None and step.added not in {
        name for group in best.groups for name in _places(group)
    }:
        how, more_usd = f"{how}, it stays idle", step.like.usd_per_h
        price_usd = price_usd + more_usd if price_usd and more_usd else None
    return ChangeEffect(step.what, found, gain, price_usd, how), best


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


def extended(plan: Plan, like: Machine, cluster: Cluster, name: str) -> Plan | None:
    """The plan with what stands on a machine alone once more, on a new one of the same kind.

    Requests then go by predicted cost, since shares were made for the replicas there were. None
    where a plan is none of replicas, or no machine of the kind holds replicas of its own.
    """
    served = plan.deployment
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
