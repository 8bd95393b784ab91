"""The best of all planners: every one that can take a case is tried, the best is improved.

All are judged by what simulation shows, with the same requests, gaps and seeds: the largest load
that a plan carries. What is returned is never worse than the best single plan, because it is one
of them or a change of one that was played and carried more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetero.apps.portfolio.base import Planner
from hetero.apps.portfolio.bound import Bound, bound
from hetero.apps.portfolio.effort import NORMAL, Effort
from hetero.apps.portfolio.improve import Change, Improved, improve
from hetero.apps.portfolio.planners import planners as all_planners
from hetero.apps.portfolio.score import Score, score
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.plans import Plan
from hetero.question import Question


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """What one planner said to a case.

    Attributes
    ----------
    entry, score
        Its plan and what that delivers; None where there is none.
    reason
        Why there is none; empty where there is one.
    """

    planner: str
    entry: Plan | None = None
    score: Score | None = None
    reason: str = ""


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
        By planner: changes of its plan that were kept, with the load carried after each.
    played
        Changes that were tried.
    bound
        What no plan exceeds; None where no bound is known.
    """

    case: Question
    tried: tuple[Tried, ...]
    best: Tried
    bound: Bound | None
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    played: int = 0

    @property
    def entry(self) -> Plan:
        """The best plan."""
        assert self.best.entry is not None
        return self.best.entry

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
        rows = []
        for one in sorted(self.tried, key=lambda one: tuple(-x for x in _key(one))):
            found = one.score
            rows.append(
                (
                    one.planner,
                    found.goodput_rps.mean if found else None,
                    100.0 * found.attainment.mean if found else None,
                    found.throughput_rps.mean if found else None,
                    found.usd_per_h if found else None,
                    found.usd_per_mtok_at_goodput.mean
                    if found and found.usd_per_mtok_at_goodput
                    else None,
                    one.reason or ("best" if one is self.best else ""),
                )
            )
        columns = (
            Column("planner"),
            Column("goodput", "requests/s"),
            Column("met targets", "%"),
            Column("throughput", "requests/s"),
            Column("price", "$/h"),
            Column("cost at goodput", "$ per 10^6 tokens"),
            Column("remark"),
        )
        limit = self.score.bound_rps
        notes = [
            f"Targets and throughput at {self.case.rate_rps:.4g} requests/s; "
            f"{len(self.score.seeds)} seeds."
        ]
        if limit is not None:
            notes.append(f"No plan carries more than {limit:.4g} requests/s, whatever the targets.")
        return Table(f"Portfolio: {self.case.name}", columns, tuple(rows), tuple(notes))


IMPROVED = "portfolio"
"""Name of what comes of improving the planners' plans."""


def portfolio(
    case: Question,
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
    ParameterError
        If there is no planner to ask.
    """
    asked = tuple(planners) if planners is not None else all_planners(effort)
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
        tried.append(ask(one, case, seeds))
    good = [one for one in tried if one.score is not None]
    if not good:
        reasons = "; ".join(f"{one.planner}: {one.reason}" for one in tried)
        raise InfeasibleError(
            f"No planner has a plan for {case.name}. {reasons}",
            resolve="offer more or larger GPUs, a smaller model or precision, or relax targets.",
        )
    ranked = sorted(good, key=_key, reverse=True)
    improved = _improved(case, ranked[: effort.improved], tuple(seeds), effort.moves)
    changes = {one.entry.planner: one.changes for one in improved if one.changes}
    played = sum(one.played for one in improved)
    found = max(improved, key=lambda one: sum(one.carried_rps))
    if found.changes:
        notes = tuple(f"Changed: {change.what}." for change in found.changes)
        entry = replace(
            found.entry,
            planner=IMPROVED,
            notes=(f"From the plan of {found.entry.planner}.", *notes, *found.entry.notes),
        )
        # The search went by short runs; what counts is what all others are scored by.
        tried.append(Tried(IMPROVED, entry, score(entry, case, seeds=seeds)))
    best = max((one for one in tried if one.score is not None), key=_key)
    return Portfolio(case, tuple(tried), best, bound(case), changes, played)


def _improved(
    case: Question, ranked: Sequence[Tried], seeds: tuple[int, ...], moves: int
) -> list[Improved]:
    """The best plans, each changed for the better as far as so many changes go."""
    found = []
    for one in ranked:
        assert one.entry is not None
        assert one.score is not None
        found.append(improve(one.entry, case, one.score.goodput_rps.mean, seeds=seeds, moves=moves))
    return found


def ask(planner: Planner, case: Question, seeds: Sequence[int] = (0,)) -> Tried:
    """What one planner says to a case, and what its plan delivers."""
    if reason := planner.unfit(case):
        return Tried(planner.name, reason=reason)
    try:
        entry = planner.plan(case)
    except InfeasibleError as error:
        return Tried(planner.name, reason=error.what)
    return Tried(planner.name, entry, score(entry, case, seeds=seeds))


def _key(one: Tried) -> tuple[float, ...]:
    return one.score.key if one.score else (-1.0, -1.0, -1.0)
