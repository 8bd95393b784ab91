"""Sizes, phases and work of islands in one mixed-integer program, with prices and changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetero.errors import ParameterError
from hetero.planners.rignall.assignment import PHASES, Assignment
from hetero.planners.rignall.rates import IslandClass, Phase, RateTable
from hetero.programs import Ints, Limits, Program, Solution


@dataclass(frozen=True, slots=True)
class Changes:
    """What it costs to leave the islands that stand, as throughput given up for each.

    Attributes
    ----------
    current
        The islands that stand, with their phases.
    flip_rps
        Price of an island that keeps its GPUs and changes its phase [requests/s].
    form_rps
        Price of an island that is formed anew, of a class that stood less often [requests/s].
    """

    current: Assignment
    flip_rps: float
    form_rps: float

    def __post_init__(self) -> None:
        if not 0 <= self.flip_rps <= self.form_rps:
            raise ParameterError(
                f"Changing a phase for {self.flip_rps} and forming an island for {self.form_rps} "
                "requests/s is no price list.",
                resolve="give 0 <= flip_rps <= form_rps: a new island loads weights as well.",
            )

    def standing(self) -> dict[tuple[IslandClass, Phase], int]:
        """Islands that stand by class and phase."""
        found: dict[tuple[IslandClass, Phase], int] = {}
        for group in self.current.groups:
            key = (group.island, group.phase)
            found[key] = found.get(key, 0) + group.count
        return found


@dataclass(frozen=True, slots=True)
class Layouts:
    """Islands by row of the rate table and phase, and the solution they come from."""

    prefill: dict[int, int]
    decode: dict[int, int]
    load_rps: float
    solution: Solution


def solve(
    rates: RateTable,
    inventory: Mapping[str, int],
    limits: Limits,
    *,
    load_rps: float | None = None,
    usd_per_gpu_h: Mapping[str, float] | None = None,
    budget_usd_per_h: float | None = None,
    changes: Changes | None = None,
) -> Layouts:
    r"""Largest load of an inventory, or with ``load_rps`` the cheapest GPUs that carry that load.

    .. math::
        \max R - \text{changes}, \quad \sum_s s\, (n_{ts}^{prefill} + n_{ts}^{decode}) \le I_t,
        \quad \sum_j x_{kj} \le n_k, \quad \sum_k b_{kj} x_{kj} \ge p_j R,
        \quad \sum_t c_t \sum_s s\, n_{ts} \le B

    Parameters
    ----------
    inventory
        GPUs of each type; the most that may be bought where ``load_rps`` is given.
    usd_per_gpu_h
        Price of a GPU of each type [$/h], c.
    budget_usd_per_h
        What all islands may cost [$/h], B.
    changes
        Prices of leaving the islands that stand.
    """
    program = Program()
    load = program.variables(
        1,
        lower=0.0 if load_rps is None else load_rps,
        upper=np.inf if load_rps is None else load_rps,
        objective=1.0 if load_rps is None else 0.0,
    )
    stock = {gpu: program.rows(1, upper=count) for gpu, count in inventory.items()}
    price = dict(usd_per_gpu_h or {})
    money = None
    if budget_usd_per_h is not None:
        money = program.rows(1, upper=budget_usd_per_h)
    columns: dict[tuple[int, Phase], int] = {}
    for phase in PHASES:
        rate = rates.rps(phase)
        serve = program.rows(len(rates.share), lower=0.0)
        program.entries(serve, load, -1.0)
        for k, island in enumerate(rates.classes):
            most = inventory.get(island.gpu, 0) // island.size
            can = np.flatnonzero(rate[k] > 0)
            if not most or not len(can):
                continue
            cost = price.get(island.gpu, 0.0) * island.size
            count = program.variables(
                1, upper=most, integer=True, objective=0.0 if load_rps is None else -cost
            )
            program.entries(stock[island.gpu], count, island.size)
            if money is not None:
                program.entries(money, count, cost)
            work = program.variables(len(can))
            capacity = program.rows(1, upper=0.0)
            program.entries(capacity, work, 1.0)
            program.entries(capacity, count, -1.0)
            program.entries(serve[can], work, rate[k, can] / rates.share[can])
            columns[k, phase] = int(count[0])
    if changes is not None:
        _price_changes(program, rates, columns, changes)
    found = program.solve(limits, names="the layout of islands")
    islands: dict[Phase, dict[int, int]] = {"prefill": {}, "decode": {}}
    for (k, phase), column in columns.items():
        if round(found.values[column]):
            islands[phase][k] = round(found.values[column])
    return Layouts(islands["prefill"], islands["decode"], float(found.values[load[0]]), found)


def _price_changes(
    program: Program, rates: RateTable, columns: dict[tuple[int, Phase], int], changes: Changes
) -> None:
    """N = kept + flipped + formed per class and phase; kept and flipped come from what stands."""
    standing = changes.standing()
    classes = sorted({k for k, _ in columns})
    for k in classes:
        island = rates.classes[k]
        left: dict[Phase, Ints] = {}
        for phase in PHASES:
            # Kept in this phase, or flipped to the other one: together no more than stand.
            left[phase] = program.rows(1, upper=standing.get((island, phase), 0))
        for phase in PHASES:
            if (k, phase) not in columns:
                continue
            other: Phase = "decode" if phase == "prefill" else "prefill"
            kept = program.variables(1)
            flipped = program.variables(1, objective=-changes.flip_rps)
            formed = program.variables(1, objective=-changes.form_rps)
            row = program.rows(1, lower=0.0, upper=0.0)
            program.entries(row, columns[k, phase], 1.0)
            for part in (kept, flipped, formed):
                program.entries(row, part, -1.0)
            program.entries(left[phase], kept, 1.0)
            program.entries(left[other], flipped, 1.0)
