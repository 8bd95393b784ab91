"""Failure and recovery of nodes and links, compiled: requests start anew elsewhere."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.pipeline_kv import give_back
from hetero.engine.pipeline_nodes import all_on_their_way, mark, push_event
from hetero.engine.pipeline_state import (
    BATCH_END,
    DOWN,
    EVENTS,
    IN_FLIGHT,
    ITEM,
    KIND_SHIFT,
    MESSAGE,
    NEXT,
    WAIT_HEAD,
    WAIT_TAIL,
)
from hetero.engine.state import RUNNING, WAITING
from hetero.simulator.pipeline_loop import admit, leaves, start, transmit


@compiled
def take_out(R, p, V, L, FM, IM, t, held):
    """Take every request whose path leads over what has failed out of the cluster.

    Returns how many there are; ``held`` receives them, the oldest first.
    """
    all_on_their_way(R, p, L, FM, IM)
    shut = not leaves(p, V, L)
    count = 0
    for r in range(IM[NEXT]):
        if R[r].status != RUNNING:
            continue
        path = p.paths + np.int64(r) * p.depth
        if shut and R[r].fixed == 0:
            R[r].lost = 1  # it waits at the coordinator, which no way leaves
        for k in range(R[r].fixed):
            edge = L[IM[path + k]]
            if edge.broken or (edge.target < p.nodes and V[edge.target].mode == DOWN):
                R[r].lost = 1
            if k == R[r].fixed - 1 and edge.target < p.nodes and not edge.up:
                R[r].lost = 1  # it would have to go on from there, and cannot
        if R[r].lost:
            held[count] = r
            count += 1
    for i in range(p.nodes + 1):
        v = V[i]
        for s in range(v.segments):
            q = v.queues + 3 * s
            IM[q], IM[q + 1] = _without_lost(R, IM[q])
        v.batch_head, v.batch_tail = _without_lost(R, v.batch_head)
        v.pending_head, v.pending_tail = _without_lost(R, v.pending_head)
        v.queued = 0
        if v.segments > 0:
            waiting = IM[v.queues]
            while waiting >= 0:
                v.queued += 1
                waiting = np.int64(R[waiting].link)
    _drop_events(R, p, V, IM, FM)
    for k in range(count):
        r = held[k]
        R[r].lost = 0
        R[r].retries += 1
        # At a node or on an edge, it has passed the nodes before; hop counts the edge it came by.
        passed = max(np.int64(R[r].hop), np.int64(0))
        give_back(R, p, V, L, IM, r, passed)
        R[r].fixed = 0
        R[r].link = -1
        R[r].status = WAITING
        IM[IN_FLIGHT] -= 1
    return count


@compiled
def _without_lost(R, head):
    kept, last = np.int64(-1), np.int64(-1)
    r = np.int64(head)
    while r >= 0:
        following = np.int64(R[r].link)
        if not R[r].lost:
            if last < 0:
                kept = r
            else:
                R[last].link = r
            R[r].link = -1
            last = r
        r = following
    return kept, last


@compiled
def _drop_events(R, p, V, IM, FM):
    """Rebuild the heap without messages of lost requests and batches of nodes that are down."""
    size = IM[EVENTS]
    IM[EVENTS] = 0
    for k in range(size):
        t, key = FM[p.heap_keys + k], IM[p.heap_items + k]
        kind, item = key >> KIND_SHIFT, key & ITEM
        dropped = (kind == MESSAGE and R[item].lost) or (kind == BATCH_END and V[item].mode == DOWN)
        if not dropped:
            # The rebuilt part never reaches what is still to be read.
            push_event(p, FM, IM, t, kind, item)


@compiled
def resume(R, p, V, L, FM, IM, t, held):
    """After a failure or recovery: start again what was taken out, then what waits."""
    for k in range(len(held)):
        r = held[k]
        if not start(R, p, V, L, FM, IM, r, t):
            _wait_in_order(R, IM, r)
    admit(R, p, V, L, FM, IM, t)
    if p.late:
        for i in range(p.nodes + 1):
            transmit(R, p, V, L, FM, IM, i, t)
    for i in range(p.nodes):
        mark(p, V[i], IM, i)


@compiled
def _wait_in_order(R, IM, r):
    """Insert a request into the waiting list by its number."""
    before = np.int64(-1)
    after = IM[WAIT_HEAD]
    while after >= 0 and after < r:
        before = after
        after = np.int64(R[after].link)
    R[r].link = after
    if before < 0:
        IM[WAIT_HEAD] = r
    else:
        R[before].link = r
    if after < 0:
        IM[WAIT_TAIL] = r
