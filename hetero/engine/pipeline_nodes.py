"""Nodes, edges and KV cache of the pipeline simulator, compiled.

The rules, at one instant: batches end, edges become free, messages arrive, requests come; then
batches form. A batch takes what waits before its segment, in order, as long as the limits of the
node allow, and runs all layers of the segment; what a node finishes it sends on at once. An edge
sends one message after another and hands each over a latency later.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled, inlined
from hetero.engine.heaps import times_pop, times_push, times_replace
from hetero.engine.pipeline_state import (
    BATCH_END,
    BUSY,
    DIRTY,
    EVENTS,
    IDLE,
    KIND_SHIFT,
    MESSAGE,
    SEND_END,
    WINDOW_FROM,
    WINDOW_UNTIL,
)


@inlined
def push_event(p, FM, IM, t, kind, item):
    """Schedule an event."""
    key = (np.int64(kind) << KIND_SHIFT) | np.int64(item)
    times_push(FM, IM, p.heap_keys, p.heap_items, IM[EVENTS], t, key)
    IM[EVENTS] += 1


@inlined
def pop_event(p, FM, IM):
    """Remove the earliest event."""
    times_pop(FM, IM, p.heap_keys, p.heap_items, IM[EVENTS])
    IM[EVENTS] -= 1


@inlined
def mark(p, v, IM, i):
    """Let node ``i`` look for a batch when this instant is over."""
    if v.dirty == 0 and v.mode == IDLE:
        v.dirty = 1
        IM[p.dirty + IM[DIRTY]] = i
        IM[DIRTY] += 1


@inlined
def enqueue(R, p, v, IM, r, i, segment):
    """A message waits before a segment of node ``i``."""
    q = v.queues + 3 * segment
    R[r].link = -1
    if IM[q] < 0:
        IM[q] = r
    else:
        R[IM[q + 1]].link = r
    IM[q + 1] = r
    R[r].at = i
    if segment == 0:
        v.queued += 1
    mark(p, v, IM, i)


@inlined
def _prompt_s(v, FM, tokens):
    last = v.prompt_last
    if tokens <= last:
        return FM[v.prompt_table + tokens]
    slope = FM[v.prompt_table + last] - FM[v.prompt_table + last - 1]
    return FM[v.prompt_table + last] + slope * (tokens - last)


@inlined
def _decode_s(v, FM, requests):
    last = v.decode_last
    if requests <= last:
        return FM[v.decode_table + requests]
    slope = FM[v.decode_table + last] - FM[v.decode_table + last - 1]
    return FM[v.decode_table + last] + slope * (requests - last)


@inlined
def begin(R, p, v, FM, IM, i, t):
    """Form the next batch of node ``i``: the next segment in turn before which something waits.

    Source: Helix, section 5.1: dynamic batching of a node.
    """
    segment = np.int64(-1)
    for step in range(1, v.segments + 1):
        s = (v.segment + step) % v.segments
        if IM[v.queues + 3 * s] >= 0:
            segment = s
            break
    if segment < 0:
        return
    q = v.queues + 3 * segment
    prompts, prompt_tokens, decodes, context = 0, np.int64(0), 0, np.int64(0)
    before = np.int64(-1)  # the last that stays in the queue
    r = IM[q]
    v.batch_head = -1
    v.batch_tail = -1
    while r >= 0:
        following = np.int64(R[r].link)
        tokens = np.int64(R[r].tokens)
        prompt = R[r].is_prompt == 1
        known = np.int64(R[r].input_tokens) + R[r].done_tokens - 1
        if prompt:
            fits = prompts == 0 or (
                prompts < v.max_prompts and prompt_tokens + tokens <= v.max_prompt_tokens
            )
        else:
            fits = decodes == 0 or (decodes < v.max_decodes and context + known <= v.max_context)
        if fits:
            if prompt:
                prompts += 1
                prompt_tokens += tokens
            else:
                decodes += 1
                context += known
            if before < 0:
                IM[q] = following
            else:
                R[before].link = following
            if IM[q + 1] == r:
                IM[q + 1] = before
            R[r].link = -1
            if v.batch_head < 0:
                v.batch_head = r
            else:
                R[v.batch_tail].link = r
            v.batch_tail = r
            if segment == 0:
                v.queued -= 1
        else:
            before = r
        r = following
    layers = IM[q + 2]
    duration = layers * (_prompt_s(v, FM, prompt_tokens) + _decode_s(v, FM, decodes))
    if segment == 0:
        duration += v.entry_s * v.fresh_tokens
        v.fresh_tokens = 0
    v.segment = segment
    v.mode = BUSY
    v.batches += 1
    v.prefill_tokens += prompt_tokens * layers
    v.decode_tokens += decodes * layers
    v.busy_s += duration
    inside = min(t + duration, FM[WINDOW_UNTIL]) - max(t, FM[WINDOW_FROM])
    if inside > 0:
        v.window_busy_s += inside
    push_event(p, FM, IM, t + duration, BATCH_END, i)


@compiled
def begin_all(R, p, V, FM, IM, t):
    """Form the batches of all nodes that may, in the order in which they were marked."""
    n = IM[DIRTY]
    IM[DIRTY] = 0
    for k in range(n):
        i = IM[p.dirty + k]
        V[i].dirty = 0
        if V[i].mode == IDLE:
            begin(R, p, V[i], FM, IM, i, t)


@inlined
def receive(R, p, L, FM, IM, r):
    """The earliest event, a message at the end of its edge, gives way to the next on its way."""
    edge = L[R[r].edge]
    following = np.int64(-1)
    if edge.head == r:
        following = np.int64(R[r].link)
        edge.head = following
        R[r].link = -1
    if following < 0:
        pop_event(p, FM, IM)
        return
    key = (np.int64(MESSAGE) << KIND_SHIFT) | following
    due = R[following].due_s
    times_replace(FM, IM, p.heap_keys, p.heap_items, IM[EVENTS], due, key)


@compiled
def all_on_their_way(R, p, L, FM, IM):
    """Give every message that is on its way an event of its own."""
    for e in range(len(L)):
        r = L[e].head
        L[e].head = -1
        while r >= 0:
            following = np.int64(R[r].link)
            R[r].link = -1
            if following >= 0:
                push_event(p, FM, IM, R[following].due_s, MESSAGE, following)
            r = following


@inlined
def send(R, p, L, FM, IM, r, e, t):
    """Give a message to an edge; it leaves when the edge is free."""
    edge = L[e]
    start = max(t, edge.free_s)
    length = R[r].tokens * edge.token_s
    edge.free_s = start + length
    edge.messages += 1
    edge.tokens += R[r].tokens
    edge.busy_s += length
    if R[r].is_prompt and start >= FM[WINDOW_FROM] and start < FM[WINDOW_UNTIL]:
        edge.prompts += 1
        edge.prompt_wait_s += start - R[r].ready_s
    R[r].edge = e
    R[r].sent_s = start
    due = start + length + edge.latency_s
    R[r].due_s = due
    R[r].link = -1
    # Messages of an edge arrive in the order they are sent, so the heap needs the first alone.
    if edge.head < 0:
        edge.head = edge.tail = r
        push_event(p, FM, IM, due, MESSAGE, r)
    elif due > R[edge.tail].due_s:
        R[edge.tail].link = r
        edge.tail = r
    else:  # at one instant the lower number comes first
        push_event(p, FM, IM, due, MESSAGE, r)
    if p.late:
        push_event(p, FM, IM, start + length, SEND_END, e)
