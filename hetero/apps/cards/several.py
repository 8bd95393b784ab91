r"""Several models on one fleet: which GPUs serve which, so that all carry as much of their load.

Machines that are alike are one kind, whose GPUs are divided among the models in whole numbers of a
grain; the machines are filled in turn, so that few are cut. The objective is the load factor

.. math:: \max_{division} \min_m \frac{goodput_m(part_m)}{rate_m}

Divisions are tried in the order of what proven bounds leave them, until none that is left can be
better than the best: that is the best of all, by the plans of quick planners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

from hetero.apps.ask import SEVERAL, Ask, asks
from hetero.apps.cards.answer import sections
from hetero.apps.cards.card import PlanCard
from hetero.apps.cards.request import CardRequest, counts, requested
from hetero.cluster import Cluster
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.planners.base import QUICK
from hetero.planners.bound import goodput_bound
from hetero.planners.ground import alike
from hetero.question import Question
from hetero.search.portfolio import ask, planner

MOST: Final = 300
"""Divisions at most; GPUs are divided in larger grains where there are more."""
_MARGIN = 0.95  # of a load factor below 1: other seeds carry less
_SLACK = 1.05  # of a bound, which holds for ever: runs that end sustain a little more
_QUICK: Final = ("tensor-parallel search", "Mélange", "expert parallelism")

Division: TypeAlias = tuple[tuple[int, ...], ...]
"""GPUs of each kind of machines, by model."""


class Found(NamedTuple):
    """A division, the least load factor, and divisions that were planned for and there are."""

    division: Division
    factor: float
    planned: int
    divisions: int


def divisions(gpus: Sequence[int], models: int, most: int = MOST) -> tuple[Division, ...]:
    """Ways to divide the GPUs of each kind among some models, in whole grains.

    Examples
    --------
    >>> divisions([2], 2)
    (((0,), (2,)), ((1,), (1,)), ((2,), (0,)))
    """
    grain = 1
    while math.prod(math.comb(-(-n // grain) + models - 1, models - 1) for n in gpus) > most:
        grain *= 2

    def ways(left: int, number: int) -> Iterator[tuple[int, ...]]:
        if number == 1:
            yield (left,)
            return
        for own in sorted({min(left, grain * k) for k in range(-(-left // grain) + 1)}):
            yield from ((own, *rest) for rest in ways(left - own, number - 1))

    every = product(*(tuple(ways(n, models)) for n in gpus))
    return tuple(tuple(zip(*one, strict=True)) for one in every)


def part_of(cluster: Cluster, division: Division, model: int) -> Cluster | None:
    """The GPUs of a model: machines in their order, the last perhaps cut; None without any."""
    kept = []
    for k, numbers in enumerate(alike(cluster)):
        before = sum(division[m][k] for m in range(model))
        after = before + division[model][k]
        for number in numbers:
            machine = cluster.machines[number]
            own = max(0, min(after, machine.count) - max(before, 0))
            before, after = before - machine.count, after - machine.count
            price = machine.usd_per_h
            share = None if price is None else price * own / machine.count
            kept += [(number, replace(machine, count=own, usd_per_h=share))] if own else []
    if not kept:
        return None
    machines = [machine for _, machine in sorted(kept, key=lambda one: one[0])]
    network = None if cluster.network is None else cluster.network.among(machines)
    return replace(cluster, machines=tuple(machines), network=network)


def best_division(
    ways: Sequence[Division],
    value: Callable[[int, tuple[int, ...]], float],
    limit: Callable[[int, tuple[int, ...]], float],
) -> Found:
    """The division of the largest least value, of which ``limit`` is a bound by model and part."""
    bounded = {way: min(limit(m, own) for m, own in enumerate(way)) for way in ways}
    best, factor, planned = ways[0], -1.0, 0
    for way in sorted(ways, key=lambda one: -bounded[one]):
        if _SLACK * bounded[way] <= factor:
            break
        planned += 1
        if (least := min(value(m, own) for m, own in enumerate(way))) > factor:
            best, factor = way, least
    return Found(best, factor, planned, len(ways))


def quick_rps(question: Question) -> float:
    """What the best plan of quick planners sustains [requests/s]; 0 without a plan."""
    scores = (ask(planner(name, QUICK), question).score for name in _QUICK)
    return max((one.goodput_rps.mean for one in scores if one), default=0.0)


@dataclass(frozen=True, eq=False, repr=False)
class SeveralPlans(Shown):
    """A division of a fleet among models, and the card of each on its part."""

    name: str
    cards: Mapping[str, PlanCard]
    rates_rps: tuple[float, ...]
    found: Found
    cut: tuple[str, ...]

    @property
    def factors(self) -> tuple[float, ...]:
        """Goodput over the rate that is asked for, by model."""
        each = zip(self.cards.values(), self.rates_rps, strict=True)
        return tuple(one.goodput_rps.value / rate for one, rate in each)

    def table(self) -> Table:
        """A row per model."""
        columns = (
            Column("model"),
            Column("GPUs"),
            Column("rate", "requests/s"),
            Column("goodput", "requests/s"),
            Column("load factor"),
            Column("price", "$/h"),
        )
        rows = tuple(
            (name, counts(one.question.gpus), rate, one.goodput_rps.value, factor, one.usd_per_h)
            for (name, one), rate, factor in zip(
                self.cards.items(), self.rates_rps, self.factors, strict=True
            )
        )
        notes = [
            f"All models meet their targets up to {min(self.factors):.3g} times the rates. Planned "
            f"for: {self.found.planned} of {self.found.divisions} divisions, by their bounds.",
            "`hetero export` takes one card at a time; `include` puts all behind one dispatcher, "
            "where they are planned without `--split`.",
        ]
        if self.cut:
            notes.append(
                f"Cut between models: {', '.join(self.cut)}. Export a later card with `--beside` "
                "and each earlier one: its engines then have GPUs and ports of their own."
            )
        return Table(f"Models on {self.name}", columns, rows, tuple(notes))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: the load factor, and the card of each model."""
        cards = {name: one.to_dict() for name, one in self.cards.items()}
        return {"factor": min(self.factors), "cut": list(self.cut), "cards": cards}


