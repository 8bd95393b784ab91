"""Predictors of output lengths: what a dispatcher believes before a request has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from hetero.errors import require

if TYPE_CHECKING:
    from hetero.workload import Trace

Ints32 = NDArray[np.int32]


class Predictor(Protocol):
    """Predicts the output tokens of every request of a trace."""

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """Predicted output tokens, at least 1; shape (N,)."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """The true output length."""

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """True output tokens, at least 1."""
        return np.maximum(trace.output_tokens, 1)


@dataclass(frozen=True, slots=True)
class Normal:
    """Independent normal draws with the mean and deviation of a sample (Xiong et al., 5.2).

    Source: Xiong et al., section 4.1: output length predictor, from the distribution of a data set.

    Parameters
    ----------
    sample
        Number of requests of the trace whose outputs are known beforehand.
    """

    sample: int = 200

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """Rounded draws, at least 1."""
        known = rng.choice(trace.output_tokens, min(self.sample, len(trace)), replace=False)
        draws = rng.normal(known.mean(), known.std(), len(trace))
        return np.maximum(np.rint(draws), 1).astype(np.int32)


DEFAULT: Final[Predictor] = Normal()
"""What is believed where nobody says: what a dispatcher has, and not the truth."""


PREDICTORS: Final[Mapping[str, Predictor]] = {"guess": DEFAULT, "oracle": Oracle()}
"""By the names that are typed."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """One length for all: a quantile of the outputs of a sample of requests."""

    quantile: float = 0.5
    sample: int = 200

    def __post_init__(self) -> None:
        require(
            0 <= self.quantile <= 1,
            f"A quantile of {self.quantile} does not exist.",
            resolve="give one in 0 to 1.",
        )

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """The quantile, at least 1, for every request."""
        known = rng.choice(trace.output_tokens, min(self.sample, len(trace)), replace=False)
        value = max(1, round(float(np.quantile(known, self.quantile))))
        return np.full(len(trace), value, np.int32)
