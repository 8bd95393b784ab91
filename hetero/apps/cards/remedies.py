"""The nearest changes after which a request can be met: each planned and simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetero.apps.cards.delivery import LATENCIES, CardEffort
from hetero.apps.cards.request import PRECISIONS, CardRequest, more
from hetero.apps.cards.sensitivity import machines
from hetero.cluster import Machine
from hetero.errors import HeteroError
from hetero.planners.bound import bound
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps
from hetero.simulator import Run, Slo
from hetero.simulator.sustained import Judged, window

_MOST_MACHINES = 16
_STEPS = 6  # of a budget
_ROUNDED_UP = 1.005

Replan = Callable[[Question], Plan]


@dataclass(frozen=True, slots=True)
class Nearest:
    """A change after which the request can be met, and the number that makes it so."""

    kind: str
    what: str
    value: float
    unit: str


def latencies(run: Run, field: str) -> NDArray[np.float64]:
    """Latencies with those of unserved requests infinite; one token has no TPOT and meets it."""
    return np.where(
        run.finished, np.where(np.isnan(getattr(run, field)), 0.0, getattr(run, field)), np.inf
    )


def quantile(values: NDArray[np.float64], share: float) -> float:
    """Smallest value that a share of all values does not exceed."""
    ordered = np.sort(values)
    return float(ordered[max(0, int(np.ceil(share * len(ordered) - 1e-9)) - 1)])


def by_targets(question: Question, run: Run, seen: Judged) -> Iterator[Nearest]:
    """The one target, and the common factor of all, that as many keep at the rate as have to."""
    if not seen.steady:
        return  # waits grow for as long as the run lasts, so that no target would do
    over = {}
    counted = slice(*window(len(run.requests)))
    for name, field in LATENCIES.items():
        target = getattr(question.slo, field)
        if target is not None:
            over[name] = (latencies(run, field)[counted], float(target))
    for name, (values, _) in over.items():
        others = [other <= goal for key, (other, goal) in over.items() if key != name]
        kept = np.logical_and.reduce([np.ones(len(values), bool), *others])
        least = _ROUNDED_UP * quantile(np.where(kept, values, np.inf), seen.needed)
        if np.isfinite(least) and len(over) > 1:
            text = f"A target of {name.upper()} of {words(least)}, the others as they are."
            yield Nearest("target", text, least, f"s of {name}")
    factor = _ROUNDED_UP * quantile(
        np.max([values / target for values, target in over.values()], axis=0), seen.needed
    )
    if np.isfinite(factor):
        wanted = ", ".join(
            f"{name.upper()} {words(factor * goal)}" for name, (_, goal) in over.items()
        )
        text = f"All targets {factor:.3g} times as long ({wanted})."
        yield Nearest("targets", text, factor, "times")


def by_rate(best: Plan, question: Question, idle: float, effort: CardEffort) -> tuple[Nearest, ...]:
    """The rate that the best plan carries, where an idle fleet meets the targets."""
    if idle < question.goal:
        return ()
    load = question.load(precision=effort.precision)
    rate = float(
        np.mean([sustained_rps(best, load, question.seed + k) for k in range(effort.seeds)])
    )
    found = Nearest("rate", f"A rate of {rate:.3g} requests/s.", rate, "requests/s")
    return (found,) if rate > 0 else ()


def suffices(question: Question, replan: Replan) -> bool:
    """Whether a changed case has a plan that meets it."""
    if question.llm.weight_bytes(question.engine.precision) > question.cluster.mem_bytes:
        return False
    try:
        plan = replan(question)
    except HeteroError:
        return False
    return judged(plan, question.load(), question.seed)[1].sustained


def by_precision(asked: CardRequest, question: Question, replan: Replan) -> Iterator[Nearest]:
    """The most exact of the smaller data types of weights that does."""
    if asked.ask.precision == "auto":
        return
    for other in PRECISIONS[1:]:
        changed = asked.at(other)
        if other == question.engine.precision or changed is None:
            continue
        changed = replace(changed, rate_rps=question.rate_rps)
        if suffices(changed, replan):
            left = asked.cluster.gpus - changed.cluster.gpus
            where = f", on {changed.cluster.gpus} GPUs, those that compute in it" if left else ""
            yield Nearest("precision", f"Weights in {other}{where}.", 1.0, other)
            return


def by_budget(question: Question, replan: Replan) -> Iterator[Nearest]:
    """What the cheapest plan costs that is found by bisection of the budget."""
    budget, all_of = question.budget_usd_per_h, question.cluster.usd_per_h
    if budget is None or all_of is None or budget >= all_of:
        return

    def enough(usd_per_h: float) -> bool:
        return suffices(replace(question, budget_usd_per_h=usd_per_h), replan)

    if not enough(all_of):
        return
    low, high = budget, all_of
    for _ in range(_STEPS):
        if high <= 1.05 * low:
            break
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if enough(middle) else (middle, high)
    least = replan(replace(question, budget_usd_per_h=high)).usd_per_h
    # Rounded up, so that the plan is within what is said.
    high = high if least is None else math.ceil(100 * least - 1e-6) / 100
    yield Nearest("budget", f"A budget of {high:,.4g} $/h instead of {budget:,.4g}.", high, "$/h")


def by_machines(question: Question, replan: Replan, goodput_rps: float = 0.0) -> Iterator[Nearest]:
    """Per kind the fewest further machines that do, by bisection from a first guess.

    The guess is the number that raises the bound as far as the rate is above what is served.
    """
    now = bound(question)
    for machine in machines(question):

        def grown(count: int, machine: Machine = machine) -> Question:
            budget = question.budget_usd_per_h
            paid = None if budget is None else budget + count * (machine.usd_per_h or 0.0)
            return replace(
                question, cluster=more(question.cluster, machine, count), budget_usd_per_h=paid
            )

        high = _MOST_MACHINES
        if now is not None and goodput_rps > 0 and (one := bound(grown(1))) is not None:
            gain = (one.rps() / now.rps() - 1.0) * goodput_rps
            guess = 2.0 * (question.rate_rps - goodput_rps) / max(gain, 1e-9)
            high = int(np.clip(np.ceil(guess), 1, _MOST_MACHINES))
        if not suffices(grown(high), replan):
            continue
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(grown(middle), replan) else (middle, high)
        paid = grown(high).budget_usd_per_h
        if paid is not None and suffices(replace(question, budget_usd_per_h=paid), replan):
            continue  # what the machine would cost buys enough of those that are there
        price = "" if machine.usd_per_h is None else f" ({high * machine.usd_per_h:,.4g} $/h more)"
        s = "s" * (high > 1)
        text = f"{high} more machine{s} of {machine.count} x {machine.gpu.name}{price}."
        yield Nearest("machines", text, float(high), f"machines of {machine.gpu.name}")


def looser(question: Question, factor: float) -> Question:
    """The case with all targets so many times as long."""
    values = {f: getattr(question.slo, f) for f in LATENCIES.values()}
    return replace(question, slo=Slo(**{f: v and factor * v for f, v in values.items()}))


def words(seconds: float) -> str:
    """A time in words."""
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1.0 else f"{seconds:,.3g} s"
