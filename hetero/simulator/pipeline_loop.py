"""The life of requests on their pipelines, from event to event, compiled."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled, inlined
from hetero.engine.gaps import count_gap
from hetero.engine.pipeline_kv import fill, fullest_layer, give_back, reserve
from hetero.engine.pipeline_nodes import (
    begin_all,
    enqueue,
    mark,
    pop_event,
    push_event,
    receive,
    send,
)
from hetero.engine.pipeline_state import (
    BATCH_END,
    CLOCK,
    DECODE_SUM_S,
    DIRTY,
    EVENTS,
    FEED_COUNT,
    FEED_KV,
    FEED_TRACE,
    HANDLED,
    IDLE,
    IN_FLIGHT,
    ITEM,
    KIND_SHIFT,
    LAUNCH,
    MESSAGE,
    NEXT,
    NO_ROOM,
    SEND_END,
    WAIT_HEAD,
    WAIT_TAIL,
    WINDOW_DECODES,
    WINDOW_FROM,
    WINDOW_UNTIL,
)
from hetero.engine.state import FINISHED, REJECTED, RUNNING, TOO_LONG, WAITING
from hetero.routers.pipelines import (
    SHORTEST_QUEUE,
    SWARM,
    by_chance,
    by_delay,
    observe_delay,
    walk,
)


@compiled
def launch(R, p, FM, IM, t):
    """The next request of the trace comes at ``t``."""
    r = IM[NEXT]
    if r < p.requests:
        IM[NEXT] += 1
        R[r].arrival_s = t
        push_event(p, FM, IM, t, LAUNCH, r)


@inlined
def take(R, p, V, L, FM, IM, r, e, t):
    """A request takes an edge as the next of its path."""
    IM[p.paths + np.int64(r) * p.depth + R[r].hop] = e
    R[r].fixed = R[r].hop + 1
    if L[e].target < p.nodes:
        V[L[e].target].outstanding += 1
    send(R, p, L, FM, IM, r, e, t)


@compiled
def transmit(R, p, V, L, FM, IM, i, t):
    """Late binding: what waits at node ``i`` takes the edges that are free, in order."""
    v = V[i]
    before = np.int64(-1)
    r = v.pending_head
    while r >= 0:
        following = np.int64(R[r].link)
        path = p.paths + np.int64(r) * p.depth
        known = R[r].hop < R[r].fixed
        if known:
            e = IM[path + R[r].hop]
            if L[e].free_s > t:
                e = np.int64(-1)
        else:
            e = by_chance(p, V, L, IM, i, t, p.router == SHORTEST_QUEUE)
        if e >= 0:
            if before < 0:
                v.pending_head = following
            else:
                R[before].link = following
            if v.pending_tail == r:
                v.pending_tail = before
            R[r].link = -1
            if known:
                send(R, p, L, FM, IM, r, e, t)
            else:
                take(R, p, V, L, FM, IM, r, e, t)
        else:
            before = r
        r = following


@inlined
def forward(R, p, V, L, FM, IM, r, i, t):
    """Send a request on from node ``i``, or let it wait there for a free edge."""
    R[r].ready_s = t
    R[r].hop += 1
    if p.late:
        v = V[i]
        R[r].at = i
        R[r].link = -1
        if v.pending_head < 0:
            v.pending_head = r
        else:
            R[v.pending_tail].link = r
        v.pending_tail = r
    elif R[r].hop < R[r].fixed:
        send(R, p, L, FM, IM, r, IM[p.paths + np.int64(r) * p.depth + R[r].hop], t)
    else:
        take(R, p, V, L, FM, IM, r, by_delay(V, L, i), t)


@compiled
def leaves(p, V, L):
    """Whether any way leads on from the coordinator."""
    found = False
    for e in range(V[p.nodes].out_first, V[p.nodes].out_first + V[p.nodes].out_count):
        if L[e].up:
            found = True
    return found


@compiled
def start(R, p, V, L, FM, IM, r, t):
    """Begin the prefill of a request, if the router finds a way; say whether it did."""
    R[r].tokens = R[r].input_tokens + R[r].done_tokens
    R[r].fixed = 0
    if p.reserves:
        R[r].expected_tokens = np.int64(R[r].input_tokens + p.expected_output)
        path = p.paths + np.int64(r) * p.depth
        expected = np.int64(R[r].expected_tokens)
        count = walk(p, V, L, IM, np.float64(R[r].tokens), expected, path, p.router)
        if count == 0:
            return False
        R[r].fixed = count
        reserve(R, p, V, L, IM, r)
        for k in range(count):
            if L[IM[path + k]].target < p.nodes:
                V[L[IM[path + k]].target].outstanding += 1
    else:
        if not leaves(p, V, L):
            return False
    R[r].prompt_tokens = R[r].tokens
    R[r].is_prompt = 1
    R[r].status = RUNNING
    R[r].issued_s = t
    R[r].hop = -1
    IM[IN_FLIGHT] += 1
    forward(R, p, V, L, FM, IM, r, p.nodes, t)
    if p.late:
        transmit(R, p, V, L, FM, IM, p.nodes, t)
    return True


@compiled
def turn_away(R, r, reason):
    """Reject a request."""
    R[r].status = REJECTED
    R[r].reason = reason
    R[r].finish_s = np.nan
    R[r].link = -1


@compiled
def offer(R, p, V, L, FM, IM, r, t):
    """A request comes: it starts, waits for KV cache, or is turned away."""
    if IM[WAIT_HEAD] < 0 and start(R, p, V, L, FM, IM, r, t):
        return
    if not p.waits:
        turn_away(R, r, NO_ROOM)
        return
    R[r].status = WAITING
    R[r].link = -1
    if IM[WAIT_HEAD] < 0:
        IM[WAIT_HEAD] = r
    else:
        R[IM[WAIT_TAIL]].link = r
    IM[WAIT_TAIL] = r
    admit(R, p, V, L, FM, IM, t)


@compiled
def admit(R, p, V, L, FM, IM, t):
    """Start what waits, in order, as far as there is room.

    What does not fit into an empty cluster never will.
    """
    while IM[WAIT_HEAD] >= 0:
        r = IM[WAIT_HEAD]
        following = np.int64(R[r].link)
        if not start(R, p, V, L, FM, IM, r, t):
            if IM[IN_FLIGHT] > 0 or p.degraded:
                return
            turn_away(R, r, TOO_LONG)
        IM[WAIT_HEAD] = following


@inlined
def token(R, p, V, L, FM, IM, r, t):
    """The coordinator receives a token."""
    first = R[r].done_tokens == 0
    if first:
        R[r].first_token_s = t
    elif t >= FM[WINDOW_FROM] and t < FM[WINDOW_UNTIL]:
        gap = t - R[r].finish_s
        IM[WINDOW_DECODES] += 1
        FM[DECODE_SUM_S] += gap
        count_gap(IM, gap, 1)
    R[r].finish_s = t
    was_prompt = R[r].is_prompt
    if R[r].done_tokens + 1 >= R[r].output_tokens:
        give_back(R, p, V, L, IM, r, R[r].fixed)
        R[r].done_tokens += 1
        R[r].status = FINISHED
        R[r].node = L[IM[p.paths + np.int64(r) * p.depth]].target
        IM[IN_FLIGHT] -= 1
        admit(R, p, V, L, FM, IM, t)
        if p.feed == FEED_COUNT:
            launch(R, p, FM, IM, t + p.feed_delay_s)
        ended = True
    else:
        R[r].done_tokens += 1
        R[r].is_prompt = 0
        R[r].tokens = 1
        R[r].issued_s = t
        R[r].hop = -1
        if p.reserves:
            path = p.paths + np.int64(r) * p.depth
            for k in range(R[r].fixed):
                edge = L[IM[path + k]]
                if edge.weight > 0.0:
                    edge.load += 1.0 / edge.weight
        forward(R, p, V, L, FM, IM, r, p.nodes, t)
        if p.late:
            transmit(R, p, V, L, FM, IM, p.nodes, t)
        ended = False
    ends = p.feed == FEED_KV and (was_prompt or ended)
    if ends and fullest_layer(p, V, FM, IM) <= p.feed_high_water:
        launch(R, p, FM, IM, t + p.feed_delay_s)


@inlined
def batch_end(R, p, V, L, FM, IM, i, t):
    """The batch of a node has run through its segment."""
    v = V[i]
    v.mode = IDLE
    r = v.batch_head
    v.batch_head = -1
    v.batch_tail = -1
    last = v.segment == v.segments - 1
    while r >= 0:
        following = np.int64(R[r].link)
        if last:
            e = np.int64(R[r].edge)
            fill(R, v, r, L[e].layers)
            if p.router == SWARM:
                observe_delay(p, L, e, t - R[r].sent_s)
            forward(R, p, V, L, FM, IM, r, i, t)
        else:
            enqueue(R, p, v, IM, r, i, v.segment + 1)
        r = following
    if last and p.late:
        transmit(R, p, V, L, FM, IM, i, t)
    mark(p, v, IM, i)


@inlined
def message(R, p, V, L, FM, IM, r, t):
    """A message reaches the node at the end of its edge."""
    edge = L[R[r].edge]
    if edge.target == p.nodes:
        token(R, p, V, L, FM, IM, r, t)
        return
    V[edge.target].fresh_tokens += R[r].tokens
    enqueue(R, p, V[edge.target], IM, r, edge.target, edge.segment)


@compiled
def play(R, p, V, L, FM, IM, until):
    """Play every event before ``until``."""
    while True:
        when = np.inf
        if IM[EVENTS] > 0:
            when = FM[p.heap_keys]
        arrival = False
        if p.feed == FEED_TRACE and IM[NEXT] < p.requests and R[IM[NEXT]].arrival_s < when:
            when = R[IM[NEXT]].arrival_s
            arrival = True
        if IM[DIRTY] > 0 and when > FM[CLOCK]:
            begin_all(R, p, V, FM, IM, FM[CLOCK])
            continue
        if when >= until or when == np.inf:
            return
        FM[CLOCK] = when
        IM[HANDLED] += 1
        if arrival:
            r = IM[NEXT]
            IM[NEXT] += 1
            offer(R, p, V, L, FM, IM, r, when)
            continue
        key = IM[p.heap_items]
        kind, item = key >> KIND_SHIFT, key & ITEM
        if kind == MESSAGE:
            receive(R, p, L, FM, IM, item)
            message(R, p, V, L, FM, IM, item, when)
            continue
        pop_event(p, FM, IM)
        if kind == BATCH_END:
            batch_end(R, p, V, L, FM, IM, item, when)
        elif kind == SEND_END:
            transmit(R, p, V, L, FM, IM, L[item].source, when)
        else:
            offer(R, p, V, L, FM, IM, item, when)


@compiled
def begin_feed(R, p, FM, IM, count):
    """Closed loop: the first ``count`` requests come one after another."""
    for k in range(count):
        launch(R, p, FM, IM, k * p.feed_delay_s)
