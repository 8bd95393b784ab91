"""What benchmarks have in common: a stopwatch, and results that are shown, recorded, or JSON."""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import psutil

from hetero.display import Shown
from hetero.errors import require
from hetero.timings import Timing, record

Say: TypeAlias = Callable[[str], None]
"""Called with the name of what is measured next."""


def silent(_: str) -> None:
    """Say nothing."""


@contextmanager
def stopwatch(spent: list[float], clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Add to ``spent`` what the block takes [s]; nothing where it raises."""
    began = clock()
    yield
    spent.append(clock() - began)


def cpu_s(*processes: psutil.Process) -> float:
    """CPU time that processes have taken so far [s]."""
    if sys.platform != "linux":
        return sum(float(t.user + t.system) for t in (one.cpu_times() for one in processes))
    # By the clock of a process, in nanoseconds: psutil reads ticks.
    return sum(time.clock_gettime(~one.pid << 3 | 2) for one in processes)


class Measured(Shown):
    """What a benchmark measured."""

    __slots__ = ()

    @abstractmethod
    def record(self) -> object:
        """The same as JSON values."""

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Times that ``--record`` keeps."""
        return ()

    def keep(self) -> None:
        """Write what ``--record`` keeps."""
        require(
            bool(self.timings),
            "No notebook cites what this measures, so there is nothing to record.",
            resolve="leave out --record.",
        )
        record(self.timings)
