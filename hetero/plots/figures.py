"""One style for every figure: sizes, colours per GPU type, and the same bytes in every run."""

from __future__ import annotations

import os
import textwrap
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.backend_bases import RendererBase
from matplotlib.backends import backend_pgf
from matplotlib.text import Text

from hetero.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour-blind-safe cycle (Okabe and Ito, black left out) for series that are not GPU types.
CYCLE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")

# Hue per generation, lightness per member, so that neighbours in a legend stay apart in grey too.
_GPU_COLOURS = {
    "V100": "#882255", "T4": "#CC6677", "A100": "#0072B2", "A800": "#6699CC", "A40": "#44AA99",
    "A6000": "#117733", "A5000": "#999933", "A10": "#88CCAA", "A30": "#55AA66", "3090": "#DDCC77",
    "L40": "#E69F00", "L20": "#EEB866", "L4": "#F0C96B", "4090": "#B8860B", "6000-Ada": "#C28E2C",
    "H100": "#D55E00", "GH200": "#B04A00", "H200": "#9C3A1A", "H800": "#E08A5B", "H20": "#F2B08F",
    "B200": "#332288", "B300": "#5B4FA8", "GB200": "#221866", "GB300": "#7B72BE",
    "5090": "#9A92CF", "PRO-6000": "#8877BB", "Rubin": "#AA4499", "MI": "#AA3377",
    "Gaudi": "#555555", "Arc": "#888888",
}  # fmt: skip


# For GPU types that are not listed; far from most of the others, and from each other in grey.
_RESERVE = ("#EE3377", "#33BBEE", "#AA4466", "#225555", "#CCBB44", "#663333", "#0077BB", "#BBAACC")
_own_colours: dict[str, str] = {}
_WIDTHS_IN = {"column": 3.33, "page": 7.0}
_printed: list[str] = []  # widths asked for by paper(), the innermost last


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
        first = zlib.crc32(name.encode()) % len(_RESERVE)
        order = _RESERVE[first:] + _RESERVE[:first]
        _own_colours[name] = next((c for c in order if c not in _own_colours.values()), order[0])
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
    """Write ``path`` as SVG, and as PNG if asked to, with no date and no random ids.

    After :func:`paper` also as PDF and PGF, in the size for print.
    """
    figure.savefig(path.with_name(path.name + ".svg"), metadata={"Date": None, "Creator": None})
    if png:
        figure.savefig(path.with_name(path.name + ".png"), metadata={"Software": None})
    if not _printed:
        return
    _fit(figure, _WIDTHS_IN[_printed[-1]])
    # TeX is needed where the PGF is set, not here: texts are measured as in all other figures.
    measure = RendererBase.get_text_width_height_descent
    with (
        mpl.rc_context({"pdf.fonttype": 42, "pgf.rcfonts": False}),
        mock.patch.object(backend_pgf.RendererPgf, "get_text_width_height_descent", measure),
        mock.patch.object(
            backend_pgf, "_get_image_inclusion_command", return_value="\\includegraphics"
        ),
    ):
        figure.savefig(path.with_name(path.name + ".pdf"), metadata={"CreationDate": None})
        figure.savefig(path.with_name(path.name + ".pgf"))


def paper(width: Literal["column", "page"] = "column") -> ExitStack:
    """Have :func:`save` write PDF and PGF too, as wide as a column (3.33 in) or a page (7 in).

    Texts stay texts, none below 7 pt; panels that do not fit beside each other go below each
    other. It holds until the end of a ``with``, or for good without one, as at the top of a
    notebook whose results go to a folder.

    Examples
    --------
    >>> with paper("page"):
    ...     pass  # save(card.figure(), Path("fleet")) writes fleet.pdf and fleet.pgf
    """
    require(
        width in _WIDTHS_IN, f"'{width}' is no width of print.", resolve="use 'column' or 'page'."
    )
    _printed.append(width)
    ends = ExitStack()
    ends.callback(_printed.pop)
    return ends


def _fit(figure: Figure, width_in: float) -> None:
    """Give a figure a width, letters of 7 pt, and as many panels beside each other as fit."""
    before_in, height_in = figure.get_size_inches()
    panels = [(one, spec) for one in figure.axes if (spec := one.get_subplotspec())]
    grids = {spec.get_gridspec() for _, spec in panels}
    rows, columns = grids.pop().get_geometry() if len(grids) == 1 else (1, 1)
    beside = min(columns, max(1, int(width_in / 1.6)))  # inches of a panel with its labels
    down, wide_in = rows * -(-columns // beside), width_in / beside
    high_in = height_in / rows * min(1.0, wide_in * columns / before_in) ** 0.5
    grid, height_in = figure.add_gridspec(down, beside), 0.0  # of legends above the panels
    for axis, spec in panels:
        names = [one.get_text() for one in axis.get_yticklabels()]
        lines = sum(name.count("\n") + 1 for name in names if name.strip("-−0123456789.,% "))
        high_in = max(high_in, 1.5, 0.5 + 0.125 * lines)
        if beside < columns:  # what does not fit goes below, each column with all of its rows
            block, column = divmod(spec.colspan.start, beside)
            axis.set_subplotspec(grid[block * rows + spec.rowspan.start, column])
            if block and not column:
                first = next(a for a, old in panels if old.rowspan.start == spec.rowspan.start)
                axis.tick_params(labelleft=True)
                own = axis.get_ylabel() if axis.yaxis.label.get_visible() else ""
                axis.set_ylabel(own or first.get_ylabel(), visible=True)
    for legend in list(figure.legends):
        names = [one.get_text() for one in legend.get_texts()]
        across = max(1, int(width_in / (0.45 + 0.056 * max(map(len, names)))))
        figure.legends.remove(legend)
        figure.legend(
            [*filter(None, legend.legend_handles)], names, loc="outside upper center", ncols=across
        )
        height_in += 0.17 * -(-len(names) // across)
    figure.set_size_inches(width_in, high_in * down + height_in)
    for text in figure.findobj(Text):
        text.set_fontsize(8.0 if float(text.get_fontsize()) > 10.0 else 7.0)
    for axis in figure.axes:
        axis.tick_params(labelsize=7.0, which="both")
    figure.draw_without_rendering()  # lays the panels out, whose room for texts is known then
    for axis in figure.axes:
        room = axis.get_window_extent()
        _wrap(axis.yaxis.label, room.height / figure.dpi)
        for text in (axis.xaxis.label, axis.title, getattr(axis, "_left_title", axis.title)):
            _wrap(text, room.width / figure.dpi)
    for text in figure.texts:
        _wrap(text, width_in)


def _wrap(text: Text, width_in: float) -> None:
    letters = max(8, int(width_in / 0.056))  # a letter of 7 pt has that width on average
    lines = (textwrap.fill(one, letters) for one in text.get_text().split("\n"))
    text.set_text("\n".join(lines))


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
                middle = bar.get_x() + bar.get_width() / 2
                axis.plot(middle, value, marker, color="black", ms=size, mew=1.2)
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=5)  # type: ignore[arg-type]
