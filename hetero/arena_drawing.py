"""Pictures of a contest: who wins where, what it costs, how sure it is, and what routers change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from hetero.arena import league
from hetero.arena.league import CASE, GOODPUT, PORTFOLIO, PRICE, TIE
from hetero.figures import CYCLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito's colours and Tol's muted ones: apart for all eyes, with a mark of its own each.
_COLOURS: Final = (
    *CYCLE[:6],
    *("#332288", "#999933", "#882255", "#44AA99", "#AA4499", "#DDCC77", "#661100", "#888888"),
)
_MARKS: Final = "osD^vPX<>hHpd8"
_SHARES = LinearSegmentedColormap.from_list("shares", ["#F7F4EA", "#9CC7D8", "#0072B2"])
_CHANGE = LinearSegmentedColormap.from_list("change", ["#D55E00", "#FFFFFF", "#0072B2"])
_NONE = "#EDEDED"


def colours(planners: Sequence[str]) -> dict[str, str]:
    """A colour for each planner, the same in every picture of a contest; the portfolio is black."""
    others = [name for name in planners if name != PORTFOLIO]
    found = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(others)}
    return found | {PORTFOLIO: "#111111"}


def marks(planners: Sequence[str]) -> dict[str, str]:
    """A mark for each planner, so that no picture rests on colours alone."""
    others = [name for name in planners if name != PORTFOLIO]
    return {name: _MARKS[k % len(_MARKS)] for k, name in enumerate(others)} | {PORTFOLIO: "*"}


def winners(table: pd.DataFrame, labels: Mapping[str, str] | None = None) -> Figure:
    """Heat map: share of the best goodput by case and planner; frames are wins within 2 %.

    Parameters
    ----------
    labels
        Shorter names of workloads.
    """
    wide = 100.0 * league.shares(table)
    values = wide.to_numpy()
    rows, columns = values.shape
    fig, axis = plt.subplots(figsize=(2.9 + 0.62 * columns, 1.75 + 0.23 * rows))
    axis.set_facecolor(_NONE)
    axis.pcolormesh(values, cmap=_SHARES, vmin=0, vmax=100, edgecolor="white", linewidth=0.8)
    for i in range(rows):
        for j in range(columns):
            share = values[i, j]
            text = "-" if np.isnan(share) else f"{share:.0f}"
            dark = np.isfinite(share) and share > 62
            wins = np.isfinite(share) and share >= 100 * (1 - TIE)
            axis.text(
                j + 0.5, i + 0.5, text, ha="center", va="center", fontsize=7,
                color="white" if dark else "#222222", fontweight="bold" if wins else "normal",
            )  # fmt: skip
            if wins:
                axis.add_patch(
                    Rectangle((j + 0.06, i + 0.1), 0.88, 0.8, fill=False, edgecolor="#111111",
                              linewidth=1.3)
                )  # fmt: skip
    axis.set_xticks(np.arange(columns) + 0.5, [_wrapped(name) for name in wide.columns])
    axis.set_yticks(np.arange(rows) + 0.5, _case_labels(list(wide.index), labels or {}))
    axis.tick_params(length=0, labelsize=7.5)
    axis.xaxis.tick_top()
    plt.setp(axis.get_xticklabels(), rotation=45, ha="left", rotation_mode="anchor")
    # A line above the first workload of every cluster.
    clusters = wide.index.get_level_values("cluster")
    for i in range(1, rows):
        if clusters[i] != clusters[i - 1]:
            axis.axhline(i, color="#555555", linewidth=0.9)
    axis.invert_yaxis()
    axis.grid(visible=False)
    for side in axis.spines.values():
        side.set_visible(False)
    return fig


def fronts(
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
    found = league.pareto(table, ["model", "workload"])
    names = list(dict.fromkeys(table["planner"]))
    colour, mark = colours(names), marks(names)
    across = 2 if len(cases) == 4 else min(3, len(cases))
    down = -(-len(cases) // across)
    fig, axes = plt.subplots(
        down, across, figsize=(3.3 * across + 1.9, 2.75 * down + 0.5), squeeze=False
    )
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
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("goodput [requests/s]")
    for axis in axes.flat[max(0, len(cases) - across) : len(cases)]:
        axis.set_xlabel("price of the GPUs in use [$/h]")
    fig.legend(list(shown.values()), list(shown), loc="outside right upper", fontsize=7.5)
    return fig


def bars(
    table: pd.DataFrame,
    cases: Sequence[tuple[str, str, str]],
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Goodput of every planner with its 95 % interval over seeds, one panel per case.

    A line stands at the bound on throughput where it is within the panel, a cross where a planner
    has no plan.
    """
    own = league.plans(table)
    names = list(dict.fromkeys(own["planner"]))
    colour = colours(names)
    across = min(3, len(cases))
    down = -(-len(cases) // across)
    fig, axes = plt.subplots(
        down,
        across,
        figsize=(3.1 * across + 1.2, (0.21 * len(names) + 0.85) * down + 0.3),
        sharey=True,
        squeeze=False,
    )
    where = np.arange(len(names))[::-1]
    for axis, case in zip(axes.flat, cases, strict=False):
        here = own[(own[CASE] == list(case)).all(axis=1)].set_index("planner")
        for y, name in zip(where, names, strict=True):
            row = here.loc[name] if name in here.index else None
            if row is None or not np.isfinite(row[GOODPUT]):
                axis.plot(0.02, y, "x", color="#999999", transform=axis.get_yaxis_transform())
                continue
            mean = float(row[GOODPUT])
            low = max(0.0, float(row["goodput, low [requests/s]"]))
            high = float(row["goodput, high [requests/s]"])
            axis.barh(y, mean, 0.72, color=colour[name])
            axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color="#444444", lw=0.9)
        limit = here["bound [requests/s]"].max()
        if np.isfinite(limit):
            axis.axvline(limit, color="#777777", linewidth=0.9, linestyle=":")
        cluster, model, workload = case
        told = (labels or {}).get(workload, workload)
        axis.set_title(f"{cluster}\n{model}, {told}", fontsize=8)
        axis.set_yticks(where, names, fontsize=7.5)
        axis.grid(axis="y", visible=False)
        axis.set_xlim(left=0)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(cases) - across) : len(cases)]:
        axis.set_xlabel("goodput [requests/s]")
    return fig


