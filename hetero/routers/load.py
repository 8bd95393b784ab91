"""Routers that compare what the dispatcher has sent to each replica and not got back."""

from __future__ import annotations

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled


@compiled
def least_requests(R, E, S, r):
    """The replica with the fewest unfinished requests."""
    best, least = -1, np.int64(0)
    for i in range(len(E)):
        if may_take(R, E, S, r, i) and (best < 0 or S[i].outstanding < least):
            best, least = i, S[i].outstanding
    return best


@compiled
def least_tokens(R, E, S, r):
    """The replica with the fewest tokens, inputs and predicted outputs, of unfinished requests."""
    best, least = -1, np.int64(0)
    for i in range(len(E)):
        if may_take(R, E, S, r, i) and (best < 0 or S[i].outstanding_tokens < least):
            best, least = i, S[i].outstanding_tokens
    return best


@compiled
def pick(draw, count):
    """Index 0 to count - 1 from a uniform draw."""
    return min(int(draw * count), count - 1)
