"""Pictures of ThunderServe's experiments: plans, attainment over deadlines, searches, losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from hetero.arrays import Floats
from hetero.intervals import interval
from hetero.planners.reschedule.episode import Episode
from hetero.planners.reschedule.policy import Policy
from hetero.planners.thunderserve.phases import PhasePlan
from hetero.plots import figures
from pipelines.studies import thunderserve
from pipelines.studies.thunderserve import (
    GRID,
    KINDS,
    LENGTHS,
    PRINTED,
    SYSTEMS,
    TPS,
    Key,
    Scales,
    mean_attained,
)
from pipelines.studies.thunderserve_changes import POLICIES, PRINTED_TABU_S, recorded_s

Style: TypeAlias = dict[str, Any]
_HUES: Final = (figures.CYCLE[4], figures.CYCLE[2], figures.CYCLE[0], "#777777")
_PALE: Final = (figures.CYCLE[1], figures.CYCLE[5], "#BBBBBB")
COLOURS: Final = dict(zip(SYSTEMS, (*_HUES, *_PALE), strict=True))
_SOLID, _DASHED, _DOTTED = ({"color": "#444444", "linestyle": x} for x in ("-", "--", ":"))
_LOSS: Final[dict[str, Style]] = {
    "before": {"linestyle": "-", "color": "#333333"},
    "none": {"linestyle": ":", "color": figures.CYCLE[0]},
    "light": {"linestyle": "--", "color": figures.CYCLE[1]},
    "full": {"linestyle": "-.", "color": figures.CYCLE[2]},
}


def groups_figure(plans: Mapping[str, PhasePlan], size: tuple[float, float]) -> Figure:
    """Two plans by title: a row per machine, a box per GPU, the group's number in it.

    Boxes of prefill groups are hatched.
    """
    fig, axes = plt.subplots(1, 2, figsize=size, sharey=True)
    for axis, (title, made) in zip(axes, plans.items(), strict=True):
        _boxes(axis, made)
        counts = len(made.prefill), len(made.decode)
        axis.set_title("{}: {} prefill, {} decode".format(title, *counts))
    looks: list[Style] = [{"facecolor": "white", "hatch": "////"}, {"facecolor": "#999999"}]
    handles = [Patch(edgecolor="#555555", **look) for look in looks]
    fig.legend(handles, ["prefill", "decode"], loc="outside upper right", ncols=2)
    return fig


def _boxes(axis: Axes, made: PhasePlan) -> None:
    machines = made.evaluator.model.machines
    free = [0] * len(machines)
    groups = [(one, "////") for one in made.prefill] + [(one, "") for one in made.decode]
    label = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    for k, (one, hatch) in enumerate(groups):
        for machine in (stage.machine for stage in one.stages for _ in range(stage.gpus)):
            x, y = free[machine], len(machines) - 1 - machine
            free[machine] += 1
            colour = figures.gpu_colour(machines[machine].gpu.name)
            axis.add_patch(
                Rectangle(
                    (x + 0.05, y + 0.08), 0.9, 0.84, facecolor="white" if hatch else colour,
                    edgecolor=colour, linewidth=1.4, hatch=hatch,
                )
            )  # fmt: skip
            axis.text(
                x + 0.5, y + 0.5, str(k + 1), ha="center", va="center", fontsize=9,
                color="#111111", bbox=label,
            )  # fmt: skip
    axis.set_xlim(0, max(m.count for m in machines))
    axis.set_ylim(0, len(machines))
    axis.set_yticks(
        [len(machines) - 0.5 - k for k in range(len(machines))],
        [f"{m.name} ({m.gpu.name})" for m in machines],
    )
    axis.set_xticks([])
    axis.grid(visible=False)


def orchestration_figure(plans: Mapping[str, PhasePlan]) -> Figure:
    """Share of the requests per pair of replicas, by workload (ThunderServe Fig. 5)."""
    fig, axes = plt.subplots(1, 2, figsize=(10.2, 3.4))
    for axis, (name, made) in zip(axes, plans.items(), strict=True):
        share = pd.DataFrame(
            100 * made.orchestration.share,
            index=pd.Index([f"P{i + 1}" for i in range(len(made.prefill))], name="prefill replica"),
            columns=pd.Index([f"D{j + 1}" for j in range(len(made.decode))], name="decode replica"),
        )
        figures.heat_map(share, axis, annot=True, fmt=".1f", cmap="Blues", vmin=0)
        axis.set_title(f"{name}: share of the requests [%]")
    return fig


def cloud_attainment_figure(scales: Mapping[Key, Sequence[Scales]]) -> Figure:
    """Attainment of ThunderServe, HexGen and our search at every rate (ThunderServe Fig. 7)."""
    rates = list(dict.fromkeys(rate for _, rate, _ in scales))
    shades = dict(zip(rates, figures.CYCLE, strict=False))
    ways = {"ThunderServe": _SOLID, "HexGen": _DASHED, "our search": _DOTTED}
    curves = {
        (rate, system): style | {"color": shades[rate]}
        for rate in rates
        for system, style in ways.items()
    }
    entries: dict[str, Style] = {f"{rate:g} req/s": {"color": shades[rate]} for rate in rates}
    return _grid(scales, curves, entries | ways)


def in_house_attainment_figure(scales: Mapping[Key, Sequence[Scales]]) -> Figure:
    """Attainment on the cloud and in house at the lowest and highest rate (ThunderServe Fig. 8)."""
    rates = list(dict.fromkeys(rate for _, rate, _ in scales))
    ends = dict(zip(rates[:: max(len(rates) - 1, 1)], (_SOLID, _DASHED), strict=False))
    shown = [system for system in SYSTEMS if system not in ("HexGen", "our search")]
    curves = {
        (rate, system): style | {"color": COLOURS[system]}
        for system in shown
        for rate, style in ends.items()
    }
    entries: dict[str, Style] = {system: {"color": COLOURS[system]} for system in shown}
    return _grid(scales, curves, entries | {f"{rate:g} req/s": s for rate, s in ends.items()})


def _grid(
    scales: Mapping[Key, Sequence[Scales]],
    curves: Mapping[tuple[float, str], Style],
    entries: Mapping[str, Style],
) -> Figure:
    """A row per workload, a column per kind of target, a curve per rate and system."""
    fig, axes = plt.subplots(2, 3, figsize=(10.2, 5.2), sharex=True, sharey=True)
    for row, name in zip(axes, dict.fromkeys(name for name, _, _ in scales), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            _curves(axis, ((scales[name, *at], style) for at, style in curves.items()), kind)
            axis.set_ylim(0, 102)
            for goal in (90, 99):
                axis.axhline(goal, color="#BBBBBB", linewidth=0.8, linestyle=":")
        row[0].set_ylabel(f"{name}\nattainment [%]")
    for (top, bottom), kind in zip(axes.T, KINDS, strict=True):
        top.set_title(kind.upper())
        bottom.set_xlabel("SLO scale [x A100]")
    _line_legend(fig, entries)
    return fig


def _curves(
    axis: Axes, curves: Iterable[tuple[Sequence[Scales], Style]], kind: str = "e2e"
) -> None:
    for scales, style in curves:
        axis.plot(GRID, 100 * mean_attained(scales, kind), **style)
    axis.set_xscale("log", base=2)


def _line_legend(fig: Figure, entries: Mapping[str, Style]) -> None:
    handles = [Line2D([], [], **style) for style in entries.values()]
    fig.legend(handles, list(entries), loc="outside upper right", ncols=len(handles))


def networks_figure(table: pd.DataFrame) -> Figure:
    """Attainment by rate as estimated and as simulated on either network, a panel per workload."""
    ways = list(table.columns[4:])
    long = table.melt(list(table.columns[:4]), ways, "attainment", "attainment [%]")
    fig, axes = plt.subplots(1, 2, figsize=(9.2, 3.4), sharey=True)
    for axis, (name, here) in zip(axes, long.groupby("workload", sort=False), strict=True):
        sns.barplot(
            here, x="rate [req/s]", y="attainment [%]", hue="attainment", saturation=1, ax=axis,
            palette=["#BBBBBB", COLOURS["ThunderServe"], figures.CYCLE[1]], errorbar=interval,
            err_kws={"color": "#222222", "linewidth": 1.2},
        )  # fmt: skip
        axis.set(title=name, ylim=(0, 105))
    figures.shared_legend(fig)
    return fig


def throughput_figure(overloaded: pd.DataFrame) -> Figure:
    """Throughput under overload over ThunderServe's, with intervals over seeds (Fig. 9)."""
    wide = overloaded.pivot(index=["workload", "seed"], columns="system", values=TPS)
    shares = wide.div(wide["ThunderServe"], axis="index").melt(ignore_index=False).reset_index()
    fig, axes = plt.subplots(1, 2, figsize=(8.2, 3.6), sharey=True)
    for axis, name in zip(axes, overloaded["workload"].unique(), strict=True):
        sns.barplot(
            shares[shares["workload"] == name], x="value", y="system", order=SYSTEMS, hue="system",
            palette=COLOURS, saturation=1, width=0.7, errorbar=interval,
            err_kws={"color": "#222222", "linewidth": 1.2}, ax=axis,
        )  # fmt: skip
        axis.set(xlabel="throughput / ThunderServe's", ylabel="", title=name)
    return fig


