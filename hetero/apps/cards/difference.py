"""Plans compared: two cards, and the best plans with and without features, for the same requests.

Cards of the same seed have simulated the same requests, gaps and draws of the step times, so that
their figures are compared pair by pair: an interval of the difference, and the probability that
the two stand in the other order than their values say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from hetero.apps.ask import WHAT_IF, Ask, asks
from hetero.apps.cards.answer import best_plan, on_cheapest
from hetero.apps.cards.card import PlanCard, Sampled
from hetero.apps.cards.contenders import COMPARED, Progress
from hetero.apps.cards.delivery import delivered
from hetero.apps.cards.delivery import difference as paired
from hetero.apps.cards.infeasible import NoPlanError
from hetero.apps.cards.request import CardRequest, counts, requested
from hetero.apps.cards.sections import in_words, show, title, wrapped
from hetero.display import Column, Shown, Table
from hetero.encoding import finite
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
class Contrast:
    """One figure of two cards.

    Attributes
    ----------
    low, high
        Central 90 % of the differences; of the mean over seeds where step times are not drawn.
    flips
        Probability that the order is the other one; a tie counts as half. NaN where the cards
        share no draws.
    """

    what: str
    unit: str
    first: float
    second: float
    low: float
    high: float
    flips: float

    @property
    def interval(self) -> str:
        """The interval in words."""
        return f"{show(self.low)} to {show(self.high)}" if math.isfinite(self.low) else "-"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Difference(Shown):
    """Two plans side by side.

    Attributes
    ----------
    texts
        What is said of each in words: question, replicas, routing.
    contrasts
        Figures with the interval of their difference.
    paired
        Whether both simulated the same requests and draws.
    """

    names: tuple[str, str]
    texts: tuple[tuple[str, str, str], ...]
    contrasts: tuple[Contrast, ...]
    paired: bool

    def table(self) -> Table:
        """The figures."""
        columns = (
            Column("figure", of=lambda one: f"{one.what} [{one.unit}]"),
            Column("first"),
            Column("second"),
            Column("first - second", of=lambda one: f"{one.first - one.second:+.3g}"),
            Column("90 % interval", of="interval"),
            Column("other order", "%", 3, of=lambda one: 100.0 * one.flips),
        )
        notes = (
            "Other order: probability, over arrivals and the error of step times, that the two "
            "stand in the other order.",
        )
        if not self.paired:
            notes = (
                "The cards did not play the same requests, seeds and draws: their differences have "
                "no interval.",
            )
        return Table.of("What differs in figures", columns, self.contrasts, *wrapped(notes))

    def words(self) -> Table:
        """What is said in words."""
        first, second = self.names
        columns = (Column(""), Column(f"first: {first}"), Column(f"second: {second}"))
        return Table("What differs in words", columns, self.texts)

    def __str__(self) -> str:
        lines = [f"first:  {self.names[0]}", f"second: {self.names[1]}", ""]
        for what, first, second in self.texts:
            if first == second:
                lines.append(f"{what}: {first}")
                continue
            lines.append(f"{what}:")
            lines += [f"  first:  {first}", f"  second: {second}"]
        return "\n".join([*lines, "", str(self.table())])

    def _repr_html_(self) -> str:
        return self.words()._repr_html_() + self.table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what is no number is null."""
        texts = [dict(zip(("what", "first", "second"), one, strict=True)) for one in self.texts]
        found = {"names": self.names, "texts": texts, "figures": self.contrasts}
        head = {"format": "hetero plan difference", "version": 1}
        return {**head, **finite(found), "paired": self.paired}


def difference(first: PlanCard, second: PlanCard) -> Difference:
    """What differs between two plans.

    Examples
    --------
    Of two cards that ``hetero plan FLEET ... --output CARD.json`` has written::

        print(difference(PlanCard.load("now.json"), PlanCard.load("with_more.json")))
    """
    a, b = first.question, second.question
    alike = (a.seed, a.trace, a.requests) == (b.seed, b.trace, b.requests)
    said = _texts(second)
    texts = tuple((what, text, said[what]) for what, text in _texts(first).items())
    return Difference(
        (title(first), title(second)), texts, tuple(_contrasts(first, second, alike)), alike
    )


def _texts(card: PlanCard) -> dict[str, str]:
    asked = card.question
    goals = ", ".join(f"{name} {1e3 * s:,.4g} ms" for name, s in asked.targets_s.items())
    groups = (
        f"{one.count} x (" + in_words(one.gpus) + f", {one.parallelism}, {one.phase})"
        for one in card.groups
    )
    return {
        "cluster": f"{asked.cluster} ({counts(asked.gpus)})",
        "load": f"{show(asked.rate_rps)} requests/s of {asked.trace}",
        "targets": f"{goals} for {100 * asked.goal:g} %",
        "planner": card.planner,
        "weights": card.precision,
        "replicas": "; ".join(groups),
        "routing": card.routing,
    }


def _contrasts(first: PlanCard, second: PlanCard, alike: bool) -> Iterator[Contrast]:
    yield _contrast("goodput", "requests/s", first.goodput_rps, second.goodput_rps, alike)
    if first.usd_per_h is not None and second.usd_per_h is not None:
        nan = math.nan
        yield Contrast("cost", "$/h", first.usd_per_h, second.usd_per_h, nan, nan, nan)
    if first.usd_per_mtok is not None and second.usd_per_mtok is not None:
        unit = "$ per 10^6 tokens"
        yield _contrast("cost", unit, first.usd_per_mtok, second.usd_per_mtok, alike)
    same = alike and first.question.rate_rps == second.question.rate_rps
    for key, name in {"requests_per_s": "throughput", "met joint": "within all targets"}.items():
        if key in first.served and key in second.served:
            factor, unit = (100.0, "%") if key.startswith("met") else (1.0, "requests/s")
            yield _contrast(name, unit, first.served[key], second.served[key], same, factor)
    for name, found in first.latencies_s.items():
        for p, one in found.items():
            other = second.latencies_s.get(name, {}).get(p)
            if other is not None and math.isfinite(one.value) and math.isfinite(other.value):
                yield _contrast(f"{name.upper()} P{p}", "ms", one, other, same, 1e3)


def _contrast(
    what: str, unit: str, first: Sampled, second: Sampled, alike: bool, factor: float = 1.0
) -> Contrast:
    nan = math.nan
    a, b = factor * first.value, factor * second.value
    if not alike:
        return Contrast(what, unit, a, b, nan, nan, nan)
    gap = paired(first, second)
    low, high = gap.interval()
    drawn = np.asarray(gap.draws or gap.seeds)
    flips = float(np.mean(0.5 * (1.0 - np.sign(gap.value) * np.sign(drawn))))
    return Contrast(what, unit, a, b, factor * low, factor * high, flips)


# What if ----------------------------------------------------------------------------------------


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
