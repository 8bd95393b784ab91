"""Routers that look at no state: rotation, chance, weights, one replica.

Layout of the router memory ``RM``: round robin [next]; weighted chance [weight per replica];
interleaved [weight per replica, credit per replica]; single [replica].
"""

from __future__ import annotations

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.kv import fits
from hetero.engine.state import DECODE_ONLY, DEFER, DOWN, REJECT


@compiled
def round_robin(R, E, S, RM, r):
    """The next replica in turn that could hold the request."""
    count = len(E)
    start = int(RM[0])
    for k in range(count):
        i = start + k
        if i >= count:
            i -= count
        if may_take(R, E, S, r, i):
            RM[0] = i + 1 if i + 1 < count else 0
            return i
    return -1


@compiled
def weighted_random(R, E, S, weight, draw, r):
    """A replica with probability proportional to its weight, among those that could hold it."""
    total = 0.0
    for i in range(len(E)):
        if may_take(R, E, S, r, i):
            total += weight[i]
    target = draw * total
    last = -1
    for i in range(len(E)):
        if may_take(R, E, S, r, i) and weight[i] > 0.0:
            last = i
            target -= weight[i]
            if target < 0.0:
                return i
    return last


@compiled
def interleaved(R, E, S, weight, credit, r):
    """Smooth weighted rotation: every replica earns its weight, the richest serves and pays."""
    best = -1
    total = 0.0
    for i in range(len(E)):
        if may_take(R, E, S, r, i):
            total += weight[i]
            credit[i] += weight[i]
            if best < 0 or credit[i] > credit[best]:
                best = i
    if best >= 0:
        credit[best] -= total
    return best


@compiled
def single(R, E, S, RM, r):
    """Always the same replica, if it could hold the request; while it is down they wait."""
    i = int(RM[0])
    if S[i].mode == DOWN and E[i].role != DECODE_ONLY and fits(R, E[i], r):
        return DEFER
    return i if may_take(R, E, S, r, i) else REJECT
