r"""The cheapest fleet for a load: an integer program, a proven bound, and simulation.

1. The integer program of Mélange (:mod:`hetero.planners.baselines.melange`) over kinds of machines
   and their divisions proposes the cheapest fleet whose instances sustain the rate times a factor
   f. What an instance sustains there is a steady state; queues and bursts are not in it.
2. Simulation decides: f is bisected for the cheapest proposal that carries the load in every seed.
3. Descent: machines are taken away, or exchanged for cheaper ones, as long as what is left carries
   the load in simulation.
4. The same for every GPU type alone gives the best fleet of one type; the answer is never dearer.
5. Step times err, so the fleets are simulated again with draws of them
   (:func:`hetero.question.sustained_draws`); none is sized anew for a draw.

:mod:`hetero.apps.capacity.fluid` proves what every fleet of these machines must cost with these
step times, targets aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hetero.apps.capacity.fluid import Counts, together
from hetero.apps.capacity.market import Draws, Market
from hetero.apps.capacity.outcome import Outcome
from hetero.apps.capacity.prices import PriceList
from hetero.cluster import Cluster
from hetero.costs.cost import CostSettings
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.plans import Plan
from hetero.question import DRAWS, Question, in_draws

NEAR: Final = 1.5
"""Times the price of the cheapest fleet of one GPU type, up to which others are searched."""
_FIRST = 1.15  # factor tried first: instances loaded to 87 %
_LEAST, _LARGEST = 0.25, 16.0
_WIDTH = 1.03  # last bracket of the factor
_TRIALS = 60  # fleets that a descent may simulate
_HOPE = 0.75  # of a proposal's price: a descent that would have to save more is not begun


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that carries the load in simulation.

    Attributes
    ----------
    counts
        Machines by kind (its number in the market) and division.
    draws
        Whether it carries the load with each draw of the step times.
    """

    counts: Counts
    usd_per_h: float
    outcome: Outcome
    draws: Draws = ()


@dataclass(frozen=True, eq=False, repr=False)
class Sizing(Shown):
    """The cheapest fleet found for a load, with the evidence.

    Attributes
    ----------
    bound_usd_per_h
        Proven: no fleet of these machines serves the rate for less, targets aside.
    program_usd_per_h
        Proven bound of the integer program at a factor of 1: the least price if instances could
        be kept at the steady state that they sustain under the targets.
    alone
        By GPU type: the cheapest fleet found of that type alone, or why there is none.
    least_usd_per_h
        By GPU type: proven least price of a fleet of that type alone, targets aside.
    """

    market: Market
    best: Candidate
    bound_usd_per_h: float
    program_usd_per_h: float
    alone: dict[str, Candidate | str]
    least_usd_per_h: dict[str, float]

    @property
    def usd_per_h(self) -> float:
        """Price of the fleet [$/h]."""
        return self.best.usd_per_h

    @property
    def gap(self) -> float:
        """Distance of the price from the proven bound, over the price."""
        return max(0.0, 1.0 - self.bound_usd_per_h / self.usd_per_h)

    @property
    def plan(self) -> Plan:
        """The fleet as a plan."""
        return self.market.plan(self.best.counts, "cheapest fleet")

    @property
    def homogeneous(self) -> tuple[str, Candidate] | None:
        """GPU type and fleet of the cheapest fleet of one type."""
        found = [(name, one) for name, one in self.alone.items() if isinstance(one, Candidate)]
        return min(found, key=lambda pair: pair[1].usd_per_h, default=None)

    @property
    def runner_up(self) -> Candidate | None:
        """The cheapest fleet of one GPU type that the answer is not made of alone."""
        used = {self.market.offers[k].gpu.name for k, _ in self.best.counts}
        found = [
            one for name, one in self.alone.items() if isinstance(one, Candidate) and used != {name}
        ]
        return min(found, key=lambda one: one.usd_per_h, default=None)

    def table(self) -> Table:
        """One row per kind of machine and division, the alternatives below."""
        market, load, best = self.market, self.market.load, self.best
        rows = tuple(
            (
                market.offers[k].name,
                n,
                " + ".join(f"TP {d}" for d in division),
                n * market.offers[k].usd_per_h,
            )
            for (k, division), n in sorted(best.counts.items())
        )
        columns = (
            Column("machine"),
            Column("number"),
            Column("instances of each"),
            Column("price", "$/h"),
        )
        low, high = best.outcome.attained_interval
        notes = [
            f"{100 * best.outcome.mean:.1f} % of the requests meet the targets "
            f"({100 * low:.1f} to {100 * high:.1f}, {best.outcome.shown}; "
            f"goal {100 * load.goal:g} %), with {load.arriving}.",
            *self._safety(),
            f"Proven for these step times: no fleet of these machines serves this rate for less "
            f"than {self.bound_usd_per_h:.3f} $/h, targets aside; gap {100 * self.gap:.0f} %.",
            f"Estimate of a steady state under the targets: {self.program_usd_per_h:.3f} $/h.",
        ]
        if (single := self.homogeneous) is not None:
            one = single[1]
            saved = 100 * (1 - self.usd_per_h / one.usd_per_h)
            notes.append(
                f"Cheapest of one GPU type: {self._fleet(one)} for {one.usd_per_h:.3f} $/h; this "
                f"one costs {saved:.1f} % less."
            )
        used = {market.offers[k] for k, _ in best.counts}
        quoted = sorted({f"{o.gpu.name}: {market.prices.price_source(o)}" for o in used})
        notes += [f"Prices: {'; '.join(quoted)}.", *market.notes]
        title = (
            f"{market.llm.name} in {market.settings.engine.precision} at {load.rate_rps:g} "
            f"requests/s: {self.usd_per_h:.3f} $/h"
        )
        return Table(title, columns, rows, tuple(notes))

    def _fleet(self, one: Candidate) -> str:
        return ", ".join(f"{n} x {kind}" for kind, n in self.market.names(one.counts).items())

    def _safety(self) -> Iterator[str]:
        """In how many draws of step times the fleet carries the load, and what then wins."""
        best, other = self.best, self.runner_up
        if not best.draws:
            return
        yield f"Carries {self.market.load.rate_rps:g} requests/s in {in_draws(best.draws)}."
        if assumed := self.market.assumed(best.counts):
            said = f"No step time of {' and '.join(assumed)} was ever measured: "
            said += f"this fleet stays the cheapest in {in_draws(best.draws)}"
            if other is not None:
                instead = [a and not b for a, b in zip(other.draws, best.draws, strict=True)]
                said += (
                    f"; in {100 * float(np.mean(instead)):.0f} % {self._fleet(other)} for "
                    f"{other.usd_per_h:.3f} $/h carries the load where it does not"
                )
            yield f"{said}. No fleet is sized anew for a draw."

    def alternatives(self) -> Table:
        """The cheapest fleet of every GPU type alone."""
        rows: list[tuple[object, ...]] = []
        for name, one in self.alone.items():
            least = self.least_usd_per_h.get(name)
            if isinstance(one, Candidate):
                safe = 100 * np.mean(one.draws) if one.draws else None
                rows.append(
                    (name, one.usd_per_h, least, 100 * one.outcome.mean, safe, self._fleet(one))
                )
            else:
                rows.append((name, None, least, None, None, one))
        rows.sort(key=lambda row: (row[1] is None, row[1] or row[2] or float("inf")))
        columns = (
            Column("GPU"),
            Column("price", "$/h"),
            Column("proven at least", "$/h"),
            Column("SLO met", "%", 3),
            Column("carries in draws", "%", 3),
            Column("fleet"),
        )
        note = "Proven for these step times, targets aside. Draws: of the error of step times."
        return Table("Fleets of one GPU type", columns, tuple(rows), (note,))


