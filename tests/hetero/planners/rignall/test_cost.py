from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall.cost import cheapest, cost_usd_per_h, front
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import SolverLimits
from hetero.workload.lengths import LengthRanges

TIGHT = SolverLimits(gap=1e-8)
PRICES = {"a": 1.0, "b": 2.5}


@pytest.fixture(scope="module")
def rates() -> RateTable:
    random = np.random.default_rng(8)
    edges = np.arange(4) * 100
    ranges = LengthRanges(edges[:-1], edges[1:], edges[:-1] + 50, np.array([0.5, 0.3, 0.2]))
    classes = tuple(IslandClass(gpu, size) for gpu in PRICES for size in (1, 2, 4))
    scale = np.array([c.size * PRICES[c.gpu] ** 1.1 for c in classes])[:, None]
    prefill, decode = (scale * random.uniform(0.6, 1.4, (6, 3)) for _ in ("p", "d"))
    return RateTable(classes, ranges, prefill, decode)


def test_front_is_that_of_every_inventory(rates: RateTable) -> None:
    inventory = {"a": 4, "b": 3}
    found = front(rates, inventory, PRICES, [2.0, 5.0, 7.5, 50.0], limits=TIGHT)
    loads = {}
    for a, b in itertools.product(range(5), range(4)):
        try:
            one = exact(rates, {"a": a, "b": b}, limits=TIGHT).served_rps
        except (InfeasibleError, ParameterError):
            continue
        loads[a, b] = one
    budgets = [2.0, 5.0, 7.5, 50.0]
    best = [
        max((r for (a, b), r in loads.items() if a + 2.5 * b <= budget), default=0.0)
        for budget in budgets
    ]
    assert [plan.served_rps for plan in found.plans] == pytest.approx(best, rel=1e-5)
    for plan, budget in zip(found.plans, budgets, strict=True):
        assert cost_usd_per_h(plan, PRICES) <= budget + 1e-9
        assert plan.bound >= plan.served_rps * (1 - 1e-9)
    assert "bound" in str(found)


def test_cheapest_purchase_carries_the_load_and_no_other_costs_less(rates: RateTable) -> None:
    found = cheapest(rates, PRICES, 2.0, limits=TIGHT)
    assert found.plan.served_rps >= 2.0 * (1 - 1e-6)
    assert found.usd_per_h == pytest.approx(found.bound_usd_per_h, rel=1e-5)
    best = np.inf
    for a, b in itertools.product(range(9), range(5)):
        try:
            load = exact(rates, {"a": a, "b": b}, limits=TIGHT).served_rps
        except (InfeasibleError, ParameterError):
            continue
        if load >= 2.0 * (1 - 1e-6):
            best = min(best, a + 2.5 * b)
    assert found.usd_per_h == pytest.approx(best)
    assert found.gap == pytest.approx(0, abs=1e-5)
    # More load never costs less.
    assert cheapest(rates, PRICES, 4.0, limits=TIGHT).usd_per_h >= found.usd_per_h - 1e-9


def test_errors_of_prices_loads_and_budgets(rates: RateTable) -> None:
    with pytest.raises(ParameterError, match="price of b is not given"):
        front(rates, {"a": 4, "b": 2}, {"a": 1.0}, [5.0])
    with pytest.raises(ParameterError, match=r"price of a is 0\.0"):
        front(rates, {"a": 4}, {"a": 0.0}, [5.0])
    with pytest.raises(InfeasibleError, match=r"No budget up to 0\.5"):
        front(rates, {"a": 4}, PRICES, [0.5])
    with pytest.raises(ParameterError, match="budget of 0"):
        front(rates, {"a": 4}, PRICES, [0.0])
    with pytest.raises(ParameterError, match="load of -1"):
        cheapest(rates, PRICES, -1.0)
    with pytest.raises(InfeasibleError, match="cannot carry 1000"):
        cheapest(rates, PRICES, 1000.0, most={"a": 4, "b": 4})
