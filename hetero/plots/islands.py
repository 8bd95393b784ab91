"""A picture of who serves which lengths: the work of islands over the input length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.rates import PHASES
from hetero.plots.figures import gpu_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(plan: Assignment) -> Figure:
    """Share of the requests of each length that each group of islands serves, per phase.

    One colour per GPU type; groups of the same type are parted by white lines and named where
    there is room.
    """
    ranges = plan.rates.ranges
    width = (ranges.end_tokens - ranges.start_tokens).astype(np.float64)
    fig, axes = plt.subplots(2, 1, figsize=(7.5, 5.0), sharex=True)
    seen: dict[str, None] = {}
    for axis, phase in zip(axes, PHASES, strict=True):
        flow = plan.flow_rps(phase)
        share = 100 * flow / np.maximum(flow.sum(axis=0), 1e-12)
        groups = plan.of(phase)
        base = np.zeros(len(width))
        for g in sorted(range(len(groups)), key=lambda g: (groups[g].island, g)):
            island = groups[g].island
            seen[island.gpu] = None
            axis.bar(
                ranges.start_tokens, share[g], width=width, align="edge", bottom=base,
                color=gpu_colour(island.gpu), edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            _name(axis, f"{groups[g].count} x {island.size}", share[g], base, ranges.start_tokens)
            base = base + share[g]
        axis.set(ylabel=f"{phase}\nshare of requests [%]", ylim=(0, 100))
        axis.grid(visible=False)
    axes[1].set_xlabel("input length [tokens]")
    fig.suptitle(
        f"{plan.served_rps:,.4g} requests/s, bound {plan.bound:,.4g}; "
        "labels: islands x GPUs of each",
        fontsize=9,
    )
    handles = [Patch(color=gpu_colour(gpu), label=gpu) for gpu in seen]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(seen))
    return fig


def _name(axis: Axes, text: str, share: Floats, base: Floats, start: NDArray[np.int64]) -> None:
    """Label a group where its widest run of full bars is."""
    full = np.flatnonzero(share > 25.0)
    best = max(np.split(full, np.flatnonzero(np.diff(full) > 1) + 1), key=len)
    width = start[1] - start[0] if len(start) > 1 else 1
    if not len(best) or len(best) * width < 0.05 * (start[-1] - start[0]):
        return
    middle = best[len(best) // 2]
    axis.text(
        start[middle], base[middle] + share[middle] / 2, text, ha="center", va="center", fontsize=7,
        color="black", bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
    )  # fmt: skip