def convergence_figure(curves: Mapping[tuple[str, int], Floats]) -> Figure:
    """Best estimate over the steps of a search, mean and range of seeds (ThunderServe Fig. 10).

    The legend has the times of the whole search, as recorded by the benchmark and as printed.
    """
    fig, axes = _panels(curves, "step of the search", "best estimate so far [%]", (9.2, 3.0))
    sizes = dict.fromkeys(size for _, size in curves)
    for name, axis in axes.items():
        for size, colour in zip(sizes, figures.CYCLE, strict=False):
            best = curves[name, size]
            recorded = recorded_s(f"phases.tabu.{size}")
            ours = "" if recorded is None else f"{recorded:.1f} s here, "
            label = f"{size} GPUs: {ours}{PRINTED_TABU_S[size]} s printed"
            sns.lineplot(
                x=np.tile(range(best.shape[1]), len(best)), y=best.ravel(), color=colour,
                label=label, errorbar=("pi", 100), err_kws={"linewidth": 0, "alpha": 0.2}, ax=axis,
            )  # fmt: skip
        axis.set(ylim=(-5, 105), xlim=(0, None))
        axis.set_xscale("symlog", linthresh=1)  # most of it happens in the first steps
        axis.xaxis.set_major_formatter("{x:g}")
    figures.shared_legend(fig, "outside upper right")
    return fig


