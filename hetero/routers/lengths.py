"""Rotation among the replicas that a plan gives to the range of a request's input length.

Layout of the router memory ``RM``: [number of ranges J, whether the least loaded is taken]; the J
ends of the ranges [tokens], rising; of each range the place and the number of its prefill entries
and of its decode entries; of each entry its replica, its weight and the credit it has gathered.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.kv import fits
from hetero.engine.state import DOWN
from hetero.routers.load import least_tokens

RANGES, BY_LOAD, HEADER = 0, 1, 2
RANGE_COLUMNS, ENTRY_COLUMNS = 4, 3


@compiled
def _range_of(RM, tokens):
    """Number of the first range that ends beyond a length; the last one holds what is longer."""
    low, high = 0, int(RM[RANGES]) - 1
    while low < high:
        middle = (low + high) // 2
        if RM[HEADER + middle] > tokens:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _open(R, E, S, r, i, decode):
    """Whether a replica can take the phase of a request."""
    if decode:
        return S[i].mode != DOWN and fits(R, E[i], r)
    return may_take(R, E, S, r, i)


@compiled
def _turn(R, E, S, RM, r, first, count, decode):
    """Replica among ``count`` entries from ``first`` on, -1 if none can take the request."""
    by_load = RM[BY_LOAD] != 0.0
    best = -1
    total, least = 0.0, np.inf
    for p in range(first, first + ENTRY_COLUMNS * count, ENTRY_COLUMNS):
        i = int(RM[p])
        if not _open(R, E, S, r, i, decode):
            continue
        if by_load:
            queue = (S[i].outstanding_tokens + R[r].input_tokens) / RM[p + 1]
            if queue < least:
                best, least = p, queue
        else:
            total += RM[p + 1]
            RM[p + 2] += RM[p + 1]
            if best < 0 or RM[p + 2] > RM[best + 2]:
                best = p
    if best < 0:
        return -1
    RM[best + 2] -= total
    return int(RM[best])


@compiled
def range_shares(R, E, S, RM, r):
    """Prefill replica of the request's range; its decode replica is noted in the request."""
    row = HEADER + int(RM[RANGES]) + RANGE_COLUMNS * _range_of(RM, R[r].input_tokens)
    i = _turn(R, E, S, RM, r, int(RM[row]), int(RM[row + 1]), False)
    if i < 0:
        return least_tokens(R, E, S, r)
    j = _turn(R, E, S, RM, r, int(RM[row + 2]), int(RM[row + 3]), True)
    if j >= 0:
        R[r].decode_node = np.int32(j)
    return i
