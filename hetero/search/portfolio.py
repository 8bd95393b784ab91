"""The best of all planners: every one that can take a case is tried, the best is improved.

All are judged by what simulation shows, with the same requests, gaps and seeds: the largest load
that a plan carries. What is returned is never worse than the best single plan, because it is one
of them or a change of one that was simulated and served more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hetero.errors import InfeasibleError, ParameterError
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, Planner
from hetero.planners.baselines import hexgen, homogeneous, melange, ranks
from hetero.planners.helix import plan as helix
from hetero.planners.rignall import plan as rignall
from hetero.planners.score import Rank, Score, score
from hetero.planners.thunderserve import plan as thunderserve
from hetero.planners.xiong import plan as xiong
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.improve import improve

PLANNERS: Final[tuple[Planner, ...]] = (
    xiong.plan,
    melange.plan,
    homogeneous.plan,
    homogeneous.split_plan,
    hexgen.plan,
    thunderserve.plan,
    thunderserve.tabu,
    rignall.plan,
    rignall.bayes,
    helix.plan,
    helix.separate,
    helix.swarm,
    helix.petals,
)
"""Those of the papers and of earlier systems, in the order that they are asked in."""


def planners(effort: Effort = NORMAL, *, experts: bool = False) -> tuple[Planner, ...]:
    """Every planner, with so much effort each, and those of experts under engines that exist.

    Examples
    --------
    >>> [planner.name for planner in planners()][:3]
    ['tensor-parallel search', 'Mélange', 'vLLM homogeneous']
    """
    chosen = (*PLANNERS, ranks.plan) if experts else PLANNERS
    return tuple(replace(one, effort=effort) for one in chosen)


def planner(name: str, effort: Effort = NORMAL) -> Planner:
    """The planner of a name."""
    for one in planners(effort, experts=True):
        if one.name == name:
            return one
    raise ParameterError(
        f"No planner is called '{name}'.",
        resolve=f"use one of {', '.join(one.name for one in planners())}.",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """What one planner said to a case.

    Attributes
    ----------
    plan, score
        Its plan and what that delivers; None where there is none.
    reason
        Why there is none; empty where there is one.
    proof
        What the search showed of all layouts, where this is the plan that it ended with.
    """

    planner: str
    plan: Plan | None = None
    score: Score | None = None
    reason: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Portfolio:
    """The best plan for a case, and the evidence.

    Attributes
    ----------
    tried
        One row per planner, in the order they were asked, and a last one for the best plan after
        improvement, where that found something better.
    best
        The row of the highest goodput.
    """

    tried: tuple[Tried, ...]
    best: Tried

    @property
    def plan(self) -> Plan:
        """The best plan."""
        assert self.best.plan is not None
        return self.best.plan

    @property
    def score(self) -> Score:
        """What it delivers."""
        assert self.best.score is not None
        return self.best.score


IMPROVED = "portfolio"
"""Name of what comes of improving the planners' plans."""


def portfolio(
    question: Question,
    *,
    effort: Effort = NORMAL,
    planners: Sequence[Planner] | None = None,
    seeds: Sequence[int] = (0,),
    progress: Callable[[str], None] | None = None,
) -> Portfolio:
    """Try every planner that can take a case, and return the best plan with the evidence.

    Parameters
    ----------
    effort
        How much planners and improvement may try. Counts: the same case gives the same plan.
    planners
        Planners to ask; all by default.
    seeds
        Runs that plans are judged by.
    progress
        Called with the name of each planner before it is asked, then with what is searched.

    Raises
    ------
    InfeasibleError
        If no planner has a plan; the text gives the reasons.
    """
    say, tried = progress or (lambda _: None), list[Tried]()
    for one in [replace(one, effort=effort) for one in PLANNERS] if planners is None else planners:
        say(one.name)
        tried.append(ask(one, question, seeds))
    if not tried:
        raise ParameterError("No planner is asked.", resolve="name one or more.")
    good = [one for one in tried if one.score is not None]
    if not good:
        reasons = "; ".join(f"{one.planner}: {one.reason}" for one in tried)
        raise InfeasibleError(
            f"No planner has a plan for {question.name}. {reasons}",
            resolve="offer more or larger GPUs, a smaller model or precision, or relax targets.",
        )
    ranked = sorted(good, key=_key, reverse=True)[: max(1, effort.improved)]
    starts = [(one.plan, one.score.seeds_rps) for one in ranked if one.plan and one.score]
    most = effort.designs_for(question.cluster)
    found = improve(
        starts,
        question,
        seeds=tuple(seeds),
        designs=most,
        say=lambda left: say(f"search of layouts, at most {left:,} of {most:,} designs left"),
    )
    if found.changes:
        notes = (f"Improved from the plan of {ranked[0].planner}.", *found.plan.notes)
        plan = replace(found.plan, planner=IMPROVED, notes=notes)
        better = score(plan, question, seeds=seeds, known=found.goodput_rps)
        tried.append(Tried(IMPROVED, plan, better, proof=found.proof))
    else:
        tried[tried.index(ranked[0])] = replace(ranked[0], proof=found.proof)
    best = max((one for one in tried if one.score is not None), key=_key)
    return Portfolio(tuple(tried), best)


def ask(planner: Planner, question: Question, seeds: Sequence[int] = (0,)) -> Tried:
    """What one planner says to a case, and what its plan delivers."""
    if reason := planner.unfit(question):
        return Tried(planner.name, reason=reason)
    try:
        plan = planner.plan(question)
    except InfeasibleError as error:
        return Tried(planner.name, reason=error.what)
    if not question.spans and (alone := ground.spanned(plan, question)):
        why = f"Layers over machines are not planned where one holds the model, as {alone} does."
        return Tried(planner.name, reason=why)
    return Tried(planner.name, plan, score(plan, question, seeds=seeds))


def _key(one: Tried) -> Rank:
    return Rank(one.score)
