"""The problem with ratios, and the linear program that the inner loop solves in its place."""

from __future__ import annotations

import island_ratios
import numpy as np
import pytest
from scipy.optimize import minimize

from hetero.planners.rignall import inner
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.workload.lengths import LengthRanges


@pytest.mark.parametrize("seed", range(3))
def test_the_problem_with_ratios_is_solved_globally(seed: int) -> None:
    random = np.random.default_rng(seed)
    rate, share = random.uniform(0.3, 5.0, (2, 3)), random.dirichlet(np.ones(3))
    price = float(random.uniform(0.5, 20.0))
    found = island_ratios.solve(rate, share, price)

    def negative(logits: np.ndarray) -> float:
        x = np.exp(logits - logits.max()).reshape(2, 3)
        served = (rate * x / x.sum(axis=1, keepdims=True)).sum(axis=0)
        total = served.sum()
        return float(price * np.abs(served / total - share).sum() - total)

    local = [
        -minimize(
            negative, random.normal(0, 2, 6), method="Nelder-Mead", options={"maxfev": 2000}
        ).fun
        for _ in range(6)
    ]
    assert found.objective >= max(local) - 1e-6
    # Its own work attains the objective, so it is no bound only.
    with np.errstate(divide="ignore"):
        assert -negative(np.log(np.maximum(found.work, 1e-300)).ravel()) == pytest.approx(
            found.objective, abs=1e-6
        )


@pytest.mark.parametrize("seed", range(3))
def test_where_deviations_cost_enough_the_inner_loop_carries_the_same_load(seed: int) -> None:
    random = np.random.default_rng(seed)
    rate, share = random.uniform(0.3, 5.0, (2, 3)), random.dirichlet(np.ones(3))
    found = island_ratios.solve(rate, share, 1e6)
    assert found.deviation == pytest.approx(0.0, abs=1e-9)
    # Two islands that can only decode, and one that prefills whatever comes.
    classes = tuple(IslandClass(gpu, 4) for gpu in "abc")
    edges = np.arange(4)
    ranges = LengthRanges(edges[:-1], edges[1:], edges[:-1], share)
    prefill, decode = np.zeros((3, 3)), np.zeros((3, 3))
    prefill[2], decode[:2] = 1e3, rate
    table = RateTable(classes, ranges, prefill, decode)
    served = inner.solve(table, dict.fromkeys(classes, 1)).served_rps
    assert served == pytest.approx(found.total_rps, rel=1e-6)
