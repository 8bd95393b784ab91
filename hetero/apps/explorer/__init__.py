"""The explorer: a fleet, a workload, a rate, targets and a router in; a view out.

:func:`explore` is a pure function of its arguments; :class:`Explorer` puts dropdowns and sliders in
front of it in JupyterLab, and nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero.apps.explorer.view import Point, View, explore
from hetero.errors import HeteroError

if TYPE_CHECKING:
    from hetero.apps.explorer.widgets import Explorer

__all__ = ["Explorer", "Point", "View", "explore"]


def __getattr__(name: str) -> object:
    # ipywidgets is an extra, and views are worth having without it.
    if name != "Explorer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from hetero.apps.explorer.widgets import Explorer
    except ModuleNotFoundError as error:
        raise HeteroError(
            f"The explorer needs {error.name}, which is not installed.",
            resolve="pip install 'hetero[lab]'; explore() gives the same views without it.",
        ) from error
    return Explorer