@asks(SEVERAL, Ask)
def several(ask: Ask) -> SeveralPlans:
    """How a fleet should serve several models at once; two of one name are two loads.

    Raises
    ------
    InfeasibleError
        If no division serves all of them.
    """
    say = ask.progress or (lambda _: None)
    models, rates = ask.model, ask.rate or ()
    require(
        len(rates) == len(models),
        f"{len(models)} models and {len(rates)} rates are given.",
        resolve="give one --model, or as many --rate as --model, in the same order.",
    )
    require(len(models) > 1, "One model has the fleet alone.", resolve="use hetero.plan.")
    loads = [*zip(models, rates, strict=True)]
    ask = replace(ask, trace=ask.opened())

    def question(cluster: object, name: str, rate: float) -> CardRequest:
        return requested(replace(ask, cluster=cluster, model=name, rate=rate))  # type: ignore[arg-type]

    whole = [question(ask.cluster, *load) for load in loads]
    fleet = whole[0].cluster
    gpus = [sum(fleet.machines[n].count for n in numbers) for numbers in alike(fleet)]

    # Which of the machines that are alike serve a model does not matter to what it carries.
    def at(model: int, own: tuple[int, ...]) -> CardRequest | None:
        part = part_of(fleet, (own, tuple(n - k for n, k in zip(gpus, own, strict=True))), 0)
        return None if part is None else question(part, *loads[model])

    @cache
    def limit(model: int, own: tuple[int, ...]) -> float:
        one = at(model, own)
        if one is None or one.question.llm.weight_bytes(one.precisions[0]) > one.cluster.mem_bytes:
            return 0.0
        found = goodput_bound(one.question)
        return math.inf if found is None else found / loads[model][1]

    @cache
    def value(model: int, own: tuple[int, ...]) -> float:
        one = at(model, own)
        say(f"{loads[model][0]} on {'none' if one is None else counts(one.cluster.gpu_counts)}")
        return quick_rps(one.question) / loads[model][1] if one else 0.0

    found = best_division(divisions(gpus, len(loads)), value, limit)
    if found.factor <= 0:
        names = ", ".join(name for name, _ in loads)
        raise InfeasibleError(
            f"No division of {fleet.name} serves {names} within the targets.",
            resolve="offer more GPUs, a lower precision, or relax the targets.",
        )
    cards: dict[str, PlanCard] = {}
    held: list[str] = []
    for m, (name, rate) in enumerate(loads):
        part = part_of(fleet, found.division, m) or fleet
        held += [machine.name for machine in part.machines]
        label = name if name not in cards else f"{name} ({m + 1})"
        say(label)
        # What cannot be served in full is planned for as far as it can.
        most = rate * min(1.0, _MARGIN * found.factor)
        *_, cards[label] = sections(question(part, name, most), ask.progress)
    cut = tuple(name for name in dict.fromkeys(held) if held.count(name) > 1)
    return SeveralPlans(fleet.name, cards, tuple(rate for _, rate in loads), found, cut)
