"""Routers that compare what the dispatcher has sent to each replica and not got back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.replica import advance, advance_all
from hetero.routers.base import LEAST_REQUESTS, LEAST_TOKENS, POWER_OF_TWO, Builtin


@compiled
def least_requests(R, E, S, r):
    """The replica with the fewest unfinished requests."""
    best, least = -1, np.int64(0)
    for i in range(len(E)):
        if may_take(R, E, S, r, i) and (best < 0 or S[i].outstanding < least):
            best, least = i, S[i].outstanding
    return best


@dataclass(frozen=True)
class LeastRequests(Builtin):
    """The replica with the fewest unfinished requests."""

    name: str = "least requests"
    code: ClassVar[int] = LEAST_REQUESTS


@compiled
def least_tokens(R, E, S, r):
    """The replica with the fewest tokens, inputs and predicted outputs, of unfinished requests."""
    best, least = -1, np.int64(0)
    for i in range(len(E)):
        if may_take(R, E, S, r, i) and (best < 0 or S[i].outstanding_tokens < least):
            best, least = i, S[i].outstanding_tokens
    return best


@dataclass(frozen=True)
class LeastTokens(Builtin):
    """The replica with the fewest tokens in unfinished requests."""

    name: str = "least tokens"
    code: ClassVar[int] = LEAST_TOKENS


@compiled
def _pick(draw, count):
    """Index 0 to count - 1 from a uniform draw."""
    return min(int(draw * count), count - 1)


@compiled
def power_of_two(R, E, S, FM, IM, first, second, r, t):
    """The less loaded of two replicas drawn at random; only if neither can, the least loaded."""
    count = len(E)
    i = _pick(first, count)
    j = _pick(second, count - 1) if count > 1 else 0
    j += 1 if count > 1 and j >= i else 0
    advance(R, E[i], S[i], FM, IM, t)
    advance(R, E[j], S[j], FM, IM, t)
    if not may_take(R, E, S, r, i):
        i = j
        if not may_take(R, E, S, r, j):
            advance_all(R, E, S, FM, IM, t)
            i = least_requests(R, E, S, r)
    elif may_take(R, E, S, r, j) and S[j].outstanding < S[i].outstanding:
        i = j
    return i


@dataclass(frozen=True)
class PowerOfTwo(Builtin):
    """The less loaded of two replicas drawn at random."""

    name: str = "power of two"
    code: ClassVar[int] = POWER_OF_TWO
    draws: ClassVar[bool] = True
