"""The best layout and the cheapest GPUs: against every layout, by hand, and within bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall import inner
from hetero.planners.rignall.assignment import gpus_used
from hetero.planners.rignall.cost import cheapest, cost_usd_per_h, front
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import SolverError, SolverLimits
from hetero.workload.lengths import LengthRanges


def table(seed: int, gpus: int = 2, most: int = 5, width: int = 3) -> RateTable:
    """Rates with noise, so that neither small nor large islands win throughout."""
    random = np.random.default_rng(seed)
    share = random.dirichlet(np.ones(width))
    edges = np.arange(width + 1) * 100
    ranges = LengthRanges(edges[:-1], edges[1:], edges[:-1] + 50, share)
    classes = tuple(IslandClass(f"gpu{g}", s) for g in range(gpus) for s in range(1, most + 1))
    sizes = np.array([c.size for c in classes])[:, None]
    grow = random.choice([0.8, 1.0, 1.2])
    prefill, decode = (
        sizes**grow * random.uniform(0.6, 1.4, (len(classes), width)) for _ in ("p", "d")
    )
    decode[np.flatnonzero(sizes[:, 0] == 1)] = 0.0
    return RateTable(classes, ranges, prefill, decode)


def partitions(total: int, sizes: list[int]) -> Iterator[dict[int, int]]:
    if not sizes:
        yield {}
        return
    for count in range(total // sizes[0] + 1):
        for rest in partitions(total - count * sizes[0], sizes[1:]):
            yield {sizes[0]: count, **rest} if count else rest


def brute_force(rates: RateTable, inventory: dict[str, int], allowed: list[int]) -> float:
    best = 0.0
    choices = [list(partitions(count, allowed)) for count in inventory.values()]
    for parts in itertools.product(*choices):
        layout = {
            IslandClass(gpu, size): count
            for gpu, part in zip(inventory, parts, strict=True)
            for size, count in part.items()
        }
        try:
            found = inner.solve(rates, layout, "flow").objective
        except (InfeasibleError, ParameterError):
            continue
        best = max(best, found)
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["splits", "program"])
def test_brute_force_over_tiny_inventories(seed: int, method: str) -> None:
    rates, inventory = table(seed), {"gpu0": 4, "gpu1": 3}
    found = exact(rates, inventory, method=method, limits=SolverLimits(gap=1e-9))  # type: ignore[arg-type]
    assert found.served_rps == pytest.approx(brute_force(rates, inventory, [1, 2, 3, 4]), rel=1e-6)
    assert found.bound == pytest.approx(found.served_rps, rel=1e-5)
    assert all(used <= inventory[gpu] for gpu, used in gpus_used(found.layout).items())


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), first=st.integers(2, 14), second=st.integers(0, 11))
def test_both_methods_prove_the_same_optimum(seed: int, first: int, second: int) -> None:
    rates = table(seed, most=7)
    inventory = {"gpu0": first, "gpu1": second}
    try:
        one = exact(rates, inventory, method="splits", limits=SolverLimits(gap=1e-7))
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            exact(rates, inventory, method="program")
        return
    other = exact(rates, inventory, method="program", limits=SolverLimits(gap=1e-7))
    assert one.served_rps == pytest.approx(other.served_rps, rel=1e-5)
    assert one.bound >= other.served_rps * (1 - 1e-6)
    assert other.bound >= one.served_rps * (1 - 1e-6)


@pytest.mark.parametrize("method", ["splits", "program"])
def test_rules_on_sizes_hold_and_cost_throughput(method: str) -> None:
    rates, inventory = table(3, most=8), {"gpu0": 12, "gpu1": 8}
    free = exact(rates, inventory, method=method)  # type: ignore[arg-type]
    pairs = exact(rates, inventory, pairs=True, method=method)  # type: ignore[arg-type]
    large = exact(rates, inventory, minimum=3, method=method)  # type: ignore[arg-type]
    powers = exact(rates, inventory, sizes=(2, 4, 8), method=method)  # type: ignore[arg-type]
    assert all(c.size % 2 == 0 for c in pairs.layout)
    assert all(c.size >= 3 for c in large.layout)
    assert all(c.size in (2, 4, 8) for c in powers.layout)
    for ruled in (pairs, large, powers):
        assert ruled.served_rps <= free.bound * (1 + 1e-9)
    assert pairs.served_rps >= powers.served_rps * (1 - 2e-4)
    only = brute_force(rates, {"gpu0": 6}, [3, 5])
    found = exact(rates, {"gpu0": 6}, sizes=(3, 5), method=method)  # type: ignore[arg-type]
    assert found.served_rps == pytest.approx(only, rel=1e-4)


def test_a_limit_is_reported_with_a_bound_that_holds() -> None:
    rates, inventory = table(5, gpus=3, most=12), {"gpu0": 40, "gpu1": 40, "gpu2": 40}
    proven = exact(rates, inventory, limits=SolverLimits(gap=1e-6))
    stopped = exact(rates, inventory, limits=SolverLimits(gap=1e-9, nodes=4))
    assert proven.status == "optimal"
    assert proven.gap <= 1e-6
    assert stopped.status == "limit"
    assert stopped.served_rps <= proven.bound * (1 + 1e-9)
    assert stopped.bound >= proven.served_rps * (1 - 1e-9)
    with pytest.raises(SolverError, match="No layout was found"):
        exact(rates, inventory, limits=SolverLimits(nodes=1))


def test_errors_name_the_cause() -> None:
    rates = table(0)
    with pytest.raises(ParameterError, match="no GPU called 'H1000'"):
        exact(rates, {"H1000": 8})
    with pytest.raises(InfeasibleError, match="1 gpu1 GPUs are fewer than the smallest island, 2"):
        exact(rates, {"gpu0": 8, "gpu1": 1}, minimum=2)
    with pytest.raises(InfeasibleError, match="No size of gpu0 islands is allowed: minimum 6"):
        exact(rates, {"gpu0": 8}, minimum=6)
    with pytest.raises(InfeasibleError, match="serves every range of lengths in both phases"):
        exact(rates, {"gpu0": 2})
    with pytest.raises(InfeasibleError, match="serves every range of lengths in both phases"):
        exact(rates, {"gpu0": 2}, method="program")
    with pytest.raises(ParameterError, match="inventory holds no GPU"):
        exact(rates, {"gpu0": 0})
    with pytest.raises(ParameterError, match="inventory of -1 gpu0"):
        exact(rates, {"gpu0": -1})
    with pytest.raises(ParameterError, match="no method called 'guess'"):
        exact(rates, {"gpu0": 8}, method="guess")  # type: ignore[arg-type]
    many = table(1, gpus=5, most=2)
    with pytest.raises(ParameterError, match="splits into phases"):
        exact(many, dict.fromkeys(many.gpus, 60), method="splits")


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
