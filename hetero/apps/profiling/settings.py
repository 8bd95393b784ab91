"""What to ask a server for: settings of a profile, and prompts of a wanted length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.errors import EndpointError, ParameterError, require
from hetero.streams import stream

LEAST_OUTPUT_TOKENS = 8
"""Fewer decode steps than this, less the first and the last, show no step time."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """So many requests at once, each of these lengths.

    Attributes
    ----------
    batch
        Requests sent together.
    input_tokens, output_tokens
        Wanted lengths of each.
    """

    batch: int
    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        require(
            min(self.batch, self.input_tokens) >= 1 and self.output_tokens >= LEAST_OUTPUT_TOKENS,
            f"A setting of {self.batch} requests with {self.input_tokens} input and "
            f"{self.output_tokens} output tokens shows no step times.",
            resolve="ask for at least 1 request, 1 input token and "
            f"{LEAST_OUTPUT_TOKENS} output tokens.",
        )

    @property
    def tokens(self) -> int:
        """Tokens that the server processes for it."""
        return self.batch * (self.input_tokens + self.output_tokens)


def grid(
    batches: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> tuple[Setting, ...]:
    """Every combination; four batch sizes by three lengths determine p1 to p8.

    Examples
    --------
    >>> len(grid([1, 2, 4, 8], [64, 256, 1024], [32]))
    12
    """
    return tuple(Setting(b, i, o) for b in batches for i in inputs for o in outputs)


def between(settings: Sequence[Setting], count: int, *, seed: int = 0) -> tuple[Setting, ...]:
    """Fresh settings between and beside measured ones, none of them measured, for a check.

    Batches are drawn evenly up to the largest measured one, input lengths evenly in their
    logarithm from 20 % below the shortest to 25 % above the longest; outputs are the longest
    measured.

    Examples
    --------
    >>> fresh = between(grid([1, 4], [64, 256], [32]), 5)
    >>> len(fresh), max(one.batch for one in fresh) <= 4
    (5, True)
    """
    require(
        count >= 1 and len(settings) > 0,
        f"{count} fresh settings beside {len(settings)} measured ones check nothing.",
        resolve="ask for at least one, beside at least one.",
    )
    rng = stream(seed, "fresh settings")
    most = max(one.batch for one in settings)
    lengths = [one.input_tokens for one in settings]
    low, high = np.log(0.8 * min(lengths)), np.log(1.25 * max(lengths))
    outputs = max(one.output_tokens for one in settings)
    measured = {(one.batch, one.input_tokens) for one in settings}
    found: dict[Setting, None] = {}
    for _ in range(100 * count):
        tokens = max(1, round(float(np.exp(rng.uniform(low, high)))))
        one = Setting(int(rng.integers(1, most, endpoint=True)), tokens, outputs)
        if (one.batch, one.input_tokens) not in measured:
            found[one] = None
        if len(found) == count:
            return tuple(found)
    raise ParameterError(
        f"There are no {count} settings between and beside the measured ones, only {len(found)}.",
        resolve="ask for fewer, or measure a wider range of batches and lengths.",
    )


class Prompts:
    """Prompts of a wanted number of tokens, no two alike, so that no prefix cache helps.

    The number of tokens per word is learnt from two answers of the server.
    """

    __slots__ = ("_offset", "_per_word", "_words")

    def __init__(self) -> None:
        rng = stream(0, "words")
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        self._words = np.unique(["".join(rng.choice(letters, 4)) for _ in range(4096)])
        self._per_word, self._offset = 1.0, 0.0

    def words(self, count: int, rng: np.random.Generator) -> str:
        """A prompt of so many random words."""
        return " ".join(rng.choice(self._words, count))

    def learn(self, counts: Sequence[tuple[int, int]]) -> None:
        """Take over pairs of (words, tokens that the server counted)."""
        (few, less), (many, more) = min(counts), max(counts)
        require(
            more > less,
            f"The server counts {more} tokens in {many} words and {less} in {few}.",
            resolve="check that its usage counts the tokens of the prompt.",
            error=EndpointError,
        )
        self._per_word = (more - less) / (many - few)
        self._offset = less - self._per_word * few

    def of_tokens(self, tokens: int, rng: np.random.Generator) -> str:
        """A prompt of about so many tokens."""
        return self.words(max(1, round((tokens - self._offset) / self._per_word)), rng)
