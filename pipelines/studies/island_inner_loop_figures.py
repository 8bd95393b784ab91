"""Figures of what islands of GPUs can do, are given, and reach in simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import ScalarFormatter

from hetero.arrays import Floats
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.rates import PHASES, Phase
from hetero.plots import figures
from hetero.workload.lengths import LengthRanges
from pipelines.studies import island_inner_loop as study
from pipelines.studies.island_evaluator import Evaluation
from pipelines.studies.island_inner_loop import LAYOUTS, SEEN, SHOWN, Solutions, benchmark64, count

_LINES: Final = {32: "-", 16: "--", 8: "-.", 4: ":"}
_HATCHES: Final = {32: None, 16: "//", 8: "..", 4: "xx"}


def quirks_figure(table: pd.DataFrame) -> Figure:
    """Heat maps of the changes that mending each quirk makes [%], by GPU type."""
    cells = table.set_index("oddity mended").rename_axis(None)
    fig, axes = plt.subplots(1, len(SEEN), figsize=(11.6, 4.2), sharey=True)
    for axis, what in zip(axes, SEEN, strict=True):
        changes = cells[[f"{what}, {gpu} [%]" for gpu in SHOWN]].set_axis(SHOWN, axis=1)
        # Shades by size, since all mended together change far more than most alone.
        shade = changes.map(lambda value: np.sign(value) * np.log1p(abs(value)))
        text = changes.map(
            lambda value: "" if abs(value) <= 0.05 else f"{value:+.{1 if abs(value) < 10 else 0}f}"
        )
        figures.heat_map(shade, axis, annot=text, cmap="PuOr", vmin=-6, vmax=6)
        axis.set_xticks(axis.get_xticks(), SHOWN, rotation=45, ha="right")
        axis.set_title(f"{what} [%]")
    return fig


def lengths_figure(where: LengthRanges, width_tokens: int) -> Figure:
    """Probability of each input length, and its mean over each range (fig. 4.2)."""
    fig, axis = plt.subplots(figsize=(7.0, 3.0))
    percent = 100 * where.share / width_tokens
    style: dict[str, Any] = {"align": "edge", "color": "#C7DCEB", "edgecolor": "white"}
    label = f"ranges of {width_tokens} tokens, mean over the range"
    axis.bar(where.start_tokens, percent, width_tokens, label=label, **style)
    axis.plot(study.INPUT.probabilities() * 100, color=figures.CYCLE[0], label="p(s)")
    axis.set(
        xlabel="input length s [tokens]", ylabel="probability of one length [%]", ylim=(0, None)
    )
    axis.legend(title=f"outputs: mean {study.OUTPUT}, largest {study.MAX_OUTPUT:,} tokens")
    return fig


def prefill64_figure(count: int) -> Figure:
    """Prefill throughput of 64 GPUs by parallelism, read as printed and as whole (fig. 4.3)."""
    fig, axes = plt.subplots(2, len(SHOWN), figsize=(11.5, 4.8), sharex=True, sharey="row")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.92, 7))
    for row, reading in zip(axes, ("printed", "whole"), strict=True):
        for axis, gpu in zip(row, SHOWN, strict=True):
            measured = benchmark64(gpu, "prefill", reading, count)
            for name, rps, shade in zip(measured.names, measured.rps, shades, strict=True):
                axis.plot(measured.length_tokens, rps, color=shade, linewidth=1.3, label=name)
            _tokens_axis(axis)
            if axis in axes[0]:
                axis.set_title(gpu)
        row[0].set_ylabel(f"{reading}: throughput\n[requests/s]")
    plt.setp(axes[1], xlabel="input length [tokens]")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=7)
    return fig


def decode64_figure(count: int) -> Figure:
    """Decode throughput of 64 GPUs, coloured where best at some length (fig. 4.4)."""
    fig, axes = plt.subplots(2, 3, figsize=(9.6, 5.2), sharex=True, sharey=True)
    for axis, gpu in zip(axes.flat, SHOWN, strict=True):
        measured = benchmark64(gpu, "decode", "thesis", count)
        best = sorted(set(measured.winners.tolist()) - {-1})
        draw = partial(axis.plot, measured.length_tokens)
        rps = np.where(measured.rps > 0, measured.rps, np.nan)
        for k in range(len(rps)):
            if k not in best:
                draw(rps[k], color="#CFCFCF")
        for colour, k in zip(figures.CYCLE, best, strict=False):
            chosen = " (chosen)" if k == measured.chosen else ""
            draw(rps[k], color=colour, label=measured.names[k] + chosen)
        never, partly = study.fitting(measured)
        _tokens_axis(axis)
        axis.set_title(f"{gpu}: {never} never fit, {partly} partly", fontsize=9)
        axis.legend(fontsize=7)
    plt.setp(axes[:, 0], ylabel="throughput [requests/s]")
    plt.setp(axes[1], xlabel="input length [tokens]")
    return fig


def readings_figure(solved: Solutions) -> Figure:
    """Throughput of both phases and the load by maximum flow under each reading, per layout."""
    fig, axes = plt.subplots(1, len(LAYOUTS), figsize=(10.4, 2.9), sharey=True)
    for axis, name in zip(axes, LAYOUTS, strict=True):
        here = {reading: each for (reading, layout), each in solved.items() if layout == name}
        rates = pd.DataFrame(
            {"reading": reading, "phase": phase, "rate": each.plan.rate_rps(phase).sum()}
            for reading, each in here.items()
            for phase in PHASES
        )
        sns.barplot(rates, x="reading", y="rate", hue="phase", saturation=1, ax=axis)
        _marks(axis, [each.flow.served_rps for each in here.values()], "load by max flow")
        axis.tick_params(axis="x", rotation=30)
        axis.set(xlabel="", title=f"layout ({name})", yscale="log")
        axis.minorticks_off()
    axes[0].set_ylabel("throughput [requests/s]")
    figures.shared_legend(fig, "outside upper right")
    return fig


def rates_figure(solved: Solutions) -> Figure:
    """Throughput of one island of each class on each range (fig. 5.1)."""

    def draw(axis: Axes, name: str, phase: Phase) -> None:
        table = solved["thesis", name].rates
        by_class = dict(zip(table.classes, table.rps(phase), strict=True))
        for island, rps in by_class.items():
            colour, line = figures.gpu_colour(island.gpu), _LINES[island.size]
            shown = np.where(rps > 0, rps, np.nan)
            axis.plot(table.ranges.middle_tokens, shown, color=colour, linestyle=line)
        axis.set_yscale("log")
        axis.minorticks_off()
        idle = [f"{c.size} {c.gpu.split('-')[0]}" for c, rps in by_class.items() if not rps.any()]
        if idle:
            text = "cannot: " + ", ".join(idle)
            axis.text(0.03, 0.04, text, transform=axis.transAxes, fontsize=7)

    fig = _by_layout(draw, "{} [requests/s]", sharey="row")
    below = fig.axes[len(LAYOUTS)]
    below.set_ylim(bottom=0.4 * below.get_ylim()[0])  # room for the text
    sizes = {size: {"color": "#555555", "linestyle": line} for size, line in _LINES.items()}
    _legend(fig, partial(Line2D, [], []), sizes)
    return fig


def assignment_figure(solved: Solutions, width_tokens: int) -> Figure:
    """Time of a phase's islands that each range is given, stacked by class (fig. 5.2)."""

    def draw(axis: Axes, name: str, phase: Phase) -> None:
        plan = solved["thesis", name].plan
        where, islands = plan.rates.ranges, count(plan, phase)
        _stacked(axis, plan, phase, [100 * g.count * g.share / islands for g in plan.of(phase)],
                 width_tokens)  # fmt: skip
        edges = [*where.start_tokens, where.end_tokens[-1]]
        axis.stairs(100 * where.share, edges, color="black", linewidth=1.2)
        text = f"{islands} of {sum(count(plan, each) for each in PHASES)} islands"
        axis.text(0.97, 0.93, text, transform=axis.transAxes, ha="right", fontsize=8)
        axis.set_ylim(bottom=0)

    fig = _by_layout(draw, "{}: time per range [%]")
    _bar_legend(fig, Line2D([], [], color="black", linewidth=1.2, label="share of requests"))
    return fig


