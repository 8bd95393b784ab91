"""The best layout of an inventory into islands: sizes, phases and work, with a proven bound."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from hetero.errors import InfeasibleError, require
from hetero.planners.rignall import exact_splits, inner
from hetero.planners.rignall.assignment import Assignment, Inventory, Layouts, check_inventory
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase, RateTable
from hetero.programs import Program, SolverLimits

Method: TypeAlias = Literal["auto", "splits", "program"]

GAP = 1e-4  # relative distance to the bound at which a layout counts as proven


def exact(
    rates: RateTable,
    inventory: Inventory,
    *,
    minimum: int = 1,
    pairs: bool = False,
    sizes: Collection[int] | None = None,
    method: Method = "auto",
    limits: SolverLimits | None = None,
) -> Assignment:
    """The layout, phases and work that carry the largest load of the given mix of lengths.

    Parameters
    ----------
    minimum
        Smallest island [GPUs].
    pairs
        Whether GPUs come in pairs, as clouds rent them: only even sizes.
    sizes
        Sizes that may be used, such as powers of two or the GPUs of a node; by default every
        size in the rate table.
    method
        ``splits`` searches over the GPUs of each type that prefill, ``program`` is one integer
        program over all classes; both prove the same optimum. By default splits where their grid
        is small enough to hold, which it is for up to three or four types.

    Returns
    -------
    Assignment
        Its ``bound`` is proven: no layout of these sizes carries more.

    Raises
    ------
    InfeasibleError
        If no island fits the inventory, or the inventory cannot serve the workload in both
        phases.

    Examples
    --------
    >>> from hetero.workload.lengths import ranges
    >>> rates = RateTable((IslandClass("H20", 2), IslandClass("H20", 4)),
    ...                   ranges([100, 100, 100, 900], 500),
    ...                   [[4.0, 1.0], [8.5, 2.5]], [[9.0, 6.0], [18.0, 13.0]])
    >>> found = exact(rates, {"H20": 10})
    >>> print({str(c): n for c, n in found.layout.items()}, round(found.served_rps, 3))
    {'4 x H20': 2, '2 x H20': 1} 8.0
    """
    require(
        method in get_args(Method),
        f"There is no method called '{method}'.",
        resolve=f"use one of {', '.join(get_args(Method))}.",
    )
    limits = limits or SolverLimits(gap=GAP)
    rates, held = usable(rates, inventory, minimum=minimum, pairs=pairs, sizes=sizes)
    small = exact_splits.cells(rates, held) <= exact_splits.CELLS
    require(
        small or method != "splits",
        f"The inventory has {exact_splits.cells(rates, held):,} splits into phases.",
        resolve="use method 'program', or fewer GPU types or sizes.",
    )
    if small and method != "program":
        found, form, least = exact_splits.solve(rates, held, limits), "exact, splits", 0.0
    else:
        found, form, least = solve_program(rates, held, limits), "exact, program", 1e-9
    if found.load_rps <= least:
        named = ", ".join(f"{count} {gpu}" for gpu, count in held.items())
        raise InfeasibleError(
            f"No layout of {named} serves every range of lengths in both phases.",
            resolve="add GPUs, allow larger islands, or cut the workload at a shorter length.",
        )
    return assigned(rates, found, form)


def usable(
    rates: RateTable,
    inventory: Inventory,
    *,
    minimum: int = 1,
    pairs: bool = False,
    sizes: Collection[int] | None = None,
) -> tuple[RateTable, dict[str, int]]:
    """The classes of the table that the inventory and the rules on sizes allow.

    Raises
    ------
    InfeasibleError
        If a type has too few GPUs for its smallest island, or no size is left.
    """
    held = check_inventory(inventory)
    kept: list[IslandClass] = []
    for gpu, count in held.items():
        if gpu not in rates.gpus:
            rates.index(gpu, 1)  # raises, naming the GPUs that there are
        allowed = [
            c
            for c in rates.classes
            if c.gpu == gpu
            and c.size >= minimum
            and not (pairs and c.size % 2)
            and (sizes is None or c.size in sizes)
        ]
        if not allowed:
            raise InfeasibleError(
                f"No size of {gpu} islands is allowed: minimum {minimum}"
                + (", pairs only" if pairs else "")
                + ("" if sizes is None else f", sizes {', '.join(map(str, sorted(sizes)))}")
                + ".",
                resolve="allow a size that the rate table has, or tabulate more.",
            )
        fitting = [c for c in allowed if c.size <= count]
        if not fitting:
            raise InfeasibleError(
                f"{count} {gpu} GPUs are fewer than the smallest island, "
                f"{min(c.size for c in allowed)}.",
                resolve="allow smaller islands, add GPUs of the type, or leave it out.",
            )
        kept += fitting
    return rates.select(kept), held


def assigned(rates: RateTable, found: Layouts, form: str) -> Assignment:
    """The assignment of islands per phase, with their bound."""
    layout = {
        rates.classes[k]: found.prefill.get(k, 0) + found.decode.get(k, 0)
        for k in sorted({*found.prefill, *found.decode})
    }
    phases = {rates.classes[k]: count for k, count in found.decode.items()}
    made = inner.solve(rates, layout, phases=phases)
    return replace(made, form=form, bound=max(found.bound, made.objective), status=found.status)


def solve_program(
    rates: RateTable,
    inventory: Mapping[str, int],
    limits: SolverLimits,
    *,
    load_rps: float | None = None,
    usd_per_gpu_h: Mapping[str, float] | None = None,
    budget_usd_per_h: float | None = None,
) -> Layouts:
    r"""Largest load of an inventory, or with ``load_rps`` the cheapest GPUs that carry that load.

    .. math::
        \max R, \quad \sum_s s\, (n_{ts}^{prefill} + n_{ts}^{decode}) \le I_t,
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
    found = program.solve(limits, names="the layout of islands")
    islands: dict[Phase, dict[int, int]] = {"prefill": {}, "decode": {}}
    for (k, phase), column in columns.items():
        if round(found.values[column]):
            islands[phase][k] = round(found.values[column])
    return Layouts(
        **islands, load_rps=float(found.values[load[0]]), bound=found.bound, status=found.status
    )
