"""The tables of a plan card, and the card as text of 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from hetero.apps.cards.card import (
    PART,
    PERCENTILES,
    ChangeEffect,
    PlanCard,
    Sampled,
    TriedPlanner,
)
from hetero.catalog import Gpu
from hetero.display import Column, Table
from hetero.errors import require
from hetero.simulator.sustained import ARRIVING

if TYPE_CHECKING:
    from hetero.deployment import Deployment


WIDTH = 100
_VAGUE_PERCENT = 100.0  # error of step times that the headline warns of
_CHANGES = "What one change would do"
CHEAPEST = "The cheapest part found: "
"""What a card's note of it begins with."""
# Notes that belong to the answer.
_FIRST = (CHEAPEST, "Left idle: ", "Its caches hold the longest request")
FRONT = "What the last dollar buys"
_MANY = 2.0  # times what was asked for, from which on less may do
_SERVED = {
    "requests_per_s": ("throughput", "requests/s", 1.0),
    "output_tps": ("output tokens", "tokens/s", 1.0),
    "total_tps": ("input and output tokens", "tokens/s", 1.0),
    "met ttft": ("requests within TTFT", "%", 100.0),
    "met tpot": ("requests within TPOT", "%", 100.0),
    "met e2e": ("requests within E2E", "%", 100.0),
    "met joint": ("requests within all targets", "%", 100.0),
}


def show(value: float, digits: int = 3) -> str:
    """A number as tables show it."""
    return Column("", digits=digits).show(float(value))


def between(one: Sampled, factor: float = 1.0) -> str:
    """An interval in words."""
    low, high = one.interval()
    return f"{show(factor * low)} to {show(factor * high)}"


def in_words(gpus: Mapping[str, int]) -> str:
    """Numbers of GPUs."""
    return " + ".join(f"{count} x {name}" for name, count in gpus.items())


def title(card: PlanCard) -> str:
    """Model, cluster and workload."""
    asked = card.question
    return f"{asked.model} on {asked.cluster}, {asked.trace}"


def headline(card: PlanCard) -> tuple[str, ...]:
    """The answer in a few sentences: what was asked for, the goodput, how sure, what next."""
    asked, rate, bound = card.question, show(card.question.rate_rps), card.bound
    draws = np.array(card.goodput_rps.draws)
    said = []
    if asked.rate_given and len(draws):
        said = [
            f"The plan carries the {rate} requests/s asked for in "
            f"{100 * (draws >= asked.rate_rps).mean():.0f} % of {len(draws)} draws of the error of "
            "step times."
        ]
    within = f"{100 * asked.goal:g} % of them within {targets(card)}"
    mean = f"is {'' if bound else 'at least '}{show(card.goodput_rps.value)}"
    error = f"{between(card.goodput_rps)} in 90 % of draws of their error"
    if len(draws) and (less := float((draws < card.promised_rps).mean())):
        error += f", and less than is promised in {100 * less:.0f} % of them"
    step_times = (
        f"with the step times below, {error if len(draws) else 'whose error is not drawn'}."
    )
    if card.promised_rps > 0:
        said.append(
            f"It can be promised {show(card.promised_rps)} requests/s: {within}, with 95 % "
            "confidence over arrivals and parts of the workload, not over the error of step times. "
            f"Its mean goodput over arrivals, which no promise exceeds, {mean} {step_times}"
        )
    else:
        none = "No rate can be promised: some parts of the workload miss the goal at any. "
        said.append(f"{none}With {within} the mean goodput over arrivals {mean} {step_times}")
    if asked.rate_given and card.promised_rps < asked.rate_rps:
        said.append(f"The {rate} requests/s asked for are more than can be promised.")
    if asked.rate_given and card.headline_rps >= _MANY * asked.rate_rps:
        times = show(card.headline_rps / asked.rate_rps, 2)
        least = any(note.startswith(CHEAPEST) for note in card.notes)
        advice = "" if least else ": `--cheapest` looks for less"
        said.append(f"That is {times} times what was asked for{advice}.")
    said += [note for note in card.notes if note.startswith(_FIRST)]
    said.append(
        f"With these step times no plan serves more than {show(bound.rate_rps)} requests/s on "
        f"these GPUs ({bound.what}); the goodput is {bound.gap_percent:.0f} % below."
        if bound
        else "No bound is known for this model; a larger rate counts only where requests come for "
        "several times as long as one takes, and no longer runs were played."
    )
    said += [card.proof] if card.proof else []
    if card.usd_per_h is not None and card.usd_per_mtok is not None:
        tokens = card.served["total_tps"].value / card.served["requests_per_s"].value
        full = card.usd_per_h / 3600.0 / (card.headline_rps * tokens) * 1e6
        more = f", {show(full)} at {show(card.headline_rps)}" if asked.rate_given else ""
        each = f"{show(card.usd_per_mtok.value)} $ per 10^6 tokens at {rate} requests/s{more}"
        said.append(f"It costs {show(card.usd_per_h, 4)} $/h: {each}.")
    else:
        lacking = [one.gpu for one in card.sources if one.usd_per_gpu_h is None]
        gpus = sum(one.count for one in card.sources)
        each = f"{gpus} GPUs, {show(card.headline_rps / max(gpus, 1))} requests/s each"
        each = each if gpus != 1 else "1 GPU"
        lacks = f"{', '.join(lacking) or 'a GPU'} has no price"
        said.append(f"It takes {each}; what that costs is not known, as {lacks}.")
    said += [card.limits.sentence] if card.limits is not None and card.limits.sentence else []
    said += _of_changes(card)
    vague = [(max(x.prefill_error_percent, x.decode_error_percent), x.gpu) for x in card.sources]
    if (worst := max(vague, default=(0.0, ""))) and worst[0] > _VAGUE_PERCENT:
        said.insert(1, f"Step times of {worst[1]} are known to +-{show(worst[0], 2)} % only.")
    return tuple(said)