def throughput_figure(solved: Solutions, width_tokens: int) -> Figure:
    """Throughput per range, stacked by class of island (fig. 5.3)."""

    def draw(axis: Axes, name: str, phase: Phase) -> None:
        plan = solved["thesis", name].plan
        _stacked(axis, plan, phase, plan.flow_rps(phase), width_tokens)

    fig = _by_layout(draw, "{} [requests/s]")
    _bar_legend(fig)
    return fig


def _stacked(
    axis: Axes, plan: Assignment, phase: Phase, heights: Iterable[Floats], width_tokens: int
) -> None:
    """Bars of each range, one group of islands on top of the other."""
    below = np.zeros(len(plan.rates.ranges))
    for group, height in zip(plan.of(phase), heights, strict=True):
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0, "bottom": below}
        style |= {"color": figures.gpu_colour(group.island.gpu)}
        style |= {"hatch": _HATCHES[group.island.size]}
        axis.bar(plan.rates.ranges.middle_tokens, height, 0.92 * width_tokens, **style)
        below += height


def _bar_legend(fig: Figure, *more: Artist) -> None:
    sizes = {
        size: {"facecolor": "#999999", "hatch": hatch, "edgecolor": "white"}
        for size, hatch in _HATCHES.items()
    }
    _legend(fig, partial(Rectangle, (0, 0), 1, 1), sizes, *more)


