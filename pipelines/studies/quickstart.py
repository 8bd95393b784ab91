"""The picture of a plan card: what runs where, what it carries, and what that rests on."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hetero.apps.cards import sections
from hetero.apps.cards.card import PlanCard, Replicas
from hetero.plots.figures import gpu_colour
from hetero.simulator import Run


def served_by_group(card: PlanCard, run: Run) -> pd.Series:
    """Share [%] of the finished requests of a run that each group of a card's replicas served."""
    shares = 100.0 * run.frame()["replica"].dropna().value_counts(normalize=True)
    return pd.Series(
        {
            _group_name(group): sum(float(shares.get(name, 0.0)) for name in group.names)
            for group in card.groups
        },
        name="requests served [%]",
    )


def card_figure(card: PlanCard, run: Run) -> Figure:
    """A plan card at a glance: groups and their part, goodput under its bound, latencies.

    Parameters
    ----------
    run
        The plan of the card, simulated at the load that was asked for.
    """
    fig, axes = plt.subplots(1, 3, figsize=(10.4, 3.3), width_ratios=(1.0, 1.0, 0.8))
    _groups(axes[0], card, served_by_group(card, run))
    _borrowed(axes[1], card)
    _latencies(axes[2], card)
    asked = card.question
    fleet = " + ".join(f"{count} {name}" for name, count in asked.gpus.items())
    fig.suptitle(f"{asked.model} on {fleet}", fontsize=11, fontweight="bold", x=0.012, ha="left")
    return fig


def _group_name(group: Replicas) -> str:
    gpus = " + ".join(f"{count} {name}" for name, count in group.gpus.items())
    phase = "" if group.phase == "both" else f", {group.phase}"
    return f"{group.count} x ({gpus})\n{group.parallelism}{phase}"


def _groups(axis: Axes, card: PlanCard, shares: pd.Series) -> None:
    said = [f"{card.usd_per_h:.2f} $/h"] if card.usd_per_h is not None else []
    said += [f"{card.limits.binding} binds"] if card.limits is not None else []
    bars = [(str(name), share, f"{share:.0f} %") for name, share in shares.items()]
    colours = [gpu_colour(next(iter(group.gpus))) for group in card.groups]
    _bars(axis, bars, colours, shares + 1.5, 1.25 * max(shares))
    axis.set(xlabel="requests served [%]", ylabel="replicas", title=", ".join(said))


def _borrowed(axis: Axes, card: PlanCard) -> None:
    low, high = card.goodput_rps.interval()
    rows = [("goodput", card.goodput_rps.value, "#0072B2")]
    if card.question.rate_given:
        rows.insert(0, ("asked for", card.question.rate_rps, "#009E73"))
    if card.bound is not None:
        rows.append(("bound", card.bound.rate_rps, "#BBBBBB"))
    most = max(high, *(row[1] for row in rows))
    bars = [(name, value, sections.show(value)) for name, value, _ in rows]
    ends = [max(value, high * (name == "goodput")) + 0.02 * most for name, value, _ in rows]
    at = _bars(axis, bars, [row[2] for row in rows], ends, 1.2 * most)["goodput"]
    axis.plot([low, high], [at, at], color="#111111", linewidth=1.6, marker="|", markersize=9)
    title = f"{100 * card.question.goal:g} % within the targets"
    axis.set(xlabel="requests/s (line: 90 % interval)", ylabel="load", title=title)


def _latencies(axis: Axes, card: PlanCard) -> None:
    shares = {
        f"{name.upper()} P{p}": 100 * card.latencies_s[name][p].value / target_s
        for name, target_s in card.question.targets_s.items()
        for p in (50, 90, 99)
    }
    bars = [(name, value, f"{value:.0f} %") for name, value in shares.items()]
    _bars(
        axis,
        bars,
        "#56B4E9",
        [value + 2 for value in shares.values()],
        1.25 * max(100.0, *shares.values()),
    )
    axis.axvline(100, color="#111111", linewidth=1.2, linestyle="--")
    title = f"at {sections.show(card.question.rate_rps)} requests/s"
    axis.set(xlabel="of the target [%]", ylabel="latency", title=title)


def _bars(
    axis: Axes, bars: list[tuple[str, float, str]], colour: Any, ends: Any, most: float
) -> dict[str, int]:
    """Bars of name, length and what is written at its end, the first on top; where each stands."""
    names, lengths, texts = zip(*bars, strict=True)
    places = list(range(len(bars)))[::-1]
    axis.barh(places, lengths, color=colour, height=0.6)
    for place, end, text in zip(places, ends, texts, strict=True):
        axis.text(end, place, text, va="center", fontsize=8)
    axis.set(yticks=places, yticklabels=names, xlim=(0, most), ylim=(-0.6, len(bars) - 0.4))
    axis.grid(visible=False, axis="y")
    return dict(zip(names, places, strict=True))
