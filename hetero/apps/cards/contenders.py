"""The plans that contend: every planner in every precision, and the rule that takes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetero.apps.cards.delivery import goodput
from hetero.apps.cards.request import CardRequest
from hetero.errors import InfeasibleError
from hetero.planners.base import EFFORTS as ARENA
from hetero.planners.base import Effort
from hetero.planners.score import Rank
from hetero.plans import Plan
from hetero.question import Question, drawable
from hetero.search.portfolio import Portfolio, planner, planners, portfolio
from hetero.search.portfolio import Tried as Asked
from hetero.simulator.metrics import attainment
from hetero.simulator.uncertainty import Outcomes

Progress = Callable[[str], None]
"""Called with what is done next."""

_DIGITS = 3  # of the rate where none is asked for
_SPARED = "not asked by a quick card, since another plan meets the targets"
_BLIND = ("layer placement", "separate pipelines", "Swarm", "Petals")  # to targets
_FAST = ("tensor-parallel search", "Mélange", "HexGen", "islands exact")
_NEAR = 20  # designs near the plan of one planner, where its question is changed
COMPARED = 6  # times fewer designs than of a card, where questions are compared
_APART_DESIGNS = 20  # times fewer where phases may be apart beside a card without
_APART = 1_000  # from the first seed of a case: none that a card reports


@dataclass(frozen=True, slots=True)
class Contender:
    """A plan, the case that it was made for, and the planner's row."""

    question: Question
    asked: Asked

    @property
    def rate_rps(self) -> float:
        """Rate that it sustains, over the seeds that plans are compared by; NaN without a plan."""
        return self.asked.score.goodput_rps.mean if self.asked.score else math.nan

    @property
    def plan(self) -> Plan:
        """The plan."""
        assert self.asked.plan is not None
        return self.asked.plan

    @property
    def key(self) -> Rank:
        """What contenders are ranked by."""
        return Rank(self.asked.score)


def contenders(
    asked: CardRequest, say: Progress, rate_rps: float | None = None, *, compared: bool = False
) -> list[Contender]:
    """Rows of all planners in every precision; empty if none has a plan.

    Where no rate is asked for, their plans for a first rate only say which one to plan for, and are
    not searched from.
    """
    effort = ARENA[asked.ask.effort]
    designs = effort.designs // (COMPARED if compared else 1)
    effort = replace(effort, designs=designs if rate_rps or asked.rate_given else 0)
    rows: list[Contender] = []
    for precision in asked.precisions:
        question = asked.at(precision)
        if question is None or question.llm.weight_bytes(precision) > question.cluster.mem_bytes:
            continue
        question = replace(question, rate_rps=rate_rps or question.rate_rps)
        label = f"{precision}: " if len(asked.precisions) > 1 else ""
        try:
            found = compete(question, effort, asked, partial(_labelled, say, label))
        except InfeasibleError:
            continue
        rows += [Contender(question, one) for one in found.tried]
    return rows


def _seeds(question: Question) -> tuple[int, int]:
    """Seeds that plans are compared by: of thousands the best one is lucky with a single one."""
    return question.seed, question.seed + _APART


def _labelled(say: Progress, label: str, name: str) -> None:
    say(f"{label}{name}")


def compete(question: Question, effort: Effort, asked: CardRequest, say: Progress) -> Portfolio:
    """Every planner asked.

    Planners of layers over a network take as long as all others together and seldom carry as
    much, so that a quick card asks them only where no other plan meets the targets.
    """
    known = planners(effort, experts=bool(question.llm.experts))
    later = [one for one in known if one.name in _BLIND and asked.ask.effort == "quick"]
    first = [one for one in known if one not in later]
    tried = partial(portfolio, question, effort=effort, seeds=_seeds(question), progress=say)
    if not later:
        return tried(planners=known)
    with suppress(InfeasibleError):
        found = tried(planners=first)
        if found.score.goodput_rps.mean > 0:
            spared = tuple(Asked(one.name, reason=one.unfit(question) or _SPARED) for one in later)
            return replace(found, tried=(*found.tried, *spared))
    return tried(planners=known)


