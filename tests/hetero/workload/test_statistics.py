from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from hetero.errors import ParameterError
from hetero.workload import statistics


def test_distances_agree_with_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 30, 500), rng.integers(5, 40, 300)
    expected = scipy.stats.ks_2samp(a, b, method="asymp").statistic
    assert statistics.ks_distance(a, b) == pytest.approx(expected)
    c = rng.integers(0, 30, 500)
    assert statistics.spearman(a, c) == pytest.approx(scipy.stats.spearmanr(a, c).statistic)


def test_poisson_arrivals_have_unit_burstiness() -> None:
    arrival = np.cumsum(np.random.default_rng(1).exponential(0.1, 100_000))
    assert statistics.gap_cv(arrival) == pytest.approx(1.0, abs=0.02)
    for window in (0.5, 5.0, 50.0):
        assert statistics.fano(arrival, window) == pytest.approx(1.0, abs=0.25)
    assert statistics.rate_rps(arrival) == pytest.approx(10.0, rel=0.02)


def test_batches_multiply_the_fano_factor() -> None:
    # Each Poisson event brings k requests at once: the Fano factor is k.
    events = np.cumsum(np.random.default_rng(2).exponential(0.1, 50_000))
    assert statistics.fano(np.repeat(events, 7), 1.0) == pytest.approx(7.0, rel=0.1)


def test_the_cut_off_last_window_does_not_count() -> None:
    # Ten per second for 100 s and half a second more: steady, so no variance at all.
    arrival = np.arange(1005) / 10
    assert statistics.fano(arrival, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert statistics.counts(arrival, 1.0)[-1] == 5


def test_undefined_statistics_are_nan_not_numbers() -> None:
    assert math.isnan(statistics.gap_cv([0.0, 1.0]))
    assert math.isnan(statistics.gap_cv([2.0, 2.0, 2.0]))
    assert math.isnan(statistics.fano([0.0, 1.0], 10.0))
    assert math.isnan(statistics.pearson([1, 1, 1], [1, 2, 3]))
    assert math.isinf(statistics.rate_rps([1.0, 1.0]))
    with pytest.raises(ParameterError, match="window"):
        statistics.fano([0.0, 1.0], 0.0)


def test_count_error_counts_misplaced_arrivals() -> None:
    real = np.array([0.0, 30.0, 61.0, 70.0])
    assert statistics.count_error(real, real + 5.0) == 0.0  # windows start with each trace
    assert statistics.count_error(real, np.array([0.0, 1.0, 2.0, 3.0])) == 1.0
    assert statistics.count_error(real, np.array([0.0])) == 0.75
