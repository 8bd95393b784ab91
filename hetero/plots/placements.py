"""Pictures of placements: layers held by nodes with the flow through them, and the flow network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from hetero.arrays import Floats
from hetero.placement.network import Flow
from hetero.plots.figures import gpu_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BOTTLENECK, _BAR = "#B00020", 0.72  # colour, and height of a bar in its row
_HALO = withStroke(linewidth=1.4, foreground="white")  # names stay readable on any colour


def draw(
    flow: Flow,
    axes: Axes,
    *,
    title: str = "",
    legend: bool = True,
    use: Floats | None = None,
    marked: Mapping[tuple[int, int], str] | None = None,
) -> None:
    """Nodes as bars over the layers they hold, filled as far as the flow uses them.

    Lines between bars are flows, as wide as they are large; a red frame or line is in the smallest
    cut, which is the bottleneck. Nodes of one region are in rows of their own.

    Parameters
    ----------
    use
        Share of every node that is filled instead, shape (n,).
    marked
        Links, from and to, that are red instead of the smallest cut, with a text each.
    """
    placement = flow.network.placement
    layers = placement.problem.llm.layers
    lanes = rows(flow)
    busy = flow.utilisation if use is None else use
    edges, cut = flow.link_tokens_per_s, flow.cut
    used = edges[:-1, :-1] > 1e-6 * flow.tokens_per_s
    if marked is not None:
        cut = np.zeros_like(cut)
        for a, b in marked:
            cut[a, b] = used[a, b] = True
    for a, b in np.argwhere(used).tolist():
        one, other = placement.ranges[a], placement.ranges[b]
        assert one is not None
        assert other is not None
        at = np.array([[one[1], max(one[1], other[0])], [lanes[a], lanes[b]]])
        axes.plot(
            *at,
            color=_BOTTLENECK if cut[a, b] else "#555555",
            linewidth=0.5 + 3.5 * max(edges[a, b] / flow.tokens_per_s, 0.4 * cut[a, b]),
            alpha=0.55,
            solid_capstyle="round",
            zorder=1,
        )
        if marked is not None and (a, b) in marked:
            axes.annotate(
                marked[a, b], at.mean(axis=1), (4, 0), textcoords="offset points", va="center",
                fontsize=7, color=_BOTTLENECK, zorder=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8},
            )  # fmt: skip
    for k, node, (start, stop) in placement.nodes():
        colour = gpu_colour(node.kind.gpu)
        low = lanes[k] - _BAR / 2
        axes.barh(lanes[k], stop - start, _BAR, left=start, color=colour, alpha=0.25, zorder=2)
        axes.bar(
            (start + stop) / 2, _BAR * busy[k], stop - start, bottom=low, color=colour, zorder=3
        )
        axes.barh(
            lanes[k], stop - start, _BAR, left=start, fill=False, zorder=4,
            edgecolor=_BOTTLENECK if cut[k, k] else "#333333", linewidth=1.6 if cut[k, k] else 0.5,
        )  # fmt: skip
        # About how many layers a name takes in a row; on narrow bars it stands upright.
        wide = 0.007 * layers * len(node.name) <= stop - start
        axes.text(
            (start + stop) / 2, lanes[k], node.name, ha="center", va="center", fontsize=7,
            rotation=0 if wide else 90, path_effects=[_HALO], zorder=5, clip_on=True,
        )  # fmt: skip
    if legend:
        kinds = dict.fromkeys(node.kind.gpu for _, node, _ in placement.nodes())
        axes.legend(
            [Patch(color=gpu_colour(gpu)) for gpu in kinds], list(kinds), ncols=len(kinds),
            fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1,
        )  # fmt: skip
    axes.set(xlabel="layer", yticks=[], xlim=(0, layers), ylim=(max(lanes.values()) + 0.6, -0.6))
    axes.grid(visible=False)
    axes.set_title(title or f"{flow.tokens_per_s:,.0f} tokens/s", fontsize=9)


def rows(flow: Flow) -> dict[int, int]:
    """Row of every node: the first free one of its region's rows, region after region."""
    placement = flow.network.placement
    regions = placement.problem.regions
    lanes: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []
    top, last = 0, ""
    for k, node, (start, stop) in sorted(
        placement.nodes(),
        key=lambda item: (regions.index(item[1].region), item[2][0], -item[2][1], item[0]),
    ):
        if node.region != last:
            top, last = max((r + 1 for r, _, _ in taken), default=0), node.region
        row = top
        while any(r == row and s < stop and start < e for r, s, e in taken):
            row += 1
        taken.append((row, start, stop))
        lanes[k] = row
    return lanes


