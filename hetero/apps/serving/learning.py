r"""Step models refitted to the answers of an engine while it serves.

From outside an engine shows when a request got its first token and when its last. Between them lie
as many steps as it has further tokens, and the sums that :class:`EngineWork` keeps say what these
steps did on average: ``b`` requests decoded and read ``c`` tokens, and each prefilled ``q`` tokens
of other requests. With the step times ``d`` and ``p`` that the engine is told to have,

.. math::
    tpot &= f_d\, d(1, 0) + f_g (d(b, c) - d(1, 0)) + f_p (p(q) - p(1)) \\
    ttft &= f_d\, p(1) + f_p (p(n) - p(1)) + front

where a request of ``n`` input tokens finds no other waiting; if others decode, one and a half steps
of theirs take the place of ``p(1)``: it comes in the midst of one. The factors and the front end
are those of :func:`hetero.apps.refitted.refitted`, and ``hetero observe`` fits the same by
simulation; here they are linear.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from hetero.apps.refitted import refitted
from hetero.arrays import Floats
from hetero.latency import storage
from hetero.latency.step import StepModel

#: Later tokens of an answer that tells of steps, at least.
LEAST: Final = 4
_FIRST: Final = 8  # answers before the first fit; then after twice as many each time
_KEPT: Final = 256  # answers that are fitted; each takes part in a fit, but not often
_MOST: Final = 8.0  # of a factor, either way
_HUBER: Final = 1.5  # spreads from which on errors count linearly
_PRIOR: Final = 0.3  # weight of "all parts are off alike", by that of an answer
_GOOD: Final = 0.06  # error with which step times are left as they were told
_BETTER: Final = 0.01  # by which it has to fall


@dataclass(eq=False, slots=True)
class EngineWork:
    """What an engine has done, summed over time."""

    at_s: float = 0.0
    decoding_s: float = 0.0  # requests that decoded, by the time for which,
    cached_s: float = 0.0  # and tokens that they held
    prompts: int = 0  # that it has taken in,
    tokens: int = 0
    pairs: float = 0.0  # of queries and keys
    held: int = 0  # tokens of those that decode, after the last of them came or went

    def until(self, now_s: float, decoding: int, cached: int) -> None:
        """So many requests decoded up to now, and hold so many tokens; these grow evenly."""
        passed_s = now_s - self.at_s
        if passed_s > 0.0:
            self.decoding_s += passed_s * decoding
            self.cached_s += passed_s * 0.5 * (self.held + cached)
            self.at_s = now_s

    def prompt(self, tokens: int) -> None:
        """A prompt has been taken in."""
        self.prompts += 1
        self.tokens += tokens
        self.pairs += 0.5 * tokens * tokens

    def mark(self) -> Mark:
        """The sums as they stand."""
        return self.at_s, self.decoding_s, self.cached_s, self.prompts, self.tokens, self.pairs


Mark = tuple[float, float, float, int, int, float]


class First(NamedTuple):
    """Time to the first token of a request that found none waiting, and what decoded then."""

    ttft_s: float
    tokens: int
    decoding: int
    cached: int


class Later(NamedTuple):
    """Time per later token of an answer, and what its steps did on average."""

    tpot_s: float
    decoding: float
    cached: float
    prompts: float
    tokens: float
    pairs: float


@dataclass(eq=False, slots=True)
class StepLearner:
    """What the answers of an engine tell of its steps.

    Examples
    --------
    >>> told = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> learner = StepLearner(told)
    >>> for k in range(8):
    ...     learner.first.append(First(0.09 + 1e-5 * k, 100, 0, 0))
    ...     learner.answer(0.06 + 1e-5 * k, 10, (0.0,) * 6, (1.0, 1.0, 100.0, 0, 0, 0.0))
    >>> learner.due and learner.refit(), round(learner.ratio, 1)
    (True, 3.0)
    >>> round(float(learner.step.decode_seconds([100])), 2)
    0.06
    """

    told: StepModel
    step: StepModel = field(init=False)  # in use
    first: deque[First] = field(default_factory=lambda: deque(maxlen=_KEPT // 2))
    later: deque[Later] = field(default_factory=lambda: deque(maxlen=_KEPT))
    answers: int = 0
    ratio: float = np.nan  # median of the times seen over those expected
    error: float = np.nan  # median size of the error, the mean of first and of later tokens
    refits: int = 0
    _due: int = _FIRST
    _factors: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.told
        self._factors = np.array([1.0, 1.0, 1.0, self.told.request_s])

    @classmethod
    def of(cls, told: StepModel, before: StepLearner | None) -> StepLearner:
        """The one before if it was told the same, else a new one."""
        same = before is not None and storage.to_json(before.told) == storage.to_json(told)
        return before if before is not None and same else cls(told)

    def answer(self, tpot_s: float, later: int, begin: Mark, end: Mark) -> None:
        """An answer of so many later tokens, between these sums of its engine."""
        passed_s = end[0] - begin[0]
        if later < LEAST or passed_s <= 0.0 or tpot_s <= 0.0:
            return
        self.answers += 1
        by = (passed_s, passed_s, later, later, later)
        sums = zip(begin[1:], end[1:], by, strict=True)
        self.later.append(Later(tpot_s, *((new - old) / share for old, new, share in sums)))

    @property
    def due(self) -> bool:
        """Whether there are enough new answers for a fit."""
        return self.answers >= self._due

    def refit(self, *, keep: bool = True) -> bool:
        """Fit what has been seen; whether a step model that expects it better is in use now.

        Without ``keep`` none comes into use, and only :attr:`ratio` and :attr:`error` are new.
        """
        self._due = self.answers + min(self.answers, _KEPT)
        seen, columns = self._equations()
        front_s = float(np.median(seen[len(self.later) :])) if self.first else 1.0
        factors = _fit(columns, seen, self.told.request_s, front_s)
        self.ratio = float(np.median(seen / (columns @ self._factors)))
        self.error, error = (self._error(columns @ x / seen) for x in (self._factors, factors))
        good = self.refits == 0 and self.error < _GOOD
        if not keep or good or self.error - error < _BETTER:
            return False
        decode, growth, prefill, front_s = factors.tolist()
        found = refitted(self.told, prefill, decode, front_s, floor=decode, growth=growth)
        source = f"{self.told.source}, refitted to {self.answers} answers"
        self._factors, self.refits = factors, self.refits + 1
        self.step = replace(found, source=source, provenance="measured")
        return True

    def _error(self, expected: Floats) -> float:
        """Median size of the error of later and of first tokens, their mean."""
        size, many = np.abs(expected - 1.0), len(self.later)
        kinds = [size[:many], size[many:]] if self.first else [size]
        return float(np.mean([np.median(one) for one in kinds]))

    def line(self) -> str:
        """What was learnt, as logs have it."""
        decode, growth, prefill, front_s = self._factors.tolist()
        return (
            f"steps learnt from {self.answers} answers, whose times were {self.ratio:.2f} times "
            f"those expected: a decode step takes {decode:.2f} times as long as told, its growth "
            f"{growth:.2f}, prefill {prefill:.2f}, the front end {1e3 * front_s:.3g} ms"
        )

    def _equations(self) -> tuple[Floats, Floats]:
        """Times of :attr:`later`, then of :attr:`first`, and what each factor adds to them."""
        step = self.told
        one = float(step.seconds(1, 1)), float(step.seconds(1))
        tpot, decoding, cached, prompts, tokens, pairs = np.array(self.later).T
        b, many = np.maximum(np.rint(decoding), 1.0), np.maximum(prompts, 1e-9)
        more = prompts * (step.seconds(1 + tokens / many, 0, 0.0, pairs / many) - one[1])
        growth = step.seconds(b, b, cached) - one[0]
        rows = [np.column_stack([np.full(len(tpot), one[0]), growth, more, np.zeros(len(tpot))])]
        if not self.first:
            return tpot, rows[0]
        ttft, inputs, beside, held = np.array(self.first).T
        b, busy = np.maximum(beside, 1.0), beside > 0
        prompt = step.seconds(inputs, 0, 0.0, 0.5 * inputs * inputs) - one[1]
        growth = np.where(busy, 1.5 * (step.seconds(b, b, held) - one[0]), 0.0)
        base = np.where(busy, 1.5 * one[0], one[1])
        rows.append(np.column_stack([base, growth, prompt, np.ones(len(ttft))]))
        return np.concatenate([tpot, ttft]), np.concatenate(rows)


def _fit(columns: Floats, seen: Floats, told_s: float, typical_s: float) -> Floats:
    """Factors by least squares of relative errors after Huber, within their bounds."""
    every = float(np.clip(np.median(seen / (columns[:, :3].sum(axis=1))), 1 / _MOST, _MOST))
    scale = np.array([every, every, every, typical_s])
    a = columns * scale / seen[:, None]
    prior = _PRIOR * np.array([[1, 0, 0, 0], [-1, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 1]])
    wanted = _PRIOR * np.array([1.0, 0.0, 0.0, told_s / typical_s])
    low = np.array([1 / _MOST] * 3 + [0.0]) / scale
    high = np.array([_MOST] * 3 + [typical_s]) / scale
    weight, found = np.ones(len(seen)), np.ones(4)
    for _ in range(5):
        weighted = a * weight[:, None]
        square = weighted.T @ a + prior.T @ prior
        right = weighted.sum(axis=0) + prior.T @ wanted
        free = np.ones(4, np.bool_)
        while free.any():
            left = right[free] - square[np.ix_(free, ~free)] @ found[~free]
            found[free] = np.linalg.solve(square[np.ix_(free, free)], left)
            outside = free & ((found < low) | (found > high))
            found = np.clip(found, low, high)
            if not outside.any():
                break
            free &= ~outside
        size = np.abs(a @ found - 1.0)
        spread = max(1.48 * float(np.median(size)), 0.01)
        weight = np.minimum(1.0, _HUBER * spread / np.maximum(size, 1e-9))
    return np.asarray(found * scale)
