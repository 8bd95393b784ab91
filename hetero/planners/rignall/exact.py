"""The best layout of an inventory into islands: sizes, phases and work, with a proven bound."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from hetero.errors import InfeasibleError, require
from hetero.planners.rignall import exact_program, exact_splits, inner
from hetero.planners.rignall.assignment import Assignment, Inventory, Layouts, check_inventory
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import SolverLimits

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
        found, form, least = exact_program.solve(rates, held, limits), "exact, program", 1e-9
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
