"""The best of all planners: every one that can take a case is tried, the best is improved.

All are judged by what simulation shows, with the same requests, gaps and seeds: the largest load
that a plan carries. What is returned is never worse than the best single plan, because it is one
of them or a change of one that was simulated and served more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, Planner
from hetero.planners.baselines import hexgen, homogeneous, melange, ranks
from hetero.planners.bound import Bound, bound
from hetero.planners.helix import plan as helix
from hetero.planners.rignall import plan as rignall
from hetero.planners.score import Rank, Score, score
from hetero.planners.thunderserve import plan as thunderserve
from hetero.planners.xiong import plan as xiong
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.improve import improve
from hetero.search.race import Change

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
class Portfolio(Shown):
    """The best plan for a case, and the evidence.

    Attributes
    ----------
    tried
        One row per planner, in the order they were asked, and a last one for the best plan after
        improvement, where that found something better.
    best
        The row of the highest goodput.
    changes
        Those of the best single plan that were kept, with the load served after each.
    simulated
        Designs that were raced.
    proof
        What that shows of all layouts, in a sentence.
    bound
        What no plan exceeds; None where no bound is known.
    """

    question: Question
    tried: tuple[Tried, ...]
    best: Tried
    bound: Bound | None
    changes: tuple[Change, ...] = ()
    simulated: int = 0
    proof: str = ""

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

    @property
    def single(self) -> Tried:
        """The best plan of a single planner, as it came."""
        return max((one for one in self.tried if one.score and one.planner != IMPROVED), key=_key)

    def table(self) -> Table:
        """Every planner with what its plan delivers, or why it has none."""
        rows = sorted(self.tried, key=_key, reverse=True)
        cost = "usd_per_mtok_at_goodput"
        columns = (
            Column("planner", of=lambda x: x.planner),
            Column("goodput", "requests/s", of=lambda x: x.score and x.score.goodput_rps.mean),
            Column("met targets", "%", of=lambda x: x.score and 100.0 * x.score.attainment.mean),
            Column(
                "throughput", "requests/s", of=lambda x: x.score and x.score.throughput_rps.mean
            ),
            Column("price", "$/h", of=lambda x: x.score and x.score.usd_per_h),
            Column(
                "cost at goodput",
                "$ per 10^6 tokens",
                of=lambda x: getattr(getattr(x.score, cost, None), "mean", None),
            ),
            Column("remark", of=lambda x: x.reason or ("best" if x is self.best else "")),
        )
        limit = self.score.bound_rps
        told = (
            f"Targets and throughput at {self.question.rate_rps:.4g} requests/s; "
            f"{len(self.score.seeds)} seeds.",
            f"No plan that serves as many requests carries more than {limit:.4g} requests/s."
            if limit is not None
            else "",
            self.proof,
        )
        return Table.of(f"Portfolio: {self.question.name}", columns, rows, *told)


IMPROVED = "portfolio"
"""Name of what comes of improving the planners' plans."""


def portfolio(
    question: Question,
    *,
    effort: Effort = NORMAL,
    planners: Sequence[Planner] | None = None,
    seeds: Sequence[int] = (0,),
    budget_s: float | None = None,
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
    budget_s
        Ask no further planner after so many seconds; the plan then depends on the machine's
        speed. None for no limit.
    progress
        Called with the name of each planner before it is asked.

    Raises
    ------
    InfeasibleError
        If no planner has a plan; the text gives the reasons.
    """
    asked = (replace(one, effort=effort) for one in PLANNERS) if planners is None else planners
    asked = tuple(asked)
    if not asked:
        raise ParameterError("No planner is asked.", resolve="name one or more.")
    began = time.monotonic()
    tried: list[Tried] = []
    for one in asked:
        if budget_s is not None and tried and time.monotonic() - began > budget_s:
            tried.append(Tried(one.name, reason=f"not asked within {budget_s:g} s"))
            continue
        if progress:
            progress(one.name)
        tried.append(ask(one, question, seeds))
    good = [one for one in tried if one.score is not None]
    if not good:
        reasons = "; ".join(f"{one.planner}: {one.reason}" for one in tried)
        raise InfeasibleError(
            f"No planner has a plan for {question.name}. {reasons}",
            resolve="offer more or larger GPUs, a smaller model or precision, or relax targets.",
        )
    ranked = sorted(good, key=_key, reverse=True)[: max(1, effort.improved)]
    starts = [(one.plan, one.score.seeds_rps) for one in ranked if one.plan and one.score]
    found = improve(
        starts, question, seeds=tuple(seeds), designs=effort.designs_for(question.cluster)
    )
    if found.changes:
        changed = "; ".join(dict.fromkeys(change.what for change in found.changes))
        notes = (f"From the plan of {ranked[0].planner}: {changed}.", *found.plan.notes)
        plan = replace(found.plan, planner=IMPROVED, notes=notes)
        better = score(plan, question, seeds=seeds, known=found.goodput_rps)
        tried.append(Tried(IMPROVED, plan, better, proof=found.proof))
    else:
        tried[tried.index(ranked[0])] = replace(ranked[0], proof=found.proof)
    best = max((one for one in tried if one.score is not None), key=_key)
    return Portfolio(
        question, tuple(tried), best, bound(question), found.changes, found.simulated, found.proof
    )


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
