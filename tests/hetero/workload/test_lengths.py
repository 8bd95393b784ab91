from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import ParameterError
from hetero.workload import lengths
from hetero.workload.synthetic import RIGNALL_INPUT, Lognormal


def test_ranges_follow_the_definition_of_the_thesis() -> None:
    # Rignall 4.6.3: start k W, middle k W + floor(W / 2), share the sum of p(s) over the range.
    width = 500
    found = lengths.ranges(RIGNALL_INPUT, width, limit_tokens=8001)
    p = RIGNALL_INPUT.probabilities()
    assert len(found) == 17
    for k in range(16):
        assert found.start_tokens[k] == k * width
        assert found.end_tokens[k] == k * width + width
        assert found.middle_tokens[k] == k * width + 250
        assert found.share[k] == pytest.approx(p[k * width : (k + 1) * width].sum())
    assert found.share.sum() == pytest.approx(1.0)


def test_no_length_is_lost() -> None:
    drawn = np.random.default_rng(0).integers(1, 8000, 1000)
    for width in (1, 7, 500, 8000, 10_000):
        found = lengths.ranges(drawn, width)
        assert found.share.sum() == pytest.approx(1.0)
        assert found.end_tokens[-1] > drawn.max()
        assert found.end_tokens[-1] - width <= drawn.max()
        index = found.index(drawn)
        assert np.all(found.start_tokens[index] <= drawn)
        assert np.all(drawn < found.end_tokens[index])
        np.testing.assert_allclose(np.bincount(index, minlength=len(found)) / 1000, found.share)


def test_bins_are_closed_on_the_left() -> None:
    # HeteroServe 3.3: [0, l1), [l1, l2), ...
    found = lengths.bins([255, 256, 511, 512, 2047, 2048], (256, 512, 2048), limit_tokens=4096)
    np.testing.assert_allclose(found.share, [1 / 6, 2 / 6, 2 / 6, 1 / 6])
    assert found.index([255, 256]).tolist() == [0, 1]


def test_shares_of_a_sample_approach_those_of_its_distribution() -> None:
    prompts = Lognormal(512, 1.2, 4096)
    edges = (256, 512, 2048)
    exact = lengths.bins(prompts, edges, limit_tokens=4097)
    sample = lengths.bins(prompts.draw(100_000, np.random.default_rng(3)), edges, limit_tokens=4097)
    np.testing.assert_allclose(sample.share, exact.share, atol=0.007)


def test_percentile_edges_split_as_asked() -> None:
    drawn = np.random.default_rng(0).integers(1, 100_000, 20_000)
    edges = lengths.percentile_edges(drawn, (25, 50, 90))
    found = lengths.bins(drawn, edges, limit_tokens=100_000)
    np.testing.assert_allclose(found.share, [0.25, 0.25, 0.4, 0.1], atol=1e-3)
    assert lengths.percentile_edges([5, 5, 5, 5], (25, 50)) == (6,)


def test_what_lies_beyond_is_an_error_not_a_loss() -> None:
    with pytest.raises(ParameterError, match="beyond the last range"):
        lengths.ranges([1, 1000], 100, limit_tokens=500)
    with pytest.raises(ParameterError, match="beyond the last range"):
        lengths.ranges(Lognormal(512, 1.2), 100, limit_tokens=500)
    with pytest.raises(ParameterError, match="limit_tokens"):
        lengths.ranges(RIGNALL_INPUT, 100)
    with pytest.raises(ParameterError, match="width_tokens"):
        lengths.ranges([1, 2], 0)
    with pytest.raises(ParameterError, match="rise"):
        lengths.bins([1], (512, 256), limit_tokens=4096)
    with pytest.raises(ParameterError, match="outside the ranges"):
        lengths.ranges([1, 2], 10).index([99])