def fastest(
    asked: CardRequest, found: list[Contender], say: Progress, *, compared: bool = False
) -> list[Contender]:
    """Plans for the largest rate: planned again for that of the best plans so far, and searched."""
    best = max(found, key=lambda one: one.key, default=None)
    if best is None or best.asked.score is None:
        return found
    rate = rounded_down(best.rate_rps) if best.rate_rps > 0 else best.question.rate_rps
    again = contenders(asked, say, rate, compared=compared)
    return max(again, found, key=lambda rows: max((one.key for one in rows), default=Rank(None)))


def winner(asked: CardRequest, best: Contender, found: Sequence[Contender]) -> str:
    """Planner that plans a changed case: the one of the best plan that is not an improvement."""
    names = {one.name for one in planners(ARENA[asked.ask.effort], experts=True)}
    if best.plan.planner in names:
        return best.plan.planner
    single = [one for one in found if one.asked.plan and one.plan.planner in names]
    return max(single, key=lambda one: one.key).plan.planner


def planned_by(name: str, asked: CardRequest, question: Question) -> Plan:
    """Plan of one planner, and the best of so few near it that a card can ask for several."""
    effort = replace(ARENA[asked.ask.effort], designs=_NEAR)
    return portfolio(
        question, effort=effort, planners=[planner(name, effort)], seeds=_seeds(question)
    ).plan


def fast(question: Question, asked: CardRequest) -> Plan:
    """The best plan of the planners that answer within a second or so, as it came."""
    best: Plan | None = None
    reason: InfeasibleError | None = None
    share = -1.0
    for name in _FAST:
        try:
            plan = planner(name, ARENA[asked.ask.effort]).plan(question)
        except InfeasibleError as error:
            reason = reason or error
            continue
        met = attainment(plan.simulate(question.arrivals(), question.seed), question.slo)
        if met > share:
            best, share = plan, met
    if best is None:
        assert reason is not None
        raise reason
    return best


def with_phases_apart(asked: CardRequest, best: Contender) -> str:
    """What phases apart would bring beside a plan without, in a sentence; empty where they may."""
    effort = ARENA[asked.ask.effort]
    effort = replace(effort, designs=effort.designs // _APART_DESIGNS)
    together, apart = best.question, replace(best.question, split=True)
    able = [one for one in planners(effort) if one.unfit(together) and not one.unfit(apart)]
    if together.split or not able:
        return ""
    try:
        found = portfolio(apart, effort=effort, planners=able, seeds=_seeds(apart))
    except InfeasibleError:
        return ""
    rate, phases = found.score.goodput_rps.mean, {one.phase for one in found.plan.groups}
    if phases == {"both"} or rate <= best.rate_rps:
        return "Prefill and decode apart would bring nothing: no such plan was found to carry more."
    more = f"{100.0 * (rate / best.rate_rps - 1.0):.0f} % more" if best.rate_rps > 0 else "some"
    return (
        f"Prefill and decode apart would carry {more} ({rate:.3g} requests/s, {best.rate_rps:.3g} "
        "together), which `--split` plans and `hetero serve` does not run."
    )


def chosen(asked: CardRequest, found: Sequence[Contender], say: Progress) -> Contender:
    """The plan that the rule takes."""
    good = [one for one in found if one.asked.plan is not None]
    best = max(good, key=lambda one: one.key)
    able = [one for one in good if drawable(one.plan) and one.rate_rps > 0]
    if asked.ask.choose == "nominal" or len(able) < 2:
        return best
    say(f"{asked.ask.choose} over step times")
    sampled = [goodput(one.plan, one.question, asked.effort) for one in able]
    names = tuple(str(k) for k in range(len(able)))
    outcomes = Outcomes(
        names,
        ("goodput",),
        np.array([[one.value] for one in sampled]),
        np.array([[[value] for value in one.draws] for one in sampled]),
    )
    return able[int(outcomes.best("goodput", asked.ask.choose))]


def reason_of(one: Asked) -> str:
    """Why a planner has no plan, without its name."""
    return one.reason.removeprefix(f"{one.planner}: ")


def rounded_down(rate_rps: float) -> float:
    """The rate rounded down to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(rate_rps)) - _DIGITS + 1)
    return float(f"{math.floor(rate_rps / unit) * unit:.{_DIGITS}g}")
