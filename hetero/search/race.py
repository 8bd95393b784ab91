r"""The search: designs race against the best plan so far, under the one rule of a sustained rate.

A design is raced at the rate that the best plan sustains and a little more, by runs that grow: one
that misses the goal by far in few requests gets no more of them, and one that passes the rule is
the best from then on, at the largest rate that it sustains. What comes in which order depends on
the plans so far alone, never on how many designs may be raced; so a larger budget begins with the
same designs, and what is found never falls.

Beside the best plan stand its neighbours, other routers, and whatever else a caller tries; where
none is better, the layouts of the whole fleet follow by their bounds
(:mod:`hetero.search.space`). Once the bound of all that are left is below the best plan,
it is the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from hetero.errors import HeteroError
from hetero.planners.bound import capped
from hetero.planners.score import PRECISION, goodput
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps, sustains
from hetero.routers import Builtin
from hetero.search.space import ReplicaLayout, ReplicaSpace
from hetero.simulator import Slo
from hetero.simulator.drivers import MissedError

Ruled = tuple[str, Builtin]
"""A router in words, and itself."""
Build = Callable[[Plan, ReplicaLayout, str, Builtin], Plan]
"""The plan of a layout and a router, by the names and with the steps of another plan."""

GAIN = 1.005
"""A design must sustain so much more than the best plan so far, a cheaper one as much."""
SLACK = 1.05
"""Over its bound a design may look better, by the sample of requests and the rule's precision."""
OURS = 2
"""Routers that every layout is raced with before any layout is with the others."""

_LEAST_SHARE = 1e-3  # of the case's load that a plan must sustain where the one before does none
_SHORT = (1 / 16, 0.2)  # of the requests of the rule; below the goal
# Of 1,117 designs on 21 cases none that passed the rule was farther below its goal there; a
# judgement on samples, unlike the rest of a watch.
_EARLY = ((1 / 4, 0.08), (1 / 2, 0.04))
_SHORT_IN_BURSTS = 0.4  # below the goal
_FEWEST = 300  # requests
_HOPELESS = 0.4  # below the goal: other routers do not help
_BATCH = 32  # layouts
_CLIMB = 500  # designs near each plan that is given
_BOUNDED = 50  # ways to divide the fleet, per design that may be raced


class Race:
    """The best plan so far, what it carries, and how many designs may still be raced.

    Parameters
    ----------
    plan, goodput_rps
        One to begin with, and the rate that it sustains with the arrivals of each seed.
    say
        Called before a design is raced, with how many more may be.
    """

    def __init__(
        self,
        question: Question,
        plan: Plan,
        goodput_rps: Sequence[float],
        *,
        seeds: Sequence[int],
        budget: int,
        say: Callable[[int], None] = lambda left: None,
    ) -> None:
        self.question, self.seeds = question, tuple(seeds)
        self.plan, self.goodput_rps = plan, tuple(goodput_rps)
        self.budget = self.left = budget
        self.say = say
        self.changes: list[str] = []

    @property
    def mean_rps(self) -> float:
        """Rate that the best plan so far sustains, over the seeds."""
        return sum(self.goodput_rps) / len(self.goodput_rps)

    def attempt(self, what: str, make: Callable[[], Plan]) -> float:
        """Race a plan, and keep it if it is better: above 0 if so, else by how much it misses."""
        if self.left < 1:
            return -1.0
        self.say(self.left)
        self.left -= 1
        try:
            return self._confirmed(what, make())
        except HeteroError:
            return -1.0  # what no plan can have, such as a router that needs more

    def _confirmed(self, what: str, plan: Plan) -> float:
        if (missed := self.missed(plan)) < 0:
            return missed
        rates = self._rates(plan)
        if sum(rates) <= sum(self.goodput_rps) and not (
            rates == self.goodput_rps and self._cheaper(plan)
        ):
            return 0.0
        self.plan, self.goodput_rps = plan, rates
        self.changes.append(what)
        return 1.0

    def _rates(self, plan: Plan) -> tuple[float, ...]:
        """Rates that a plan sustains, the last of them 0 where it would not make the plan better.

        The first is known to be at least what is wanted.
        """
        load, near = capped(plan, self.question, PRECISION), self._wanted(plan)
        found = [sustained_rps(plan, load, self.seeds[0], near_rps=near, known=True)]
        for seed in self.seeds[1:]:
            near, known = found[-1] or near, False
            needed = sum(self.goodput_rps) - sum(found)
            if len(found) == len(self.seeds) - 1 and needed >= near:
                if not sustains(plan, load.at(needed), seed):
                    return (*found, 0.0)
                near, known = needed, True
            found.append(sustained_rps(plan, load, seed, near_rps=near, known=known))
        return tuple(found)

    def _cheaper(self, plan: Plan) -> bool:
        return (plan.usd_per_h or math.inf) < (self.plan.usd_per_h or math.inf)

    def _wanted(self, plan: Plan) -> float:
        gain = 1.0 if self._cheaper(plan) else GAIN
        return gain * self.goodput_rps[0] or _LEAST_SHARE * self.question.rate_rps

    def missed(self, plan: Plan) -> float:
        """By how much a plan misses the goal at the rate of the best so far; 0 if it does not."""
        load = self.question.load(self._wanted(plan))
        whole = load.requests(plan)
        poisson, share = load.process != "scaled", _SHORT[0]
        few = max(_FEWEST, int(share * whole))
        if load.slo != Slo() and few < whole / 2:
            run = plan.simulate(load.arrivals(few, self.seeds[0]), self.seeds[0])
            short = load.rule.judge(run).attained - load.goal
            if short < -(_SHORT[1] if poisson else _SHORT_IN_BURSTS):
                return short
        early = tuple((at, 1.0 - load.goal + below) for at, below in _EARLY if poisson)
        try:
            seen = judged(plan, load, self.seeds[0], early=early)[1]
        except MissedError as error:
            return min(error.attained - load.goal, -1e-9)
        return 0.0 if seen.sustained else min(seen.attained - seen.needed, -1e-9)