def draw_network(flow: Flow, axes: Axes) -> None:
    """The flow network of a few nodes: in and out vertices, flow of capacity on every edge.

    Source: Helix, Fig. 2b: flow network of a placement.
    """
    placement = flow.network.placement
    problem = placement.problem
    order = sorted(placement.nodes(), key=lambda item: (item[2], item[0]))
    lanes = rows(flow)
    starts = sorted({held[0] for _, _, held in order})
    column = {k: 1 + 2 * starts.index(held[0]) for k, _, held in order}
    at: dict[tuple[int, int], tuple[float, float]] = {}
    for k in column:
        at[k, 0] = (column[k], -lanes[k])
        at[k, 1] = (column[k] + 1, -lanes[k])
    middle = -(max(lanes.values())) / 2
    n = len(problem.nodes)
    at |= {(n, 1): (0, middle), (n, 0): (2 + 2 * len(starts) - 1, middle)}
    labels = {(n, 1): "source", (n, 0): "sink"}
    for k, node, (start, stop) in order:
        labels[k, 0], labels[k, 1] = f"{node.name}\nin", f"{node.name}\nout"
        edge = (at[k, 0], at[k, 1])
        text = f"[{start}, {stop})\n{flow.node_tokens_per_s[k]:,.0f} of "
        text += f"{placement.tokens_per_s(k):,.0f}"
        _edge(axes, edge, text, bool(flow.cut[k, k]), flow.node_tokens_per_s[k] > 0)
    for a, b in np.argwhere(flow.network.valid()):
        moved = flow.link_tokens_per_s[a, b]
        limit = problem.link_tokens_per_s[a, b]
        text = f"{moved:,.0f} of " + (f"{limit / 1e6:,.3g} M" if limit >= 1e6 else f"{limit:,.0f}")
        _edge(axes, (at[int(a), 1], at[int(b), 0]), text, bool(flow.cut[a, b]), moved > 0)
    for vertex, (x, y) in at.items():
        axes.text(
            x, y, labels[vertex], ha="center", va="center", fontsize=7, zorder=3,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#333333"},
        )  # fmt: skip
    axes.set(xlim=(-0.4, 1.4 + 2 * len(starts)), ylim=(-max(lanes.values()) - 0.5, 0.5))
    axes.axis("off")
    axes.set_title(f"Maximum flow {flow.tokens_per_s:,.0f} tokens/s", fontsize=9)


def _edge(
    axes: Axes,
    ends: tuple[tuple[float, float], tuple[float, float]],
    text: str,
    in_cut: bool,
    used: bool,
) -> None:
    colour = _BOTTLENECK if in_cut else "#333333" if used else "#AAAAAA"
    axes.annotate(
        "", xy=ends[1], xytext=ends[0], zorder=1,
        arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 16, "shrinkB": 16,
                    "linewidth": 1.6 if in_cut else 1.0},
    )  # fmt: skip
    x, y = ((a + b) / 2 for a, b in zip(*ends, strict=True))
    axes.text(
        x, y, text, ha="center", va="center", fontsize=7, color=colour, zorder=2,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip


def figure_of(flow: Flow, *, title: str = "") -> Figure:
    """One placement as a figure of its own, as high as it has rows."""
    count = max(rows(flow).values()) + 1
    figure, axes = plt.subplots(figsize=(9.0, 1.4 + 0.5 * count))
    draw(flow, axes, title=title)
    return figure
