"""KV caches on their way from a prefill to a decode replica.

The prefill replica keeps the cache of a request until its transfer ends. Two structures hold a
transfer: the heap of all ends, which hands requests over in order of time, and the list of each
prefill replica, which frees its memory.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.ends import set_end
from hetero.engine.heaps import times_push
from hetero.engine.kv import vacate
from hetero.engine.state import AT_BOUNDARY, IN_TRANSFER, TRANSFERS


@compiled
def transfer_end_s(R, r):
    """When the KV transfer of a request ends."""
    return R[r].finish_s + R[r].transfer_s


@compiled
def announce(FM, IM, e, r, t):
    """Let the fleet look at a request at ``t``."""
    times_push(FM, IM, e.transfer_keys, e.transfer_items, IM[TRANSFERS], t, r)
    IM[TRANSFERS] += 1


@compiled
def begin_transfer(R, e, s, FM, IM, r):
    """Send the KV cache of a request, whose prefill has just ended, to its decode replica.

    It waits until what its link shares with others is free, in order of the ends of prefills.
    """
    j = R[r].decode_node
    tokens = np.int64(R[r].input_tokens) + R[r].done_tokens - 1
    busy_s = FM[e.link_s_per_token + j] * tokens
    start = R[r].finish_s
    for k in range(e.media + 2 * j, e.media + 2 * j + 2):
        if IM[k] >= 0:
            start = max(start, FM[IM[k]])
    for k in range(e.media + 2 * j, e.media + 2 * j + 2):
        if IM[k] >= 0:
            FM[IM[k]] = start + busy_s
    R[r].transfer_s = start - R[r].finish_s + FM[e.link_latency_s + j] + busy_s
    R[r].status = IN_TRANSFER
    end = transfer_end_s(R, r)
    announce(FM, IM, e, r, end)
    previous = np.int64(-1)
    q = s.leaving
    while q >= 0 and transfer_end_s(R, q) <= end:
        previous, q = q, np.int64(R[q].link)
    R[r].link = q
    if previous < 0:
        s.leaving = r
    else:
        R[previous].link = r


@compiled
def left(R, e, s, IM, t):
    """Free what requests whose transfers have ended by ``t`` held on their prefill replica."""
    r = s.leaving
    while r >= 0 and transfer_end_s(R, r) <= t:
        vacate(R, e, s, IM, r, R[r].reserved)
        r = np.int64(R[r].link)
    s.leaving = r


@compiled
def wake(e, s, FM, t):
    """Let a replica look again at ``t`` whether it has room, if it waits for a transfer."""
    if s.mode == AT_BOUNDARY and s.clock_s > t:
        s.clock_s = t
        set_end(e, FM, t)


@compiled
def abandon(R, e, s, FM, IM, r, t):
    """Free at ``t`` what a request in transfer holds on its prefill replica."""
    previous = np.int64(-1)
    q = s.leaving
    while q != r:
        previous, q = q, np.int64(R[q].link)
    if previous < 0:
        s.leaving = R[r].link
    else:
        R[previous].link = R[r].link
    vacate(R, e, s, IM, r, R[r].reserved)
    wake(e, s, FM, t)
