"""How routers of pipelines decide, compiled: which edge a request takes next.

FLOW settles the whole path when a request comes; SWARM decides hop by hop when a prompt is ready
to be sent; RANDOM and SHORTEST_QUEUE when an edge is free.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.pipeline_kv import room
from hetero.engine.pipeline_state import DRAWS

FLOW, SWARM, RANDOM, SHORTEST_QUEUE = 0, 1, 2, 3

#: Edges with less than this share of what leaves a node are not used (Helix).
LEAST_SHARE = 0.05


@compiled
def draw(p, IM):
    """A number in [0, 1): splitmix64 of a counter, so that nothing has to be drawn in advance."""
    IM[DRAWS] += 1
    z = p.seed + np.uint64(IM[DRAWS]) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 1.1102230246251565e-16


@compiled
def by_weight(p, V, L, i, tokens, expected):
    """Interleaved weighted round robin over the edges of a node that have room; -1 for none.

    Source: Helix, section 5.1: interleaved weighted round robin (IWRR) over the flow; w_uv.
    """
    first, stop = V[i].out_first, V[i].out_first + V[i].out_count
    total = 0.0
    for e in range(first, stop):
        total += L[e].weight
    best, least = np.int64(-1), np.inf
    for e in range(first, stop):
        edge = L[e]
        if not edge.up or edge.weight <= 0.0 or edge.weight < LEAST_SHARE * total:
            continue
        if edge.target < p.nodes and not room(p, V[edge.target], expected):
            continue
        after = edge.load + tokens / edge.weight
        if after < least:
            best, least = np.int64(e), after
    if best >= 0:
        L[best].load = least
    return best


@compiled
def by_delay(V, L, i):
    """Swarm: the edge whose turn it is; its next turn comes a mean delay later. -1 for none."""
    best, least = np.int64(-1), np.inf
    for e in range(V[i].out_first, V[i].out_first + V[i].out_count):
        if L[e].up and L[e].priority < least:
            best, least = np.int64(e), L[e].priority
    if best >= 0:
        L[best].priority += L[best].delay_s
    return best


@compiled
def observe_delay(p, L, e, seconds):
    """Swarm: what a message took from the start of its sending to the end of its batch."""
    L[e].delay_s = p.smoothing * seconds + (1.0 - p.smoothing) * L[e].delay_s


@compiled
def by_chance(p, V, L, IM, i, t, shortest):
    """An edge drawn among those free at ``t``, or of these to the shortest queues; -1: none."""
    first, stop = V[i].out_first, V[i].out_first + V[i].out_count
    limit = np.int64(2**62)
    if shortest:
        for e in range(first, stop):
            if L[e].up:
                j = L[e].target
                limit = min(limit, V[j].queued if j < p.nodes else np.int64(-1))
    count = 0
    for e in range(first, stop):
        if L[e].up and L[e].free_s <= t:
            j = L[e].target
            queued = V[j].queued if j < p.nodes else np.int64(-1)
            if not shortest or queued == limit:
                count += 1
    if count == 0:
        return np.int64(-1)
    left = min(int(draw(p, IM) * count), count - 1)
    for e in range(first, stop):
        if L[e].up and L[e].free_s <= t:
            j = L[e].target
            queued = V[j].queued if j < p.nodes else np.int64(-1)
            if not shortest or queued == limit:
                if left == 0:
                    return np.int64(e)
                left -= 1
    return np.int64(-1)


@compiled
def walk(p, V, L, IM, tokens, expected, path, code):
    """Settle a whole path into ``IM[path:]`` and return its edges; 0 where there is none.

    The decisions of routers that otherwise decide on the way are taken as of now.
    """
    i, count = p.nodes, 0
    while True:
        if code == SWARM:
            e = by_delay(V, L, i)
        elif code in (RANDOM, SHORTEST_QUEUE):
            e = by_chance(p, V, L, IM, i, np.inf, code == SHORTEST_QUEUE)
        else:
            e = by_weight(p, V, L, i, tokens, expected)
        if e < 0:
            break
        IM[path + count] = e
        count += 1
        i = L[e].target
        if i == p.nodes:
            return count
    if code == FLOW:
        for k in range(count):
            L[IM[path + k]].load -= tokens / L[IM[path + k]].weight
    return 0