def losses_figure(scales: Mapping[tuple[str, str, str], Sequence[Scales]]) -> Figure:
    """Attainment before a loss and after it by policy; a row per plan, a column per workload."""
    names, starts, _ = (list(dict.fromkeys(part)) for part in zip(*scales, strict=True))
    fig, axes = plt.subplots(2, 2, figsize=(9.4, 5.0), sharex=True, sharey=True)
    for row, start in zip(axes, starts, strict=True):
        for axis, name in zip(row, names, strict=True):
            keys = {(name, start, label): style for label, style in _LOSS.items()}
            _curves(axis, ((scales[key], s) for key, s in keys.items() if key in scales))
            axis.set_ylim(0, 102)
            axis.set_title(f"{name}, start: {start}")
        row[0].set_ylabel("E2E attainment [%]")
    for axis in axes[1]:
        axis.set_xlabel("SLO scale [x A100]")
    _line_legend(fig, {"before the loss": _LOSS["before"]} | {p: _LOSS[p] for p in POLICIES})
    return fig


def episodes_figure(
    simulated: Mapping[tuple[str, Policy], Episode], at_s: float, slot_s: float = 15.0
) -> Figure:
    """90th percentile of the latency by time of arrival; a line marks the loss."""
    fig, axes = _panels(simulated, "time of arrival [s]", "E2E P90 [s]", (9.4, 2.9))
    for name, axis in axes.items():
        for policy, colour in zip(POLICIES, figures.CYCLE, strict=False):
            if (name, policy) not in simulated:
                continue
            run = simulated[name, policy].run
            arrival = run.requests["arrival_s"]
            slot = np.digitize(arrival, np.arange(0, arrival.max(), slot_s))
            centre = [arrival[slot == k].mean() for k in np.unique(slot)]
            p90 = [np.nanquantile(run.e2e_s[slot == k], 0.9) for k in np.unique(slot)]
            axis.plot(centre, p90, color=colour, label=policy)
        axis.axvline(at_s, color="#777777", linewidth=0.9, linestyle=":")
        axis.set_yscale("log")
    figures.shared_legend(fig, "outside upper right", ncols=3)
    return fig


