"""The cheapest machines to add so that a load survives the loss of any one machine.

Sets of machines of a price list are tried in order of their price. A set will do if the load is
carried in simulation when any one machine is down: one of the plan's, or one of the set's own. The
first that does is the cheapest of all sets of these machines. Left out are divisions of machines
for which a cheaper machine of the list, or the same, sustains as much of every kind of request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero.apps.capacity.fluid import Counts
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.prices import PriceList
from hetero.apps.capacity.resilience import kinds_of_loss
from hetero.apps.capacity.states import Kind, cheapest_set
from hetero.apps.capacity.trial import Outcome, dispatcher, outcome
from hetero.arrays import Floats
from hetero.costs.cost import CostSettings
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.baselines.capacity import buckets, capacity_rps
from hetero.plans import Plan
from hetero.question import Load, Question
from hetero.simulator import Event

_SETS = 2000


@dataclass(frozen=True, eq=False, repr=False)
class Spare(Shown):
    """Machines to add, and what every loss then leaves.

    Attributes
    ----------
    counts
        Machines by kind (number in the market) and division; empty if none are needed.
    losses
        Machine that is lost, and the load with what is left.
    plan
        The plan with the machines added.
    """

    market: Market
    counts: Counts
    losses: tuple[tuple[str, Outcome], ...]
    plan: Plan

    @property
    def usd_per_h(self) -> float:
        """Price of the machines to add [$/h]."""
        return self.market.usd_per_h(self.counts)

    @property
    def machines(self) -> dict[str, int]:
        """Machines to add by name of their kind."""
        return self.market.names(self.counts)

    def table(self) -> Table:
        """One row per loss."""
        columns = (
            Column("machine lost", of=lambda one: one[0] or "none"),
            Column("SLO met", "%", 3, of=lambda one: 100 * one[1].mean),
            Column("goodput", "requests/s", 3, of=lambda one: one[1].goodput_rps),
        )
        names = ", ".join(f"{n} x {name}" for name, n in self.machines.items())
        title = f"Cheapest spare: {names or 'none is needed'}, {self.usd_per_h:.3f} $/h"
        load = self.market.load
        notes = (
            f"With it {load.rate_rps:g} requests/s are carried (goal {100 * load.goal:g} %) "
            "whichever machine is lost.",
            *(
                f"Price of {offer.gpu.name}: {self.market.prices.price_source(offer)}."
                for offer in dict.fromkeys(self.market.offers[k] for k, _ in self.counts)
            ),
        )
        return Table.of(title, columns, self.losses, *notes)


def spare(
    plan: Plan,
    question: Question,
    prices: PriceList,
    *,
    precision: float = 0.02,
    seeds: tuple[int, ...] = (0, 1, 2),
) -> Spare:
    """The cheapest machines that keep the targets of a plan through the loss of any one machine.

    The dispatcher routes by predicted times to first token, over the plan's replicas and those of
    the spare alike.
    """
    base = plan.deployment
    if base is None or any(replica.role != "both" for replica in base.replicas):
        raise ParameterError(
            f"The plan of {plan.planner} is not one of whole replicas that serve both phases.",
            resolve="plan whole replicas, such as with Mélange, or look for spares by hand.",
        )
    load = question.load(precision=precision, seeds=seeds)
    market = Market(prices, question.llm, load, CostSettings(engine=question.engine))
    groups = [(names[0], down) for names, _, down in kinds_of_loss(plan, question.cluster)]
    first = groups[0]  # the loss that failed last is tried first

    def holds(more: Counts) -> Spare | None:
        nonlocal first
        whole = _with(plan, market, more)
        every = [("", ()), *groups, *_own(market, more)]
        found: dict[str, Outcome] = {}
        for name, down in dict.fromkeys([every[0], first, *every]):
            one = _left(whole, load, down)
            if one is None or not one.sustained:
                first = (name, down) if (name, down) in groups else first
                return None
            found[name] = one
        return Spare(market, more, tuple((name, found[name]) for name, _ in every), whole)

    each = {(k, division): market.offers[k].usd_per_h for k, division in _undominated(market)}
    found = cheapest_set(each, market.allowed, holds, _SETS)
    if found is None:
        raise InfeasibleError(
            f"None of the cheapest sets of machines of {prices.name}, {_SETS:,} at most, carries "
            f"{load.rate_rps:g} requests/s through any single loss.",
            resolve="lower the rate, relax the targets, or offer larger machines.",
        )
    return found


def _with(plan: Plan, market: Market, counts: Counts) -> Plan:
    """The plan with a spare fleet, and the dispatcher of such a fleet before both."""
    router = dispatcher(market.load)
    if not counts:
        return replace(plan, router=router)
    base, more = plan.deployment, market.plan(counts).deployment
    assert base is not None
    assert more is not None
    added = tuple(replace(one, name=f"spare {one.name}") for one in more.replicas)
    whole = replace(base, replicas=base.replicas + added)
    return replace(plan, router=router, serving=whole)


def _own(market: Market, counts: Counts) -> list[tuple[str, tuple[str, ...]]]:
    """Losses of one machine of the spare itself, one per kind and division."""
    machine = {group.name: group.stages[0][0] for group in market.groups(counts)}
    return [
        (f"spare {machine[names[0]]}", tuple(f"spare {name}" for name in names))
        for names, *_ in market.replicas(counts).values()
    ]


def _left(plan: Plan, load: Load, down: tuple[str, ...]) -> Outcome | None:
    """What is left of a plan; None if nothing is."""
    assert plan.deployment is not None
    if len(down) == len(plan.deployment.replicas):
        return None
    return outcome(plan, load, events=[Event(0.0, name) for name in down], stop_early=True)


def _undominated(market: Market) -> list[Kind]:
    """Kinds and divisions, cheapest first, without those that a cheaper one outdoes throughout."""
    ranges = buckets(market.load.trace)
    found: list[tuple[Floats, Kind]] = []
    for k, division in sorted(market.fluid.columns, key=lambda at: market.offers[at[0]].usd_per_h):
        each = [market.kinds[k].instances[d] for d in division]
        rates = np.array(
            [sum(capacity_rps(one, part, market.load.slo) for one in each) for part in ranges]
        )
        limited = market.offers[k].limit is not None
        if limited or not any(np.all(other >= rates) for other, _ in found):
            # What is limited may run out, so that it stands in for nothing else.
            found.append((0.0 * rates if limited else rates, (k, division)))
    return [at for _, at in found]
