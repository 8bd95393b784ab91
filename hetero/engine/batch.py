"""Requests that wait, join a batch, outgrow it, are evicted from it and finish."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.gaps import count_gap
from hetero.engine.heaps import due_step, entry, heap_pop, heap_push, item_of
from hetero.engine.kv import at_hand, blocks, expected, hold, unknown_tokens, vacate
from hetero.engine.state import (
    CHANGES,
    FINISHED,
    LOGGED,
    PAGED,
    PREFILL_ONLY,
    RUNNING,
    STATIC,
    SWAP,
    SWAPPED,
    WAITING,
)
from hetero.engine.transfers import announce, begin_transfer


@compiled
def push_waiting(R, s, r, front):
    """Put a request behind (or before) those of its priority in the queue."""
    if not at_hand(R, r):
        R[r].status = WAITING
    last = np.int64(R[r].priority) - front  # of those before it
    before = np.int64(-1)
    if s.head >= 0 and R[s.tail].priority <= last:
        before = s.tail
    else:
        following = s.head
        while following >= 0 and R[following].priority <= last:
            before, following = following, np.int64(R[following].link)
    if before < 0:
        R[r].link, s.head = s.head, r
    else:
        R[r].link, R[before].link = R[before].link, r
    if R[r].link < 0:
        s.tail = r
    s.waiting += 1
    s.waiting_tokens += unknown_tokens(R, r)


@compiled
def pop_waiting(R, s):
    """Take the request at the head of the queue."""
    r = s.head
    s.head = R[r].link
    if s.head < 0:
        s.tail = -1
    s.waiting -= 1
    s.waiting_tokens -= unknown_tokens(R, r)
    return r


@compiled
def unlink(R, head, r):
    """Take a request out of a list; whether it was there, the head now, and what was before it."""
    previous, q = np.int64(-1), np.int64(head)
    while q >= 0 and q != r:
        previous, q = q, np.int64(R[q].link)
    if q >= 0 and previous >= 0:
        R[previous].link = R[r].link
    return q >= 0, np.int64(R[r].link) if q >= 0 > previous else np.int64(head), previous


@compiled
def append(R, s, r):
    """Append a request, whatever its status, to the step that is being formed."""
    R[r].link = -1
    if s.batch_head < 0:
        s.batch_head = r
    else:
        R[s.batch_tail].link = r
    s.batch_tail = r


@compiled
def into_batch(R, s, r):
    """Append a request to the prefill that is being formed."""
    R[r].status = RUNNING
    append(R, s, r)


@compiled
def take(R, e, s, IM, hits):
    """Admit the head of the queue, of whose KV cache ``hits`` blocks are cached, and return it."""
    r = s.head
    pop_waiting(R, s)
    hold(R, e, s, IM, r, hits)
    return r


@compiled
def charge(R, s, r):
    """Count a request for its replica in the dispatcher's records."""
    s.load += R[r].credit
    s.outstanding += 1
    s.outstanding_tokens += np.int64(R[r].input_tokens) + R[r].predicted_tokens


@compiled
def release(R, s, r):
    """Undo what the dispatcher counted for a request on its replica."""
    s.load -= R[r].credit
    s.outstanding -= 1
    s.outstanding_tokens -= np.int64(R[r].input_tokens) + R[r].predicted_tokens


@compiled
def finish(R, e, s, IM, r, released):
    """A request has its last token: free its KV cache and close its records."""
    vacate(R, e, s, IM, r, released)
    R[r].done_tokens = R[r].output_tokens
    R[r].finish_s = s.clock_s
    R[r].status = FINISHED
    release(R, s, r)
    IM[CHANGES] += 1
    if e.log > 0:
        IM[e.log + IM[LOGGED]] = r
        IM[LOGGED] += 1


@compiled
def schedule(R, e, s, IM, r, done):
    """Enter a request with ``done`` tokens in the heap: due when it ends or fills its space."""
    ahead = np.int64(R[r].output_tokens) - done
    outgrows = False
    if e.admission != PAGED:
        space = np.int64(R[r].reserved) - R[r].input_tokens - done
        outgrows = space < ahead
        ahead = min(ahead, space)
    R[r].done_tokens = done + ahead
    heap_push(IM, e.keys, s.running, entry(s.steps + ahead, outgrows, r))
    s.running += 1


@compiled
def join(R, e, s, IM, r, done):
    """A request with ``done`` generated tokens starts to decode."""
    stored = np.int64(R[r].input_tokens) + done - 1
    if e.admission == PAGED:
        IM[e.residues + (stored - s.steps) % e.block_tokens] += 1
        IM[e.order + s.running] = r
    schedule(R, e, s, IM, r, done)
    s.decoding_load += R[r].credit
    s.cached += stored + 1
    R[r].status = RUNNING
    R[r].link = s.fresh_head
    s.fresh_head = r
    s.fresh += 1


