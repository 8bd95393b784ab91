from __future__ import annotations

import math
import pickle

import pytest

from hetero.errors import (
    ParameterError,
    require,
    require_not_negative,
    require_positive,
    require_share,
)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_is_not_positive_is_named(value: float) -> None:
    require_positive(rate_rps=1e-9, goal=2)
    with pytest.raises(ParameterError, match="rate_rps is "):
        require_positive(goal=1.0, rate_rps=value)


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan])
def test_what_is_negative_is_named(value: float) -> None:
    require_not_negative(wait_s=0.0)
    with pytest.raises(ParameterError, match="wait_s is "):
        require_not_negative(wait_s=value)


@pytest.mark.parametrize("value", [0.0, 1.01, math.nan])
def test_what_is_no_share_is_named(value: float) -> None:
    require_share(goal=1.0)
    with pytest.raises(ParameterError, match=r"goal is .* Resolve: give a share"):
        require_share(goal=value)


def test_a_refusal_survives_the_way_from_a_worker() -> None:
    with pytest.raises(ParameterError) as caught:
        require(False, "The seed is -1.", resolve="give 0 or more.")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