def routers(table: pd.DataFrame) -> Figure:
    """Heat map: what another router makes of a planner's replicas, median over the cases."""
    found = league.routers(table)
    wide = found.pivot_table(
        index="planner", columns="router", values="over its own [%]", aggfunc="median", sort=False
    )
    values = wide.to_numpy()
    rows, columns = values.shape
    fig, axis = plt.subplots(figsize=(2.7 + 0.58 * columns, 1.8 + 0.27 * rows))
    axis.set_facecolor(_NONE)
    axis.pcolormesh(values, cmap=_CHANGE, vmin=-60, vmax=60, edgecolor="white", linewidth=0.8)
    for i, j in np.argwhere(np.isfinite(values)):
        axis.text(
            j + 0.5, i + 0.5, f"{values[i, j]:+.0f}", ha="center", va="center", fontsize=7,
            color="white" if abs(values[i, j]) > 45 else "#222222",
        )  # fmt: skip
    axis.set_xticks(np.arange(columns) + 0.5, wide.columns)
    axis.set_yticks(np.arange(rows) + 0.5, wide.index)
    axis.tick_params(length=0, labelsize=7.5)
    axis.xaxis.tick_top()
    plt.setp(axis.get_xticklabels(), rotation=45, ha="left", rotation_mode="anchor")
    axis.invert_yaxis()
    axis.grid(visible=False)
    for side in axis.spines.values():
        side.set_visible(False)
    return fig


def standings(table: pd.DataFrame) -> Figure:
    """League: every case's share of the best as a point, their geometric mean as a bar."""
    ranked = league.league(table)
    own = league.plans(table)
    names = list(ranked["planner"])
    colour = colours(list(dict.fromkeys(own["planner"])))
    fig, axis = plt.subplots(figsize=(7.4, 0.9 + 0.3 * len(names)))
    where = np.arange(len(names))[::-1]
    for y, (_, row) in zip(where, ranked.iterrows(), strict=True):
        mean = row["geometric mean [% of best]"]
        if np.isfinite(mean):
            axis.barh(y, mean, 0.7, color=colour[row["planner"]], alpha=0.35)
        share = 100 * own[own["planner"] == row["planner"]]["share of best"].to_numpy()
        share = np.sort(share[share > 0])
        offset = 0.5 * (np.arange(len(share)) % 5 - 2) / 5
        axis.plot(share, y + offset, "o", color=colour[row["planner"]], markersize=2.8)
        axis.text(
            1.01, y, f"{row['wins']} wins, {row['cases served']} of {row['cases']} cases",
            transform=axis.get_yaxis_transform(), va="center", fontsize=7.5, color="#444444",
        )  # fmt: skip
    axis.axvline(100, color="#777777", linewidth=0.9, linestyle=":")
    axis.set_yticks(where, names)
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="goodput over the best of any single planner in the case [%]", xlim=(0, None))
    return fig


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
