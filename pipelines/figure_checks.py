"""What a reader stumbles over in a figure: letters too small, texts cut off or on each other.

Figures are kept with their texts as paths, so they are measured where they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hetero.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

SMALLEST_PT: Final = 7.0
#: How far texts may reach over the edge or into each other: their boxes are larger than the ink.
_SLACK_PT: Final = 1.5


def hold(figure: Figure, name: str) -> None:
    """Raise if a figure, by its notebook/name, has :func:`faults`."""
    found = faults(figure)
    require(
        not found,
        f"Figure '{name}' has {len(found)} fault{'s' * (len(found) != 1)}: {'; '.join(found[:6])}.",
        resolve="make it or its letters larger, move what is hidden, or add what is missing.",
    )


def faults(figure: Figure) -> list[str]:
    """Faults of a figure in its own size, each in a clause.

    Letters below 7 pt, texts that the canvas cuts off, texts on each other, data under a legend,
    and numbers along axes of which none has a title.
    """
    figure.draw_without_rendering()
    slack = _SLACK_PT * figure.dpi / 72.0
    canvas = figure.bbox.padded(slack)
    texts = [(text, text.get_window_extent()) for text in _seen(figure) if text.get_text().strip()]
    found = []
    for text, box in texts:
        if (size := float(text.get_fontsize())) < SMALLEST_PT:
            found.append(f"{text.get_text()!r} has {size:.3g} pt")
        if not (canvas.contains(box.x0, box.y0) and canvas.contains(box.x1, box.y1)):
            found.append(f"{text.get_text()!r} is cut off")
    # The box of a slanted text is not what it covers.
    straight = [one for one in texts if one[0].get_rotation() % 90 == 0]
    found += [
        f"{text.get_text()!r} lies on {other.get_text()!r}"
        for (text, box), (other, beside) in combinations(straight, 2)
        if min(_common(box, beside)) > slack
    ]
    hidden = [f"a legend lies on data in panel {k}" for k, axes in enumerate(figure.axes)
              if _hides_data(axes)]  # fmt: skip
    return found + hidden + [f"no {x} axis has a title" for x in "xy" if _untitled(figure, x)]


def _seen(artist: Any) -> Iterator[Text]:
    """Texts that are drawn; an axis keeps ticks that are out of view, or is switched off."""
    if not artist.get_visible():
        return
    if hasattr(artist, "get_fontsize"):
        yield artist
    children = artist.get_children()
    if not getattr(artist, "axison", True):
        children = [child for child in children if not hasattr(child, "get_view_interval")]
    if hasattr(artist, "get_view_interval"):
        low, high = sorted(artist.get_view_interval())
        margin = 1e-9 * (high - low)
        children = [
            child for child in children
            if not hasattr(child, "get_loc") or low - margin <= child.get_loc() <= high + margin
        ]  # fmt: skip
    for child in children:
        yield from _seen(child)


def _common(a: Bbox, b: Bbox) -> tuple[float, float]:
    """Width and height of what two boxes share, below 0 where they are apart."""
    return min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)


def _hides_data(axes: Axes) -> bool:
    legend = axes.get_legend()
    if legend is None or not axes.get_visible():
        return False
    box = legend.get_window_extent()
    points = [
        line.get_transform().transform_path(line.get_path().interpolated(20)).vertices
        for line in axes.lines
        if line.get_transform() == axes.transData and line.get_visible()
    ]
    points += [c.get_offset_transform().transform(c.get_offsets()) for c in axes.collections]
    inside = any(box.count_contains(np.asarray(one)) for one in points)
    return inside or any(min(_common(box, bar.get_window_extent())) > 0 for bar in axes.patches)


def _untitled(figure: Figure, which: str) -> bool:
    """Whether numbers stand along axes in this direction, and none of these has a title."""
    axes = [getattr(one, f"{which}axis") for one in figure.axes if one.get_visible() and one.axison]
    labels = [text.get_text() for axis in axes for text in _seen(axis)]
    numbers = any(text.replace(",", "").replace(".", "").isdigit() for text in labels)
    return numbers and not any(axis.get_label_text() for axis in axes)