def ablation_figure(
    table: pd.DataFrame, scales: Mapping[tuple[str, str], Sequence[Scales]]
) -> Figure:
    """Attainment and mean time with parts of the system switched off (ThunderServe Fig. 12).

    Above, only scales at which attainment differs from 0 and 100 % are shown. Below, the times are
    over those of the full system; lines mark what the paper prints.
    """
    fig, axes = plt.subplots(2, 2, figsize=(9.2, 5.2), height_ratios=(3, 2))
    wide = table.pivot(index=["workload", "seed"], columns="system", values="mean E2E [s]")
    labels = list(dict.fromkeys(label for _, label in scales))
    ratios = wide.div(wide[labels[0]], axis="index")[labels[1:]]
    colours = dict(zip(labels, figures.CYCLE, strict=False))
    looks = dict(zip(labels, ((3.2, "-"), (1.6, "-"), (2.2, "--"), (1.4, ":")), strict=True))
    for (top, bottom), name in zip(axes.T, table["workload"].unique(), strict=True):
        styles = {
            x: {"color": colours[x], "label": x, "linewidth": w, "linestyle": s}
            for x, (w, s) in looks.items()
        }
        _curves(top, ((scales[name, x], style) for x, style in styles.items()))
        means = np.array([mean_attained(scales[name, x]) for x in labels])
        moving = GRID[((means > 0.01) & (means < 0.999)).any(axis=0)]
        top.set(
            title=name, xlabel="SLO scale [x A100]", xlim=(moving[0], moving[-1]), ylim=(0, 102)
        )
        sns.barplot(
            ratios.loc[name].melt(), x="value", y="system", hue="system", palette=colours,
            saturation=1, width=0.7, errorbar=interval, ax=bottom,
            err_kws={"color": "#222222", "linewidth": 1.2},
        )  # fmt: skip
        for printed in (1.3, 1.3 * 4):
            bottom.axvline(printed, color="#777777", linewidth=0.9, linestyle=":")
        bottom.set(xlabel="mean time / full system's (dotted: printed)", ylabel="")
        bottom.set(yticks=range(3), yticklabels=labels[1:] if bottom is axes[1, 0] else [])
    axes[0, 0].set_ylabel("E2E attainment [%]")
    figures.shared_legend(fig, "outside upper right")
    return fig


def arrivals_figure(
    poisson: Mapping[Key, Sequence[Scales]],
    own: Mapping[tuple[str, str], Sequence[Scales]],
    rate_rps: float,
) -> Figure:
    """Attainment with Poisson arrivals (solid) and with the trace's own (dashed)."""
    fig, axes = _panels(own)
    for name, axis in axes.items():
        for system in PRINTED:
            colour = {"color": COLOURS[system]}
            pair = (poisson[name, rate_rps, system], _SOLID), (own[name, system], _DASHED)
            _curves(axis, ((scales, style | colour) for scales, style in pair))
    entries: dict[str, Style] = {system: {"color": COLOURS[system]} for system in PRINTED}
    _line_legend(fig, entries | {"Poisson": _SOLID, "of the trace": _DASHED})
    return fig


def _panels(
    keys: Iterable[tuple[str, object]],
    x: str = "SLO scale [x A100]",
    y: str = "E2E attainment [%]",
    size: tuple[float, float] = (9.2, 2.9),
) -> tuple[Figure, dict[str, Axes]]:
    """A panel for every workload, the first part of a key."""
    fig, axes = plt.subplots(1, 2, figsize=size, sharey=True)
    panels = dict(zip(dict.fromkeys(name for name, _ in keys), axes, strict=True))
    for name, axis in panels.items():
        axis.set_title(name)
        axis.set_xlabel(x)
    axes[0].set_ylabel(y)
    return fig, panels


def kv_shares_figure(shares: pd.DataFrame) -> Figure:
    """Share of the KV transfer over the input length; bands as printed (ThunderServe Fig. 18)."""
    fig, axis = plt.subplots(figsize=(6.4, 3.0))
    sns.lineplot(
        shares, x="input [tokens]", y="KV share [%]", hue="bits", hue_order=(16, 8, 4),
        palette=list(figures.CYCLE[:3]), style="output [tokens]",
        style_order=(thunderserve.OUTPUTS, 64, 16), ax=axis,
    )  # fmt: skip
    axis.axhspan(16, 30, color=figures.CYCLE[0], alpha=0.08)
    axis.axhspan(4, 9, color=figures.CYCLE[2], alpha=0.12)
    axis.set(ylabel="KV transfer [% of the time]", xticks=LENGTHS)
    sns.move_legend(axis, "center left", bbox_to_anchor=(1.01, 0.5))
    return fig
