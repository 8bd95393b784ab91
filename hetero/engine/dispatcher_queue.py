"""Requests that wait at the dispatcher.

A request is held where its router defers it, or where every replica that could take it is down.
Those that a router deferred are offered to it again, the smallest priority first and of one the
oldest, until it defers one, whenever a request gets its first token or its last; the others when a
replica fails or recovers. What is held in the end, when nothing is left to wait for, is rejected.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled, inlined
from hetero.engine.replica import advance_all, next_end_s
from hetero.engine.state import (
    CHANGES,
    DEFERRED,
    DEFERRED_FOR_GOOD,
    EVENTS,
    HELD,
    HELD_HEAD,
    HELD_TAIL,
    SEEN_CHANGES,
    TRANSFERS,
)


@inlined
def _comes_first(R, a, b):
    """Whether held request ``a`` stands before ``b``."""
    return R[a].priority < R[b].priority or (R[a].priority == R[b].priority and a < b)


@compiled
def keep(R, IM, r):
    """Put a request among those that are held."""
    R[r].status = HELD
    before = IM[HELD_TAIL]
    if before >= 0 and _comes_first(R, r, before):
        before, following = np.int64(-1), IM[HELD_HEAD]
        while _comes_first(R, following, r):
            before, following = following, np.int64(R[following].link)
    if before < 0:
        R[r].link, IM[HELD_HEAD] = IM[HELD_HEAD], r
    else:
        R[r].link, R[before].link = R[before].link, r
    if R[r].link < 0:
        IM[HELD_TAIL] = r
    IM[DEFERRED] += R[r].reason == DEFERRED_FOR_GOOD


@compiled
def hold(R, E, S, FM, IM, r, reason, t):
    """Hold a request from ``t`` on; it is rejected for ``reason`` if that is for good."""
    R[r].reason = reason
    R[r].node = -1
    R[r].decode_node = -1
    keep(R, IM, r)
    # Only what changes from now on is a reason to offer it again.
    advance_all(R, E, S, FM, IM, t)
    IM[SEEN_CHANGES] = IM[CHANGES]


@compiled
def merge(R, IM, lost):
    """Put requests that lost their replica among those that are held."""
    IM[EVENTS] += 1
    for k in range(len(lost)):
        R[lost[k]].reason = 0
        keep(R, IM, lost[k])


@compiled
def is_deferred(R, r):
    """Whether a request is held because its router deferred it."""
    return R[r].status == HELD and R[r].reason == DEFERRED_FOR_GOOD


@compiled
def first_deferred(R, IM):
    """The oldest request that a router deferred, and the one held before it; -1 for none."""
    r, before = IM[HELD_HEAD], np.int64(-1)
    while r >= 0 and R[r].reason != DEFERRED_FOR_GOOD:
        r, before = np.int64(R[r].link), r
    return r, before


@compiled
def drop(R, IM, r, before):
    """Take a deferred request, which stands behind ``before``, out of those that are held."""
    following = np.int64(R[r].link)
    if before < 0:
        IM[HELD_HEAD] = following
    else:
        R[before].link = following
    if following < 0:
        IM[HELD_TAIL] = before
    IM[DEFERRED] -= 1


@compiled
def take_all(IM):
    """Empty the list of the held ones and return its first."""
    r = IM[HELD_HEAD]
    IM[HELD_HEAD] = IM[HELD_TAIL] = -1
    IM[DEFERRED] = 0
    return r


@compiled
def next_change_s(R, E, S, FM, IM, until):
    """Play the fleet to the next first token or finish, at most to ``until``, where it is inf."""
    while True:
        t = next_end_s(E, FM)
        if IM[TRANSFERS] > 0:
            t = min(t, FM[E[0].transfer_keys])
        if t > until or t == np.inf:
            return np.inf
        for _ in range(2):
            advance_all(R, E, S, FM, IM, t)
            if IM[CHANGES] != IM[SEEN_CHANGES]:
                IM[SEEN_CHANGES] = IM[CHANGES]
                return t
            if t >= until:
                return np.inf
            t = np.nextafter(t, np.inf)  # a moment later batches due now are formed
