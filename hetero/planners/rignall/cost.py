"""What islands cost: the most throughput of each budget, and the cheapest GPUs for a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall import exact_program
from hetero.planners.rignall.assignment import PHASES, Assignment, Inventory, gpus_used
from hetero.planners.rignall.exact import GAP, assigned, usable
from hetero.planners.rignall.rates import RateTable
from hetero.programs import SolverLimits

Prices = Mapping[str, float]
"""Price of a GPU of each type [$/h]."""


def check_prices(rates: RateTable, prices: Prices, inventory: Inventory) -> dict[str, float]:
    """The price of each type of an inventory.

    Raises
    ------
    ParameterError
        If a type has none, or it is not above 0.
    """
    for gpu in inventory:
        price = prices.get(gpu)
        if price is None or not 0 < price < np.inf:
            raise ParameterError(
                f"The price of {gpu} is {'not given' if price is None else f'{price} $/h'}.",
                resolve="give a price above 0 [$/h] for each type of the inventory.",
            )
    return {gpu: float(prices[gpu]) for gpu in inventory}


def cost_usd_per_h(assignment: Assignment, prices: Prices) -> float:
    """What the GPUs of all islands cost [$/h]."""
    return sum(prices[gpu] * count for gpu, count in gpus_used(assignment.layout).items())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Front(Shown):
    """Plans of which none is both cheaper and faster than another.

    Attributes
    ----------
    plans
        From the cheapest to the fastest.
    prices
        Price of a GPU of each type [$/h].
    """

    plans: tuple[Assignment, ...]
    prices: dict[str, float]

    def table(self) -> Table:
        """One row per plan."""
        rows = []
        for plan in self.plans:
            cost = cost_usd_per_h(plan, self.prices)
            gpus = ", ".join(f"{n} {gpu}" for gpu, n in gpus_used(plan.layout).items())
            rows.append(
                (
                    cost,
                    plan.served_rps,
                    plan.bound,
                    cost / (3.6e-3 * plan.served_rps),
                    gpus,
                    plan.status,
                )
            )
        columns = (
            Column("cost", "$/h"),
            Column("load", "requests/s"),
            Column("bound", "requests/s"),
            Column("price", "$ per million requests"),
            Column("GPUs"),
            Column("status"),
        )
        return Table("Plans by budget", columns, tuple(rows))


def front(
    rates: RateTable,
    inventory: Inventory,
    prices: Prices,
    budgets_usd_per_h: Sequence[float],
    *,
    minimum: int = 1,
    sizes: Collection[int] | None = None,
    limits: SolverLimits | None = None,
) -> Front:
    """The most throughput of each budget, dominated plans left out.

    Each budget is a program of its own with a proven bound: the front is exact at the budgets
    asked for, up to the gap.

    Raises
    ------
    ParameterError
        If a price is missing or a budget is not above 0.
    InfeasibleError
        If no budget buys islands that serve the workload.

    Examples
    --------
    >>> from hetero.planners.rignall.rates import IslandClass
    >>> from hetero.workload.lengths import ranges
    >>> rates = RateTable((IslandClass("H20", 2), IslandClass("H200", 2)),
    ...                   ranges([100, 100, 100, 900], 500),
    ...                   [[4.0, 1.0], [9.0, 4.0]], [[9.0, 6.0], [10.0, 7.0]])
    >>> found = front(rates, {"H20": 8, "H200": 8}, {"H20": 1.0, "H200": 3.0}, [4, 8, 16])
    >>> [round(plan.served_rps, 2) for plan in found.plans]
    [2.29, 6.86, 13.71]
    """
    rates, held = usable(rates, inventory, minimum=minimum, sizes=sizes)
    price = check_prices(rates, prices, held)
    plans: list[Assignment] = []
    for budget in sorted(budgets_usd_per_h):
        if not budget > 0:
            raise ParameterError(
                f"A budget of {budget} $/h buys nothing.", resolve="give budgets above 0."
            )
        found = exact_program.solve(
            rates,
            held,
            limits or SolverLimits(gap=GAP),
            usd_per_gpu_h=price,
            budget_usd_per_h=budget,
        )
        if found.load_rps <= 1e-9:
            continue
        plan = assigned(
            rates,
            found.prefill,
            found.decode,
            found.solution.bound,
            found.solution.status,
            f"exact within {budget:g} $/h",
        )
        if not plans or plan.served_rps > plans[-1].served_rps * (1.0 + GAP):
            plans.append(plan)
    if not plans:
        raise InfeasibleError(
            f"No budget up to {max(budgets_usd_per_h):g} $/h buys islands that serve every range "
            "in both phases.",
            resolve="raise the budget, or allow smaller islands.",
        )
    return Front(tuple(plans), price)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Purchase(Shown):
    """The cheapest GPUs that carry a load.

    Attributes
    ----------
    plan
        Their islands; it may carry a little more than asked for.
    load_rps
        Load that was asked for [requests/s].
    usd_per_h, bound_usd_per_h
        Cost of the GPUs, and the cost below which no GPUs carry the load [$/h].
    """

    plan: Assignment
    load_rps: float
    usd_per_h: float
    bound_usd_per_h: float

    @property
    def gap(self) -> float:
        """Share of the cost that a better purchase could save at most."""
        return max(0.0, 1.0 - self.bound_usd_per_h / self.usd_per_h)

    def table(self) -> Table:
        """One row per GPU type."""
        rows = tuple((gpu, count) for gpu, count in gpus_used(self.plan.layout).items())
        notes = (
            f"{self.usd_per_h:,.4g} $/h for {self.load_rps:g} requests/s; no purchase costs less "
            f"than {self.bound_usd_per_h:,.4g} $/h.",
        )
        return Table("The cheapest GPUs", (Column("GPU"), Column("count")), rows, notes)


def cheapest(
    rates: RateTable,
    prices: Prices,
    load_rps: float,
    *,
    most: Inventory | None = None,
    minimum: int = 1,
    sizes: Collection[int] | None = None,
    limits: SolverLimits | None = None,
) -> Purchase:
    """The cheapest inventory that carries a load of the given mix of lengths.

    Parameters
    ----------
    prices
        Price of a GPU of each type that may be bought [$/h].
    load_rps
        Load [requests/s].
    most
        The most GPUs of each type on offer; by default as many as are wanted.
    limits
        By default a gap of 0.1 % of the cost.

    Raises
    ------
    ParameterError
        If the load or a price is not above 0.
    InfeasibleError
        If what is on offer cannot carry the load.
    """
    if not 0 < load_rps < np.inf:
        raise ParameterError(f"A load of {load_rps} requests/s.", resolve="give one above 0.")
    offer = (
        dict(most) if most is not None else {gpu: _ample(rates, gpu, load_rps) for gpu in prices}
    )
    rates, held = usable(rates, offer, minimum=minimum, sizes=sizes)
    price = check_prices(rates, prices, held)
    try:
        found = exact_program.solve(
            rates, held, limits or SolverLimits(gap=1e-3), load_rps=load_rps, usd_per_gpu_h=price
        )
    except InfeasibleError as error:
        named = ", ".join(f"{count} {gpu}" for gpu, count in held.items())
        raise InfeasibleError(
            f"{named} cannot carry {load_rps:g} requests/s.",
            resolve="offer more GPUs or types, or lower the load.",
        ) from error
    plan = assigned(
        rates, found.prefill, found.decode, 0.0, found.solution.status, f"cheapest for {load_rps:g}"
    )
    return Purchase(plan, load_rps, cost_usd_per_h(plan, price), -found.solution.bound)


def _ample(rates: RateTable, gpu: str, load_rps: float) -> int:
    """More GPUs of a type than the load can need: islands of one class for each phase alone."""
    rates.index(gpu, next((c.size for c in rates.classes if c.gpu == gpu), 1))
    need, largest = 0, 0
    for k, island in enumerate(rates.classes):
        if island.gpu != gpu:
            continue
        largest = max(largest, island.size)
        for phase in PHASES:
            rate = rates.rps(phase)[k]
            can = rate > 0
            islands = np.ceil((load_rps * rates.share[can] / rate[can]).sum())
            need = max(need, int(islands) * island.size)
    return 2 * need + largest
