r"""The best layout by splitting every GPU type between the phases, with a proven bound.

Let a say how many GPUs of each type prefill, the rest decode, and let P(a), D(a) be the largest
loads that the best islands of those GPUs carry in each phase. The best layout carries
:math:`\max_a \min(P(a), D(a))`. For any weights w >= 0 of the ranges that add up to 1, duality
gives

.. math::
    P(a) \le \sum_t K_t(a_t; w), \qquad
    K_t(m; w) = \max \Big\{ \sum_s n_s \max_j \frac{w_j b_{tsj}}{p_j} :
    \sum_s s\, n_s \le m,\; n \in \mathbb{N} \Big\},

a knapsack per type, solved for all m at once. So one set of weights bounds P on the whole grid of
splits. Weights come from column generation over the partitions of a type's GPUs into islands.
The split with the largest bound is refined until no split's bound lies above the best layout.
The integer program over all classes at once, see :mod:`~hetero.planners.rignall.exact`,
has the same optimum but a weaker bound: its relaxation mixes splits, and fractions of islands.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.planners.rignall.assignment import Layouts
from hetero.planners.rignall.rates import Phase, RateTable
from hetero.programs import Program, SolverError, SolverLimits

Split = tuple[int, ...]
Partition = tuple[tuple[int, int], ...]
"""Islands of one type: (row of the class among those of the type, count)."""

CELLS = 4_000_000  # splits beyond which the grid takes too much memory
_TOLERANCE = 1e-5  # relative gap at which column generation ends
_PROGRESS = 1e-4  # smaller gains of new cuts are not waited for


def units(rates: RateTable, inventory: dict[str, int]) -> dict[str, int]:
    """GPUs that a type can be divided by: the greatest common divisor of its sizes."""
    return {
        gpu: math.gcd(*(c.size for c in rates.classes if c.gpu == gpu and c.size <= count))
        for gpu, count in inventory.items()
    }


def cells(rates: RateTable, inventory: dict[str, int]) -> int:
    """Number of splits of an inventory."""
    unit = units(rates, inventory)
    return math.prod(count // unit[gpu] + 1 for gpu, count in inventory.items())


def solve(rates: RateTable, inventory: dict[str, int], limits: SolverLimits) -> Layouts:
    """The layout with the largest load; ``limits.nodes`` counts splits that are looked at.

    Every type of the inventory must have a class that fits it.

    Raises
    ------
    SolverError
        If a limit came before any layout that serves all ranges.
    """
    unit = units(rates, inventory)
    held = tuple(count // unit[gpu] for gpu, count in inventory.items())
    prefill = _Side(rates, "prefill", tuple(inventory), unit, held)
    decode = _Side(rates, "decode", tuple(inventory), unit, held)
    turned = (slice(None, None, -1),) * len(held)
    best: tuple[float, dict[int, int], dict[int, int]] = (0.0, {}, {})
    began, looked = time.monotonic(), 0
    while True:
        either = np.minimum(prefill.bound, decode.bound[turned])
        here = tuple(int(k) for k in np.unravel_index(np.argmax(either), either.shape))
        bound = float(either[here])
        enough = best[0] * (1.0 + limits.gap)
        if bound <= enough:
            return Layouts(best[1], best[2], best[0], max(bound, best[0]), "optimal")
        stopped = limits.nodes is not None and looked >= limits.nodes
        if limits.seconds is not None and time.monotonic() - began > limits.seconds:
            stopped = True
        if stopped and best[0] <= 0:
            raise SolverError(
                f"No layout was found in the {looked} splits that the limit allows.",
                resolve="raise the limit, or check that the inventory can serve the workload.",
            )
        if stopped:
            return Layouts(best[1], best[2], best[0], bound, "limit")
        looked += 1
        there = tuple(n - k for n, k in zip(held, here, strict=True))
        sides = [(prefill, here), (decode, there)]
        parts = [side.rounded(at) for side, at in sides]
        load = min(value for value, _ in parts)
        if load > best[0]:
            best = (load, parts[0][1], parts[1][1])
        refined = min(side.bound[at] for side, at in sides)
        if refined <= best[0] * (1.0 + limits.gap) or refined < bound * (1.0 - _PROGRESS):
            continue
        # The cuts are exhausted here: what is left is the integrality of partitions.
        for side, at in sorted(sides, key=lambda one: one[0].value(one[1])):
            if side.settle(at, best[0], limits.gap / 4) <= best[0] * (1.0 + limits.gap):
                break
        else:
            whole = [side.settled[at] for side, at in sides]
            load = min(value for value, _ in whole)
            if load > best[0]:
                best = (load, whole[0][1], whole[1][1])


@dataclass(slots=True)
class _Side:
    """One phase: bounds of its load on every split, and layouts that attain them."""

    rates: RateTable
    phase: Phase
    gpus: tuple[str, ...]
    unit: dict[str, int]
    held: Split
    bound: Floats = field(init=False)
    rows: list[Ints] = field(init=False)
    sizes: list[Ints] = field(init=False)
    gain: list[Floats] = field(init=False)
    known: list[list[Partition]] = field(init=False)
    refined: dict[Split, tuple[float, list[Partition], Floats]] = field(default_factory=dict)
    settled: dict[Split, tuple[float, dict[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rate = self.rates.rps(self.phase)
        self.bound = np.full([n + 1 for n in self.held], np.inf)
        self.rows, self.sizes, self.gain = [], [], []
        for gpu, most in zip(self.gpus, self.held, strict=True):
            unit = self.unit[gpu]
            fitting = [
                (c.size // unit, k)
                for k, c in enumerate(self.rates.classes)
                if c.gpu == gpu and c.size // unit <= most and rate[k].max() > 0
            ]
            fitting.sort()
            self.sizes.append(np.array([s for s, _ in fitting], np.int64))
            self.rows.append(np.array([k for _, k in fitting], np.int64))
            self.gain.append(rate[self.rows[-1]] / self.rates.share)
        self.known = [[()] for _ in self.gpus]

    def value(self, at: Split) -> float:
        """Load of the relaxation over partitions at a split."""
        return self.refined[at][0]

    def rounded(self, at: Split) -> tuple[float, dict[int, int]]:
        """Refine the bound at a split; the islands of the best partitions, and their load."""
        if at not in self.refined:
            self.refined[at] = self._refine(at)
        parts = self.refined[at][1]
        islands = {int(self.rows[t][k]): count for t, part in enumerate(parts) for k, count in part}
        work = [(t, k, float(count)) for t, part in enumerate(parts) for k, count in part]
        if not work:
            return 0.0, {}
        program = Program()
        serve = self._load(program)
        for t, k, count in work:
            self._work(program, serve, t, k, program.rows(1, upper=count))
        return program.solve().objective, islands

    def settle(self, at: Split, worth: float, gap: float) -> float:
        """The integer optimum at a split, as far as it exceeds ``worth``; returns its bound."""
        if at not in self.settled:
            program = Program()
            serve = self._load(program)
            weights = self.refined[at][2]
            tables = [self._knapsack(t, weights) for t in range(len(self.gpus))]
            whole = sum(float(table[m]) for (table, _, _), m in zip(tables, at, strict=True))
            columns: list[tuple[int, int]] = []
            for t, (table, _, value) in enumerate(tables):
                row = program.rows(1, upper=at[t])
                for k, size in enumerate(self.sizes[t]):
                    if size > at[t]:
                        break
                    # With one such island in it, no layout is bounded above what is known.
                    if whole - table[at[t]] + table[at[t] - size] + value[k] < worth:
                        continue
                    count = program.variables(1, upper=at[t] // size, integer=True)
                    program.entries(row, count, size)
                    capacity = program.rows(1, upper=0.0)
                    program.entries(capacity, count, -1.0)
                    self._work(program, serve, t, k, capacity)
                    columns.append((int(self.rows[t][k]), int(count[0])))
            if not columns:
                self.settled[at] = (0.0, {})
                bound = worth
            else:
                found = program.solve(
                    SolverLimits(gap=gap), names=f"the {self.phase} side of a split"
                )
                chosen = {row: round(found.values[column]) for row, column in columns}
                self.settled[at] = (found.objective, {r: n for r, n in chosen.items() if n})
                bound = max(found.bound, worth)
            # Fewer GPUs cannot do more.
            below = tuple(slice(0, n + 1) for n in at)
            np.minimum(self.bound[below], bound, out=self.bound[below])
        return float(self.bound[at])

    def _load(self, program: Program) -> Ints:
        """The load R, and a row per range that asks for p_j R."""
        load = program.variables(1, objective=1.0)
        serve = program.rows(len(self.rates.share), lower=0.0)
        program.entries(serve, load, -1.0)
        return serve

    def _work(self, program: Program, serve: Ints, t: int, k: int, capacity: Ints) -> None:
        """Time per range of the islands of a class, within a capacity."""
        gain = self.gain[t][k]
        can = np.flatnonzero(gain > 0)
        x = program.variables(len(can))
        program.entries(capacity, x, 1.0)
        program.entries(serve[can], x, gain[can])

    def _knapsack(self, t: int, weights: Floats) -> tuple[Floats, Ints, Floats]:
        """K_t(m) for all m, the class taken last at each m (-1: none), and values of classes."""
        most, sizes = self.held[t], self.sizes[t]
        value = (self.gain[t] * weights).max(axis=1) if len(sizes) else np.zeros(0)
        table, last = np.zeros(most + 1), np.full(most + 1, -1, np.int64)
        fits = np.searchsorted(sizes, np.arange(most + 1), side="right")
        for m in range(1, most + 1):
            table[m] = table[m - 1]
            if fits[m]:
                taken = table[m - sizes[: fits[m]]] + value[: fits[m]]
                k = int(taken.argmax())
                if taken[k] > table[m]:
                    table[m], last[m] = taken[k], k
        return table, last, value

    def _cut(self, weights: Floats) -> list[tuple[Floats, Ints, Floats]]:
        """Bound every split by one set of weights."""
        tables = [self._knapsack(t, weights) for t in range(len(self.gpus))]
        total = np.zeros(1)
        for t, (table, _, _) in enumerate(tables):
            shape = [1] * len(self.gpus)
            shape[t] = -1
            total = total + table.reshape(shape)
        np.minimum(self.bound, total, out=self.bound)
        return tables

    def _partition(self, t: int, last: Ints, m: int) -> Partition:
        counts: dict[int, int] = {}
        while m > 0:
            k = int(last[m])
            if k < 0:
                m -= 1
            else:
                counts[k] = counts.get(k, 0) + 1
                m -= int(self.sizes[t][k])
        return tuple(sorted(counts.items()))

    def _fits(self, t: int, part: Partition, m: int) -> bool:
        return sum(int(self.sizes[t][k]) * count for k, count in part) <= m

    def _refine(self, at: Split) -> tuple[float, list[Partition], Floats]:
        """Column generation over partitions at a split: its load, best partitions, weights."""
        count = len(self.rates.share)
        weights, value = np.full(count, 1.0 / count), -1.0
        parts = [[p for p in self.known[t] if self._fits(t, p, at[t])] for t in range(len(at))]
        chosen: list[Partition] = [() for _ in at]
        while True:
            tables = self._cut(weights)
            bound = sum(float(table[m]) for (table, _, _), m in zip(tables, at, strict=True))
            fresh = False
            for t, (_, last, _) in enumerate(tables):
                part = self._partition(t, last, at[t])
                if part not in parts[t]:
                    parts[t].append(part)
                    self.known[t].append(part)
                    fresh = True
            if value >= 0 and (bound <= value * (1.0 + _TOLERANCE) or not fresh):
                return value, chosen, weights
            program = Program()
            serve = self._load(program)
            mix: list[Ints] = []
            for t, known in enumerate(parts):
                taken = program.variables(len(known))
                program.entries(program.rows(1, upper=1.0), taken, 1.0)
                for k in sorted({k for part in known for k, _ in part}):
                    capacity = program.rows(1, upper=0.0)
                    islands = [float(dict(part).get(k, 0)) for part in known]
                    program.entries(capacity, taken, -np.array(islands))
                    self._work(program, serve, t, k, capacity)
                mix.append(taken)
            found = program.solve(names="the mix of partitions")
            value = found.objective
            duals = np.abs(found.duals[serve])
            weights = duals / duals.sum() if duals.sum() > 0 else weights
            chosen = [
                known[int(np.argmax(found.values[taken]))]
                for known, taken in zip(parts, mix, strict=True)
            ]