def _of_changes(card: PlanCard) -> list[str]:
    """What stands out of the changes, in a sentence."""
    if not (clear := [one for one in card.changes if one.gain_rps.interval()[0] > 0.0]):
        return []
    best = max(clear, key=lambda one: one.gain_rps.value)
    gain = f"{show(best.gain_rps.value)} requests/s more ({between(best.gain_rps)})"
    return [f"Of the changes beyond chance, {best.what} brings most: {gain}."]


def targets(card: PlanCard) -> str:
    """The targets in words."""
    return " and ".join(
        f"{name.upper()} {1e3 * goal:,.4g} ms" for name, goal in card.question.targets_s.items()
    )


def replicas_table(card: PlanCard) -> Table:
    """Which GPUs form which replicas."""
    shared = any(math.isfinite(one.share) for one in card.groups)
    columns = [Column("replicas"), Column("GPUs each"), Column("parallelism"), Column("phase")]
    columns += [Column("requests", "%", 3)] if shared else []
    columns.append(Column("where"))
    rows = []
    for one in card.groups:
        row: list[object] = [one.count, in_words(one.gpus), one.parallelism, one.phase]
        row += [100.0 * one.share] if shared else []
        rows.append((*row, textwrap.shorten(", ".join(one.names), 36, placeholder=" ...")))
    idle = ", ".join(f"{count} x {name}" for name, count in card.idle.items())
    told = (note for note in card.notes if note.startswith("Weights in ") and "GiB" in note)
    notes = [f"Routing: {card.routing}.", next(told, f"Weights in {card.precision}.")]
    notes += [_steps(card.plan.deployment)] if card.plan.deployment else []
    notes += [f"Idle: {idle}."] if idle else []
    return Table(f"Plan ({card.planner})", tuple(columns), tuple(rows), tuple(notes))


def _steps(deployment: Deployment) -> str:
    """How engines form steps, in words."""
    ways: dict[tuple[str, int, int], list[str]] = {}
    for one in deployment.replicas:
        engine = one.engine
        way = (engine.batching, engine.max_step_tokens, engine.max_batch)
        where = f"{one.gpu.name}{' ' + one.role if one.role != 'both' else ''}" if one.gpu else ""
        ways.setdefault(way, [])
        ways[way] += [where] if where and where not in ways[way] else []
    said = [
        f"{tokens:,} tokens and {batch:,} requests{' on ' * (len(ways) > 1)}"
        f"{', '.join(names) * (len(ways) > 1)}"
        for (_, tokens, batch), names in ways.items()
    ]
    batching = {"chunked": "prompts in chunks", "prefill first": "prompts first"}
    kinds = dict.fromkeys(batching.get(way, way) for way, *_ in ways)
    return f"Steps: {' or '.join(kinds)}, at most {'; '.join(said)}."