def cheapest_part(
    question: Question,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    progress: Callable[[str], None] | None = None,
) -> tuple[Cluster, Sizing]:
    """The cheapest part of a cluster that carries a load with whole replicas, and its evidence.

    Raises
    ------
    InfeasibleError
        If the whole cluster does not carry it, or the cheapest part exceeds the budget.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> from hetero.simulator import Slo
    >>> question = Question(
    ...     cluster.cluster("thunderserve-cloud-32"),
    ...     catalog.llm("Llama-3-8B"),
    ...     workload.load("azure2023_conv"),
    ...     2.0,
    ...     Slo(ttft_s=2.0, tpot_s=0.15),
    ... )
    >>> part, found = cheapest_part(question, seeds=(0,))
    >>> part.usd_per_h == found.usd_per_h < question.cluster.usd_per_h
    True
    """
    load = question.load(seeds=seeds)
    listed = PriceList.of_cluster(question.cluster)
    market = Market(listed, question.llm, load, CostSettings(engine=question.engine))
    found = cheapest(market, near=1.0, progress=progress)
    budget = question.budget_usd_per_h
    if budget is not None and found.usd_per_h > budget:
        raise InfeasibleError(
            f"The cheapest part found of {question.cluster.name} costs {found.usd_per_h:.4g} $/h, "
            f"above the budget of {budget:.4g} $/h.",
            resolve="raise the budget, or lower the rate.",
        )
    used = {machine for group in found.plan.groups for machine, *_ in group.stages}
    kept = [machine for machine in question.cluster.machines if machine.name in used]
    return question.cluster.part(kept), found


