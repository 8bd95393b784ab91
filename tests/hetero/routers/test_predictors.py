"""What predictors know of output lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetero.errors import ParameterError
from hetero.routers import Normal, Oracle, Quantile
from tests.hetero.routers.router_states import trace


def test_oracle_tells_the_truth_and_at_least_one():
    served = trace()
    outputs = served.output_tokens.copy()
    outputs[0] = 0
    told = Oracle().predict(
        dataclasses.replace(served, output_tokens=outputs), np.random.default_rng(0)
    )
    assert told[0] == 1
    assert np.array_equal(told[1:], outputs[1:])


def test_normal_has_the_moments_of_the_sample_and_no_skill():
    served = trace(20_000)
    told = Normal(sample=20_000).predict(served, np.random.default_rng(0))
    true = served.output_tokens
    # Draws below 1 become 1, which moves the mean of a normal with sd = mean by about 8 %.
    assert told.mean() == pytest.approx(1.083 * true.mean(), rel=0.03)
    assert abs(np.corrcoef(told, true)[0, 1]) < 0.03
    assert told.min() == 1


def test_quantile_gives_one_length():
    served = trace(1000)
    told = Quantile(0.9, sample=1000).predict(served, np.random.default_rng(0))
    assert set(told.tolist()) == {round(float(np.quantile(served.output_tokens, 0.9)))}
    with pytest.raises(ParameterError, match=r"1\.5"):
        Quantile(1.5)
