"""Rotation through pairs of a prefill and a decode replica, or draws of them.

Layout of the router memory ``RM``: [whether pairs are drawn, number of parts, part in force]; of
each part its start [s], the place of its first pair and the number of its pairs; of each pair its
prefill replica, its decode replica (-1 where the first serves both phases), its weight and the
credit it has gathered.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.kv import fits
from hetero.engine.state import DOWN
from hetero.routers.load import least_tokens

DRAWN, PARTS, PART, HEADER = 0, 1, 2, 3
PART_COLUMNS, PAIR_COLUMNS = 3, 4


@compiled
def _open(R, E, S, RM, r, p):
    """Whether the pair at ``p`` can take a request."""
    i, j = int(RM[p]), int(RM[p + 1])
    return may_take(R, E, S, r, i) and (j < 0 or (S[j].mode != DOWN and fits(R, E[j], r)))


@compiled
def pair_shares(R, E, S, RM, draw, r, t):
    """Prefill replica of the pair to serve; the decode replica is noted in the request."""
    part = int(RM[PART])
    while part + 1 < int(RM[PARTS]) and RM[HEADER + PART_COLUMNS * (part + 1)] <= t:
        part += 1
    RM[PART] = part
    first = int(RM[HEADER + PART_COLUMNS * part + 1])
    stop = first + PAIR_COLUMNS * int(RM[HEADER + PART_COLUMNS * part + 2])
    drawn = RM[DRAWN] != 0.0
    best = -1
    total = 0.0
    for p in range(first, stop, PAIR_COLUMNS):
        if _open(R, E, S, RM, r, p):
            total += RM[p + 2]
            if not drawn:
                RM[p + 3] += RM[p + 2]
            if best < 0 or RM[p + 3] > RM[best + 3]:
                best = p
    if best < 0:
        return least_tokens(R, E, S, r)
    if drawn:
        target = draw * total
        for p in range(first, stop, PAIR_COLUMNS):
            if _open(R, E, S, RM, r, p):
                best = p
                target -= RM[p + 2]
                if target < 0.0:
                    break
    else:
        RM[best + 3] -= total
    R[r].decode_node = np.int32(RM[best + 1])
    return int(RM[best])
