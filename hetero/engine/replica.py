"""The life of one replica, from event to event, compiled.

Between two events of a replica (admission, completion, memory full, arrival) its batch is
constant and a decode step is a line in the step number, so a run of n steps ends at

    clock + n first + slope n (n - 1) / 2

and nothing in between needs to be simulated. A replica is advanced only when somebody looks at it.

The rules, at one instant: steps and KV transfers end, replicas fail or recover, requests arrive,
batches form. When a step ends, finished requests leave first, then requests that have filled
their reservation ask for more, the oldest first. When a batch forms, requests join in the order
of the queue, and swapping in and out precedes the step.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.async_scheduling import next_step
from hetero.engine.batch import complete, emit, prefilled, push_waiting, release
from hetero.engine.compiled import compiled
from hetero.engine.compose import begin_padded, compose, make_room
from hetero.engine.gaps import count_line
from hetero.engine.heaps import due_step, times_pop
from hetero.engine.kv import grow, growth, room, steps_until_full
from hetero.engine.state import (
    AT_BOUNDARY,
    AT_HAND,
    BLOCK,
    CHUNKED,
    DECODE_ONLY,
    DOWN,
    FINISHED,
    IDLE,
    IN_DECODE,
    IN_PREFILL,
    KEY_BITS,
    MOST_STEPS,
    PAGED,
    PREFILL_ONLY,
    STATIC,
    TRANSFERS,
)
from hetero.engine.steps import decode_run, run_s, step_s, steps_to_reach
from hetero.engine.transfers import left, transfer_end_s


@compiled
def begin_decode(R, e, s, FM, IM):
    """Start a run of decode steps up to the next completion, memory limit or kink."""
    limit = due_step(IM[e.keys]) - s.steps
    # What is first may fit in place of an evicted request that stands behind it.
    joins = s.evicted > 0 and s.running < e.max_batch and room(R, e, s, IM, s.head)
    if joins or s.staged_count > 0 or s.staged_tokens > 0:
        limit = np.int64(1)
    if s.unseen > 0:
        limit = min(limit, e.poll_steps - (s.steps - s.looked) % e.poll_steps)
    if e.admission == PAGED:
        limit = steps_until_full(e, s, IM, limit)
    b = s.padded if e.batching == STATIC else s.running
    first, slope, limit = decode_run(e, FM, b, s.cached, limit)
    s.run_steps = limit
    s.run_first_s = first
    s.run_slope_s = slope
    s.mode = IN_DECODE
    FM[e.index] = s.clock_s + s.stall_s + run_s(first, slope, limit)


@compiled
def settle_decode(R, e, s, IM):
    """The decode run in progress has ended."""
    n, first, slope = s.run_steps, s.run_first_s, s.run_slope_s
    b = s.running
    start = s.clock_s + s.stall_s
    emit(R, s, IM, start + first, b - s.fresh)
    if n > 1:
        count_line(IM, first, slope, 1, n, b)
    grow(e, s, IM, n)
    end = start + run_s(first, slope, n)
    s.busy_s += end - s.clock_s
    s.stall_s = 0.0
    s.clock_s = end
    s.last_emit_s = end
    s.steps += n
    s.cached += n * (s.padded if e.batching == STATIC else b)
    s.decode_tokens += n * b
    if s.steps > MOST_STEPS:
        base = s.steps - (s.steps % e.block_tokens)
        for k in range(s.running):
            IM[e.keys + k] -= base << KEY_BITS
        s.steps -= base
        s.looked -= base
    complete(R, e, s, IM)


@compiled
def settle_prefill(R, e, s, FM, IM):
    """The prefill or mixed step in progress has ended."""
    now = FM[e.index]
    s.busy_s += now - s.clock_s
    s.prefill_s += now - s.clock_s
    s.prefill_tokens += s.step_tokens
    s.stall_s = 0.0
    s.clock_s = now
    if s.mixed:
        b = s.running
        emit(R, s, IM, now, b - s.fresh)
        grow(e, s, IM, 1)
        s.last_emit_s = now
        s.steps += 1
        s.cached += b
        s.decode_tokens += b
        s.mixed = 0
    if s.partial >= 0:
        s.partial_tokens += s.chunk_tokens
        s.chunk_tokens = 0
    cached = s.cached
    r = s.batch_head
    s.batch_head = -1
    s.batch_tail = -1
    while r >= 0:
        following = np.int64(R[r].link)
        prefilled(R, e, s, FM, IM, r)
        r = following
    if e.batching == STATIC:
        s.cached = cached
    s.looked = s.steps
    complete(R, e, s, IM)


@compiled
def begin(R, e, s, FM, IM):
    """Choose what a replica does next, at a boundary between steps."""
    if e.batching == STATIC:
        if s.running > 0:
            begin_decode(R, e, s, FM, IM)
        else:
            begin_padded(R, e, s, FM)
        return
    chunked = e.batching == CHUNKED
    if s.running == 0 or (s.steps - s.looked) % e.poll_steps == 0:
        s.looked = s.steps
        s.unseen = 0
    if e.ahead:
        tokens, pairs = next_step(R, e, s, IM)
    else:
        # Where it always decodes it must have its blocks before anything is admitted.
        evicted = chunked and make_room(R, e, s, IM)
        budget = e.max_step_tokens - (s.running if chunked else 0)
        size = e.block_tokens if e.admission == PAGED else 1
        scarce = s.running > 0 and e.kv_tokens - s.used * size < e.free_share * e.kv_tokens
        tokens, pairs = compose(R, e, s, IM, budget, 0, evicted or scarce)
    if tokens > 0:
        mixed = chunked and s.running > 0
        b = s.running if mixed else 0
        cached = s.cached if mixed else 0
        s.mixed = 1 if mixed else 0
        s.step_tokens = tokens
        s.mode = IN_PREFILL
        FM[e.index] = s.clock_s + s.stall_s + step_s(e, FM, tokens + b, b, cached, pairs)
        return
    if not chunked:
        make_room(R, e, s, IM)
    if s.running > 0:
        begin_decode(R, e, s, FM, IM)
    elif s.head >= 0 and s.leaving >= 0:
        # No memory before a KV transfer has ended.
        s.mode = AT_BOUNDARY
        s.clock_s = transfer_end_s(R, s.leaving)
    else:
        s.mode = IDLE
        FM[e.index] = np.inf


@compiled
def advance(R, e, s, FM, IM, t):
    """Play a replica up to time ``t``: every step that ends by then, no batch formed at ``t``."""
    while True:
        if s.mode == AT_BOUNDARY:
            if s.clock_s >= t:
                FM[e.index] = s.clock_s
                return
            left(R, e, s, IM, s.clock_s)
            begin(R, e, s, FM, IM)
            if s.mode == AT_BOUNDARY:
                continue
        if s.mode == IDLE or s.mode == DOWN or FM[e.index] > t:
            return
        if s.mode == IN_DECODE:
            settle_decode(R, e, s, IM)
        else:
            if e.prefix > 0:  # what was free first is taken first
                left(R, e, s, IM, np.nextafter(FM[e.index], -np.inf))
            settle_prefill(R, e, s, FM, IM)
        s.mode = AT_BOUNDARY


@compiled
def enqueue(R, e, s, FM, IM, r, t):
    """A request reaches a replica at ``t``; a decode run it may interrupt is cut short."""
    push_waiting(R, s, r, False)
    first = s.head == r
    R[r].at = e.index
    s.unseen += 1
    # A smaller one that now comes first may fit where the one before it waited for a transfer.
    if s.mode == IDLE or (s.mode == AT_BOUNDARY and first and s.clock_s > t):
        s.clock_s = t
        s.mode = AT_BOUNDARY
        FM[e.index] = t
    elif (
        s.mode == IN_DECODE
        and e.batching != STATIC
        and (e.poll_steps > 1 or (first and s.running < e.max_batch and room(R, e, s, IM, r)))
    ):
        first_s, slope = s.run_first_s, s.run_slope_s
        start = s.clock_s + s.stall_s
        n = steps_to_reach(first_s, slope, start, t, s.run_steps)
        s.run_steps = min(n + (s.looked - s.steps - n) % e.poll_steps, s.run_steps)
        FM[e.index] = start + run_s(first_s, slope, s.run_steps)
    # Nothing else brings an end forward but failures.
    FM[e.block] = min(FM[e.block], FM[e.index])


@compiled
def deliver(R, E, S, FM, IM, t):
    """Hand over the KV transfers that end by ``t``, in order of time."""
    while IM[TRANSFERS] > 0 and FM[E[0].transfer_keys] <= t:
        when, r = FM[E[0].transfer_keys], IM[E[0].transfer_items]
        times_pop(FM, IM, E[0].transfer_keys, E[0].transfer_items, IM[TRANSFERS])
        IM[TRANSFERS] -= 1
        left(R, E[R[r].node], S[R[r].node], IM, when)
        j = R[r].decode_node
        if R[r].status == FINISHED:  # with its prefill
            R[r].decode_node = -1
            release(R, S[j], r)
            continue
        advance(R, E[j], S[j], FM, IM, when)
        R[r].status = AT_HAND
        enqueue(R, E[j], S[j], FM, IM, r, when)


@compiled
def next_end_s(E, FM):
    """When the first replica ends what it is doing."""
    count, blocks = len(E), E[0].block
    first = np.inf
    for b in range(0, count, BLOCK):
        if FM[blocks + b // BLOCK] < first:
            earliest = np.inf
            for i in range(b, min(b + BLOCK, count)):
                earliest = min(earliest, FM[i])
            FM[blocks + b // BLOCK] = earliest
            first = min(first, earliest)
    return first


@compiled
def advance_all(R, E, S, FM, IM, t):
    """Play every replica up to ``t``, those that only decode after what they are sent.

    Where transfers share links, prefills end one after the other over the whole fleet.
    """
    split = E[0].split
    while E[0].shared:
        k, first = -1, np.inf
        for i in range(len(E)):
            waits = S[i].mode == AT_BOUNDARY and S[i].clock_s >= t
            if E[i].role == PREFILL_ONLY and FM[i] < first and not waits:
                k, first = i, FM[i]
        if k < 0 or first > t:
            break
        advance(R, E[k], S[k], FM, IM, min(np.nextafter(first, np.inf), t))
    count, blocks = len(E), E[0].block
    for b in range(0, count, BLOCK):
        if FM[blocks + b // BLOCK] <= t:
            earliest = np.inf
            for i in range(b, min(b + BLOCK, count)):
                if FM[i] <= t and not (split and E[i].role == DECODE_ONLY):
                    advance(R, E[i], S[i], FM, IM, t)
                earliest = min(earliest, FM[i])
            FM[blocks + b // BLOCK] = earliest
    if split:
        deliver(R, E, S, FM, IM, t)
        for i in range(len(E)):
            if FM[i] <= t and E[i].role == DECODE_ONLY:
                advance(R, E[i], S[i], FM, IM, t)


@compiled
def snapshot(E, S, IM, t, used, busy_s):
    """Fill in what each replica holds of its KV cache and how long it was busy; shapes (M,).

    The records of a run of decode steps stand as they were when it began.
    """
    for i in range(len(E)):
        e, s = E[i], S[i]
        used[i], busy_s[i] = s.used, s.busy_s
        if s.mode == IN_DECODE or s.mode == IN_PREFILL:
            busy_s[i] += max(t - s.clock_s, 0.0)
        if s.mode == IN_DECODE and e.admission == PAGED:
            first, slope, start = s.run_first_s, s.run_slope_s, s.clock_s + s.stall_s
            n = steps_to_reach(first, slope, start, t, s.run_steps)
            n -= 1 if start + run_s(first, slope, n) > t else 0
            used[i] += growth(e, s, IM, n)