@dataclass(eq=False)
class LayoutRace:
    """A race over the layouts of a space.

    Parameters
    ----------
    routers
        Every layout is raced with the first :data:`OURS` before any is with the others.
    polish
        Called where no router is better, with the race: what else may change in its best plan.
    most_rps
        What no layout exceeds.
    """

    race: Race
    space: ReplicaSpace
    build: Build
    routers: Sequence[Ruled]
    polish: Callable[[Race], None] = lambda race: None
    most_rps: float = math.inf
    _raced: set[object] = field(default_factory=set)

    def run(
        self, layouts: Sequence[ReplicaLayout] = (), promising: Sequence[ReplicaLayout] = ()
    ) -> str:
        """Race what promises most, what is near it and these layouts, then all; what that shows."""
        found = [
            one
            for one in promising
            if max([self._attempt("", one, ruled) for ruled in self.routers[:OURS]]) > 0
        ]
        if found:
            self.settle(found[-1], self.routers)
        different = {self.space.key(layout): layout for layout in reversed(layouts)}
        for k, layout in enumerate(reversed(different.values())):
            if better := self._climb(layout, self.routers[: None if k == 0 else OURS]):
                self.settle(better, self.routers)
        said, complete = self._sweep(self.routers[:OURS])
        if complete and len(self.routers) > OURS:
            further, complete = self._sweep(self.routers)
            said = further if complete else said
        return said

    def _climb(self, layout: ReplicaLayout, routers: Sequence[Ruled]) -> ReplicaLayout | None:
        """What is near a layout of its own accord, where that is better than the best plan."""
        whole, raced = self.race, self._raced
        plan = self.build(whole.plan, layout, *self.routers[0])
        rates = goodput(plan, whole.question, whole.seeds)
        budget, more = min(whole.left, _CLIMB), max(0, whole.left - _CLIMB)
        say = lambda left: whole.say(more + left)  # noqa: E731
        self.race = Race(whole.question, plan, rates, seeds=whole.seeds, budget=budget, say=say)
        self._raced = set()
        layout = self.settle(layout, routers)
        found, self.race, self._raced = self.race, whole, raced
        whole.left -= budget - found.left
        if found.mean_rps <= whole.mean_rps:
            return None
        whole.plan, whole.goodput_rps = found.plan, found.goodput_rps
        whole.changes = [*found.changes] or [f"routing: {found.plan.routing}"]
        return layout

    def settle(self, layout: ReplicaLayout, routers: Sequence[Ruled]) -> ReplicaLayout:
        """Routers, what the caller tries, and neighbours, until nothing is better."""
        better: ReplicaLayout | None = layout
        general = routers[0]
        while better is not None and self.race.left:
            layout, tried = better, -1
            while len(self.race.changes) != tried and self.race.left:
                for ruled in routers:
                    if self._attempt("", layout, ruled) > 0:
                        general = ruled
                tried = len(self.race.changes)
                self.polish(self.race)
                if len(self.race.changes) != tried:  # no router was tried with these limits yet
                    self._raced -= {(self.space.key(layout), ruled[0]) for ruled in routers}
            near = (one for one in self.space.neighbours(layout) if not self._worse(one[1]))
            won = (one for what, one in near if self._attempt(what, one, general) > 0)
            better = next(won, None)
        return layout

    def _sweep(self, routers: Sequence[Ruled]) -> tuple[str, bool]:
        """Race all layouts by their bounds until those that are left are worse; whether all are."""
        source = self.space.layouts()
        ways, discarded, limit, known = 0, 0, np.inf, (0, np.inf)
        most = min(self.space.count, _BOUNDED * self.race.budget)
        while limit * SLACK >= self.race.mean_rps and self.race.left and ways < most:
            batch, known = list[ReplicaLayout](), (ways, limit)
            for limit, some in islice(source, _BATCH):
                if limit * SLACK < self.race.mean_rps:
                    break
                good = [one for one in some if not self._worse(one)]
                ways, discarded = ways + 1, discarded + (not good)
                batch += good
            else:
                limit = limit if ways < self.space.count else 0.0
            near = [_misses(self.race, self.build, one, routers) for one in batch]
            for one, missed in zip(batch, near, strict=True):
                won = [
                    self._attempt("", one, ruled) > 0 if by >= 0 else self._skip(one, ruled)
                    for ruled, by in zip(routers, missed, strict=False)
                ]
                if any(won):
                    self.settle(one, self.routers)
        worse = limit * SLACK < self.race.mean_rps or ways == self.space.count
        complete = worse and self.race.left > 0
        all_, discarded = self.space.count, discarded + self.space.count - ways
        what = "ways to divide the fleet into whole replicas and phases"
        under = f"with {len(routers)} router{'s' if len(routers) > 1 else ''} each"
        if complete:
            said = f"It is the best of all {all_:,} {what}, {under}"
            were = "was" if discarded == 1 else "were"
            said += f"; {discarded:,} {were} discarded by their bounds." if discarded else "."
        else:
            ways, limit = known if not self.race.left else (ways, limit)
            limit, raced = min(limit, self.most_rps), self.race.budget - self.race.left
            said = f"It is the best of {raced:,} designs near those of the planners"
            none = f"no way {what.removeprefix('ways ')}"
            if ways:
                said = f"It is the best of {ways:,} of {all_:,} {what}, {under}"
                none = "none of the others"
            said += (
                f"; {none} serves more than {limit:.4g} requests/s."
                if limit < np.inf
                else f"; there are {all_:,} {what}."
            )
        return said, complete

    def _worse(self, layout: ReplicaLayout) -> bool:
        return self.space.bound_rps(layout) * SLACK < self.race.mean_rps

    def _skip(self, layout: ReplicaLayout, ruled: Ruled) -> bool:
        self._raced.add((self.space.key(layout), ruled[0]))
        self.race.left -= self.race.left > 0
        return False

    def _attempt(self, what: str, layout: ReplicaLayout, ruled: Ruled) -> float:
        key = (self.space.key(layout), ruled[0])
        if key in self._raced:
            return -1.0
        self._raced.add(key)
        label = ", ".join(filter(None, (what, f"routing: {ruled[0]}")))
        return self.race.attempt(label, partial(self.build, self.race.plan, layout, *ruled))


def _misses(
    race: Race, build: Build, layout: ReplicaLayout, routers: Sequence[Ruled]
) -> list[float]:
    """By how much a layout misses with each router, until one shows that none will do."""
    found: list[float] = []
    for ruled in routers:
        try:
            found.append(race.missed(build(race.plan, layout, *ruled)))
        except HeteroError:
            found.append(-1.0)
        if found[-1] < -_HOPELESS:
            break
    return found