def delivery_table(card: PlanCard) -> Table:
    """Throughput, attainment and cost at the rate, with intervals."""
    rows: list[tuple[object, ...]] = [_row("goodput", "requests/s", card.goodput_rps)]
    if card.promised_rps > 0:
        row = ("can be promised", "requests/s", show(card.promised_rps), None, None)
        rows.insert(0, row)
    rows += [
        _row(name, unit, card.served[key], factor)
        for key, (name, unit, factor) in _SERVED.items()
        if key in card.served
    ]
    if math.isfinite(card.shuffled_rps):
        row = ("goodput, requests in any order", "requests/s", show(card.shuffled_rps), None, None)
        rows.insert(-len(card.served), row)
    if card.usd_per_mtok is not None:
        rows.append(_row("cost", "$ per 10^6 tokens", card.usd_per_mtok))
    seeds, draws = len(card.goodput_rps.seeds), len(card.goodput_rps.draws)
    asked = card.question
    held = "" if asked.arrivals != "scaled" else ", which all hold this log and know no other"
    said = "rate asked for" if asked.rate_given else "largest rate found"
    notes = [
        f"All but the goodput at {show(asked.rate_rps)} requests/s, the {said}; "
        f"{ARRIVING[asked.arrivals]}, over the part of each run that counts.",
        f"Over arrivals: 95 % interval of the mean over {seeds} seeds{held}. "
        + (
            f"With step times: 90 % of {draws} draws of their error, each with its own arrivals."
            if draws
            else "Step times of this kind of plan are not drawn."
        ),
    ]
    columns = ("figure", "unit", "value", "over arrivals", "with step times")
    return Table("What it delivers", tuple(map(Column, columns)), tuple(rows), wrapped(notes))


def _row(name: str, unit: str, one: Sampled, factor: float = 1.0) -> tuple[object, ...]:
    low, high = one.over_seeds()
    if unit == "%":  # of a share, which ends at 0 and 1
        low, high = max(low, 0.0), min(high, 1.0)
    arrivals = f"{show(factor * low)} to {show(factor * high)}"
    return (name, unit, show(factor * one.value), arrivals, between(one, factor))


def latencies_table(card: PlanCard) -> Table:
    """Percentiles of the latencies against their targets."""
    rows = []
    for name, found in card.latencies_s.items():
        target = card.question.targets_s.get(name)
        if name == "e2e" and name not in card.question.targets_s:
            continue
        for p, one in found.items():
            if math.isnan(one.value):
                continue
            over = None if target is None else 100.0 * one.value / target
            goal = None if target is None else 1e3 * target
            rows.append((f"{name.upper()} P{p}", 1e3 * one.value, between(one, 1e3), goal, over))
    columns = (
        Column("latency"),
        Column("value", "ms"),
        Column("with step times", "ms"),
        Column("target", "ms"),
        Column("of the target", "%", 3),
    )
    return Table("Latencies against targets", columns, tuple(rows))


def rates_table(card: PlanCard) -> Table:
    """What the plan does with less than its goodput and with more."""
    targeted = [name for name in card.at_rates[0].latencies_s if name in card.question.targets_s]
    columns = [
        Column("rate", "req/s", 3),
        Column("of the promise", "%", 3),
        Column("all met", "%", 3),
        *(Column(f"{name.upper()} P{PERCENTILES[1]}", "ms", 3) for name in targeted),
    ]
    rows = tuple(
        (
            one.rate_rps,
            100.0 * one.rate_rps / card.headline_rps,
            100.0 * one.met,
            *(1e3 * one.latencies_s[name][1] for name in targeted),
        )
        for one in card.at_rates
    )
    note = "One run each, its requests drawn anew in blocks. Above the goodput queues may grow"
    most = f", above {show(card.bound.rate_rps)} those of any plan do" if card.bound else ""
    note += f"{most}."
    return Table("At other rates", tuple(columns), rows, wrapped([note]))


def limits_table(card: PlanCard) -> Table:
    """What the goodput gains by more of each thing."""
    assert card.limits is not None
    columns = (
        Column("what", of="name"),
        Column("goodput gained by 10 % more of it", "%", 3, "gain_percent"),
    )
    return Table.of("What binds", columns, card.limits.rows)


