from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hetero.intervals import draws_needed, interval, ranking
from pipelines.studies.ledger import Order


def test_interval_is_the_one_of_the_t_test() -> None:
    x = np.random.default_rng(0).normal(3.0, 1.0, 7)
    expected = stats.ttest_1samp(x, 0.0).confidence_interval(0.9)
    assert interval(x, 0.9) == pytest.approx((expected.low, expected.high))


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    ends = np.array([interval(rng.normal(0.0, 1.0, 5)) for _ in range(2000)])
    assert np.mean((ends[:, 0] < 0) & (ends[:, 1] > 0)) == pytest.approx(0.95, abs=0.02)


def test_one_value_is_its_own_interval() -> None:
    assert interval([2.0]) == (2.0, 2.0)


def test_pairs_that_noise_could_turn_are_left_open() -> None:
    found = Order(ranking({"a": [1.0, 5.0, 3.0], "b": [1.1, 4.8, 3.2], "c": [9.0, 9.5, 10.0]}))
    assert found.entails(Order("c>a,c>b"))
    assert found.entails(Order("b>=a"))
    assert not found.entails(Order("b>a"))


def test_pairing_over_seeds_decides_what_overlapping_intervals_hide() -> None:
    level = np.array([0.0, 100.0, 50.0])
    assert ranking({"a": level, "b": level + np.array([1.0, 1.1, 0.9])}) == "b>a"


def test_distant_pairs_can_be_apart_where_neighbours_are_not() -> None:
    noise = np.array([-1.0, 0.0, 1.0])
    text = ranking({"a": 1.6 + 0.2 * noise[::-1], "b": 1.0 + noise, "c": 0.5 - 0.2 * noise})
    assert text == "a>=b>=c, a>c"
    assert Order(text).entails(Order("a>c"))


def test_equal_values_tie() -> None:
    assert not Order(ranking({"a": [1.0, 2.0], "b": [1.0, 2.0]})).entails(Order("a>b"))
    assert ranking({"a": [1.0], "b": [1.0]}) == "a>=b"


def test_a_pair_is_strict_only_if_all_wider_ones_are() -> None:
    # b is surely above c, but a, which is above b by the mean alone, is not.
    wild = np.array([0.0, 10.0, 5.0])
    samples = {"a": wild, "b": np.array([3.0, 3.1, 3.2]), "c": np.array([1.0, 1.1, 1.2])}
    found = Order(ranking(samples))
    assert found.entails(Order("a>=b>=c"))
    assert not found.entails(Order("a>c"))
    del samples["a"]
    assert ranking(samples) == "b>c"


def test_as_many_draws_as_are_needed_bring_the_interval_there() -> None:
    seen = np.random.default_rng(0).normal(1.0, 4.0, 5)
    needed = draws_needed(np.diff(interval(seen))[0] / 2.0, 5, 1.0)
    halves = [stats.t.ppf(0.975, n - 1) * seen.std(ddof=1) / n**0.5 for n in (needed - 1, needed)]
    assert halves[1] <= 1.0 < halves[0]
    assert draws_needed(1.0, 5, 0.0) == 100_000  # no number would
