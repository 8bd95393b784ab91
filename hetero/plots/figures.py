"""One style for every figure: sizes, colours per GPU type, and the same bytes in every run."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

#: Colour-blind-safe cycle (Okabe and Ito, black left out) for series that are not GPU types.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")

# Hue per generation, lightness per member, so that neighbours in a legend stay apart in grey too.
_GPU_COLOURS = {
    "V100": "#882255",
    "T4": "#CC6677",
    "A100": "#0072B2",
    "A800": "#6699CC",
    "A40": "#44AA99",
    "A6000": "#117733",
    "A5000": "#999933",
    "A10": "#88CCAA",
    "A30": "#55AA66",
    "3090": "#DDCC77",
    "L40": "#E69F00",
    "L20": "#EEB866",
    "L4": "#F0C96B",
    "4090": "#B8860B",
    "6000-Ada": "#C28E2C",
    "H100": "#D55E00",
    "GH200": "#B04A00",
    "H200": "#9C3A1A",
    "H800": "#E08A5B",
    "H20": "#F2B08F",
    "B200": "#332288",
    "B300": "#5B4FA8",
    "GB200": "#221866",
    "GB300": "#7B72BE",
    "5090": "#9A92CF",
    "PRO-6000": "#8877BB",
    "Rubin": "#AA4499",
    "MI": "#AA3377",
    "Gaudi": "#555555",
    "Arc": "#888888",
}


# For GPU types that are not listed; far from most of the others, and from each other in grey.
_RESERVE = ("#EE3377", "#33BBEE", "#AA4466", "#225555", "#CCBB44", "#663333", "#0077BB", "#BBAACC")
_own_colours: dict[str, str] = {}


def gpu_colour(name: str) -> str:
    """Colour of a GPU type, the same in every figure.

    A type that is not listed has a colour of a reserve by its name; no two of up to eight such
    types in one program have the same.

    Examples
    --------
    >>> gpu_colour("A100-SXM-80GB") == gpu_colour("A100-PCIE-80GB")
    True
    >>> gpu_colour("my accelerator") != gpu_colour("my other accelerator")
    True
    """
    matches = [key for key in _GPU_COLOURS if key in name]
    if matches:
        return _GPU_COLOURS[max(matches, key=len)]
    if name not in _own_colours:
        first = zlib.crc32(name.encode())
        order = [_RESERVE[(first + k) % len(_RESERVE)] for k in range(len(_RESERVE))]
        taken = set(_own_colours.values())
        _own_colours[name] = next((c for c in order if c not in taken), order[0])
    return _own_colours[name]


def use_style() -> None:
    """Set the one style of figures; call it once at the top of a notebook."""
    # matplotlib stamps files with this date; a fixed one makes two runs equal.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    mpl.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 100,
            "savefig.dpi": 150,
            "figure.constrained_layout.use": True,
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=CYCLE),
            "grid.color": "#E3E3E3",
            "grid.linewidth": 0.7,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
            "svg.hashsalt": "hetero",
            "svg.fonttype": "path",
        }
    )


def heat_map(values: pd.DataFrame, axis: Axes, **options: object) -> None:
    """Cells of a table as shades, their texts in them; a cell without a value is grey.

    Names of the index and of the columns become the labels of the axes.

    Parameters
    ----------
    options
        What ``seaborn.heatmap`` takes: ``annot`` (texts of the shape of ``values``), ``cmap``, ...
    """
    # Imported where it draws: it brings seconds of start that no other command should pay.
    import seaborn as sns

    style = {"cbar": False, "fmt": "", "linewidths": 0.8, "annot_kws": {"fontsize": 7.5}}
    axis.set_facecolor("#EDEDED")
    sns.heatmap(values, ax=axis, **style | options)
    axis.tick_params(length=0)
    axis.tick_params(axis="y", rotation=0)
    axis.grid(visible=False)


def mean_and_range(x: ArrayLike, runs: ArrayLike, axis: Axes, **options: object) -> None:
    """Mean over runs as a line and their range as a band; ``runs`` has a row per run.

    Parameters
    ----------
    options
        What ``seaborn.lineplot`` takes: ``color``, ``label``, ``marker``, ...
    """
    import seaborn as sns

    values = np.asarray(runs, np.float64)
    style = {"errorbar": ("pi", 100), "err_kws": {"linewidth": 0, "alpha": 0.2}}
    sns.lineplot(
        x=np.tile(np.asarray(x), len(values)), y=values.ravel(), ax=axis, **style | options
    )


def shared_legend(figure: Figure, loc: str = "outside upper center", **options: Any) -> None:
    """One legend beside the panels with every label once, in place of those inside them."""
    entries: dict[str, Artist] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
        if (inside := axis.get_legend()) is not None:
            inside.remove()
    style: dict[str, Any] = {"loc": loc, "ncols": len(entries)}
    figure.legend(list(entries.values()), list(entries), **style | options)


def stamp(figure: Figure, text: str) -> None:
    """Print the provenance in small grey letters under a figure, once."""
    if getattr(figure, "_hetero_stamp", None) is None:
        figure._hetero_stamp = figure.supxlabel(  # type: ignore[attr-defined]
            text, x=0.995, ha="right", fontsize=7, color="#777777"
        )


def save(figure: Figure, path: Path, *, png: bool = True) -> None:
    """Write ``path`` as SVG, and as PNG if asked to, with no date and no random ids."""
    figure.savefig(path.with_name(path.name + ".svg"), metadata={"Date": None, "Creator": None})
    if png:
        figure.savefig(path.with_name(path.name + ".png"), metadata={"Software": None})


def close(figure: Figure) -> None:
    """Release a figure that was saved."""
    plt.close(figure)


def mark_bars(axis: Axes, marks: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Label grouped bars, and mark two values on each: the first as a line, the other as a cross.

    Parameters
    ----------
    marks
        By hue and then by group; NaN is left out.
    """
    for bars, values in zip(axis.containers, marks, strict=True):
        for bar, pair in zip(bars, values, strict=False):
            for value, marker, size in zip(pair, ("_", "x"), (9, 5), strict=True):
                at = bar.get_x() + bar.get_width() / 2
                axis.plot(at, value, marker, color="black", ms=size, mew=1.2)
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=5)  # type: ignore[arg-type]
