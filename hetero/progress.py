"""Progress of long work, shown to people only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress(
    total: int, label: str, *, unit: str = "requests", show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is gone when the work is done; yields what to call with each advance.

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
    with tqdm(
        total=total, desc=label, unit=f" {unit}", unit_scale=True, leave=False, disable=not shown
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
