from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall.assignment import gpus_used
from hetero.planners.rignall.cost import cheapest, cost_usd_per_h, front
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.links import LinkGraph, Node, largest_islands, pooled
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.planners.rignall.reschedule import reschedule
from hetero.programs import Limits
from hetero.workload.lengths import LengthRanges

TIGHT = Limits(gap=1e-8)
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


def test_rescheduling_keeps_more_the_more_a_change_costs(rates: RateTable) -> None:
    inventory = {"a": 8, "b": 8}
    before = exact(rates, inventory, limits=TIGHT)
    other = LengthRanges(
        rates.ranges.start_tokens,
        rates.ranges.end_tokens,
        rates.ranges.middle_tokens,
        np.array([0.05, 0.15, 0.8]),
    )
    shifted = replace(rates, ranges=other)
    free = reschedule(shifted, inventory, before, limits=TIGHT)
    some = reschedule(shifted, inventory, before, flip_rps=0.1, form_rps=0.2, limits=TIGHT)
    never = reschedule(shifted, inventory, before, flip_rps=1e3, form_rps=1e3, limits=TIGHT)
    assert free.plan.served_rps == pytest.approx(
        exact(shifted, inventory, limits=TIGHT).served_rps, rel=1e-5
    )
    assert free.plan.served_rps >= some.plan.served_rps >= never.plan.served_rps - 1e-9
    assert never.flipped == never.formed == 0
    assert never.kept <= sum(before.layout.values())
    changed = [one.flipped + one.formed for one in (free, some, never)]
    assert changed == sorted(changed, reverse=True)
    # What the changes cost is worth it: no other trade between load and changes is better.
    worth = some.plan.served_rps - 0.1 * some.flipped - 0.2 * some.formed
    assert worth >= never.plan.served_rps - 1e-6
    assert worth >= free.plan.served_rps - 0.1 * free.flipped - 0.2 * free.formed - 1e-6
    # Nothing changes where nothing has changed.
    same = reschedule(rates, inventory, before, flip_rps=0.01, form_rps=0.01, limits=TIGHT)
    assert (same.flipped, same.formed) == (0, 0)
    with pytest.raises(ParameterError, match="no price list"):
        reschedule(rates, inventory, before, flip_rps=2.0, form_rps=1.0)


def test_no_island_crosses_a_slow_link(rates: RateTable) -> None:
    graph = LinkGraph(
        {f"s{k}": Node("a", 2, 300.0) for k in range(3)} | {"t": Node("b", 4, 300.0)},
        {("s0", "s1"): 100.0, ("s1", "s2"): 10.0, ("s0", "t"): 100.0},
    )
    together = graph.pools(50.0)
    assert [(p.gpu, p.count, p.nodes) for p in together] == [
        ("a", 4, ("s0", "s1")),
        ("a", 2, ("s2",)),
        ("b", 4, ("t",)),
    ]
    assert largest_islands(together) == {"a": 4, "b": 4}
    found = exact(*pooled(rates, together), limits=TIGHT)
    apart = exact(*pooled(rates, graph.pools(200.0)), limits=TIGHT)
    whole = exact(rates, {"a": 6, "b": 4}, limits=TIGHT)
    assert apart.served_rps <= found.served_rps + 1e-9
    assert found.served_rps <= whole.served_rps + 1e-9
    assert max(c.size for c in apart.layout if c.gpu.startswith("a")) <= 2
    assert gpus_used(found.layout).get("a s2", 0) <= 2
    with pytest.raises(InfeasibleError, match="No node has a link of 1000"):
        graph.pools(1000.0)
    with pytest.raises(ParameterError, match="'x', which is no node"):
        LinkGraph({"s": Node("a", 2, 300.0)}, {("s", "x"): 1.0})
    with pytest.raises(ParameterError, match="no GPU called 'c'"):
        pooled(rates, LinkGraph({"u": Node("c", 4, 1.0)}, {}).pools(1.0))
    large = rates.select(c for c in rates.classes if c.size == 4)
    with pytest.raises(InfeasibleError, match="Pool s0 has 2 a, fewer than the smallest island, 4"):
        pooled(large, graph.pools(200.0))
    with pytest.raises(ParameterError, match="A node of 0"):
        Node("a", 0, 1.0)
