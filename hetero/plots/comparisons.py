"""A comparison as a picture: means, and paired differences to a baseline, rate by rate."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from hetero.plots import figures

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_UNITS = {"_rps": "requests/s", "_tps": "tokens/s", "_s": "s"}


def draw(summary: pd.DataFrame, metric: str, note: str) -> Figure:
    """A row per rate, a mark per system; what leaves 0 on the right is told apart.

    Parameters
    ----------
    summary
        What :meth:`hetero.comparison.Comparison.summary` gives.
    """
    figures.use_style()
    groups = list(summary.groupby("rate_rps", sort=False))
    most = summary["system"].nunique()
    figure, axes = plt.subplots(
        len(groups),
        2,
        sharex="col",
        squeeze=False,
        figsize=(7.2, 0.9 + len(groups) * 0.3 * (most + 1)),
    )
    for (left, right), (rate, rows) in zip(axes, groups, strict=True):
        names, at = list(rows["system"]), range(len(rows))
        for axis, keys in ((left, "mean mean_low mean_high"), (right, "difference low high")):
            value, low, high = (rows[key].to_numpy() for key in keys.split())
            colours = [figures.CYCLE[k % len(figures.CYCLE)] for k in at]
            axis.hlines(at, low, high, color=colours, linewidth=2.0)
            axis.scatter(value, at, color=colours, zorder=3, s=22)
            axis.set(ylim=(len(names) - 0.5, -0.5), yticks=at, yticklabels=names)
        left.set_title(f"{rate:.4g} requests/s")
        right.set(yticklabels=[], title=f"less {rows['baseline'].iloc[0]}, paired")
        right.axvline(0.0, color="black", linewidth=0.9, linestyle="--")
    unit = next((f" [{text}]" for end, text in _UNITS.items() if metric.endswith(end)), "")
    axes[-1, 0].set_xlabel(metric + unit)
    axes[-1, 1].set_xlabel(f"difference{unit}")
    told = "One seed, no intervals" if summary["low"].isna().all() else "95 % intervals over seeds"
    figures.stamp(figure, textwrap.fill(f"{told}. {note}", 110))
    return figure