def cheapest(
    market: Market,
    *,
    near: float = NEAR,
    draws: int = DRAWS,
    progress: Callable[[str], None] | None = None,
) -> Sizing:
    """The cheapest fleet of a market for its load, see :func:`hetero.size`."""
    load, fluid = market.load, market.fluid
    say = progress or (lambda _: None)
    require(
        fluid.left_out <= 1 - load.goal,
        f"{100 * fluid.left_out:.1f} % of the requests fit the KV cache of no machine of "
        f"{market.prices.name}, and {100 * (1 - load.goal):.1f} % may be missed.",
        resolve="offer larger machines, a lower precision, or cut long requests.",
        error=InfeasibleError,
    )
    say("bound")
    floor = fluid.least_usd_per_h(load.rate_rps)
    program = market.program().cheapest(load.rate_rps)
    say("mixed fleets")
    mixed = _proposal(market, None)
    found = [] if mixed is None else [_descend(market, mixed)]
    alone: dict[str, Candidate | str] = {}
    bounds: dict[str, float] = {}
    least = float("inf")
    for name, price in _types(market):
        say(f"{name} alone")
        if isinstance(price, str):
            alone[name] = price
            continue
        bounds[name] = market.bound(name).least_usd_per_h(load.rate_rps)
        if bounds[name] >= near * least:
            times = bounds[name] / least
            alone[name] = f"not searched: proven to cost {times:.2g} times the cheapest or more"
        elif (proposed := _proposal(market, name)) is None:
            alone[name] = "no number of machines meets the targets in simulation"
        else:
            hopeful = proposed.usd_per_h * _HOPE < least
            one = _descend(market, proposed, only=name) if hopeful else proposed
            alone[name] = one
            found.append(one)
            least = min(least, one.usd_per_h)
    require(
        bool(found),
        f"No fleet of {market.prices.name} meets the targets for {100 * load.goal:g} % of "
        f"{load.rate_rps:g} requests/s in simulation.",
        resolve="relax the targets or the goal, or offer other or more machines.",
        error=InfeasibleError,
    )
    best = min(found, key=lambda one: one.usd_per_h)
    if best is not found[0] or mixed is None:
        # The best of one type may become cheaper still with other types.
        best = _descend(market, best)
    say("draws of step times")

    def drawn(one: Candidate) -> Candidate:
        return replace(one, draws=market.draws(one.counts, draws=draws)) if draws else one

    judged = {n: drawn(one) if isinstance(one, Candidate) else one for n, one in alone.items()}
    return Sizing(market, drawn(best), floor, program.bound, judged, bounds)


def _types(market: Market) -> list[tuple[str, float | str]]:
    """GPU types by the least price that the program gives them, or why they cannot."""
    found: list[tuple[str, float | str]] = []
    for name in dict.fromkeys(offer.gpu.name for offer in market.offers):
        try:
            found.append((name, market.program(name).cheapest(market.load.rate_rps).bound))
        except InfeasibleError as error:
            limits = [offer.limit for offer in market.offers if offer.gpu.name == name]
            few = None not in limits or name in dict(market.prices.most_gpus)
            found.append((name, "those on offer do not suffice" if few else error.what))
    return sorted(found, key=lambda pair: (isinstance(pair[1], str), pair[1]))


def _proposal(market: Market, only: str | None) -> Candidate | None:
    """The cheapest proposal of the program that carries the load, by bisection of the factor."""
    load = market.load
    try:
        program = market.program(only)
    except InfeasibleError:
        return None
    best: Candidate | None = None

    def carries(factor: float) -> bool | None:
        nonlocal best
        try:
            plan = program.cheapest(factor * load.rate_rps)
        except InfeasibleError:
            return None
        counts = market.counts(program, plan.used)
        if not market.sustains(counts):
            return False
        price = market.usd_per_h(counts)
        if best is None or price < best.usd_per_h:
            best = Candidate(counts, price, market.play(counts))
        return True

    low = high = _FIRST
    first = carries(high)
    while first is False and high < _LARGEST:
        low, high = high, high * 1.3
        first = carries(high)
    while first and low == high and low > _LEAST:
        low /= 1.3
        if not carries(low):
            break
        high = low
    while best is not None and high > low * _WIDTH:
        middle = (low * high) ** 0.5
        if carries(middle):
            high = middle
        else:
            low = middle
    return best


def _descend(market: Market, start: Candidate, only: str | None = None) -> Candidate:
    """Take machines away or exchange them for cheaper ones while simulation allows it."""
    best, trials = start, 0
    improved = True
    while improved and trials < _TRIALS:
        improved = False
        for price, counts in sorted(_cheaper(market, best, only), key=lambda pair: pair[0]):
            if trials >= _TRIALS:
                break
            if market.fluid.most_rps(counts) < market.load.rate_rps:
                continue
            trials += 1
            if market.sustains(counts):
                best = Candidate(counts, price, market.play(counts))
                improved = True
                break
    return best


def _cheaper(market: Market, one: Candidate, only: str | None) -> Iterator[tuple[float, Counts]]:
    """Fleets that differ by one machine: one less, or another kind or division in its place."""
    seen = set()
    columns = [
        (k, division)
        for k, division in market.fluid.columns
        if only in (None, market.offers[k].gpu.name)
    ]
    for key in one.counts:
        for other in (None, *columns):
            if other == key:
                continue
            counts = together(one.counts, {key: -1} | ({other: 1} if other else {}))
            price = market.usd_per_h(counts)
            at = tuple(counts.items())
            if price < one.usd_per_h * (1 - 1e-9) and at not in seen and market.allowed(counts):
                seen.add(at)
                yield price, counts
