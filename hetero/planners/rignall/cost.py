"""What islands cost: the most throughput of each budget, and the cheapest GPUs for a load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.planners.rignall.assignment import Assignment, Inventory, gpus_used
from hetero.planners.rignall.exact import GAP, assigned, solve_program, usable
from hetero.planners.rignall.rates import PHASES, RateTable
from hetero.programs import SolverLimits

Prices = Mapping[str, float]
"""Price of a GPU of each type [$/h]."""


def check_prices(rates: RateTable, prices: Prices, inventory: Inventory) -> dict[str, float]:
    """The price of each type of an inventory."""
    for gpu in inventory:
        price = prices.get(gpu)
        require(
            price is not None and 0 < price < np.inf,
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

        def cost(plan: Assignment) -> float:
            return cost_usd_per_h(plan, self.prices)

        def gpus(plan: Assignment) -> str:
            return ", ".join(f"{n} {gpu}" for gpu, n in gpus_used(plan.layout).items())

        columns = (
            Column("cost", "$/h", of=cost),
            Column("load", "requests/s", of="served_rps"),
            Column("bound", "requests/s"),
            Column(
                "price",
                "$ per million requests",
                of=lambda plan: cost(plan) / (3.6e-3 * plan.served_rps),
            ),
            Column("GPUs", of=gpus),
            Column("status"),
        )
        return Table.of("Plans by budget", columns, self.plans)


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
        require(
            budget > 0, f"A budget of {budget} $/h buys nothing.", resolve="give budgets above 0."
        )
        found = solve_program(
            rates,
            held,
            limits or SolverLimits(gap=GAP),
            usd_per_gpu_h=price,
            budget_usd_per_h=budget,
        )
        if found.load_rps <= 1e-9:
            continue
        plan = assigned(rates, found, f"exact within {budget:g} $/h")
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
        note = (
            f"{self.usd_per_h:,.4g} $/h for {self.load_rps:g} requests/s; no purchase costs less "
            f"than {self.bound_usd_per_h:,.4g} $/h."
        )
        rows = tuple(gpus_used(self.plan.layout).items())
        return Table("The cheapest GPUs", (Column("GPU"), Column("count")), rows, (note,))


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
    InfeasibleError
        If what is on offer cannot carry the load.
    """
    require(0 < load_rps < np.inf, f"A load of {load_rps} requests/s.", resolve="give one above 0.")
    offer = (
        dict(most) if most is not None else {gpu: _ample(rates, gpu, load_rps) for gpu in prices}
    )
    rates, held = usable(rates, offer, minimum=minimum, sizes=sizes)
    price = check_prices(rates, prices, held)
    try:
        found = solve_program(
            rates, held, limits or SolverLimits(gap=1e-3), load_rps=load_rps, usd_per_gpu_h=price
        )
    except InfeasibleError as error:
        named = ", ".join(f"{count} {gpu}" for gpu, count in held.items())
        raise InfeasibleError(
            f"{named} cannot carry {load_rps:g} requests/s.",
            resolve="offer more GPUs or types, or lower the load.",
        ) from error
    plan = assigned(rates, replace(found, bound=0.0), f"cheapest for {load_rps:g}")
    return Purchase(plan, load_rps, cost_usd_per_h(plan, price), -found.bound)


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
