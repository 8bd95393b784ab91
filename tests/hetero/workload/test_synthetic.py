from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from hetero.errors import ParameterError
from hetero.workload import statistics
from hetero.workload.synthetic import (
    HETEROSERVE_INPUT,
    HETEROSERVE_OUTPUT,
    RIGNALL_INPUT,
    Bimodal,
    Exponential,
    Fixed,
    LengthDistribution,
    Lognormal,
    TruncatedNormal,
    synthetic,
)

DISTRIBUTIONS: tuple[LengthDistribution, ...] = (
    Fixed(7),
    Lognormal(512, 1.2),
    Lognormal(512, 1.2, 4096, "clip"),
    Lognormal(512, 1.2, 4096, "resample"),
    Lognormal(2, 0.8),
    RIGNALL_INPUT,
    TruncatedNormal(5, 3, 0, 9),
    Exponential(256),
    Exponential(1.5),
    Bimodal(),
)


@pytest.mark.parametrize("lengths", DISTRIBUTIONS, ids=repr)
def test_draws_follow_the_distribution_function(lengths: LengthDistribution) -> None:
    draws = lengths.draw(40_000, np.random.default_rng(0))
    assert draws.dtype == np.int32
    assert draws.min() >= 1
    points = np.unique(np.concatenate([draws, draws - 1]))
    points = points[points >= 1]
    empirical = np.searchsorted(np.sort(draws), points, side="right") / len(draws)
    # Massart: the distance exceeds 0.01 in one of 1,500 draws of this size.
    assert np.abs(empirical - lengths.cdf(points)).max() < 0.01
    assert np.all(np.diff(lengths.cdf(points)) >= 0)


def mean(lengths: LengthDistribution, limit: int) -> float:
    return float(np.sum(1.0 - lengths.cdf(np.arange(0, limit))))


def test_heteroserve_prompts_have_the_known_means() -> None:
    # 512 exp(1.2^2 / 2) = 1,052 without a ceiling; clipped 910 and drawn again 771 tokens.
    assert 512 * np.exp(0.72) == pytest.approx(1052, abs=1)
    assert mean(Lognormal(512, 1.2), 2_000_000) == pytest.approx(1052, abs=1)
    assert mean(HETEROSERVE_INPUT, 5000) == pytest.approx(910, abs=1)
    assert mean(Lognormal(512, 1.2, 4096, "resample"), 5000) == pytest.approx(771, abs=1)
    prompts = Lognormal(512, 1.2)
    assert 1 - float(prompts.cdf(2048)) == pytest.approx(0.124, abs=0.001)
    assert float(prompts.cdf(2383)) == pytest.approx(0.9, abs=0.001)
    assert float(prompts.cdf(228)) == pytest.approx(0.25, abs=0.002)


def test_exponential_has_its_mean_in_whole_tokens() -> None:
    assert mean(HETEROSERVE_OUTPUT, 20_000) == pytest.approx(256, abs=0.01)


def test_rignall_density_is_the_truncated_normal() -> None:
    # Each whole length stands for one token around it.
    a, b = (-0.5 - 500) / 2000, (8000.5 - 500) / 2000
    reference = scipy.stats.truncnorm(a, b, loc=500, scale=2000)
    at = np.array([100, 500, 2000, 7000])
    np.testing.assert_allclose(RIGNALL_INPUT.cdf(at), reference.cdf(at + 0.5), atol=1e-7)
    p = RIGNALL_INPUT.probabilities()
    assert p.argmax() == 500
    assert p[0] / p[500] == pytest.approx(np.exp(-0.5 * 0.25**2))


def test_bimodal_has_nothing_between_its_modes() -> None:
    lengths = Bimodal()
    draws = lengths.draw(10_000, np.random.default_rng(0))
    assert not np.any((draws >= 128) & (draws <= 2048))
    assert np.mean(draws > 2048) == pytest.approx(0.5, abs=0.02)


def test_synthetic_trace_is_seeded_and_its_lengths_do_not_depend_on_the_rate() -> None:
    def make(rate: float | None, seed: int = 0) -> object:
        return synthetic(500, HETEROSERVE_INPUT, HETEROSERVE_OUTPUT, rate_rps=rate, seed=seed)

    a, b, c = make(10.0), make(10.0), make(20.0)
    np.testing.assert_array_equal(a.arrival_s, b.arrival_s)
    np.testing.assert_array_equal(a.input_tokens, c.input_tokens)
    np.testing.assert_allclose(a.arrival_s, 2 * c.arrival_s)
    assert not np.array_equal(a.input_tokens, make(10.0, seed=1).input_tokens)
    assert statistics.spearman(a.input_tokens, a.output_tokens) == pytest.approx(0.0, abs=0.15)
    assert not make(None).arrival_s.any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Fixed(0),
        lambda: Lognormal(0, 1.2),
        lambda: Lognormal(512, 0),
        lambda: TruncatedNormal(1, 1, 5, 4),
        lambda: TruncatedNormal(1, 0, 0, 4),
        lambda: Exponential(1.0),
        lambda: Bimodal((1, 200), (100, 300)),
        lambda: Bimodal(long_share=1.5),
        lambda: synthetic(0, Fixed(1), Fixed(1), rate_rps=None),
    ],
)
def test_impossible_distributions_are_refused(wrong: object) -> None:
    with pytest.raises(ParameterError, match="it takes"):
        wrong()  # type: ignore[operator]
