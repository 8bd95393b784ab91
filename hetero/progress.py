"""Progress of long work: a bar in a terminal or below a notebook's cell, else lines on stderr."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm

EVERY_S = 5.0
"""Between two lines where stderr is a pipe or a file; work that is done sooner prints none [s]."""
_SOON = 0.2  # of that, until the first line of work that nobody asked for
_COLUMNS = 88  # of a bar below a cell, whose width is not known here


class Advance(Protocol):
    """What is called with each advance, and with what is done next."""

    def __call__(self, count: int, what: str = "", /) -> None:
        """Count so much more as done."""


@contextmanager
def progress(
    total: int | None,
    label: str,
    *,
    unit: str = "requests",
    show: bool | None = None,
    soon: bool = False,
) -> Iterator[Advance]:
    """A bar that is gone when the work is done; yields what to call with each advance.

    In a terminal it is a line on stderr. In a notebook it is an output of its own, of which an
    empty one is left, the same in every run; stderr would leave a coloured box of blanks.

    Parameters
    ----------
    total
        How much there is to do; None where that is not known.
    unit
        Of what is counted; empty where what is next says all.
    show
        By default a bar where stderr is a terminal, and where it is a pipe or a file a line every
        :data:`EVERY_S` at most. A notebook passes whether it runs by hand.
    soon
        Whether the first line comes earlier.

    Examples
    --------
    >>> with progress(10, "routing") as advance:
    ...     advance(10)
    """
    shown = sys.stderr.isatty() if show is None else show
    shell = _kernel()
    lines = show is None and not shown and shell is None
    begun = time.monotonic()
    due = begun + EVERY_S * (_SOON if soon else 1.0)
    done = 0
    below: dict[str, Any] = {}
    if shown and shell is not None:
        below = {"file": _Output(), "ncols": _COLUMNS}
    with tqdm(
        total=total,
        desc=label,
        unit=f" {unit}",
        unit_scale=True,
        leave=False,
        disable=not shown,
        bar_format=None if unit else "{desc} [{elapsed}]",
        **below,
    ) as bar:

        def advance(count: int, what: str = "", /) -> None:
            nonlocal done, due
            done += count
            if what and shown:
                bar.set_description(f"{label}: {what}", refresh=False)
            bar.update(count)
            if lines and (now := time.monotonic()) >= due:
                of = "" if total is None else f" of {total:,}"
                counted = f"{done:,}{of} {unit}" if unit else ""
                said = ", ".join(filter(None, (what, counted, f"{now - begun:.0f} s")))
                print(f"{label}: {said}", file=sys.stderr)
                due = now + EVERY_S

        yield advance


def printed(text: str) -> None:
    """Print at once, above the bar where there is one."""
    with tqdm.external_write_mode(sys.stdout):
        print(text, flush=True)


def _kernel() -> Any:
    """The shell of a Jupyter kernel, None anywhere else; IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


def by_hand() -> bool:
    """Whether this is a notebook that a person runs: only then may a cell ask for an answer."""
    return bool(getattr(getattr(_kernel(), "kernel", None), "_allow_stdin", False))


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
