"""The compiled switch over the built-in routers."""

from __future__ import annotations

from hetero.engine.candidates import look_ahead, may_take
from hetero.engine.compiled import compiled
from hetero.engine.replica import advance, advance_all
from hetero.engine.state import PREFILL_ONLY
from hetero.routers.capability import NEXT_EPOCH_S, heteroserve, latency_aware, refresh
from hetero.routers.lengths import range_shares
from hetero.routers.load import least_requests, least_tokens, pick
from hetero.routers.predictive import predictive
from hetero.routers.prefixes import cache_aware
from hetero.routers.rotation import interleaved, round_robin, single, weighted_random
from hetero.routers.shares import pair_shares
from hetero.routers.workload import workload

ROUND_ROBIN, WEIGHTED_RANDOM, INTERLEAVED, SINGLE = 0, 1, 2, 3
LEAST_REQUESTS, LEAST_TOKENS, POWER_OF_TWO = 4, 5, 6
WORKLOAD, HETEROSERVE, LATENCY_AWARE, LENGTH_AWARE, PREDICTIVE = 7, 8, 9, 10, 11
PAIR_SHARES, CACHE_AWARE, RANGE_SHARES = 12, 13, 14


@compiled
def _power_of_two(R, E, S, FM, IM, first, second, r, t):
    """The less loaded of two replicas drawn at random; only if neither can, the least loaded."""
    count = len(E)
    i = pick(first, count)
    j = pick(second, count - 1) if count > 1 else 0
    j += 1 if count > 1 and j >= i else 0
    advance(R, E[i], S[i], FM, IM, t)
    advance(R, E[j], S[j], FM, IM, t)
    if not may_take(R, E, S, r, i):
        i = j
        if not may_take(R, E, S, r, j):
            advance_all(R, E, S, FM, IM, t)
            i = least_requests(R, E, S, r)
    elif may_take(R, E, S, r, j) and S[j].outstanding < S[i].outstanding:
        i = j
    return i


@compiled
def decide(code, R, E, S, FM, IM, RM, first, second, r, t):
    """Replica by router ``code``, -1 for none; ``first`` and ``second`` are uniform draws."""
    count = len(E)
    if code == ROUND_ROBIN:
        return round_robin(R, E, S, RM, r)
    if code == POWER_OF_TWO:
        return _power_of_two(R, E, S, FM, IM, first, second, r, t)
    if code == WEIGHTED_RANDOM:
        return weighted_random(R, E, S, RM, first, r)
    if code == INTERLEAVED:
        return interleaved(R, E, S, RM[:count], RM[count:], r)
    if code == SINGLE:
        return single(R, E, S, RM, r)
    if code == PAIR_SHARES:
        advance_all(R, E, S, FM, IM, t)
        return pair_shares(R, E, S, RM, first, r, t)
    if code == LENGTH_AWARE:
        start = 1 + (count if R[r].input_tokens > RM[0] else 0)
        return weighted_random(R, E, S, RM[start : start + count], first, r)
    if code in (HETEROSERVE, LATENCY_AWARE):
        if t >= RM[NEXT_EPOCH_S]:
            advance_all(R, E, S, FM, IM, t)
            refresh(S, RM, t)
        if code == HETEROSERVE:
            return heteroserve(R, E, S, RM, r)
        return latency_aware(R, E, S, RM, r)
    advance_all(R, E, S, FM, IM, t)
    if code == LEAST_REQUESTS:
        return least_requests(R, E, S, r)
    if code == LEAST_TOKENS:
        return least_tokens(R, E, S, r)
    if code == CACHE_AWARE:
        return cache_aware(R, E, S, IM, RM, r)
    if code == WORKLOAD:
        return workload(R, E, S, RM, r)
    if code == RANGE_SHARES:
        return range_shares(R, E, S, RM, r)
    return predictive(R, E, S, FM, IM, RM, r, t)


@compiled
def pair(code, R, E, S, FM, IM, RM, first, second, r, t):
    """Replica for the prefill (or everything) and replica for the decode, -1 for none."""
    i = decide(code, R, E, S, FM, IM, RM, first, second, r, t)
    return i, R[r].decode_node if i >= 0 and E[i].role == PREFILL_ONLY else -1


@compiled
def choose(code, R, E, S, FM, IM, RM, U, r, t):
    """The same, with the uniform draws of a request in ``U``."""
    if E[0].split:
        advance_all(R, E, S, FM, IM, t)
        look_ahead(R, E, S, r)
    first = second = 0.0
    if code in (WEIGHTED_RANDOM, POWER_OF_TWO, LENGTH_AWARE, PAIR_SHARES):
        first, second = U[r, 0], U[r, 1]
    return pair(code, R, E, S, FM, IM, RM, first, second, r, t)