def evaluation_figure(by_layout: Mapping[str, Evaluation]) -> Figure:
    """Throughput per input length by the model of ranges and evaluated, and the workload."""
    fig, axes = plt.subplots(1, len(by_layout), figsize=(11.2, 3.4), sharex=True)
    for axis, (name, each) in zip(axes, by_layout.items(), strict=True):
        for colour, phase in zip(figures.CYCLE, PHASES, strict=False):
            model, truth = each.model_rps[phase], each.evaluated_rps[phase]
            axis.plot(each.tokens, model, color=colour, linewidth=0.9, alpha=0.55)
            axis.plot(each.tokens, truth, color=colour, linewidth=1.4)
        slower = min(each.model_rps[phase].sum() for phase in PHASES)
        axis.plot(each.tokens, slower * each.share, color="black", linestyle=":", linewidth=1.0)
        axis.set(title=f"layout ({name})", xlabel="input length [tokens]", ylim=(0, None))
    axes[0].set_ylabel("throughput per length [requests/s]")
    handles = [
        Line2D([], [], color=figures.CYCLE[0], label="prefill, evaluated"),
        Line2D([], [], color=figures.CYCLE[1], label="decode, evaluated"),
        Line2D([], [], color="#777777", linewidth=0.9, alpha=0.55, label="model"),
        Line2D([], [], color="black", linestyle=":", label="workload, scaled to the slower phase"),
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return fig


def division_figure(sizes: Mapping[float, tuple[int, ...]]) -> Figure:
    """Sizes of islands by skew of the divider [GPUs], and their spread (fig. 4.8)."""
    fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.0), width_ratios=[1.7, 1])
    shown = {f"{skew:+g}": sizes[skew] for skew in (-5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0)}
    rows = pd.DataFrame(shown, index=range(1, len(shown["+0"]) + 1))
    rows = rows.melt(ignore_index=False, var_name="skew")
    sns.barplot(
        rows, x=rows.index, y="value", hue="skew", palette="PuOr", saturation=1,
        edgecolor="#555555", linewidth=0.3, ax=axes[0],
    )  # fmt: skip
    axes[0].set(xlabel="island", ylabel="size [GPUs]")
    axes[0].legend(title="skew", ncols=4, loc="upper center")
    axes[1].plot(list(sizes), [np.std(each) for each in sizes.values()], marker="o")
    axes[1].set(xlabel="skew", ylabel="standard deviation\nof sizes [GPUs]", ylim=(0, None))
    return fig


def replay_figure(table: pd.DataFrame) -> Figure:
    """Load that each routing rule sustains of what plans promise, from rows of ``replay``."""
    fig, axis = plt.subplots(figsize=(9.2, 3.6))
    output = table["mean output"].map(
        {"per range": "output per range", "one for all": "one mean output"}
    )
    labels = table["trace"] + "\nW = " + table["W [tokens]"].astype(str) + "\n" + output
    rates = table.set_axis(labels).filter(like="sustained, ")
    rates = rates.rename(columns=lambda name: name.removesuffix(" [requests/s]"))
    rates = rates.melt(ignore_index=False, var_name="rule")
    sns.barplot(rates, x=rates.index, y="value", hue="rule", saturation=1, ax=axis)
    _marks(axis, table["plan [requests/s]"], "promised by the plan")
    axis.set(xlabel="", ylabel="load [requests/s]")
    axis.set_ylim(top=1.25 * table["plan [requests/s]"].max())
    axis.legend(ncols=2, loc="upper left")
    return fig


def _marks(axis: Axes, heights: Iterable[float], label: str) -> None:
    """A line across each group of bars."""
    for k, height in enumerate(heights):
        axis.plot([k - 0.42, k + 0.42], [height] * 2, color="black", label=None if k else label)


def _tokens_axis(axis: Axes) -> None:
    axis.set(xscale="log", yscale="log")
    axis.set_xticks((16, 128, 1024, 8192))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.minorticks_off()


def _by_layout(
    draw: Callable[[Axes, str, Phase], None], label: str, sharey: Literal["row"] | bool = False
) -> Figure:
    """A column per layout, prefill above and decode below."""
    fig, axes = plt.subplots(2, len(LAYOUTS), figsize=(11.2, 4.8), sharex=True, sharey=sharey)
    for column, name in zip(axes.T, LAYOUTS, strict=True):
        column[0].set_title(f"layout ({name})")
        column[1].set_xlabel("input length [tokens]")
        for axis, phase in zip(column, PHASES, strict=True):
            draw(axis, name, phase)
    for axis, phase in zip(axes[:, 0], PHASES, strict=True):
        axis.set_ylabel(label.format(phase))
    return fig


def _legend(
    fig: Figure, handle: Callable[..., Artist], sizes: Mapping[int, dict[str, Any]], *more: Artist
) -> None:
    """One entry per GPU type and one per size."""
    gpus = dict.fromkeys(island.gpu for layout in LAYOUTS.values() for island in layout)
    handles = [handle(color=figures.gpu_colour(gpu), label=gpu) for gpu in gpus]
    handles += [handle(**style, label=f"{size} GPUs") for size, style in sizes.items()]
    handles += more
    ncols = len(handles) if not more else -(-len(handles) // 2)
    fig.legend(handles=handles, loc="outside upper center", ncols=ncols)
