"""What remains of a plan when any one machine is lost.

Every machine is taken away in turn, and the load is simulated with the rest:

- *afterwards*: the replicas that had a GPU on the machine are down from the start, the router knows
  it and serves with what is left;
- *the loss itself*: the machine goes in the middle of a run. What it held is routed again with the
  tokens already streamed kept as part of the prompt; counted are the requests that arrive within
  a minute of the loss;
- *planned again*: the planner makes a new plan for the machines that are left, which takes the time
  of loading weights. Plans over the layers of a network are judged by this alone.

Machines whose replicas are alike are simulated once.

Spare machines of a price list are looked for in order of their price. A set will do if the load is
served in simulation when any one machine is down: one of the plan's, or one of the set's own. Left
out are divisions of machines for which a cheaper machine of the list, or the same, sustains as much
of every kind of request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hetero.apps.capacity.fluid import Counts
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.outcome import Outcome, dispatcher, outcome
from hetero.apps.capacity.prices import PriceList
from hetero.apps.capacity.spot import cheapest_set
from hetero.cluster import Cluster
from hetero.costs.cost import CostSettings
from hetero.display import Column, Shown, Table
from hetero.errors import HeteroError, InfeasibleError, ParameterError
from hetero.planners.base import Planner
from hetero.plans import Plan
from hetero.question import DRAWS, Load, Question, in_draws, sustained_draws, sustained_rps
from hetero.simulator import Event
from hetero.simulator.metrics import attainment

_WINDOW_S = 60.0  # after a loss: as long as queues take to show
_SETS = 2000  # of spare machines


@dataclass(frozen=True, slots=True)
class Loss:
    """What the loss of one machine leaves.

    Attributes
    ----------
    machines
        Machines whose loss has these consequences, one at a time; empty for no loss.
    gpus
        GPUs of the plan on one of them, by type.
    replicas
        Replicas that go down with it.
    after
        The load with what is left; None for plans over the layers of a network.
    sustained_rps
        Largest rate that what is left sustains, mean over seeds.
    shock
        Share of the requests arriving within a minute of the loss that meet the targets.
    interrupted
        Requests that the loss interrupts, mean over seeds.
    planned_again
        The load with a new plan for the machines left; None where it was not asked for or none
        exists.
    draws
        Whether what is left carries the load with each draw of the step times.
    """

    machines: tuple[str, ...]
    gpus: dict[str, int]
    replicas: tuple[str, ...]
    after: Outcome | None = None
    sustained_rps: float | None = None
    shock: float | None = None
    interrupted: float | None = None
    planned_again: Outcome | None = None
    draws: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Resilience(Shown):
    """A plan without any one of its machines.

    Attributes
    ----------
    whole
        With all machines.
    losses
        One per kind of machine, the worst first.
    """

    plan: Plan
    load: Load
    whole: Loss
    losses: tuple[Loss, ...]

    @property
    def worst(self) -> Loss:
        """The loss that leaves the least attainment."""
        return self.losses[0]

    @property
    def holds(self) -> bool:
        """Whether the load is sustained through any single loss, with the plan or a new one."""
        return all(
            any(found is not None and found.sustained for found in (one.after, one.planned_again))
            for one in (self.whole, *self.losses)
        )

    @property
    def draws(self) -> tuple[bool, ...]:
        """Whether the load is served through any single loss, by draw of the step times."""
        return tuple(map(all, zip(*(one.draws for one in (self.whole, *self.losses)), strict=True)))

    def table(self) -> Table:
        """The N-1 table: one row per kind of machine."""
        columns = [
            Column("machine lost", of=lambda one: _names(one.machines)),
            Column(
                "GPUs lost",
                of=lambda one: ", ".join(f"{n} x {gpu}" for gpu, n in one.gpus.items()) or None,
            ),
            Column("SLO met", "%", 3, of=lambda one: one.after and 100 * one.after.mean),
            Column("goodput", "requests/s", 3, of="after.goodput_rps"),
            Column(
                "throughput", "tokens/s", of=lambda x: x.after and np.mean(x.after.tokens_per_s)
            ),
            Column("sustains", "requests/s", 3, of="sustained_rps"),
            Column(
                "carries in draws", "%", 3, of=lambda x: 100 * np.mean(x.draws) if x.draws else None
            ),
            Column("SLO met in the minute after", "%", 3, of=lambda x: x.shock and 100 * x.shock),
            Column("interrupted", "requests", 3),
        ]
        if any(one.planned_again for one in self.losses):
            again = "SLO met, planned again"
            columns += [
                Column(again, "%", 3, of=lambda x: x.planned_again and 100 * x.planned_again.mean)
            ]
        targets = f"{self.load.rate_rps:g} requests/s, goal {100 * self.load.goal:g} %"
        verdict = "is sustained" if self.holds else "is not sustained"
        every = (self.whole, *self.losses)
        shown = [one.after for one in every if one.after is not None]
        safe = f"It is in {in_draws(self.draws)}, without a new plan." if self.draws else ""
        notes = (
            f"For these step times the load ({targets}) {verdict} through any single loss. {safe}",
            *(f"Simulated: {one.shown}, with {self.load.arriving}." for one in shown[:1]),
        )
        return Table.of(f"{self.plan.planner} without any one machine", columns, every, *notes)


def resilience(
    plan: Plan,
    question: Question,
    *,
    planner: Planner | None = None,
    precision: float = 0.02,
    seeds: Sequence[int] = (0, 1, 2),
    draws: int = DRAWS,
    progress: Callable[[str], None] | None = None,
) -> Resilience:
    """Take every machine of a plan away in turn.

    Parameters
    ----------
    planner
        Makes a new plan for the machines that are left; by default none is made.
    precision, seeds
        What rates are known to, and the seeds that they are means over.
    draws
        Draws of the step times with which the load is simulated again; 0 for none.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> from hetero.search.portfolio import planner
    >>> from hetero.simulator import Slo
    >>> case = Question(
    ...     cluster.cluster("heteroserve-4"),
    ...     catalog.llm("Llama-3-8B"),
    ...     workload.load("azure2023_conv"),
    ...     3.0,
    ...     Slo(ttft_s=2.0),
    ... )
    >>> found = resilience(planner("Mélange").plan(case), case, precision=0.05, seeds=(0,))
    >>> found.holds, found.whole.sustained_rps > found.worst.sustained_rps
    (True, True)
    """
    load = question.load(precision=precision, seeds=seeds)
    if plan.deployment is None and planner is None:
        raise ParameterError(
            f"The plan of {plan.planner} lays layers over a network, which does not serve on "
            "without a machine unless it is planned again.",
            resolve="give the planner as well.",
        )
    say, serves_on = progress or (lambda _: None), plan.deployment is not None
    drawn = partial(
        sustained_draws,
        plan,
        question.cluster.gpu_types,
        load,
        draws=draws,
        engine=question.engine.name,
        experts=bool(question.llm.experts),
    )
    found = []
    for machines, gpus, replicas in [((), {}, ()), *kinds_of_loss(plan, question.cluster)]:
        say(f"loss of {machines[0]}" if machines else "no loss")
        down = tuple(Event(0.0, name) for name in replicas)
        one = Loss(machines, gpus, replicas, draws=drawn(events=down))
        if serves_on or not machines:
            one = replace(one, after=outcome(plan, load, events=down))
        if serves_on:
            rates = [sustained_rps(plan, load, seed, events=down) for seed in load.seeds]
            one = replace(one, sustained_rps=float(np.mean(rates)))
        if serves_on and machines:
            shock, interrupted = _shock(plan, load, replicas)
            one = replace(one, shock=shock, interrupted=interrupted)
        if machines and planner is not None:
            one = replace(one, planned_again=_again(planner, question, load, machines[0]))
        found.append(one)
    whole, *losses = found
    # Where both meet the targets, the one that carries less is worse.
    losses.sort(key=lambda one: (_best(one), one.sustained_rps or 0.0))
    return Resilience(plan, load, whole, tuple(losses))


def kinds_of_loss(
    plan: Plan, cluster: Cluster
) -> Iterator[tuple[tuple[str, ...], dict[str, int], tuple[str, ...]]]:
    """Machines whose loss is alike, the GPUs of one, and the groups that one takes down."""
    touched: dict[str, list[int]] = {}
    for index, group in enumerate(plan.groups):
        for machine in dict.fromkeys(machine for machine, *_ in group.stages):
            touched.setdefault(machine, []).append(index)
    alike: dict[object, list[str]] = {}
    for machine, indices in touched.items():
        alike.setdefault(_signature(plan, cluster, machine, indices), []).append(machine)
    for machines in alike.values():
        gpus: dict[str, int] = {}
        for index in touched[machines[0]]:
            for machine, gpu, count, _ in plan.groups[index].stages:
                if machine == machines[0]:
                    gpus[gpu] = gpus.get(gpu, 0) + count
        names = tuple(plan.groups[index].name for index in touched[machines[0]])
        yield tuple(machines), gpus, names


def _signature(plan: Plan, cluster: Cluster, machine: str, indices: list[int]) -> object:
    """What of a machine its loss depends on."""
    one = cluster.machine(machine)
    alike = (one.gpu, one.count, one.region, one.link, one.usd_per_h)
    if plan.deployment is None:
        # A new plan depends on what is left, not on what the machine held.
        named = cluster.network is not None and bool(cluster.network.machines)
        return machine if named else alike
    found: list[object] = [alike]
    for index in indices:
        group = plan.groups[index]
        stages = tuple((gpu, count, layers) for _, gpu, count, layers in group.stages)
        if len({name for name, *_ in group.stages}) > 1:
            return machine  # its links to the others count as well
        found.append((group.phase, stages, f"{group.share:.4g}"))
    return tuple(found)


def _shock(plan: Plan, load: Load, replicas: tuple[str, ...]) -> tuple[float, float]:
    """A loss in the middle of a run: attainment of the minute after, requests interrupted."""
    shares, hit = [], []
    for seed in load.seeds:
        trace = load.arrivals(load.requests(plan), seed)
        middle = float(trace.arrival_s[len(trace) // 2])
        run = plan.simulate(trace, seed, events=[Event(middle, name) for name in replicas])
        inside = (trace.arrival_s >= middle) & (trace.arrival_s < middle + _WINDOW_S)
        shares.append(attainment(run, load.slo, inside))
        hit.append(float((run.requests["retries"] > 0).sum()))
    return float(np.mean(shares)), float(np.mean(hit))


def _again(planner: Planner, question: Question, load: Load, machine: str) -> Outcome | None:
    left = [one for one in question.cluster.machines if one.name != machine]
    try:
        plan = planner.plan(replace(question, cluster=question.cluster.part(left)))
    except HeteroError:
        return None  # no plan of this kind is left
    return outcome(plan, load)


def _best(one: Loss) -> float:
    """Attainment with what is left or, of plans over a network, with a new plan."""
    found = one.after or one.planned_again
    return found.mean if found is not None else 0.0


def _names(machines: tuple[str, ...]) -> str:
    if not machines:
        return "none"
    if len(machines) <= 3:
        return ", ".join(machines)
    return f"{machines[0]}, {machines[1]} ... {machines[-1]} ({len(machines)})"


# Spare machines -------------------------------------------------------------------------------


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

    each = {at: market.offers[at[0]].usd_per_h for at in market.worthwhile(most=1)}
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
    return replace(plan, router=router, serving=replace(base, replicas=base.replicas + added))


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
