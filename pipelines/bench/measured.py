"""What benchmarks have in common: a stopwatch, and results that are shown, recorded, or JSON."""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import psutil

from hetero.display import Column, Shown, Table
from hetero.timings import Timing

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


@dataclass(frozen=True, slots=True, repr=False)
class Times(Measured):
    """One time after the other.

    Attributes
    ----------
    about
        Headings of what is said of each time.
    rows
        What is said of it, and the time.
    """

    title: str
    about: tuple[str, ...]
    rows: tuple[tuple[tuple[object, ...], Timing], ...]
    note: str

    @property
    def timings(self) -> tuple[Timing, ...]:
        """All of them."""
        return tuple(one for _, one in self.rows)

    def table(self) -> Table:
        """One row per time."""
        columns = (*map(Column, self.about), Column("time", "s"), Column("statistic"))
        rows = tuple(
            (*what, one.seconds, f"{one.statistic} of {one.repeats}") for what, one in self.rows
        )
        return Table(self.title, columns, rows, (self.note,))

    def record(self) -> list[dict[str, object]]:
        """The same rows by heading, with the key of each time."""
        return [
            dict(zip(self.about, what, strict=True))
            | {"key": one.key, "seconds": one.seconds, "repeats": one.repeats}
            for what, one in self.rows
        ]