def changes_table(card: PlanCard) -> Table:
    """What one change would do."""
    columns = (
        Column("change", of="what"),
        Column("goodput", "req/s", 3, "goodput_rps.value"),
        Column("gain", of=lambda one: f"{one.gain_rps.value:+.3g}"),
        Column("90 % interval", of=lambda one: between(one.gain_rps)),
        Column("cost", "$/h", 4, "usd_per_h"),
        Column("how", of=lambda one: textwrap.shorten(one.how, 34, placeholder=" ...")),
    )
    clear = [one for one in card.changes if _beyond_chance(one)]
    rest = ", ".join(one.what for one in card.changes if one not in clear)
    notes = [f"No change beyond chance: {rest}."] if rest else []
    return Table.of(_CHANGES, columns, clear, *wrapped(notes))


def _beyond_chance(one: ChangeEffect) -> bool:
    low, high = one.gain_rps.interval()
    return low > 0.0 or high < 0.0


def front_table(card: PlanCard) -> Table:
    """The front of cost against goodput: each row adds for more money than the one before it."""
    rows = list[tuple[object, ...]]()
    for before, one in pairwise(front(card)):
        had, now = Counter(before.gpus), Counter(one.gpus)
        what = in_words(now - had) + (f" for {in_words(had - now)}" if had - now else "")
        rows.append((what, one.cost, one.goodput_rps, _gain(before, one)))
    unit = cost_unit(card)
    columns = (
        Column("adds, or swaps"),
        Column("cost", unit, 4),
        Column("goodput", "requests/s", 3),
        Column("more", f"requests/s per {unit.removesuffix('s')}", 3),
    )
    note = "Of the plans tried and parts of this one, by two seeds; its goodput above is by more."
    return Table(FRONT, columns, tuple(rows), (note,))


def front(card: PlanCard) -> list[TriedPlanner]:
    """What was tried that no mixture of two others serves more than for its cost, after nothing.

    The upper concave hull of goodput over cost.
    """
    hull = [TriedPlanner("", "", 0.0, None, None, "")]
    every = hull + carrying(card)
    while _gain(hull[-1], best := max(every, key=partial(_gain, hull[-1]))) > 0:
        hull.append(best)
    return hull


def _gain(before: TriedPlanner, one: TriedPlanner) -> float:
    """Goodput that each further unit of cost brings."""
    more = one.cost - before.cost
    return (one.goodput_rps - before.goodput_rps) / more if more > 0 else 0.0


def carrying(card: PlanCard) -> list[TriedPlanner]:
    """Plans and parts of this one that carry something."""
    return [one for one in card.tried if one.gpus and one.goodput_rps > 0]


def cost_unit(card: PlanCard) -> str:
    """Of the costs of what was tried."""
    return "$/h" if all(one.usd_per_h is not None for one in carrying(card)) else "GPUs"


def attempts_table(card: PlanCard) -> Table:
    """Every planner with its goodput or its reason."""
    found = sorted(
        card.tried, key=lambda one: -one.goodput_rps if math.isfinite(one.goodput_rps) else 0.0
    )
    planned = [one for one in found if not one.reason and one.planner != PART]
    several = len({one.precision for one in found}) > 1
    columns = [Column("planner")] + [Column("weights")] * several
    columns += [Column("goodput", "requests/s", 3), Column("cost", "$/h", 4)]
    rows = tuple(
        (one.planner, *((one.precision,) if several else ()), one.goodput_rps, one.usd_per_h)
        for one in planned
    )
    notes = [
        f"No plan of {'; '.join(dict.fromkeys(names))}: {reason}"
        for reason, names in by_reason(
            (one.planner, one.reason) for one in found if one.reason
        ).items()
    ]
    return Table("What was tried", tuple(columns), rows, wrapped(notes))


