"""Pictures of a contest: who wins where, what it costs, how sure it is, and what routers change."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from hetero.plots.figures import CYCLE, heat_map, shared_legend
from pipelines.studies import league
from pipelines.studies.league import CASE, GOODPUT, PORTFOLIO, PRICE, TIE

#: Okabe and Ito's colours and Tol's muted ones: apart for all eyes, with a mark of its own each.
_COLOURS: Final = (
    *CYCLE[:6],
    *("#332288", "#999933", "#882255", "#44AA99", "#AA4499", "#DDCC77", "#661100", "#888888"),
)
_MARKS: Final = "osD^vPX<>hHpd8"
_SHARES = LinearSegmentedColormap.from_list("shares", ["#F7F4EA", "#9CC7D8", "#0072B2"])
_CHANGE = LinearSegmentedColormap.from_list("change", ["#D55E00", "#FFFFFF", "#0072B2"])


def colours(planners: Sequence[str]) -> dict[str, str]:
    """A colour for each planner, the same in every picture of a contest; the portfolio is black."""
    return _each(planners, _COLOURS) | {PORTFOLIO: "#111111"}


def marks(planners: Sequence[str]) -> dict[str, str]:
    """A mark for each planner, so that no picture rests on colours alone."""
    return _each(planners, _MARKS) | {PORTFOLIO: "*"}


def _each(planners: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    others = [name for name in planners if name != PORTFOLIO]
    return dict(zip(others, itertools.cycle(looks), strict=False))


def winners_figure(table: pd.DataFrame, labels: Mapping[str, str] | None = None) -> Figure:
    """Heat map: share of the best goodput by case and planner; frames are wins within 2 %.

    Parameters
    ----------
    labels
        Shorter names of workloads.
    """
    wide = 100.0 * league.shares_frame(table)
    values = wide.to_numpy()
    rows, columns = values.shape
    fig, axis = plt.subplots(figsize=(2.9 + 0.62 * columns, 1.75 + 0.23 * rows))
    names = wide.rename(columns=_wrapped).set_axis(_case_labels(list(wide.index), labels or {}))
    heat_map(names, axis, annot=True, fmt=".0f", cmap=_SHARES, vmin=0, vmax=100)
    for (i, j), share in np.ndenumerate(values):
        if np.isnan(share):
            axis.text(j + 0.5, i + 0.5, "-", ha="center", va="center", fontsize=7)
        elif share >= 100 * (1 - TIE):
            axis.add_patch(
                Rectangle((j + 0.06, i + 0.1), 0.88, 0.8, fill=False, edgecolor="#111111",
                          linewidth=1.3)
            )  # fmt: skip
    _names_above(axis)
    # A line above the first workload of every cluster.
    clusters = wide.index.get_level_values("cluster")
    for i in range(1, rows):
        if clusters[i] != clusters[i - 1]:
            axis.axhline(i, color="#555555", linewidth=0.9)
    axis.set_title(
        "goodput [% of the best single planner]; framed: within 2 % of it; -: no plan", fontsize=8
    )
    return fig


def fronts_figure(
    table: pd.DataFrame, cases: Sequence[tuple[str, str]], labels: Mapping[str, str] | None = None
) -> Figure:
    """Goodput over price, one panel per model and workload; a line joins what nothing beats.

    Parameters
    ----------
    cases
        Model and workload of each panel.
    labels
        Shorter names of workloads.
    """
    found = league.pareto_frame(table, ["model", "workload"])
    names = list(dict.fromkeys(table["planner"]))
    colour, mark = colours(names), marks(names)
    fig, axes, lowest = _panels(len(cases), 2 if len(cases) == 4 else 3, (3.3, 1.9), (2.75, 0.5))
    shown: dict[str, Line2D] = {}
    for axis, (model, workload) in zip(axes.flat, cases, strict=False):
        here = found[(found["model"] == model) & (found["workload"] == workload)]
        front = here[here["efficient"]].sort_values(PRICE)
        axis.step(
            front[PRICE], front[GOODPUT], where="post", color="#555555", linewidth=1.0, zorder=1
        )
        for name in names:
            one = here[here["planner"] == name]
            for alike, group in one.groupby(one["cluster"].str.contains(" as "), sort=True):
                (line,) = axis.plot(
                    group[PRICE], group[GOODPUT], linestyle="", marker=mark[name],
                    color=colour[name], markersize=5.5, zorder=2 if alike else 3,
                    markerfacecolor="white" if alike else colour[name],
                )  # fmt: skip
                if not alike or name not in shown:
                    shown[name] = line
        axis.set_title(f"{model}, {(labels or {}).get(workload, workload)}", fontsize=8.5)
        axis.set_ylim(bottom=0)
        axis.margins(x=0.1)
    for axis in axes[:, 0]:
        axis.set_ylabel("goodput [requests/s]")
    for axis in lowest:
        axis.set_xlabel("price of the GPUs in use [$/h]")
    if found["cluster"].str.contains(" as ").any():
        shown["hollow: one GPU type,\nsame price"] = Line2D(
            [], [], marker="o", color="#555555", markerfacecolor="white", linestyle=""
        )
    fig.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=7.5)
    return fig


def bars_figure(
    table: pd.DataFrame,
    cases: Sequence[tuple[str, str, str]],
    labels: Mapping[str, str] | None = None,
    *,
    intervals: bool = True,
) -> Figure:
    """Goodput of every planner, and its 95 % interval over seeds if asked for, a panel per case.

    A line stands at the bound where it is within the panel, a cross where a planner
    has no plan. Two seeds make an interval that says nothing, from 0 to above the bound.
    """
    import seaborn as sns

    own = league.plans_frame(table)
    names = list(dict.fromkeys(own["planner"]))
    colour = colours(names)
    heights = (0.21 * len(names) + 0.85, 0.3)
    fig, axes, lowest = _panels(len(cases), 3, (3.1, 1.2), heights, sharey=True)
    for axis, case in zip(axes.flat, cases, strict=False):
        here = own[(own[CASE] == list(case)).all(axis=1)].set_index("planner").reindex(names)
        mean = here[GOODPUT]
        low, high = (here[f"goodput, {end} [requests/s]"] for end in ("low", "high"))
        sns.barplot(x=mean, y=names, hue=names, palette=colour, saturation=1, width=0.72, ax=axis)
        if intervals:
            axis.errorbar(
                mean, names, xerr=[mean - low.clip(lower=0), high - mean], fmt="none",
                ecolor="#444444", elinewidth=0.9,
            )  # fmt: skip
        for name in mean.index[mean.isna()]:
            axis.plot(0.02, name, "x", color="#999999", transform=axis.get_yaxis_transform())
        limit = here["bound [requests/s]"].max()
        if np.isfinite(limit):
            axis.axvline(limit, color="#777777", linewidth=0.9, linestyle=":")
        cluster, model, workload = case
        told = (labels or {}).get(workload, workload)
        axis.set_title(f"{cluster}\n{model}, {told}", fontsize=8)
        axis.tick_params(axis="y", labelsize=7.5)
        axis.set(xlim=(0, None), xlabel="")
    for axis in lowest:
        axis.set_xlabel("goodput [requests/s]")
    axes[0, 0].plot([], [], "x", color="#999999", label="no plan")
    axes[0, 0].plot([], [], ":", color="#777777", linewidth=0.9, label="bound")
    shared_legend(fig)
    return fig


def routers_figure(table: pd.DataFrame) -> Figure:
    """Heat map: what another router makes of a planner's replicas, median over the cases."""
    wide = league.routers_frame(table).pivot_table(
        index="planner", columns="router", values="over its own [%]", aggfunc="median", sort=False
    )
    rows, columns = wide.shape
    fig, axis = plt.subplots(figsize=(2.7 + 0.58 * columns, 1.8 + 0.27 * rows))
    heat_map(wide, axis, annot=True, fmt="+.0f", cmap=_CHANGE, vmin=-60, vmax=60)
    _names_above(axis)
    return fig


