from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import ParameterError
from hetero.planners.rignall import inner
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.workload.lengths import LengthRanges
from pipelines.studies.island_evaluator import evaluate

CLASSES = (IslandClass("a", 4), IslandClass("b", 4))


def tables(slope: float) -> tuple[RateTable, RateTable]:
    """Rates that fall with the length, on two ranges of three lengths and on the six lengths."""
    start = np.arange(6)
    share = np.array([0.1, 0.2, 0.1, 0.3, 0.2, 0.1])
    rate = 100.0 / (10.0 + slope * start)
    both = np.array([rate, 0.5 * rate])
    fine = RateTable(CLASSES, LengthRanges(start, start + 1, start, share), both, 2 * both)
    wide = LengthRanges(np.array([0, 3]), np.array([3, 6]), np.array([1, 4]), np.array([0.4, 0.6]))
    middle = both[:, [1, 4]]
    return RateTable(CLASSES, wide, middle, 2 * middle), fine


def test_flat_rates_leave_nothing_to_correct() -> None:
    coarse, fine = tables(0.0)
    found = inner.solve(coarse, dict.fromkeys(CLASSES, 2))
    checked = evaluate(found, fine)
    for phase in ("prefill", "decode"):
        assert checked.evaluated_rps[phase] == pytest.approx(checked.model_rps[phase])  # type: ignore[index]
        assert checked.model_rps[phase].sum() == pytest.approx(found.rate_rps(phase).sum())  # type: ignore[arg-type,index]
    assert checked.served_rps == pytest.approx(found.served_rps)
    assert checked.throughput_rps == pytest.approx(found.throughput_rps)


def test_below_the_middle_is_more_and_above_is_less() -> None:
    coarse, fine = tables(2.0)
    checked = evaluate(inner.solve(coarse, dict.fromkeys(CLASSES, 2)), fine)
    for phase in ("prefill", "decode"):
        more = np.sign(checked.evaluated_rps[phase] - checked.model_rps[phase]).round()  # type: ignore[index]
        gap = checked.evaluated_rps[phase] / checked.model_rps[phase] - 1  # type: ignore[index]
        assert np.all(more[np.abs(gap) > 1e-9] == np.array([1, -1, 1, -1]))
    by_hand = {"prefill": 0.0, "decode": 0.0}
    for phase in by_hand:
        served = np.zeros(2)
        for group in checked.assignment.of(phase):  # type: ignore[arg-type]
            rate = fine.rps(phase)[fine.index(group.island.gpu, 4)]  # type: ignore[arg-type]
            for j, lengths in enumerate((slice(0, 3), slice(3, 6))):
                mix = fine.share[lengths] / fine.share[lengths].sum()
                served[j] += group.count * group.share[j] / (mix / rate[lengths]).sum()
        by_hand[phase] = (served / [0.4, 0.6]).min()
    assert checked.served_rps == pytest.approx(min(by_hand.values()))
    assert "5.2.2" in str(checked)


def test_exact_rates_are_of_single_lengths() -> None:
    coarse, _ = tables(1.0)
    found = inner.solve(coarse, dict.fromkeys(CLASSES, 2))
    with pytest.raises(ParameterError, match="several lengths"):
        evaluate(found, coarse)
    with pytest.raises(ParameterError, match="outside the ranges"):
        evaluate(
            found,
            RateTable(
                CLASSES,
                LengthRanges(*(np.array([k]) for k in (9, 10, 9)), np.array([1.0])),
                np.ones((2, 1)),
                np.ones((2, 1)),
            ),
        )
