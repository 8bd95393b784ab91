r"""Speculative decoding as an expectation: drafts of one length that are accepted by chance.

A draft of :math:`\gamma` tokens, each accepted with probability :math:`\alpha`, gives a request E
tokens per step of the model (Leviathan et al. 2023), which verifies :math:`\gamma + 1` tokens of
each of b requests and reads their c cached tokens once. A token then takes

.. math::
    E = \frac{1 - \alpha^{\gamma + 1}}{1 - \alpha}, \quad
    T'(b, c) = \frac{T\big(b (\gamma + 1), c\big) + \gamma\,k\,T(b, c)}{E}

with T the time of a decode step and k that of the draft model's over the model's. A step that
prefills as well is counted in full for one token and :math:`1 / E` of the draft: the tokens of one
real step never take less than it, so that speculation is not flattered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero.errors import require, require_not_negative
from hetero.latency.step import Bends, Mixed, Piece, StepModel


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafts that an engine verifies, see the module.

    Attributes
    ----------
    length
        Tokens of a draft (gamma).
    acceptance
        Probability that a token of it is accepted (alpha), each by itself.
    cost
        Time of a step of the draft model over one of the model.

    Examples
    --------
    >>> drafts = Speculation(length=4, acceptance=0.7, cost=0.05)
    >>> round(drafts.tokens, 4), round(drafts.gain, 3)
    (2.7731, 2.311)
    """

    length: int
    acceptance: float
    cost: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.length >= 1 and 0.0 <= self.acceptance <= 1.0,
            f"Drafts of {self.length} tokens, accepted with a probability of {self.acceptance:g}.",
            resolve="give a length of 1 or more and an acceptance of 0 to 1, such as 4 and 0.7.",
        )
        require_not_negative(cost=self.cost)

    @property
    def tokens(self) -> float:
        """Expected tokens of a request per step of the model ."""
        return float(np.sum(self.acceptance ** np.arange(self.length + 1.0)))

    @property
    def gain(self) -> float:
        """Times that decoding gets faster at most: where verifying is free."""
        return self.tokens / (1.0 + self.length * self.cost)

    @property
    def spread(self) -> float:
        """Standard deviation of the tokens of a step over their mean, which no request sees."""
        k = np.arange(self.length + 1.0)
        second = float(np.sum((2.0 * k + 1.0) * self.acceptance**k))
        return float(np.sqrt(max(0.0, second - self.tokens**2))) / self.tokens

    def applied(self, step: StepModel, max_batch: int) -> StepModel:
        """Step times per token of up to ``max_batch`` requests that decode with drafts."""
        return replace(step, pieces=tuple(self._of(one, max_batch) for one in step.pieces))

    def _of(self, piece: Piece, max_batch: int) -> Piece:
        b = np.arange(1.0, max(max_batch, len(piece.per_cached_token_s)) + 1.0)
        at = np.minimum(b.astype(np.int64), len(piece.per_cached_token_s)) - 1
        per_token = (1.0 + self.length * self.cost) / self.tokens
        plain = replace(piece, mixed=None, bends=None)
        alone = plain.seconds(b, b, 0.0, 0.0)
        verified = plain.seconds(b * (self.length + 1), b * (self.length + 1), 0.0, 0.0)
        verified = np.maximum(verified, alone)  # where measured times of more tokens are less
        drafted = self.length * self.cost * alone
        slope = float(
            np.diff(piece.seconds(piece.knots_tokens[-1] + np.arange(2.0), 0, 0.0, 0.0))[0]
        )
        more = slope * b * ((self.length + 1) / self.tokens - 1.0) + drafted / self.tokens
        rate, level, per_prompt = piece.mixed_rows[:, at]
        if (bends := piece.bends) is not None:
            extra = bends.seconds(b[:, None], b[:, None] * bends.context_tokens)
            bends = Bends(bends.context_tokens, per_token * extra)
        return Piece(
            piece.knots_tokens,
            piece.knots_s,
            per_token * piece.per_cached_token_s[at],
            piece.per_pair_s,
            Mixed(per_token * rate, level + more, per_prompt),
            (verified + drafted) / self.tokens - piece.seconds(b, 0, 0.0, 0.0),
            bends,
        )
