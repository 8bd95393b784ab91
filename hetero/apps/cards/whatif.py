"""What features would save: the best plan with and without each, for the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hetero.apps.ask import WHAT_IF, Ask, asks
from hetero.apps.cards.answer import best_plan, on_cheapest
from hetero.apps.cards.contenders import COMPARED, Progress
from hetero.apps.cards.delivery import delivered
from hetero.apps.cards.infeasible import NoPlanError
from hetero.apps.cards.request import CardRequest, requested
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require

CHANGES: Final[Mapping[str, Callable[[str], Any]]] = {
    "precision": str,
    "kv-precision": str,
    "prefix-share": float,
    "speculate": str,
    "lora": str,
    "chunk": int,
    "memory": float,
    "slo": str,
}
"""Words of :func:`hetero.plan` that may be changed, and how their text is read."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The best plan after a change, its latencies at the question's rate; or why there is none."""

    what: str
    goodput_rps: float = math.nan
    ttft_p95_s: float = math.nan
    tpot_p95_s: float = math.nan
    gpus: int = 0
    usd_per_h: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WhatIf(Shown):
    """The question as asked, first, and after each change."""

    name: str
    rate_rps: float
    variants: tuple[Variant, ...]

    def saved(self, one: Variant) -> float:
        """Share of the cost of a request at the goodput that a change saves."""
        mine, first = ((v.usd_per_h or v.gpus) / v.goodput_rps for v in (one, self.variants[0]))
        return 1.0 - mine / first

    def table(self) -> Table:
        """A row per change."""
        columns = (
            Column("change", of=lambda one: one.what),
            Column("goodput", "requests/s", of=lambda one: one.goodput_rps),
            Column("cost of a request", "% less", of=lambda one: 100 * self.saved(one)),
            Column("TTFT P95", "ms", of=lambda one: 1e3 * one.ttft_p95_s),
            Column("TPOT P95", "ms", of=lambda one: 1e3 * one.tpot_p95_s),
            Column("GPUs", of=lambda one: one.gpus or None),
            Column("price", "$/h", of=lambda one: one.usd_per_h),
            Column("remark", of=lambda one: one.reason),
        )
        note = (
            f"Latencies at {self.rate_rps:.4g} requests/s; the same requests for all. The cost is "
            "that of the plan's GPUs at its goodput. Each row is searched "
            f"1/{COMPARED} as far as a card would be. What a format does to answers is not judged."
        )
        return Table.of(f"What if: {self.name}", columns, self.variants, note)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = [asdict(one) | {"saved": self.saved(one)} for one in self.variants]
        return {"name": self.name, "rate_rps": self.rate_rps, "variants": rows}


def changed(text: str) -> dict[str, Any]:
    """Parameters of :func:`hetero.plan` after a change, or several joined by ``+``.

    Examples
    --------
    >>> changed("precision=fp8+prefix-share=0.5")
    {'precision': 'fp8', 'prefix_share': 0.5}
    """
    found = {}
    for part in text.split("+"):
        name, _, value = (one.strip() for one in part.partition("="))
        known = ", ".join(CHANGES)
        require(
            bool(value) and name in CHANGES,
            f"'{part}' is no change.",
            resolve=f"write one of {known} and a value, as in precision=fp8.",
        )
        try:
            found[name.replace("-", "_")] = CHANGES[name](value)
        except ValueError:
            raise ParameterError(
                f"'{part}' is no change.", resolve="give it a number, as in prefix-share=0.5."
            ) from None
    return found


@asks(WHAT_IF, Ask)
def compared(ask: Ask) -> WhatIf:
    """The best plans of a question (:func:`hetero.plan`) as it is and after each change of it.

    Raises
    ------
    NoPlanError
        If no plan meets the question as asked.
    """
    ask = replace(ask, trace=ask.opened())
    cheapest, progress, question = ask.cheapest, ask.progress, requested(ask)
    others: list[tuple[str, CardRequest | InfeasibleError]] = []
    for text in ask.what_if or ():  # all are read before anything is searched for
        try:
            others.append((text, requested(replace(ask, **changed(text)))))
        except InfeasibleError as error:
            others.append((text, error))
    # Without a rate, all are compared at the one that the first plan carries.
    first, rate = _variant("as asked", question, cheapest, progress, None)
    found = [first]
    for text, other in others:
        try:
            if isinstance(other, InfeasibleError):
                raise other
            one, _ = _variant(text, other, cheapest, progress, rate)
        except NoPlanError as error:
            one = Variant(text, reason=error.explanation.sentence)
        except InfeasibleError as error:
            one = Variant(text, reason=error.what)
        found.append(one)
    return WhatIf(question.question.name, rate, tuple(found))


def _variant(
    what: str,
    question: CardRequest,
    cheapest: bool,
    progress: Progress | None,
    rate_rps: float | None,
) -> tuple[Variant, float]:
    if cheapest:
        question = on_cheapest(question, progress)
    say = progress and (lambda step: progress(f"{what}: {step}"))
    made = best_plan(question, say, compared=True)
    plan = made.best.plan
    rate = rate_rps or made.question.rate_rps
    seen = delivered(plan, made.question, rate, replace(question.effort, draws=0)).latencies_s
    ttft, tpot = seen["ttft"][95].value, seen["tpot"][95].value
    gpus = sum(plan.gpus.values())
    return Variant(what, made.goodput_rps.value, ttft, tpot, gpus, plan.usd_per_h), rate