def by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what is said of them."""
    found: dict[str, list[str]] = {}
    for name, reason in pairs:
        found.setdefault(reason, []).append(name)
    return found


def sources_table(card: PlanCard) -> Table:
    """Where the figures of each GPU type come from."""
    columns = (
        Column("GPU", of="gpu"),
        Column("number", of="count"),
        Column("step times", of=lambda one: one.step_times.partition(" ")[0]),
        Column("prefill +-", "%", 2, "prefill_error_percent"),
        Column("decode +-", "%", 2, "decode_error_percent"),
        Column("data sheet", of="data_sheet"),
        Column("price", "$/h", of="usd_per_gpu_h"),
    )
    prices: dict[str, list[str]] = {}
    for one in card.sources:
        if one.usd_per_gpu_h is not None:
            prices.setdefault(one.price, []).append(one.gpu)
    places = [
        f"Step times of {one.gpu}: {one.step_times}."
        for one in card.sources
        if " " in one.step_times
    ]
    places += [f"Price of {', '.join(of)}: {place}." for place, of in prices.items()]
    note = "+-: nine of ten steps of other models err by less; `hetero gpus` says more."
    notes = wrapped([note, *places])
    return Table.of("Where the figures come from", columns, card.sources, *notes)


def tables(card: PlanCard) -> tuple[Table, ...]:
    """All tables, in the order of reading."""
    found = [replicas_table(card), delivery_table(card), latencies_table(card)]
    found += [front_table(card)] if any(one.gpus for one in card.tried) else []
    found += [rates_table(card)] if card.at_rates else []
    found += [limits_table(card)] if card.limits is not None and card.limits.sentence else []
    found += [changes_table(card)] if card.changes else []
    return (*found, attempts_table(card), sources_table(card))


def texts(card: PlanCard) -> list[str]:
    """The card as text: headline, plan, and the other sections in the order that they are found.

    What is found after the headline is said where it stands, so that a part is final when it is
    printed; the last three are there from the beginning.
    """
    head = [title(card), "=" * min(WIDTH, len(title(card)))]
    head += wrapped(headline(replace(card, limits=None, changes=())))
    parts = ["\n".join(head)]
    for one in tables(card):
        notes = one.notes + (wrapped(_of_changes(card)) if one.title == _CHANGES else ())
        untitled = Table("", one.columns, one.rows, notes)
        parts.append(f"{one.title}\n{'-' * len(one.title)}\n{untitled}")
    return [*parts, "\n".join(wrapped(later(card)))]


def later(card: PlanCard) -> list[str]:
    """Notes that the headline leaves out."""
    return [note for note in card.notes if not note.startswith(_FIRST)]


def wrapped(sentences: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Lines of at most 100 columns."""
    return tuple(line for one in sentences for line in textwrap.wrap(one, WIDTH))


SHARES: Final = (0.58, 0.73, 0.95)
"""Of the power limit, that a busy GPU draws: least, median and largest of the runs measured."""


def power_table(card: PlanCard, gpus: Mapping[str, Gpu]) -> Table:
    """Power of a plan's GPUs while they are busy, and energy per token at its goodput.

    While its GPUs are busy, as at the goodput, a plan draws a share of the sum of their power
    limits, and its energy per token is that power over the tokens per second. The share is what
    Argonne's LLM-Inference-Bench measured with nvidia-smi on A100-SXM (400 W) and H100-SXM (700 W)
    that serve batches of 16 to 64 under vLLM, TensorRT-LLM and DeepSpeed-MII: 30 runs, file
    ``argonne_power.csv`` of the data set ``serving_runs``. Hosts, networks, cooling and what GPUs
    draw while they idle are left out.
    """
    limit_w = 0.0
    for one in card.groups:
        for name, count in one.gpus.items():
            tdp_w = gpus[name].tdp_w
            require(
                tdp_w is not None,
                f"The data sheet of {name} gives no power limit.",
                resolve="give its tdp_w in the cluster file, or leave out --power.",
            )
            limit_w += one.count * count * (tdp_w or 0.0)
    per_request = 1.0 / card.served["requests_per_s"].value
    output_tps, total_tps = (
        card.goodput_rps.value * per_request * card.served[name].value
        for name in ("output_tps", "total_tps")
    )
    low_w, busy_w, high_w = (share * limit_w for share in SHARES)
    rows = [
        ("power limits of its GPUs", limit_w, "W"),
        ("power while they are busy", busy_w, "W"),
        ("energy at the goodput", busy_w / total_tps, "J per token"),
        ("energy at the goodput", busy_w / output_tps, "J per output token"),
    ]
    notes = (
        f"An estimate: busy GPUs draw {100 * SHARES[0]:.0f} to {100 * SHARES[2]:.0f} % of their "
        f"power limit ({low_w:,.0f} to {high_w:,.0f} W), {100 * SHARES[1]:.0f} % at median of 30 "
        "public runs on A100 and H100.",
        "Of the GPUs alone, without hosts, networks and cooling; below the goodput GPUs idle, and "
        "a token takes more.",
    )
    return Table.figures("Power", *rows, notes=notes)
