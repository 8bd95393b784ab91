"""Arrivals, routing and requests that lost their replica, compiled."""

from __future__ import annotations

import numpy as np

from hetero.fleet.batch import charge
from hetero.fleet.candidates import candidates, decode_replica, why_nowhere
from hetero.fleet.compiled import compiled
from hetero.fleet.kv import fits
from hetero.fleet.prefix import hit_tokens, remember
from hetero.fleet.replica import advance, advance_all, enqueue
from hetero.fleet.state import DECODE_ONLY, DOWN, PREFILL_ONLY, REFUSED_BY_ROUTER, REJECTED
from hetero.routers.kernels import choose


@compiled
def reject(R, r, reason):
    """Turn a request away for good."""
    R[r].status = REJECTED
    R[r].reason = reason
    R[r].finish_s = np.nan
    R[r].node = -1
    R[r].decode_node = -1


@compiled
def send(R, E, S, FM, IM, r, i, j, t):
    """Dispatch a request to replica ``i`` (and for decode to ``j``) at time ``t``."""
    usable = i >= 0 and S[i].mode != DOWN and E[i].role != DECODE_ONLY and fits(R, E[i], r)
    if usable and E[i].role == PREFILL_ONLY:
        usable = j >= 0 and S[j].mode != DOWN and fits(R, E[j], r)
    if not usable:
        reason = why_nowhere(R, E, S, r)
        reject(R, r, reason if reason else REFUSED_BY_ROUTER)
        return
    R[r].node = i
    R[r].decode_node = j
    R[r].believed_tokens = hit_tokens(R, E[i], IM, E[i].books, r)
    remember(R, E[i], IM, E[i].books, r)
    charge(R, S[i], r)
    if j >= 0:
        charge(R, S[j], r)
    advance(R, E[i], S[i], FM, IM, t)
    enqueue(R, E[i], S[i], FM, IM, r, t)


@compiled
def route(R, E, S, FM, IM, RM, U, code, r, t):
    """Let a built-in router choose for one request, and dispatch it."""
    i, j = choose(code, R, E, S, FM, IM, RM, U, r, t)
    send(R, E, S, FM, IM, r, i, j, t)


@compiled
def arrivals(R, E, S, FM, IM, RM, U, code, start, stop):
    """Route requests ``start`` to ``stop - 1`` when they arrive."""
    for r in range(start, stop):
        route(R, E, S, FM, IM, RM, U, code, r, R[r].arrival_s)


@compiled
def requeue(R, E, S, FM, IM, RM, U, code, held, t):
    """Route requests again at ``t``."""
    for k in range(len(held)):
        route(R, E, S, FM, IM, RM, U, code, held[k], t)


@compiled
def look(R, E, S, FM, IM, r, t, eligible, known):
    """Bring the fleet to ``t`` for a router written in Python, and say who may take ``r``."""
    advance_all(R, E, S, FM, IM, t)
    candidates(R, E, S, r, eligible)
    for i in range(len(E)):
        known[i] = hit_tokens(R, E[i], IM, E[i].books, r)


@compiled
def send_from(R, E, S, FM, IM, r, i, t):
    """Dispatch a request to replica ``i``, with the emptiest decode replica beside it."""
    send(R, E, S, FM, IM, r, i, decode_replica(R, E, S, r, i) if i >= 0 else -1, t)
