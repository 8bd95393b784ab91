"""Which machines of an offer a planner plans with, where a budget limits what may be rented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetero.apps.portfolio.bound import bound
from hetero.apps.portfolio.score import screened
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.thunderserve.budget import within
from hetero.plans import Plan
from hetero.question import Question


def parts(question: Question, most: int) -> tuple[Question, ...]:
    """The case on each part of its offer that the budget pays for, the highest bound first.

    To none of the parts a further machine could be added. Without a budget, or where it pays for
    everything, the case itself.

    Parameters
    ----------
    most
        Number of parts that are kept.

    Raises
    ------
    InfeasibleError
        If the budget pays for no machine, or leaves too many choices.
    """
    if question.budget_usd_per_h is None:
        return (question,)
    try:
        affordable = within(question.cluster, question.budget_usd_per_h)
    except ParameterError as error:
        raise InfeasibleError(error.what, resolve=error.resolve) from None
    offers = [replace(question, cluster=part, budget_usd_per_h=None) for part in affordable]
    if len(offers) == 1:
        return tuple(offers)
    values = []
    for number, one in enumerate(offers):
        limit = bound(one)
        values.append((-limit.rps() if limit else -float(one.cluster.mem_bytes), number))
    return tuple(offers[number] for _, number in sorted(values)[:most])


def best_of(question: Question, most: int, ask: Callable[[Question], Plan]) -> Plan:
    """The plan that carries most over the parts of an offer.

    Raises
    ------
    InfeasibleError
        If there is no plan for any of them; the text is that of the first.
    """
    offers = parts(question, most)
    if len(offers) == 1:
        return ask(offers[0])
    best: Plan | None = None
    value = -1.0
    reason: InfeasibleError | None = None
    for one in offers:
        try:
            plan = ask(one)
        except InfeasibleError as error:
            reason = reason or error
            continue
        found = screened(plan, one, question.seed)
        if found > value:
            best, value = plan, found
    if best is None:
        assert reason is not None
        raise reason
    return best
