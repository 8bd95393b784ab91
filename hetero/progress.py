"""Progress of long work, shown to people only: in a terminal or below a notebook's cell."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_COLUMNS = 88  # of a bar below a cell, whose width is not known here


@contextmanager
def progress(
    total: int, label: str, *, unit: str = "requests", show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar that is gone when the work is done; yields what to call with each advance.

    In a terminal it is a line on stderr. In a notebook it is an output of its own, of which an
    empty one is left, the same in every run; stderr would leave a coloured box of blanks.

    Parameters
    ----------
    show
        By default only where stderr is a terminal, so that logs and pipelines stay clean. A
        notebook passes whether it runs by hand.

    Examples
    --------
    >>> with progress(10, "routing") as advance:
    ...     advance(10)
    """
    shown = sys.stderr.isatty() if show is None else show
    shell = _kernel() if shown else None
    below: dict[str, Any] = {"file": _Output(), "ncols": _COLUMNS} if shell is not None else {}
    with tqdm(
        total=total,
        desc=label,
        unit=f" {unit}",
        unit_scale=True,
        leave=False,
        disable=not shown,
        **below,
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


def _kernel() -> Any:
    """The shell of a Jupyter kernel, None anywhere else; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


class _Output:
    """A file whose one line is an output below the cell that runs."""

    def __init__(self) -> None:
        from IPython.display import display

        self._line = ""
        show: Any = display  # untyped
        self._handle = show({"text/html": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Show the last thing written; blanks clear the output."""
        line = text.strip("\r\n ")
        if line != self._line:
            self._line = line
            body = f"<pre>{html.escape(line)}</pre>" if line else ""
            self._handle.update({"text/html": body}, raw=True)

    def flush(self) -> None:
        """Nothing is held back."""
