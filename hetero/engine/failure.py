"""Replicas that fail and recover.

A failing replica loses its KV cache and the step in progress. What it held is routed again at
once, the oldest request first, with the tokens already streamed kept as part of the prompt. KV
transfers from or to it are lost as well. Requests still in prefill elsewhere that were bound for
it get another decode replica; where none is left they are routed again, too.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.async_scheduling import clear_stage, unstage
from hetero.engine.batch import charge, release, unlink
from hetero.engine.candidates import decode_replica
from hetero.engine.compiled import compiled
from hetero.engine.heaps import due_step, item_of
from hetero.engine.kv import at_hand, unknown_tokens, vacate
from hetero.engine.prefix import clear
from hetero.engine.replica import advance_all, settle_decode
from hetero.engine.state import (
    DOWN,
    FINISHED,
    IDLE,
    IN_DECODE,
    IN_PREFILL,
    IN_TRANSFER,
    OLDEST,
    PAGED,
    PREFILL_ONLY,
    REJECTED,
    RUNNING,
    TRANSFERS,
    WAITING,
)
from hetero.engine.steps import run_s, steps_to_reach
from hetero.engine.transfers import abandon, announce, transfer_end_s, wake


@compiled
def interrupt(R, e, s, FM, IM, t):
    """Stop a replica at ``t``: count the steps that have ended, lose the one in progress."""
    if s.mode == IN_DECODE:
        first, slope, start = s.run_first_s, s.run_slope_s, s.clock_s + s.stall_s
        n = steps_to_reach(first, slope, start, t, s.run_steps)
        if start + run_s(first, slope, n) > t:
            n -= 1
        if n > 0:
            s.run_steps = n
            settle_decode(R, e, s, IM)
    if s.mode == IN_DECODE or s.mode == IN_PREFILL:
        s.busy_s += max(t - s.clock_s, 0.0)
        s.prefill_s += max(t - s.clock_s, 0.0) if s.mode == IN_PREFILL else 0.0
    r = np.int64(s.fresh_head)
    while r >= 0:  # their latest token came with a prefill, or before a transfer or swap
        R[r].status = WAITING
        r = np.int64(R[r].link)
    for k in range(s.running):
        key = IM[e.keys + k]
        r = item_of(key)
        R[r].done_tokens -= due_step(key) - s.steps
        if R[r].status == RUNNING:
            R[r].finish_s = s.last_emit_s


@compiled
def wipe(e, s, FM, IM):
    """Leave a replica down and empty; the dispatcher's records and the totals stay."""
    if e.admission == PAGED:
        for k in range(e.block_tokens):
            IM[e.residues + k] = 0
    if e.prefix > 0:
        clear(IM, e.prefix)
    if e.prefix_index > 0:
        clear(IM, e.prefix_index)
    s.mode = DOWN
    FM[e.index] = np.inf
    s.running = s.cached = s.used = s.waiting = s.waiting_tokens = s.run_steps = 0
    s.mixed = s.padded = s.fresh = s.partial_tokens = s.chunk_tokens = 0
    s.stall_s = s.decoding_load = 0.0
    s.head = s.tail = s.batch_head = s.batch_tail = s.partial = s.fresh_head = s.leaving = -1
    clear_stage(s)


@compiled
def is_active(R, r):
    """Whether a request waits or runs on a replica."""
    return R[r].status == WAITING or R[r].status == RUNNING or at_hand(R, r)


@compiled
def lose(R, e, IM, held, count, r):
    """A request has to start again with its input and the tokens it has."""
    R[r].status = WAITING
    R[r].reserved = 0
    if e.references > 0:
        IM[e.references + r] = 0
    R[r].retries += 1
    R[r].at = -1
    held[count] = r
    return count + 1


@compiled
def drop_transfers(R, E, FM, IM):
    """Rebuild the heap of transfers without the lost ones."""
    size = IM[TRANSFERS]
    IM[TRANSFERS] = 0
    base = E[0].transfer_items
    for k in range(size):
        # What is pushed never outgrows what has been read.
        r = IM[base + k]
        if R[r].status == IN_TRANSFER:
            announce(FM, IM, E[0], r, transfer_end_s(R, r))


@compiled
def take_back(R, e, s, IM, r):
    """Remove a request from the queue, or from the prefill in progress, of a replica."""
    vacate(R, e, s, IM, r, R[r].reserved)
    if s.partial == r:
        s.partial = -1
        s.partial_tokens = s.chunk_tokens = 0
        return
    there, s.batch_head, before = unlink(R, s.batch_head, r)
    if there and s.batch_tail == r:
        s.batch_tail = before
    if there or unstage(R, s, r):
        return
    _, s.head, before = unlink(R, s.head, r)
    if s.tail == r:
        s.tail = before
    s.waiting -= 1
    s.waiting_tokens -= unknown_tokens(R, r)


@compiled
def fail(R, E, S, FM, IM, i, t, stop, held):
    """Stop replica ``i`` at ``t``; list what has to be routed again and return its number.

    Requests from ``stop`` on have not arrived yet.
    """
    advance_all(R, E, S, FM, IM, t)
    if S[i].mode == DOWN:
        return 0
    interrupt(R, E[i], S[i], FM, IM, t)
    while IM[OLDEST] < stop and (
        R[IM[OLDEST]].status == FINISHED or R[IM[OLDEST]].status == REJECTED
    ):
        IM[OLDEST] += 1
    first = IM[OLDEST]
    count = 0
    for r in range(first, stop):
        if is_active(R, r) and R[r].at == i:
            release(R, S[i], r)
            if E[i].role == PREFILL_ONLY:
                release(R, S[R[r].decode_node], r)
            count = lose(R, E[i], IM, held, count, r)
        elif R[r].status == IN_TRANSFER and (R[r].node == i or R[r].decode_node == i):
            release(R, S[R[r].decode_node], r)
            if R[r].node != i:
                abandon(R, E[R[r].node], S[R[r].node], FM, IM, r, t)
            if R[r].finish_s > t:  # in the later stages: its token counts as streamed at the end
                R[r].first_token_s = min(R[r].first_token_s, t)
                R[r].finish_s = t
            count = lose(R, E[i], IM, held, count, r)
    wipe(E[i], S[i], FM, IM)
    if E[i].split:
        drop_transfers(R, E, FM, IM)
        for r in range(first, stop):
            if is_active(R, r) and R[r].decode_node == i and R[r].at == R[r].node:
                k = R[r].node
                release(R, S[i], r)
                j = decode_replica(R, E, S, r, k)
                if j >= 0:
                    R[r].decode_node = j
                    charge(R, S[j], r)
                else:
                    release(R, S[k], r)
                    take_back(R, E[k], S[k], IM, r)
                    wake(S[k], FM, k, t)
                    count = lose(R, E[k], IM, held, count, r)
    for k in range(len(E)):
        FM[E[k].block] = -np.inf  # some may look again earlier than they were to
    return count


@compiled
def recover(s, t):
    """A replica that was down is empty and idle again, and one that drained takes more."""
    s.draining = 0
    if s.mode == DOWN:
        s.mode = IDLE
        s.clock_s = t
