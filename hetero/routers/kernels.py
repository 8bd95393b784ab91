"""The compiled switch over the built-in routers, by the numbers of :mod:`hetero.routers.base`."""

from __future__ import annotations

from hetero.engine.candidates import look_ahead
from hetero.engine.compiled import compiled
from hetero.engine.replica import advance_all
from hetero.engine.state import PREFILL_ONLY
from hetero.routers.base import (
    CACHE_AWARE,
    HETEROSERVE,
    INTERLEAVED,
    LATENCY_AWARE,
    LEAST_REQUESTS,
    LEAST_TOKENS,
    LENGTH_AWARE,
    PAIR_SHARES,
    POWER_OF_TWO,
    RANGE_SHARES,
    ROUND_ROBIN,
    SINGLE,
    WEIGHTED_RANDOM,
    WORKLOAD,
)
from hetero.routers.cache_aware import cache_aware
from hetero.routers.heteroserve import (
    NEXT_EPOCH_S,
    heteroserve,
    latency_aware,
    length_aware,
    refresh,
)
from hetero.routers.load import least_requests, least_tokens, power_of_two
from hetero.routers.pairs import pair_shares
from hetero.routers.predictive import predictive
from hetero.routers.ranges import range_shares
from hetero.routers.rotation import interleaved, round_robin, single, weighted_random
from hetero.routers.xiong import workload


@compiled
def decide(code, R, E, S, FM, IM, RM, first, second, r, t):
    """Replica by router ``code``, -1 for none; ``first`` and ``second`` are uniform draws."""
    if code == ROUND_ROBIN:
        return round_robin(R, E, S, RM, r)
    if code == POWER_OF_TWO:
        return power_of_two(R, E, S, FM, IM, first, second, r, t)
    if code == WEIGHTED_RANDOM:
        return weighted_random(R, E, S, RM, first, r)
    if code == INTERLEAVED:
        return interleaved(R, E, S, RM, r)
    if code == SINGLE:
        return single(R, E, S, RM, r)
    if code == PAIR_SHARES:
        advance_all(R, E, S, FM, IM, t)
        return pair_shares(R, E, S, RM, first, r, t)
    if code == LENGTH_AWARE:
        return length_aware(R, E, S, RM, first, r)
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