def standings_figure(table: pd.DataFrame) -> Figure:
    """League: every case's share of the best as a point, their geometric mean as a bar."""
    import seaborn as sns

    ranked = league.league_frame(table)
    own = league.plans_frame(table)
    names = list(ranked["planner"])
    colour = colours(list(dict.fromkeys(own["planner"])))
    fig, axis = plt.subplots(figsize=(7.4, 0.9 + 0.3 * len(names)))
    shares = own.assign(share=100 * own["share of best"]).query("share > 0")
    sns.barplot(
        x=ranked["geometric mean [% of best]"], y=names, hue=names, palette=colour, saturation=1,
        alpha=0.35, width=0.7, ax=axis,
    )  # fmt: skip
    sns.swarmplot(
        shares, x="share", y="planner", order=names, hue="planner", palette=colour, size=2.6,
        legend=False, warn_thresh=1.0, ax=axis,
    )  # fmt: skip
    for y, (wins, served, cases) in enumerate(
        ranked[["wins", "cases served", "cases"]].itertuples(index=False)
    ):
        axis.text(
            1.01, y, f"{wins} win{'s' * (wins != 1)}, {served} of {cases} cases",
            transform=axis.get_yaxis_transform(), va="center", fontsize=7.5, color="#444444",
        )  # fmt: skip
    axis.axvline(100, color="#777777", linewidth=0.9, linestyle=":")
    axis.set(ylabel="", xlim=(0, None))
    axis.set_xlabel("goodput over the best of any single planner in the case [%]")
    return fig


def _panels(
    count: int,
    across: int,
    width: tuple[float, float],
    height: tuple[float, float],
    *,
    sharey: bool = False,
) -> tuple[Figure, Any, list[Axes]]:
    """So many panels, those of the grid that are left over hidden, and the lowest of each column.

    Sizes are those of a panel and of what is beside them [inches].
    """
    across = max(min(across, count), 1)
    down = max(-(-count // across), 1)
    size = width[0] * across + width[1], height[0] * down + height[1]
    fig, axes = plt.subplots(down, across, figsize=size, sharey=sharey, squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return fig, axes, list(axes.flat[max(0, count - across) : count])


def _names_above(axis: Axes) -> None:
    """Names of the columns above the cells, slanted."""
    axis.set(xlabel="", ylabel="")
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=7.5)
    plt.setp(axis.get_xticklabels(), rotation=45, ha="left", rotation_mode="anchor")


def _case_labels(index: Sequence[tuple[str, str, str]], labels: Mapping[str, str]) -> list[str]:
    """Cluster and model once, then only workloads."""
    found: list[str] = []
    before: tuple[str, str] | None = None
    for cluster, model, workload in index:
        told = labels.get(workload, workload)
        found.append(told if (cluster, model) == before else f"{cluster}, {model}:  {told}")
        before = (cluster, model)
    return found


def _wrapped(name: str) -> str:
    words = name.split()
    if len(name) <= 16 or len(words) < 2:
        return name
    half = len(words) // 2 + len(words) % 2
    return " ".join(words[:half]) + "\n" + " ".join(words[half:])
