"""Why a request cannot be met: which target, which requests miss it, by how much, what would do.

All of it is simulated: the best plan found serves the requests at the rate asked for and on an idle
fleet; the nearest changes are planned and simulated until one suffices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero.apps.cards.delivery import LATENCIES, CardEffort
from hetero.apps.cards.remedies import (
    Nearest,
    Replan,
    by_budget,
    by_machines,
    by_precision,
    by_rate,
    by_targets,
    latencies,
    looser,
    quantile,
    suffices,
    words,
)
from hetero.apps.cards.request import CardRequest
from hetero.apps.cards.sections import by_reason
from hetero.apps.cards.sensitivity import STEP
from hetero.display import Column, Shown, Table
from hetero.encoding import finite
from hetero.errors import InfeasibleError
from hetero.plans import Plan
from hetero.question import Question, judged
from hetero.simulator import Run, Slo

CLASSES = 4
"""Classes of requests by the length of their input, of equal shares."""

_IDLE_SHARE = 1e-4  # of the rate asked for: requests do not meet


@dataclass(frozen=True, slots=True)
class Missed:
    """A class of requests and a target.

    Attributes
    ----------
    from_tokens, to_tokens
        Inputs of the class, both included.
    share_percent, met_percent
        Share of the class among all requests, and of those of it that meet the target.
    idle_percent
        The same on an idle fleet.
    reached_s, target_s
        Latency that the goal's share of the class keeps, and the target; infinite where too many
        are rejected.
    """

    from_tokens: int
    to_tokens: int
    share_percent: float
    target: str
    target_s: float
    met_percent: float
    idle_percent: float
    reached_s: float


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """Why there is no plan.

    Attributes
    ----------
    reason
        ``"targets"`` where an idle fleet misses them, ``"load"`` where only the rate is too high,
        ``"memory"`` or ``"planners"`` where no planner returns a plan.
    met_percent, idle_percent, goal_percent
        Requests that meet every target at the rate, on an idle fleet, and that have to.
    """

    sentence: str
    reason: str
    planner: str
    rate_rps: float
    met_percent: float
    idle_percent: float
    goal_percent: float
    missed: tuple[Missed, ...]
    nearest: tuple[Nearest, ...]
    tried: tuple[tuple[str, str], ...]

    def table(self) -> Table:
        """Classes that miss a target."""
        columns = (
            Column("inputs", "tokens", of=lambda one: f"{one.from_tokens:,} to {one.to_tokens:,}"),
            Column("requests", "%", 3, "share_percent"),
            Column("target", of=lambda one: one.target.upper()),
            Column("at most", "ms", of=lambda one: 1e3 * one.target_s),
            Column("met", "%", 3, "met_percent"),
            Column("met when idle", "%", 3, "idle_percent"),
            Column(f"reached by {self.goal_percent:g} %", "ms", of=lambda one: 1e3 * one.reached_s),
            Column("over", "x", 3, lambda one: one.reached_s / one.target_s),
        )
        return Table.of("Who misses which target", columns, self.missed)

    def __str__(self) -> str:
        parts = [self.sentence]
        if self.missed:
            parts.append(str(self.table()))
        if self.nearest:
            lines = [f"- {one.what}" for one in self.nearest]
            parts.append("\n".join(["Any one of these would do:", *lines]))
        if self.tried:
            lines = [
                f"- {', '.join(names)}: {reason}" for reason, names in by_reason(self.tried).items()
            ]
            parts.append("\n".join(["Planners without a plan:", *lines]))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"format": "hetero infeasible request", "version": 1, **finite(self)}


class NoPlanError(InfeasibleError):
    """No plan meets the request.

    Attributes
    ----------
    explanation
        Which target, which requests, by how much, and what would do.
    """

    explanation: Explanation

    @classmethod
    def of(cls, explanation: Explanation) -> NoPlanError:
        """The error that carries an explanation."""
        found = explanation.nearest
        resolve = (
            f"{found[0].what[0].lower()}{found[0].what[1:]}"
            if found
            else ("ask for less, or offer more machines.")
        )
        error = cls(explanation.sentence, resolve=resolve)
        error.explanation = explanation
        return error

    def __str__(self) -> str:
        return f"{self.explanation}\n\nResolve: {self.resolve}"


def met(plan: Plan, question: Question, rate_rps: float, effort: CardEffort) -> float:
    """Share of the requests that meet every target at a rate, mean over the seeds."""
    load = question.load(rate_rps, precision=effort.precision)
    shown = [judged(plan, load, question.seed + k)[1] for k in range(effort.seeds)]
    return float(np.mean([one.attained for one in shown]))


def explain(
    asked: CardRequest,
    question: Question,
    best: Plan | None,
    tried: Sequence[tuple[str, str]],
    replan: Replan,
    winner: Replan | None = None,
) -> Explanation:
    """Why a request cannot be met, and what would do.

    Parameters
    ----------
    best
        The plan that comes nearest; None if there is none at all.
    tried
        Planners without a plan, and why.
    replan
        Plans a changed case by every planner.
    winner
        Plans it by the one that came nearest.
    """
    if best is None:
        return _unplanned(asked, question, tried, replan)
    effort = asked.effort
    share, rate = met(best, question, question.rate_rps, effort), question.rate_rps
    idle = met(best, question, _IDLE_SHARE * rate, replace(effort, seeds=1))
    load = question.load(rate, precision=effort.precision)
    run, seen = judged(best, load, question.seed)
    unhurried = load.at(_IDLE_SHARE * rate).arrivals(len(run.requests), question.seed)
    classes = tuple(_classes(question, run, best.simulate(unhurried, question.seed)))
    again = winner or replan
    slower = by_rate(best, question, idle, effort)
    looser = [*by_targets(question, run, seen)]
    nearest = [*slower, *by_precision(asked, question, replan), *by_budget(question, again)]
    nearest += by_machines(question, again, slower[0].value if slower else 0.0)
    nearest = [*nearest, *looser] if idle >= question.goal else [*looser, *nearest]
    worst = max(classes, key=lambda one: one.reached_s / one.target_s, default=None)
    goal = 100.0 * question.goal
    if idle < question.goal:
        sentence = (
            f"No plan found meets the targets for {goal:g} % of the requests at any rate: on an "
            f"idle fleet the best one ({best.planner}) meets them for {100 * idle:.1f} %"
        )
    else:
        sentence = (
            f"No plan found carries {rate:.4g} requests/s: the best one ({best.planner}) meets the "
            f"targets for {100 * share:.1f} % of the requests; {100 * seen.needed:.1f} % have to, "
            f"for {goal:g} % to be no chance"
        )
        if not seen.steady:
            sentence += ", and waits grow for as long as requests come at that rate"
    if worst is not None:
        sentence += f"; {_worst(worst, goal)}"
    reason = "targets" if idle < question.goal else "load"
    return Explanation(
        f"{sentence}.",
        reason,
        best.planner,
        rate,
        100.0 * share,
        100.0 * idle,
        goal,
        classes,
        tuple(nearest),
        tuple(tried),
    )


def _worst(one: Missed, goal: float) -> str:
    inputs = f"requests of {one.from_tokens:,} to {one.to_tokens:,} input tokens"
    if not np.isfinite(one.reached_s):
        return f"{inputs} miss {one.target.upper()} most, since too many are not served at all"
    return (
        f"{inputs} miss {one.target.upper()} most: {goal:g} % of them have it within "
        f"{words(one.reached_s)}, {one.reached_s / one.target_s:.3g} times the "
        f"{words(one.target_s)} asked for"
    )


def _classes(question: Question, run: Run, idle: Run) -> Iterator[Missed]:
    inputs = np.asarray(run.requests["input_tokens"])
    edges = np.unique(np.quantile(inputs, np.linspace(0, 1, CLASSES + 1)).astype(np.int64))
    of = np.clip(np.searchsorted(edges[1:-1], inputs, side="right"), 0, max(len(edges) - 2, 0))
    for name, field in LATENCIES.items():
        target = getattr(question.slo, field)
        if target is None:
            continue
        seen, alone = latencies(run, field), latencies(idle, field)
        for k in np.unique(of):
            inside = of == k
            reached = quantile(seen[inside], question.goal)
            if reached > target:
                yield Missed(
                    int(inputs[inside].min()),
                    int(inputs[inside].max()),
                    100.0 * float(inside.mean()),
                    name,
                    float(target),
                    100.0 * float((seen[inside] <= target).mean()),
                    100.0 * float((alone[inside] <= target).mean()),
                    reached,
                )


def _unplanned(
    asked: CardRequest, question: Question, tried: Sequence[tuple[str, str]], replan: Replan
) -> Explanation:
    weights = question.llm.weight_bytes(question.engine.precision)
    memory = question.cluster.mem_bytes
    gib, where, name = 2.0**30, question.cluster.name, question.llm.name
    if weights > memory:
        reason = "memory"
        sentence = (
            f"{name} in {question.engine.precision} has {weights / gib:,.1f} GiB of weights, the "
            f"{question.cluster.gpus} GPUs of {where} together hold {memory / gib:,.1f} GiB"
        )
    else:
        reason = "planners"
        sentence = (
            f"No planner has a plan for {name} in {question.engine.precision} on {where} "
            f"({memory / gib:,.1f} GiB, {weights / gib:,.1f} GiB of weights)"
        )
        if question.budget_usd_per_h is not None:
            sentence += f" within {question.budget_usd_per_h:,.4g} $/h"
    nearest = [*by_precision(asked, question, replan), *by_budget(question, replan)]
    if not nearest or reason == "memory":
        nearest += by_machines(question, replan)
    loose = replace(question, slo=Slo(ttft_s=3600.0), budget_usd_per_h=None, rate_rps=1e-3)
    if not nearest and suffices(loose, replan):
        factor = STEP
        while factor < 1e6 and not suffices(looser(question, factor), replan):
            factor *= STEP
        if factor < 1e6:
            nearest = [
                Nearest("targets", f"All targets {factor:.3g} times as long.", factor, "times")
            ]
    nan = float("nan")
    return Explanation(
        f"{sentence}.",
        reason,
        "",
        question.rate_rps,
        nan,
        nan,
        100.0 * question.goal,
        (),
        tuple(nearest),
        tuple(tried),
    )
