"""Which islands prefill, which decode, and how much of each range of lengths each serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase, RateTable
from hetero.programs import Status

Layout: TypeAlias = Mapping[IslandClass, int]
"""How many islands there are of each class."""

Inventory: TypeAlias = Mapping[str, int]
"""How many GPUs there are of each type."""


def gpus_used(layout: Layout) -> dict[str, int]:
    """GPUs of each type that a layout takes.

    Examples
    --------
    >>> gpus_used({IslandClass("H20", 8): 2, IslandClass("H20", 4): 1})
    {'H20': 20}
    """
    used: Counter[str] = Counter()
    for island, count in layout.items():
        used[island.gpu] += island.size * count
    return dict(used)


def check_inventory(inventory: Inventory) -> dict[str, int]:
    """The inventory without types of which there is no GPU."""
    for gpu, count in inventory.items():
        require(
            int(count) == count and count >= 0,
            f"An inventory of {count} {gpu} GPUs does not exist.",
            resolve="give whole numbers of 0 or more.",
        )
    held = {gpu: int(count) for gpu, count in inventory.items() if count}
    require(bool(held), "The inventory holds no GPU.", resolve="give a type with a count.")
    return held


@dataclass(frozen=True, slots=True)
class Layouts:
    """The best layout per phase, its load and the proof.

    Attributes
    ----------
    prefill, decode
        Number of islands by row of the rate table.
    bound
        Of the objective that was asked for: a load [requests/s], or minus a price [$/h].
    """

    prefill: dict[int, int]
    decode: dict[int, int]
    load_rps: float
    bound: float
    status: Status


@dataclass(frozen=True, slots=True, eq=False)
class IslandGroup:
    """Islands of one class and phase that share their work equally.

    Attributes
    ----------
    island
        Class of each of them.
    phase
        What they do.
    count
        Number of islands.
    share
        Shape (J,); part of each island's time given to each range, adding up to at most 1.
    """

    island: IslandClass
    phase: Phase
    count: int
    share: Floats


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Assignment(Shown):
    r"""Islands with their phase and work, what they deliver, and how good that provably is.

    Attributes
    ----------
    rates
        Rates of the island classes on the ranges.
    groups
        Islands with their phase and their time per range.
    form
        The program that gave them.
    objective, bound
        The program's objective at this assignment, and the value no assignment exceeds.
    status
        ``optimal`` if the gap was closed, ``limit`` if a limit of the solver came first.
    """

    rates: RateTable
    groups: tuple[IslandGroup, ...]
    form: str
    objective: float
    bound: float
    status: Status

    @property
    def gap(self) -> float:
        """Relative distance between the objective and its bound."""
        return max(0.0, self.bound - self.objective) / max(abs(self.objective), 1e-12)

    @property
    def layout(self) -> dict[IslandClass, int]:
        """How many islands there are of each class."""
        found: Counter[IslandClass] = Counter()
        for group in self.groups:
            found[group.island] += group.count
        return dict(found)

    def of(self, phase: Phase) -> tuple[IslandGroup, ...]:
        """Groups of one phase."""
        return tuple(group for group in self.groups if group.phase == phase)

    def flow_rps(self, phase: Phase) -> Floats:
        r"""What each group of a phase serves of each range, shape (groups, J) [requests/s].

        :math:`n\, b_{cj}\, x_j` for n islands of class c that give the share x of their time.
        """
        groups = self.of(phase)
        if not groups:
            return np.zeros((0, len(self.rates.share)))
        rows = [self.rates.index(g.island.gpu, g.island.size) for g in groups]
        work = np.array([g.count * g.share for g in groups])
        return np.asarray(self.rates.rps(phase)[rows] * work)

    def rate_rps(self, phase: Phase) -> Floats:
        """Rate R_j of each range in one phase, shape (J,) [requests/s]."""
        return np.asarray(self.flow_rps(phase).sum(axis=0))

    @property
    def throughput_rps(self) -> float:
        """R_total: the smaller of the rates of both phases (section 4.4.1) [requests/s].

        Source: Rignall, section 4.4.1: overall throughput, the smaller of both phases; R_overall.
        """
        return float(min(self.rate_rps("prefill").sum(), self.rate_rps("decode").sum()))

    @property
    def expected_rps(self) -> float:
        r"""R_total as printed: the smaller phase of rates weighted by shares [requests/s].

        :math:`\min_{phase} \sum_i \sum_r x_i(r)\, R_i(s_r)\, p_r`. No load of requests: it grows
        with the width of the ranges, at one range to ``throughput_rps``.

        Source: Rignall, sections 4.4.2, 4.6.3, 5.2.2: expected throughput under a workload; E[R].
        """
        share = self.rates.share
        return min(float(self.rate_rps(phase) @ share) for phase in PHASES)

    @property
    def served_rps(self) -> float:
        r"""Largest load of exactly this mix of lengths that both phases carry [requests/s].

        :math:`\min_j \min(R_j^{prefill}, R_j^{decode}) / p_j`; never above ``throughput_rps``.
        """
        slower = np.minimum(self.rate_rps("prefill"), self.rate_rps("decode"))
        return float((slower / self.rates.share).min())

    @property
    def deviation_rps(self) -> float:
        r"""D_total [requests/s]: distance from the mix, and of the phases from each other.

        :math:`\sum_j |R_j - p_j R|` of both phases plus
        :math:`\sum_j |R_j^{decode} - R_j^{prefill}|` (section 4.8.1).

        Source: Rignall, section 4.8.1: total deviation; D_total.
        """
        prefill, decode = self.rate_rps("prefill"), self.rate_rps("decode")
        share = self.rates.share
        apart = np.abs(decode - prefill).sum()
        for rate in (prefill, decode):
            apart += np.abs(rate - share * rate.sum()).sum()
        return float(apart)

    def table(self) -> Table:
        """One row per group: islands, phase, the lengths that they serve, use and rate."""
        rows = []
        for phase in PHASES:
            flow = self.flow_rps(phase)
            for group, rate in zip(self.of(phase), flow, strict=True):
                served = np.flatnonzero(rate > 1e-9)
                low = high = None
                if len(served):
                    low = int(self.rates.ranges.start_tokens[served[0]])
                    high = int(self.rates.ranges.end_tokens[served[-1]]) - 1
                name = str(group.island)
                work = 100 * float(group.share.sum())
                rows.append((phase, group.count, name, low, high, work, float(rate.sum())))
        columns = (
            Column("phase"),
            Column("islands"),
            Column("each"),
            Column("from", "tokens"),
            Column("to", "tokens"),
            Column("busy", "%", 3),
            Column("rate", "requests/s"),
        )
        proof = (
            f"objective {self.objective:.6g}, bound {self.bound:.6g} (gap {100 * self.gap:.2g} %), "
            + ("proven" if self.status == "optimal" else "stopped at a limit, not proven optimal")
        )
        notes = (
            f"Throughput {self.throughput_rps:.4g} requests/s, of the given mix "
            f"{self.served_rps:.4g}; deviation {self.deviation_rps:.3g} requests/s.",
            f"Program {self.form}: {proof}.",
            self.rates.reading,
        )
        return Table(
            "Islands and what they serve", columns, tuple(rows), tuple(filter(None, notes))
        )
