"""From a question to a plan card."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import joblib

from hetero.apps.ask import PLAN, Ask, asks
from hetero.apps.capacity.sizing import cheapest_part
from hetero.apps.cards.card import (
    CardQuestion,
    GoodputBound,
    PlanCard,
    Replicas,
    Sampled,
    Source,
    TriedPlanner,
)
from hetero.apps.cards.contenders import (
    Contender,
    Progress,
    chosen,
    contenders,
    fast,
    fastest,
    planned_by,
    reason_of,
    rounded_down,
    winner,
    with_phases_apart,
)
from hetero.apps.cards.delivery import (
    LATENCIES,
    CardEffort,
    at_rates,
    delivered,
    goodput,
    promised,
    worst_quarter,
)
from hetero.apps.cards.infeasible import NoPlanError, explain
from hetero.apps.cards.request import CardRequest, counts, requested
from hetero.apps.cards.sections import CHEAPEST
from hetero.apps.cards.sensitivity import changes, lean, limits, parts
from hetero.catalog import gpus
from hetero.cluster import Cluster
from hetero.deployment import Deployment
from hetero.errors import HeteroError, require
from hetero.latency.calibration.known import gpus_table
from hetero.planners.base import EFFORTS as ARENA
from hetero.planners.base import parts as offered_parts
from hetero.planners.bound import bound, goodput_bound
from hetero.planners.ground import analytic
from hetero.plans import Group, Plan, footing
from hetero.progress import by_hand, progress
from hetero.question import Question, drawable, fit_draws, judged, step_error
from hetero.search.portfolio import ask, planners
from hetero.simulator.sustained import came

_ISLANDS = "assumed (analytic model of mixtures of experts; the error is that of dense models)"
_EXPERTS = " (routed experts: data/measured/experts.csv; the error is that of dense models)"
_POOL = 4  # plans that are tried again after every change


@asks(PLAN, Ask)
def plan(ask: Ask) -> PlanCard:
    """How a fleet should serve a model, what that delivers, and what each figure rests on.

    Raises
    ------
    NoPlanError
        If no plan meets the request; its ``explanation`` says which target, which requests, by how
        much, and the nearest changes that would do.
    HeteroError
        For whatever is unknown, missing or out of range.

    Examples
    --------
    >>> card = plan(
    ...     "thunderserve-a5000-pair", model="Llama-3-8B", slo="ttft=2s,tpot=100ms", rate=1.0
    ... )
    >>> card.goodput_rps.value > 1.0 and card.plan.gpus == {"RTX-A5000": 2}
    True
    >>> PlanCard.from_json(card.to_json()).goodput_rps == card.goodput_rps
    True
    """
    with progress(None, "plan", unit="", show=by_hand()) as advance:
        *_, card = grown(replace(ask, progress=ask.progress or partial(advance, 0)))
    return card


def grown(ask: Ask) -> Iterator[PlanCard]:
    """The card of :func:`plan` as it grows, the first with its headline and plan alone."""
    asked = requested(ask)
    return sections(on_cheapest(asked, ask.progress) if ask.cheapest else asked, ask.progress)


def on_cheapest(asked: CardRequest, progress: Progress | None) -> CardRequest:
    """The request on the cheapest part of its cluster."""
    require(
        asked.rate_given,
        "The cheapest part of a cluster is that for a rate, and none is given.",
        resolve="give one, such as --rate 20.",
    )
    whole = asked.cluster
    part, found = cheapest_part(asked.question, progress=progress)
    note = (
        f"{CHEAPEST}{counts(part.gpu_counts)} of {whole.name} for {found.usd_per_h:,.4g} $/h "
        f"instead of {whole.usd_per_h or 0.0:,.4g}. With these step times none serves the rate "
        f"for less than {found.bound_usd_per_h:,.4g} $/h."
    )
    question = replace(asked.question, cluster=part)
    return replace(asked, question=question, cluster=part, notes=(*asked.notes, note))


def sections(asked: CardRequest, progress: Progress | None = None) -> Iterator[PlanCard]:
    """The card of a request as it grows: headline and plan, then section by section.

    Sections are found in as many processes as joblib's context says, and are the same for any
    number.
    """
    say = progress or (lambda _: None)
    made = best_plan(asked, say)
    say("latencies")
    card = _headed(asked, made)
    yield card
    if asked.ask.brief:
        return
    best, question, goodput_rps, safe, found = made
    plan, effort = best.plan, asked.effort
    asked = replace(asked, ask=replace(asked.ask, progress=None))  # for other processes
    replan = partial(planned_by, winner(asked, best, found), asked)
    others = [
        one
        for one in sorted(found, key=lambda one: one.key, reverse=True)
        if one.question.engine.precision == question.engine.precision
        and one.asked.plan
        and one is not best
    ]
    pool = [plan, *(one.plan for one in others[:_POOL] if drawable(one.plan))]
    now = plan, question, goodput_rps, effort
    edge_rps, unaffordable = safe or goodput_rps.value, _unaffordable(plan, question)
    steps = changes(pool, question, goodput_rps, replan, effort)
    at = question.load(edge_rps or question.rate_rps, whole=True)
    found_next = _side_by_side(
        [
            ("goodput, requests in any order", partial(_shuffled, *now)),
            ("other rates", partial(at_rates, plan, question, edge_rps, effort)),
            ("what binds", partial(limits, *now, unaffordable=unaffordable)),
            *steps,
            ("prefill and decode apart", partial(with_phases_apart, asked, best)),
            ("worst quarter of an hour", partial(worst_quarter, plan, at, question.seed)),
        ],
        say,
    )
    for name in ("shuffled_rps", "at_rates", "limits"):
        card = replace(card, **{name: next(found_next)})
        yield card
    card = replace(card, changes=tuple(next(found_next)[0] for _ in steps))
    yield card
    notes = [*card.notes, *filter(None, [next(found_next)])]
    if (worst := next(found_next)) is not None:
        notes.append(
            f"In the worst quarter of an hour of the log, played at {at.rate_rps:.3g} requests/s, "
            f"{100 * worst:.1f} % are within the targets."
        )
    yield replace(card, notes=tuple(notes))


class BestPlan(NamedTuple):
    """The contender that the rule takes, its question, goodput and promise, and all contenders."""

    best: Contender
    question: Question
    goodput_rps: Sampled
    promised_rps: float
    found: Sequence[Contender]


def best_plan(
    asked: CardRequest, progress: Progress | None = None, *, compared: bool = False
) -> BestPlan:
    """The plan of a card without what the card says of it; raises as :func:`plan`.

    Parameters
    ----------
    compared
        Search as far as goes for several questions that are compared, the same for all, and leave
        out the draws of step times.
    """
    say = progress or (lambda _: None)
    found = contenders(asked, say, compared=compared)
    if not asked.rate_given:
        found = fastest(asked, found, say, compared=compared)
    if not found:
        raise _unmet(asked, None, (), say)
    best = chosen(asked, found, say)
    question = best.question
    say("goodput")
    draws = 0 if compared else None
    goodput_rps = goodput(best.plan, question, asked.effort, draws=draws)
    least = question.rate_rps if asked.rate_given else 0.0
    whole = best
    best, goodput_rps = lean(whole, goodput_rps, asked.effort, least_rps=least, draws=draws)
    found = [best if one is whole else one for one in found]
    safe = 0.0 if compared else promised(best.plan, question, asked.effort, goodput_rps.value)
    if not asked.rate_given and goodput_rps.value > 0:
        question = replace(question, rate_rps=rounded_down(safe or goodput_rps.value))
    if goodput_rps.value * (1.0 + asked.effort.precision) < question.rate_rps:
        raise _unmet(asked, best, found, say)
    return BestPlan(best, question, goodput_rps, safe, found)


def _unmet(
    asked: CardRequest, best: Contender | None, found: Sequence[Contender], say: Progress
) -> NoPlanError:
    say("why not, and what would do")

    def replan(question: Question) -> Plan:
        return fast(question, asked)

    if best is None:
        question = asked.question
        fits = question.llm.weight_bytes(question.engine.precision) <= question.cluster.mem_bytes
        rows = [ask(one, question) for one in planners(ARENA[asked.ask.effort]) if fits]
        reasons = [(one.planner, reason_of(one)) for one in rows if one.plan is None]
        return NoPlanError.of(explain(asked, question, None, reasons, replan))
    reasons = [(one.asked.planner, reason_of(one.asked)) for one in found if not one.asked.plan]
    again = partial(planned_by, winner(asked, best, found), asked)
    return NoPlanError.of(explain(asked, best.question, best.plan, reasons, replan, again))


def _headed(asked: CardRequest, made: BestPlan) -> PlanCard:
    """The card with its headline and plan."""
    best, question, goodput_rps, safe, found = made
    plan, effort, slo = best.plan, asked.effort, question.slo
    rate = question.rate_rps
    seen = delivered(plan, question, rate, effort)
    notes = [*plan.notes, *asked.cluster.notes, *asked.notes]
    if question.engine.precision != "fp16":
        notes.append(
            f"Weights in {question.engine.precision}: what that does to answers is not judged here."
        )
    fits = fit_draws(plan, question, effort.draws)
    if not all(fits):
        notes.append(
            f"Its caches hold the longest request in {100 * sum(fits) / len(fits):.0f} % of "
            f"{len(fits)} draws of what engines hold of the memory."
        )
    if asked.ask.choose != "nominal" and best is max(found, key=lambda one: one.key):
        notes.append(
            f"The {asked.ask.choose} over step times is that of the nominal ones: same plan."
        )
    notes += _of_engine(asked.cluster, question, plan)
    notes.append(_how(plan, question, goodput_rps.value or rate, effort))
    if question.budget_usd_per_h is not None:
        notes.append(f"Budget: {question.budget_usd_per_h:,.4g} $/h.")
    return PlanCard(
        question=CardQuestion(
            cluster=asked.cluster.name,
            gpus=asked.cluster.gpu_counts,
            model=question.llm.name,
            trace=question.trace.source or question.trace.name,
            rate_rps=rate,
            rate_given=asked.rate_given,
            targets_s={
                name: float(getattr(slo, field))
                for name, field in LATENCIES.items()
                if getattr(slo, field) is not None
            },
            goal=question.goal,
            budget_usd_per_h=question.budget_usd_per_h,
            precision=asked.ask.precision,
            choose=asked.ask.choose,
            seed=question.seed,
            requests=len(question.load().trace),
            checkpoint=name if isinstance(name := asked.ask.model, str) and "/" in name else "",
            longest_tokens=int((question.trace.input_tokens + question.trace.output_tokens).max()),
            engine=question.engine.name,
            arrivals=question.process,
            release=question.engine.release,
            memory_fraction=question.engine.memory_share,
            kv_precision=question.engine.kv_precision,
            speculate=asked.ask.speculate,
            lora=asked.ask.lora,
        ),
        planner=best.asked.planner,
        precision="fp8" if analytic(question) else question.engine.precision,
        groups=grouped(plan.groups, plan.deployment),
        idle=_idle(plan, asked.cluster),
        routing=plan.routing,
        goodput_rps=goodput_rps,
        served=dict(seen.served),
        latencies_s={name: dict(one) for name, one in seen.latencies_s.items()},
        usd_per_h=plan.usd_per_h,
        usd_per_mtok=seen.usd_per_mtok,
        bound=_bound(
            question, goodput_rps, best.asked.score.finished.mean if best.asked.score else 1.0
        ),
        limits=None,
        changes=(),
        tried=(*map(_tried, found), *parts(best)),
        sources=_sources(plan, asked.cluster, question),
        notes=tuple(notes),
        plan=plan,
        proof=best.asked.proof,
        promised_rps=safe,
    )


def _side_by_side(calls: Sequence[tuple[str, Callable[[], Any]]], say: Progress) -> Iterator[Any]:
    """What calls return, in their order, each named while it is waited for."""
    made = joblib.Parallel(return_as="generator")(joblib.delayed(call)() for _, call in calls)
    for k, (what, _) in enumerate(calls):
        say(f"{what}, {k + 1} of {len(calls)} figures")
        yield next(made)


def _shuffled(plan: Plan, question: Question, goodput_rps: Sampled, effort: CardEffort) -> float:
    """Goodput with the requests in any order; NaN where they come so, or cannot."""
    if question.process != "poisson" or question.trace.prefix_ids is not None:
        return math.nan
    return goodput(
        plan, question, effort, draws=0, near_rps=goodput_rps.value, process="shuffled"
    ).value


def _of_engine(offered: Cluster, question: Question, plan: Plan) -> list[str]:
    """Which engine runs the plan, which GPUs it leaves, and how KV caches travel."""
    spec = question.engine
    engine, precision = spec.serving, spec.precision
    found = [
        f"Engine: {engine.title} {spec.release or engine.version}; every replica keeps its rules."
        if engine.limited
        else "Engine: any; no released one has to run this plan, so that an export may refuse it."
    ]
    gpus = offered.gpu_types.values()
    if engine.memory_of(spec.release) is not None:
        found.append(
            f"KV caches are what {100 * spec.memory_share:g} % of the visible memory leaves beside "
            "the weights and the engine's profiling run."
        )
    form = question.llm.format(precision)
    if form.name not in ("fp16", "bf16", "fp32"):
        whose = ", as the checkpoint states" if form is question.llm.stated else ""
        held_gib = question.llm.weight_bytes(precision) / 2**30
        found.append(f"Weights in {form.name}{whose}: {held_gib:,.1f} GiB.")
    if reasons := [why for gpu in gpus if (why := engine.lacks(gpu, precision))]:
        found.append(f"Left out: {'; '.join(reasons)}.")
    read = [g.name for g in gpus if precision not in (*g.rated, "fp32", "fp16", "bf16")]
    if read and not analytic(question):
        found.append(
            f"Weights in {precision} are read as such and multiplied in 16 bits on "
            f"{', '.join(read)}."
        )
    links = plan.deployment.links if plan.deployment else ()
    bits = sorted({round(16 * link.compression) for *_, link in links})
    if bits and not any(note.startswith("KV caches travel") for note in plan.notes):
        found.append(f"KV caches travel in {' and '.join(map(str, bits))} bits.")
    return found


def _how(plan: Plan, question: Question, rate_rps: float, effort: CardEffort) -> str:
    """How the goodput was judged, in one sentence."""
    load = question.load(rate_rps, precision=effort.precision)
    _, seen = judged(plan, load, question.seed)
    needed = f", {100 * seen.needed:.1f} % of them within the targets to show {100 * load.goal:g} %"
    needed = needed if seen.needed > load.goal else ""
    replicas = plan.deployment.replicas if plan.deployment is not None else ()
    seeds = range(question.seed, question.seed + effort.seeds)
    return (
        f"{footing(replicas, came(load.trace, load.process), seeds)} "
        f"Goodput is the largest rate that is sustained: at {rate_rps:.4g} "
        f"requests/s {seen.requests:,} requests over {seen.seconds:,.0f} s count in each run, its "
        f"beginning and end cut{needed}, {effort.seeds} seeds and {effort.draws} draws of step "
        f"times, to {100 * effort.precision:g} %."
        + " Burstier traces need more."
        * (load.process == "poisson")
        + " Runs end before waits could miss targets so lax: the backlog alone shows what is not "
        "sustained." * load.rule.lax(rate_rps)
    )


def grouped(groups: Sequence[Group], deployment: Deployment | None = None) -> tuple[Replicas, ...]:
    """Replicas that are alike, in one row."""
    known = {one.name: one for one in deployment.replicas} if deployment is not None else {}
    engines = {
        name: {**asdict(one.engine), "kv_tokens": int(one.kv_tokens)} for name, one in known.items()
    }
    alike: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        stages = tuple((gpu, count, n) for _, gpu, count, n in group.stages)
        engine = tuple(engines.get(group.name, {}).values())
        alike.setdefault((group.phase, stages, engine), []).append(group)
    return tuple(
        Replicas(
            len(some),
            some[0].gpus,
            some[0].parallelism,
            some[0].phase,
            math.fsum(one.share for one in some),
            tuple(one.name for one in some),
            tuple(one.stages for one in some),
            engines.get(some[0].name, {}),
        )
        for some in alike.values()
    )


def _idle(plan: Plan, cluster: Cluster) -> dict[str, int]:
    left = {name: n - plan.gpus.get(name, 0) for name, n in cluster.gpu_counts.items()}
    return {name: count for name, count in left.items() if count > 0}


def _unaffordable(plan: Plan, question: Question) -> str:
    """The cheapest machine that is idle because the budget does not pay for it."""
    if question.budget_usd_per_h is None or plan.usd_per_h is None:
        return ""
    used = {machine for group in plan.groups for machine, *_ in group.stages}
    idle = [m for m in question.cluster.machines if m.name not in used and m.usd_per_h is not None]
    rented = sum(m.usd_per_h or 0.0 for m in question.cluster.machines if m.name in used)
    cheapest = min(idle, key=lambda m: m.usd_per_h or 0.0, default=None)
    if cheapest is None or rented + (cheapest.usd_per_h or 0.0) <= question.budget_usd_per_h:
        return ""
    return f"{cheapest.count} x {cheapest.gpu.name} ({cheapest.usd_per_h:,.4g} $/h)"


def _bound(question: Question, goodput_rps: Sampled, served: float) -> GoodputBound | None:
    try:
        offers = offered_parts(question, sys.maxsize)
    except HeteroError:
        return None
    most = 0.0
    for one in offers:
        limit = bound(one)
        if limit is None:
            return None
        if limit.rps(served) > most * served:
            most = max(most, goodput_bound(one, served) or 0.0)
    what = "every request is served" + ", its tokens in time" * (question.slo.tpot_s is not None)
    return GoodputBound(most, what, 100.0 * (1.0 - goodput_rps.value / most))


def _tried(one: Contender) -> TriedPlanner:
    asked, score = one.asked, one.asked.score
    return TriedPlanner(
        asked.planner,
        one.question.engine.precision,
        one.rate_rps,
        score.usd_per_h if score else None,
        asked.plan.bound_rps if asked.plan else None,
        "" if score else reason_of(asked),
        asked.plan.gpus if asked.plan else {},
    )


def _step_times(plan: Plan, gpu: str) -> tuple[list[str], set[str]]:
    """Tables that step times of a GPU type are from, and what is known of all of them."""
    replicas = plan.deployment.replicas if plan.deployment else ()
    steps = [one.step for one in replicas if one.gpu is not None and one.gpu.name == gpu]
    sources = dict.fromkeys(one.source for one in steps if one.level)
    piped = any(gpu in one.gpus for one in plan.groups if len(one.gpus) > 1)
    levels = {one.level for one in steps} | ({""} if piped or not steps else set())
    return ([f"measured ({'; '.join(sources)})"] if sources else []), levels


def _sources(plan: Plan, cluster: Cluster, question: Question) -> tuple[Source, ...]:
    mine = [gpu for gpu in gpus() if gpu.name in plan.gpus]
    rows = {str(row[0]): row for row in gpus_table(mine).rows} if mine else {}
    found = []
    for name, count in plan.gpus.items():
        machine = next(m for m in cluster.machines if m.gpu.name == name)
        row = rows.get(name)
        other = _ISLANDS if analytic(question) else str(row[3]) if row else "assumed"
        other += _EXPERTS if question.llm.experts and not analytic(question) else ""
        tables, levels = _step_times(plan, name)
        experts = bool(question.llm.experts)
        errors = [
            step_error(machine.gpu, level, question.engine.name, experts=experts)
            for level in levels
        ]
        each = None if machine.usd_per_h is None else machine.usd_per_h / machine.count
        listed = each is not None and machine.gpu.usd_per_h == each
        place = (machine.gpu.price_source or "cluster file") if listed else "cluster file"
        found.append(
            Source(
                gpu=name,
                count=count,
                step_times=", ".join([*tables, *([other] if "" in levels else [])]),
                prefill_error_percent=max(one.prefill_p90_percent for one in errors),
                decode_error_percent=max(one.decode_p90_percent for one in errors),
                data_sheet=str(row[1]) if row else "given in the cluster file",
                usd_per_gpu_h=each,
                price=place if each is not None else "none",
            )
        )
    return tuple(found)
