"""What each class of island serves of each range of input lengths, in requests per second."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.workload.lengths import LengthRanges

Phase: TypeAlias = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, order=True)
class IslandClass:
    """Islands of the same GPU type and the same number of GPUs; interchangeable.

    Examples
    --------
    >>> print(IslandClass("H200", 16))
    16 x H200
    """

    gpu: str
    size: int

    def __post_init__(self) -> None:
        require(
            self.size >= 1,
            f"An island of {self.size} {self.gpu} GPUs does not exist.",
            resolve="give a size of 1 or more.",
        )

    def __str__(self) -> str:
        return f"{self.size} x {self.gpu}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RateTable(Shown):
    r"""Rates of C island classes on J ranges of input lengths.

    An island of class c that gives the share :math:`x_{cj}` of its time to range j serves
    :math:`b_{cj} x_{cj}` requests/s of it (Rignall, section 4.8.1); ``b`` are the rates here.

    Source: Rignall, section 4.4.2: rates of islands on ranges; b_ij.

    Attributes
    ----------
    classes
        The C classes, each once.
    ranges
        The J ranges in rising order, with the length that stands for each and the share
        :math:`p_j > 0` of requests in it; gaps between them hold no request.
    prefill_rps, decode_rps
        Shape (C, J); what one island of the class serves if it serves only that range
        [requests/s]; 0 where it cannot.
    prefill_choice, decode_choice
        Parallelism of each class and phase in words, such as ``"tp8 dp2"``; empty where unknown.
    reading
        Which reading of the thesis the rates rest on, in words.

    Raises
    ------
    InfeasibleError
        If no class can prefill, or decode, some range.

    Examples
    --------
    >>> from hetero.workload.lengths import ranges
    >>> two = ranges([100, 100, 100, 900], 500)
    >>> rates = RateTable((IslandClass("H200", 8), IslandClass("H20", 8)), two,
    ...                   [[9.0, 1.5], [2.0, 0.25]], [[4.0, 3.0], [5.0, 3.5]])
    >>> rates.share.tolist(), rates.index("H20", 8)
    ([0.75, 0.25], 1)
    """

    classes: tuple[IslandClass, ...]
    ranges: LengthRanges
    prefill_rps: Floats
    decode_rps: Floats
    prefill_choice: tuple[str, ...] = ()
    decode_choice: tuple[str, ...] = ()
    reading: str = ""

    def __post_init__(self) -> None:
        count = len(self.classes)
        twice = sorted({c for c in self.classes if self.classes.count(c) > 1})
        require(
            bool(count) and not twice,
            f"Island class {twice[0]} stands twice." if twice else "There is no island class.",
            resolve="name each class of island once.",
        )
        for phase in PHASES:
            rates = np.ascontiguousarray(getattr(self, f"{phase}_rps"), dtype=np.float64)
            rates.setflags(write=False)
            object.__setattr__(self, f"{phase}_rps", rates)
            require(
                rates.shape == (count, len(self.ranges)),
                f"The {phase} rates have shape {rates.shape} for {count} classes and "
                f"{len(self.ranges)} ranges.",
                resolve="give one row per class and one column per range.",
            )
            for row, column in np.argwhere(~(np.isfinite(rates) & (rates >= 0))):
                raise ParameterError(
                    f"{self.classes[row]} has a {phase} rate of {rates[row, column]} requests/s "
                    f"on {self.named(int(column))}.",
                    resolve="give 0 where an island cannot serve a range.",
                )
            choice = getattr(self, f"{phase}_choice")
            require(
                len(choice) in (0, count),
                f"{len(choice)} {phase} choices for {count} classes.",
                resolve="give one per class, or none.",
            )
        self._check_shares()
        for phase in PHASES:
            served = self.rps(phase).max(axis=0) > 0
            if not served.all():
                first = int(np.flatnonzero(~served)[0])
                raise InfeasibleError(
                    f"No island class can {phase} {self.named(first)}"
                    + (f" ({(~served).sum()} such ranges)." if (~served).sum() > 1 else "."),
                    resolve="offer larger islands or GPUs with more memory, or cut the workload "
                    "at a shorter length.",
                )

    def _check_shares(self) -> None:
        share = self.share
        empty = np.flatnonzero(~(share > 0))
        if len(empty):
            raise ParameterError(
                f"The workload has no mass in {self.named(int(empty[0]))}"
                + (f" and {len(empty) - 1} other ranges." if len(empty) > 1 else "."),
                resolve="leave ranges without requests out (rates.occupied), or make them wider.",
            )
        require(
            abs(float(share.sum()) - 1.0) <= 1e-6,
            f"The shares of the ranges add up to {share.sum():.6g}.",
            resolve="give shares of all requests, which add up to 1.",
        )

    @property
    def share(self) -> Floats:
        """Shape (J,); share of requests per range, p_j."""
        return self.ranges.share

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU types, each once, in the order of the classes."""
        return tuple(dict.fromkeys(c.gpu for c in self.classes))

    @property
    def sizes(self) -> Ints:
        """Shape (C,); GPUs of one island of each class."""
        return np.array([c.size for c in self.classes], dtype=np.int64)

    def rps(self, phase: Phase) -> Floats:
        """Rates of a phase, shape (C, J) [requests/s]."""
        return self.prefill_rps if phase == "prefill" else self.decode_rps

    def named(self, j: int) -> str:
        """Range j in words."""
        return f"lengths {self.ranges.start_tokens[j]}-{self.ranges.end_tokens[j] - 1} tokens"

    def index(self, gpu: str, size: int) -> int:
        """Row of the class of ``size`` GPUs of a type."""
        wanted = IslandClass(gpu, size)
        if wanted in self.classes:
            return self.classes.index(wanted)
        if gpu not in self.gpus:
            raise ParameterError(
                f"The rate table has no GPU called '{gpu}'.",
                resolve=f"use {', '.join(self.gpus)}, or tabulate that GPU.",
            )
        sizes = sorted(c.size for c in self.classes if c.gpu == gpu)
        raise ParameterError(
            f"The rate table has no island of {size} {gpu} GPUs.",
            resolve=f"use a size of {', '.join(map(str, sizes))}, or tabulate that size.",
        )

    def select(self, classes: Iterable[IslandClass]) -> RateTable:
        """The same table with these classes only, in this order."""
        rows = [self.index(c.gpu, c.size) for c in classes]
        return replace(
            self,
            classes=tuple(self.classes[k] for k in rows),
            prefill_rps=self.prefill_rps[rows],
            decode_rps=self.decode_rps[rows],
            prefill_choice=tuple(self.prefill_choice[k] for k in rows if self.prefill_choice),
            decode_choice=tuple(self.decode_choice[k] for k in rows if self.decode_choice),
        )

    def alone_rps(self, phase: Phase) -> Floats:
        r"""Rate of one island that serves the whole workload alone, shape (C,) [requests/s].

        :math:`1 / \sum_j p_j / b_{cj}`, the harmonic mean: the time of a mean request decides;
        0 where a range cannot be served.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / (self.share / self.rps(phase)).sum(axis=1))

    def table(self) -> Table:
        """One row per class: parallelism and the rate on the whole workload, per phase."""

        def choice(of: tuple[str, ...]) -> Callable[[int], str]:
            return lambda k: of[k] if of else "-"

        alone = {phase: self.alone_rps(phase) for phase in PHASES}
        each = {phase: alone[phase] / self.sizes for phase in PHASES}
        columns = (
            Column("island", of=lambda k: str(self.classes[k])),
            Column("prefill with", of=choice(self.prefill_choice)),
            Column("prefill", "requests/s", of=lambda k: float(alone["prefill"][k])),
            Column("decode with", of=choice(self.decode_choice)),
            Column("decode", "requests/s", of=lambda k: float(alone["decode"][k])),
            Column("prefill per GPU", "requests/s", 3, lambda k: float(each["prefill"][k])),
            Column("decode per GPU", "requests/s", 3, lambda k: float(each["decode"][k])),
        )
        return Table.of(
            "Island classes",
            columns,
            range(len(self.classes)),
            f"Rates of one island that serves the whole workload of {len(self.ranges)} ranges "
            "alone; 0 where it cannot serve some range.",
            self.reading,
        )


def occupied(ranges: LengthRanges) -> LengthRanges:
    """The ranges that hold requests; the shares still add up to 1.

    Examples
    --------
    >>> from hetero.workload.lengths import ranges
    >>> occupied(ranges([10, 250], 100)).start_tokens.tolist()
    [0, 200]
    """
    held = ranges.share > 0
    return LengthRanges(
        ranges.start_tokens[held],
        ranges.end_tokens[held],
        ranges.middle_tokens[held],
        ranges.share[held] / ranges.share.sum(),
    )
