"""Pictures of a contest: who wins where, and whether mixing pays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator

from hetero.plots.figures import CYCLE, heat_map
from pipelines.studies import league
from pipelines.studies.league import PORTFOLIO, RATIO, TIE

#: Okabe and Ito's colours and Tol's muted ones: apart for all eyes, with a mark of its own each.
_COLOURS: Final = (
    *CYCLE[:6],
    *("#332288", "#999933", "#882255", "#44AA99", "#AA4499", "#DDCC77", "#661100", "#888888"),
)
_MARKS: Final = "osD^vPX<>hHpd8"
_SHARES = LinearSegmentedColormap.from_list("shares", ["#F7F4EA", "#9CC7D8", "#0072B2"])


def colours(planners: Sequence[str]) -> dict[str, str]:
    """A colour for each planner, the same in every picture of a contest; the portfolio is black."""
    return _each(planners, _COLOURS) | {PORTFOLIO: "#111111"}


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


def pays_figure(
    pays: pd.DataFrame, worlds: pd.DataFrame, labels: Mapping[str, str] | None = None
) -> Figure:
    """What a mixed fleet carries over the best homogeneous one of equal price, fleet by fleet.

    A mark per workload with its 95 % interval over seeds, the fleet that gains most on top; the
    band is the interval of the mean over fleets.
    """
    found = pays.assign(log=np.log(pays[RATIO])).dropna(subset="log")
    order = found.groupby("cluster")["log"].mean().sort_values(kind="stable").index
    workloads = list(dict.fromkeys(pays["workload"].sort_values()))
    colour, mark = _each(workloads, _COLOURS), _each(workloads, _MARKS)
    fig, axis = plt.subplots(figsize=(8.4, 1.5 + 0.46 * len(order)))
    mean, low, high = worlds[[RATIO, "low", "high"]].iloc[0]
    if high > low:
        told = f"mean over fleets: {mean:.2f} ({low:.2f} to {high:.2f})"
        axis.axvspan(low, high, color="#DDDDDD", zorder=0, label=told)
    axis.axvline(mean, color="#555555", linewidth=1.2, linestyle="--", zorder=1)
    axis.axvline(1.0, color="#111111", linewidth=1.0, zorder=1)
    for k, name in enumerate(workloads):
        one = found[found["workload"] == name]
        y = order.get_indexer(one["cluster"]) + 0.22 * ((len(workloads) - 1) / 2 - k)
        ends = np.abs(one[["low", "high"]].to_numpy().T - one[RATIO].to_numpy())
        axis.errorbar(
            one[RATIO], y, xerr=ends, fmt=mark[name], color=colour[name], markersize=6,
            elinewidth=1.1, label=(labels or {}).get(name, name),
        )  # fmt: skip
    rows = found.drop_duplicates("cluster").set_index("cluster").loc[order]
    axis.set_yticks(range(len(order)), rows.index + ", " + rows["model"] + "\n" + rows["GPUs"])
    axis.tick_params(axis="y", labelsize=7.5, length=0)
    axis.set(xscale="log", ylim=(-0.6, len(order) - 0.4))
    axis.xaxis.set_major_locator(FixedLocator([0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4]))
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.minorticks_off()
    axis.set_xlabel("goodput over that of the best single GPU type for as much money")
    axis.grid(axis="x", color="#EEEEEE", zorder=0)
    fig.legend(loc="outside upper center", ncols=4, fontsize=8)
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
