from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import ParameterError
from hetero.planners.islands.evaluator import evaluate
from hetero.planners.islands.inner import solve
from hetero.planners.islands.model import IslandModel
from hetero.planners.islands.parallelism import READINGS
from hetero.planners.islands.rates import IslandClass, occupied
from hetero.workload.lengths import ranges
from hetero.workload.synthetic import TruncatedNormal

LENGTHS = TruncatedNormal(500, 2000, 0, 7999)
LAYOUT = {IslandClass("B300-SXM", 16): 3, IslandClass("H200-SXM", 8): 2, IslandClass("H20", 32): 1}


def made(width: int) -> IslandModel:
    return IslandModel.of(
        LENGTHS,
        width,
        limit_tokens=8000,
        output_tokens=100,
        max_output_tokens=1000,
        reading=READINGS["thesis"],
    )


@pytest.mark.parametrize("form", ["aggregated", "flow aggregated"])
def test_every_length_by_hand(form: str) -> None:
    model = made(2000)
    plan = solve(model.rates(LAYOUT), LAYOUT, form)  # type: ignore[arg-type]
    single = model.on(occupied(ranges(LENGTHS, 1, limit_tokens=8000))).rates(LAYOUT)
    found = evaluate(plan, single)
    assert len(found.ranges) == 8000
    p = LENGTHS.probabilities()
    for phase in ("prefill", "decode"):
        groups = plan.of(phase)  # type: ignore[arg-type]
        for s in (0, 1, 1999, 2000, 5432, 7999):
            j = s // 2000
            weight = p[s] / p[2000 * j : 2000 * (j + 1)].sum()
            rates = [
                single.rps(phase)[single.index(g.island.gpu, g.island.size), s]  # type: ignore[arg-type]
                for g in groups
            ]
            by_hand = sum(g.count * g.share[j] * b for g, b in zip(groups, rates, strict=True))
            assert found.evaluated_rps[phase][s] == pytest.approx(by_hand * weight)  # type: ignore[index]
        np.testing.assert_allclose(
            np.bincount(found.range_of, found.model_rps[phase]),  # type: ignore[index]
            plan.rate_rps(phase),  # type: ignore[arg-type]
        )
        # One island at a time: its share of the time over the mean time of a request.
        j = 1
        inside = found.range_of == j
        weight = p[inside] / p[inside].sum()
        total = 0.0
        for g in groups:
            rate = single.rps(phase)[single.index(g.island.gpu, g.island.size), inside]  # type: ignore[arg-type]
            total += g.count * g.share[j] / float((weight / rate).sum())
        assert found.served_rps[phase][j] == pytest.approx(total)  # type: ignore[index]
        # The mean of times is never faster than the mean of rates.
        evaluated = np.bincount(found.range_of, found.evaluated_rps[phase])  # type: ignore[index]
        assert (found.served_rps[phase] <= evaluated * (1 + 1e-9)).all()  # type: ignore[index]


def test_at_the_resolution_of_the_plan_nothing_changes() -> None:
    rates = made(1000).rates(LAYOUT)
    plan = solve(rates, LAYOUT)
    found = evaluate(plan, rates)
    for phase in ("prefill", "decode"):
        np.testing.assert_allclose(found.evaluated_rps[phase], found.model_rps[phase])  # type: ignore[index]
        np.testing.assert_allclose(found.served_rps[phase], plan.rate_rps(phase))  # type: ignore[index, arg-type]
    assert "by mean time" in str(found)


def test_lengths_outside_the_plan_are_named() -> None:
    model = made(1000)
    plan = solve(model.rates(LAYOUT), LAYOUT)
    across = model.on(occupied(ranges(LENGTHS, 1500, limit_tokens=7500 + 500)))
    with pytest.raises(ParameterError, match="Lengths 0-1499 tokens lie in no range of the plan"):
        evaluate(plan, across.rates(LAYOUT))
