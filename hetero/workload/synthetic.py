"""Synthetic workloads: distributions of lengths, and traces made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.errors import require
from hetero.workload.trace import Trace

Ints = NDArray[np.int32]

Ceiling: TypeAlias = Literal["clip", "resample"]
"""What becomes of lengths above a ceiling: all set to it, or drawn again."""


@runtime_checkable
class LengthDistribution(Protocol):
    """A distribution of lengths in whole tokens."""

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` lengths [tokens], each at least 1."""

    def cdf(self, tokens: ArrayLike) -> Floats:
        """Probability that a drawn length is at most ``tokens``."""


def _require(good: bool, received: str, rule: str) -> None:
    what = f"Lengths cannot be drawn from {received}."
    require(good, what, resolve=f"it takes {rule}.")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request has the same length.

    Examples
    --------
    >>> Fixed(100).draw(2, np.random.default_rng(0)).tolist()
    [100, 100]
    """

    tokens: int

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"a fixed length of {self.tokens} tokens", "at least 1 token")

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` times the one length."""
        return np.full(count, self.tokens, dtype=np.int32)

    def cdf(self, tokens: ArrayLike) -> Floats:
        """0 below the length, 1 from it on."""
        return np.asarray(np.asarray(tokens) >= self.tokens, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal with mean ln(median) and standard deviation sigma.

    HeteroServe (section 4.1) draws prompts with median 512 and sigma 1.2 and says they reach at
    most 4,096 tokens, but not how longer ones are handled: clipped they have a mean of 910
    tokens, drawn again 771, without a ceiling 1,052.

    Source: HeteroServe, section 4.1: lognormal prompt lengths.

    Parameters
    ----------
    ceiling_tokens
        Longest length; None for no ceiling.
    above
        ``"clip"`` or ``"resample"``.

    Examples
    --------
    >>> prompts = Lognormal(512, 1.2)
    >>> round(float(prompts.cdf(512)), 2)
    0.5
    """

    median_tokens: float
    sigma: float
    ceiling_tokens: int | None = None
    above: Ceiling = "clip"

    def __post_init__(self) -> None:
        good = self.median_tokens >= 1 and self.sigma > 0
        good = good and (self.ceiling_tokens is None or self.ceiling_tokens >= 1)
        _require(good, f"{self}", "a median and ceiling of at least 1 token, and sigma above 0")

    def _below(self, tokens: ArrayLike) -> Floats:
        """Probability without a ceiling that the rounded length is at most ``tokens``."""
        from scipy.special import ndtr

        # Lengths are rounded to whole tokens, and 0 becomes 1.
        whole = np.floor(np.asarray(tokens, dtype=np.float64))
        z = np.log(np.maximum(whole, 1.0) + 0.5) - np.log(self.median_tokens)
        return np.where(whole >= 1, np.asarray(ndtr(z / self.sigma), dtype=np.float64), 0.0)

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` lengths; those above the ceiling are clipped to it or drawn again."""
        from scipy.special import ndtri

        if self.ceiling_tokens is None or self.above == "clip":
            z = rng.standard_normal(count)
        else:  # the inverse distribution function cut at the ceiling draws again in one go
            top = float(self._below(self.ceiling_tokens))
            z = np.asarray(ndtri(rng.random(count) * top), dtype=np.float64)
        lengths = np.rint(self.median_tokens * np.exp(self.sigma * z))
        longest = np.iinfo(np.int32).max if self.ceiling_tokens is None else self.ceiling_tokens
        return np.clip(lengths, 1, longest).astype(np.int32)

    def cdf(self, tokens: ArrayLike) -> Floats:
        """Probability of a length of at most ``tokens``, the ceiling accounted for."""
        below = self._below(tokens)
        if self.ceiling_tokens is None:
            return below
        if self.above == "resample":
            below = below / self._below(self.ceiling_tokens)
        return np.where(np.asarray(tokens) >= self.ceiling_tokens, 1.0, below)


@dataclass(frozen=True, slots=True)
class TruncatedNormal:
    """Whole lengths s in [low, high] with p(s) proportional to exp(-(s - mu)^2 / (2 sigma^2)).

    Rignall, Fig. 4.2: mu = 500, sigma = 2000, 0 <= s <= 8000. A prompt of length 0 is drawn as 1.

    Source: Rignall, section 4.3.1: distribution of input lengths; p(s).

    Examples
    --------
    >>> lengths = TruncatedNormal(500, 2000, 0, 8000)
    >>> float(lengths.cdf(8000))
    1.0
    """

    mu_tokens: float
    sigma_tokens: float
    low_tokens: int
    high_tokens: int

    def __post_init__(self) -> None:
        good = 0 <= self.low_tokens <= self.high_tokens and self.sigma_tokens > 0
        _require(good, f"{self}", "0 <= low <= high, and sigma above 0")

    def probabilities(self) -> Floats:
        """Shape (high - low + 1,); p(s) for s = low, ..., high."""
        s = np.arange(self.low_tokens, self.high_tokens + 1, dtype=np.float64)
        exponent = -0.5 * ((s - self.mu_tokens) / self.sigma_tokens) ** 2
        weight = np.exp(exponent - exponent.max())
        return np.asarray(weight / weight.sum())

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` lengths."""
        index = np.searchsorted(np.cumsum(self.probabilities()), rng.random(count), side="right")
        lengths = self.low_tokens + np.minimum(index, self.high_tokens - self.low_tokens)
        return np.asarray(np.maximum(lengths, 1), dtype=np.int32)

    def cdf(self, tokens: ArrayLike) -> Floats:
        """Probability of a length of at most ``tokens``; length 0 counts as such here."""
        total = np.concatenate([[0.0], np.cumsum(self.probabilities())])
        total[-1] = 1.0
        index = np.floor(np.asarray(tokens, dtype=np.float64)) - self.low_tokens + 1
        return np.asarray(total[np.clip(index, 0, len(total) - 1).astype(np.int64)])


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential lengths, rounded up to whole tokens: P(s <= n) = 1 - exp(-n / scale).

    The scale is chosen so that the whole-token mean is ``mean_tokens`` (a geometric law).
    HeteroServe (section 4.1) draws generations with a mean of 256.

    Source: HeteroServe, section 4.1: exponential generation lengths.

    Examples
    --------
    >>> draws = Exponential(256).draw(100_000, np.random.default_rng(0))
    >>> bool(abs(draws.mean() - 256) < 3)
    True
    """

    mean_tokens: float

    def __post_init__(self) -> None:
        _require(self.mean_tokens > 1, f"{self}", "a mean above 1 token")

    @property
    def _scale(self) -> float:
        return float(-1 / np.log1p(-1 / self.mean_tokens))

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` lengths."""
        lengths = np.ceil(rng.exponential(self._scale, size=count))
        return np.clip(lengths, 1, np.iinfo(np.int32).max).astype(np.int32)

    def cdf(self, tokens: ArrayLike) -> Floats:
        """Probability of a length of at most ``tokens``."""
        n = np.maximum(np.floor(np.asarray(tokens, dtype=np.float64)), 0.0)
        return np.asarray(-np.expm1(-n / self._scale))


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Short lengths with probability ``1 - long_share``, long ones else, each evenly spread.

    HeteroServe (section 4.4): half of the prompts under 128 tokens, half over 2,048. The upper
    end is not printed; 4,096 is that paper's longest input (section 4.3).

    Source: HeteroServe, section 4.4: bimodal prompt lengths.

    Examples
    --------
    >>> float(Bimodal().cdf(2048))
    0.5
    """

    short_tokens: tuple[int, int] = (1, 127)
    long_tokens: tuple[int, int] = (2049, 4096)
    long_share: float = 0.5

    def __post_init__(self) -> None:
        (a, b), (c, d) = self.short_tokens, self.long_tokens
        good = 1 <= a <= b < c <= d and 0 <= self.long_share <= 1
        _require(good, f"{self}", "1 <= short range < long range, and a share from 0 to 1")

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        """``count`` lengths."""
        long = rng.random(count) < self.long_share
        short_lengths = rng.integers(*self.short_tokens, size=count, endpoint=True)
        long_lengths = rng.integers(*self.long_tokens, size=count, endpoint=True)
        return np.where(long, long_lengths, short_lengths).astype(np.int32)

    def cdf(self, tokens: ArrayLike) -> Floats:
        """Probability of a length of at most ``tokens``."""
        n = np.floor(np.asarray(tokens, dtype=np.float64))
        parts = [
            np.clip((n - low + 1) / (high - low + 1), 0.0, 1.0)
            for low, high in (self.short_tokens, self.long_tokens)
        ]
        return np.asarray((1 - self.long_share) * parts[0] + self.long_share * parts[1])


#: Input lengths of Rignall's running example (Fig. 4.2).
RIGNALL_INPUT = TruncatedNormal(500, 2000, 0, 8000)
#: Prompts and generations of HeteroServe's experiments (sections 4.1 and 4.3).
HETEROSERVE_INPUT = Lognormal(512, 1.2, ceiling_tokens=4096)
HETEROSERVE_OUTPUT = Exponential(256)


def synthetic(
    count: int,
    input_tokens: LengthDistribution,
    output_tokens: LengthDistribution,
    *,
    rate_rps: float | None,
    seed: int = 0,
    name: str = "synthetic",
) -> Trace:
    """Trace of independent lengths with Poisson arrivals.

    Parameters
    ----------
    rate_rps
        Mean arrival rate [requests/s]; None lets all requests arrive at once.

    Examples
    --------
    >>> trace = synthetic(1000, HETEROSERVE_INPUT, HETEROSERVE_OUTPUT, rate_rps=49.8)
    >>> len(trace), int(trace.input_tokens.max())
    (1000, 4096)
    """
    _require(count >= 1, f"a trace of {count} requests", "at least 1 request")
    # A stream of its own for each part: another rate leaves the lengths as they are.
    lengths_in, lengths_out, gaps = np.random.default_rng(seed).spawn(3)
    trace = Trace(
        arrival_s=np.zeros(count),
        input_tokens=input_tokens.draw(count, lengths_in),
        output_tokens=output_tokens.draw(count, lengths_out),
        name=name,
        source=f"synthetic, seed {seed}",
    )
    return trace if rate_rps is None else trace.poisson(rate_rps, gaps)