@compiled
def stop_decoding(R, s, r):
    """A request, already off the heap, decodes no more."""
    # Not what rounding leaves of the sum where nothing is.
    s.decoding_load = s.decoding_load - R[r].credit if s.running > 0 else 0.0


@compiled
def resume(R, e, s, IM, r):
    """A request whose KV cache is at hand decodes at once."""
    if R[r].status == SWAPPED:
        s.stall_s += e.swap_s_per_token * (np.int64(R[r].input_tokens) + R[r].done_tokens - 1)
    join(R, e, s, IM, r, np.int64(R[r].done_tokens))


@compiled
def leave_order(e, s, IM, r):
    """Take a request out of the order of admission; ``running`` is already reduced."""
    j = 0
    while IM[e.order + j] != r:
        j += 1
    while j < s.running:
        IM[e.order + j] = IM[e.order + j + 1]
        j += 1


@compiled
def leave_fresh(R, s, r):
    """Take a request out of the list of those without a decode step yet, if it is there."""
    there, s.fresh_head, _ = unlink(R, s.fresh_head, r)
    s.fresh -= np.int64(there)
    return there


@compiled
def evict(R, e, s, IM, key):
    """Put a running request, already off the heap, back to the front of the queue."""
    r = item_of(key)
    stop_decoding(R, s, r)
    done = R[r].done_tokens - (due_step(key) - s.steps)
    stored = R[r].input_tokens + done - 1
    s.cached -= stored + 1
    if e.admission == PAGED:
        IM[e.residues + (stored - s.steps) % e.block_tokens] -= 1
        vacate(R, e, s, IM, r, blocks(e, stored))
        leave_order(e, s, IM, r)
    else:
        vacate(R, e, s, IM, r, R[r].reserved)
    if not leave_fresh(R, s, r):
        R[r].finish_s = s.last_emit_s
    R[r].done_tokens = done
    R[r].preemptions += 1
    if e.eviction == SWAP:
        R[r].status = SWAPPED
        s.stall_s += e.swap_s_per_token * stored
    push_waiting(R, s, r, True)


@compiled
def complete(R, e, s, IM):
    """Take every request whose heap entry is due out of the batch."""
    while s.running > 0 and due_step(IM[e.keys]) <= s.steps:
        key = IM[e.keys]
        r = item_of(key)
        heap_pop(IM, e.keys, s.running)
        s.running -= 1
        if R[r].done_tokens < R[r].output_tokens:
            outgrow(R, e, s, IM, key)
            continue
        stop_decoding(R, s, r)
        stored = np.int64(R[r].input_tokens) + R[r].output_tokens - 1
        if e.batching != STATIC:
            s.cached -= stored + 1
        if e.admission == PAGED:
            IM[e.residues + (stored - s.steps) % e.block_tokens] -= 1
            leave_order(e, s, IM, r)
            finish(R, e, s, IM, r, blocks(e, stored))
        else:
            finish(R, e, s, IM, r, R[r].reserved)


@compiled
def outgrow(R, e, s, IM, key):
    """A request has filled its reservation: reserve as much again as is free, or evict it."""
    r = item_of(key)
    more = min(expected(R, e, r), e.kv_tokens - s.used)
    if more > 0:
        s.used += more
        R[r].reserved += more
        schedule(R, e, s, IM, r, np.int64(R[r].done_tokens))
    else:
        evict(R, e, s, IM, key)


@compiled
def prefilled(R, e, s, FM, IM, r):
    """The prefill of a request has ended: it gets its next token, and goes on or leaves."""
    now = s.clock_s
    if e.role == PREFILL_ONLY:
        now += e.lag_s + e.lag_s_per_token * (np.int64(R[r].input_tokens) + R[r].done_tokens)
    done = min(np.int64(R[r].done_tokens) + 1, np.int64(R[r].output_tokens))
    if done == 0:  # a prompt that is only scored
        R[r].first_token_s = now
    elif done == 1:
        R[r].first_token_s = now
        IM[CHANGES] += 1
        if e.log > 0:
            IM[e.log + IM[LOGGED]] = ~r
            IM[LOGGED] += 1
    else:
        count_gap(IM, now - R[r].finish_s, 1)
    R[r].finish_s = now
    R[r].done_tokens = done
    if done >= R[r].output_tokens:
        finish(R, e, s, IM, r, R[r].reserved)
        if e.role == PREFILL_ONLY:
            R[r].finish_s = now
            announce(FM, IM, e, r, s.clock_s)  # its decode replica need not wait for it
    elif e.role == PREFILL_ONLY:
        release(R, s, r)
        begin_transfer(R, e, s, FM, IM, r)
    else:
        join(R, e, s, IM, r, done)


@compiled
def emit(R, s, IM, end, old):
    """Count the gaps before the tokens that all ``old`` and fresh requests get at ``end``."""
    if old > 0:
        count_gap(IM, end - s.last_emit_s, old)
    r = s.fresh_head
    while r >= 0:
        count_gap(IM, end - R[r].finish_s, 1)
        r = R[r].link
    s.fresh_head = -1
    s.fresh = 0
