"""Arrivals, routing and requests that lost their replica, compiled."""

from __future__ import annotations

import numpy as np

from hetero.engine.batch import charge
from hetero.engine.candidates import candidates, decode_replica, takes_more, why_nowhere
from hetero.engine.compiled import compiled
from hetero.engine.dispatcher_queue import (
    drop,
    first_deferred,
    hold,
    is_deferred,
    keep,
    merge,
    next_change_s,
    take_all,
)
from hetero.engine.heaps import times_pop, times_push
from hetero.engine.kv import fits
from hetero.engine.prefix import known_tokens, write_down
from hetero.engine.replica import advance, advance_all, enqueue
from hetero.engine.state import (
    DECODE_ONLY,
    DEFER,
    DEFERRED,
    DEFERRED_FOR_GOOD,
    FINISHED,
    HELD,
    LOGGED,
    NO_REASON,
    NO_REPLICA,
    PREFILL_ONLY,
    REFUSED_BY_ROUTER,
    REJECTED,
)
from hetero.routers.kernels import choose

# What is driven, see drive.
ROUTE, SEND, WAIT, REQUEUE, ADVANCE = 0, 1, 2, 3, 4


@compiled
def reject(R, E, IM, r, reason):
    """Turn a request away for good."""
    R[r].status = REJECTED
    R[r].reason = reason
    R[r].finish_s = np.nan
    R[r].node = -1
    R[r].decode_node = -1
    if E[0].log > 0:
        IM[E[0].log + IM[LOGGED]] = r
        IM[LOGGED] += 1


@compiled
def send(R, E, S, FM, IM, r, i, j, t):
    """Dispatch a request to replica ``i`` (and for decode to ``j``) at time ``t``."""
    usable = i >= 0 and takes_more(S[i]) and E[i].role != DECODE_ONLY and fits(R, E[i], r)
    if usable and E[i].role == PREFILL_ONLY:
        usable = j >= 0 and takes_more(S[j]) and fits(R, E[j], r)
    if not usable:
        reason = why_nowhere(R, E, S, r)
        if reason == NO_REPLICA:
            hold(R, E, S, FM, IM, r, reason, t)
        elif reason == NO_REASON and i == DEFER:
            hold(R, E, S, FM, IM, r, DEFERRED_FOR_GOOD, t)
        else:
            reject(R, E, IM, r, reason if reason else REFUSED_BY_ROUTER)
        return
    R[r].reason = NO_REASON
    R[r].node = i
    R[r].decode_node = j
    R[r].believed_tokens = known_tokens(R, E[i], IM, r)
    write_down(E[i], IM, r)
    charge(R, S[i], r)
    if j >= 0:
        charge(R, S[j], r)
    advance(R, E[i], S[i], FM, IM, t)
    enqueue(R, E[i], S[i], FM, IM, r, t)


@compiled
def route(R, E, S, FM, IM, RM, U, code, r, t):
    """Let a built-in router choose for one request, and dispatch it."""
    if E[0].shared:
        advance_all(R, E, S, FM, IM, t)
    i, j = choose(code, R, E, S, FM, IM, RM, U, r, t)
    send(R, E, S, FM, IM, r, i, j, t)


@compiled
def arrivals(R, E, S, FM, IM, RM, U, code, start, stop):
    """Route requests ``start`` to ``stop - 1`` when they arrive."""
    for r in range(start, stop):
        t = R[r].arrival_s
        if IM[DEFERRED] > 0:  # here: a call of its own for every request costs a twentieth
            offer_until(R, E, S, FM, IM, RM, U, code, t)
        route(R, E, S, FM, IM, RM, U, code, r, t)


@compiled
def answered(R, E, IM, ready, clients, think_s, t):
    """Note when clients whose requests have ended, or were refused at ``t``, send their next.

    ``ready`` and ``clients[2:]`` are a heap of these times and of the requests that ended,
    ``clients[0]`` its size, ``clients[1]`` how much of the log has been read.
    """
    while clients[1] < IM[LOGGED]:
        r = IM[E[0].log + clients[1]]
        clients[1] += 1
        if r < 0:  # a first token
            continue
        end = t
        if R[r].status == FINISHED:
            last = R[r].decode_node if R[r].decode_node >= 0 else R[r].node
            end = R[r].finish_s + E[last].way_s + E[last].way_s_per_token * R[r].input_tokens
        times_push(ready, clients, 0, 2, clients[0], end + think_s, r)
        clients[0] += 1


@compiled
def due_s(R, ready, clients, r):
    """When a client will send request ``r``; infinite while all wait, or it does not exist."""
    return ready[0] if r < len(R) and clients[0] > 0 else np.inf


@compiled
def send_next(R, ready, clients, r):
    """The client that has been ready for longest sends request ``r``."""
    R[r].arrival_s = ready[0]
    times_pop(ready, clients, 0, 2, clients[0])
    clients[0] -= 1


@compiled
def closed_loop(
    R, E, S, FM, IM, RM, U, code, start, stop, until, inclusive, ready, clients, think_s
):
    """Route requests ``start`` to ``stop - 1`` when clients send them; which comes next.

    Those are left that come at ``until`` or later, or only later where it is inclusive. The fleet
    is simulated up to then, unless ``stop`` is in the way.
    """
    r = start
    while r < stop or stop == len(R):
        due = due_s(R, ready, clients, r)
        t = next_change_s(R, E, S, FM, IM, min(due, until))
        if t < np.inf:
            if IM[DEFERRED] > 0:
                offer(R, E, S, FM, IM, RM, U, code, t)
            answered(R, E, IM, ready, clients, think_s, t)
        elif due < until or (inclusive and due == until):
            send_next(R, ready, clients, r)
            route(R, E, S, FM, IM, RM, U, code, r, due)
            answered(R, E, IM, ready, clients, think_s, due)
            r += 1
        else:
            break
    return r


@compiled
def offer(R, E, S, FM, IM, RM, U, code, t):
    """Offer deferred requests to their router at ``t``, the oldest first, until it defers one."""
    r, before = first_deferred(R, IM)
    while r >= 0:
        i, j = choose(code, R, E, S, FM, IM, RM, U, r, t)
        if i == DEFER:
            R[r].decode_node = -1
            return
        drop(R, IM, r, before)
        send(R, E, S, FM, IM, r, i, j, t)
        r, before = first_deferred(R, IM)


@compiled
def offer_all(R, E, S, FM, IM, RM, U, code, t):
    """Offer all held requests at ``t``, those that the router deferred until it defers one."""
    r = take_all(IM)
    asks = True
    while r >= 0:
        following = np.int64(R[r].link)
        if asks or R[r].reason != DEFERRED_FOR_GOOD:
            route(R, E, S, FM, IM, RM, U, code, r, t)
            asks = asks and not is_deferred(R, r)
        else:
            keep(R, IM, r)
        r = following


@compiled
def offer_until(R, E, S, FM, IM, RM, U, code, until):
    """Offer deferred requests again at every change up to ``until``."""
    while IM[DEFERRED] > 0:
        t = next_change_s(R, E, S, FM, IM, until)
        if t == np.inf:
            return
        offer(R, E, S, FM, IM, RM, U, code, t)


@compiled
def drive(
    R, E, S, FM, IM, RM, U, code, what, start, stop, t, inclusive, lost, ready, clients, think_s
):
    """What is done under a built-in router, by number; which request comes next.

    One kernel for everything, because each that Python calls is compiled with all that it calls.
    """
    if what == ROUTE:
        arrivals(R, E, S, FM, IM, RM, U, code, start, stop)
    elif what == SEND:
        return closed_loop(
            R, E, S, FM, IM, RM, U, code, start, stop, t, inclusive, ready, clients, think_s
        )
    elif what == WAIT:
        offer_until(R, E, S, FM, IM, RM, U, code, t)
    elif what == REQUEUE:
        merge(R, IM, lost)
        offer_all(R, E, S, FM, IM, RM, U, code, t)
    else:
        advance_all(R, E, S, FM, IM, t)
    return stop


@compiled
def give_up(R, E, IM):
    """Reject what is still held."""
    r = take_all(IM)
    while r >= 0:
        following = np.int64(R[r].link)
        reject(R, E, IM, r, R[r].reason)
        r = following


@compiled
def look(R, E, S, FM, IM, r, t, eligible, known):
    """Bring the fleet to ``t`` for a router written in Python, and say who may take ``r``."""
    advance_all(R, E, S, FM, IM, t)
    candidates(R, E, S, r, eligible)
    for i in range(len(E)):
        known[i] = known_tokens(R, E[i], IM, r)


@compiled
def send_from(R, E, S, FM, IM, r, i, t):
    """Dispatch a request to replica ``i``, with the emptiest decode replica beside it."""
    send(R, E, S, FM, IM, r, i, decode_replica(R, E, S, r, i) if i >= 0 else -1, t)


@compiled
def missed_for_certain(R, first, stop, now, ways, ttft, tpot, e2e):
    """Requests of a range that have missed a target, whatever follows."""
    count = 0
    for r in range(first, stop):
        late = R[r].status == REJECTED or R[r].first_token_s - R[r].arrival_s > ttft
        if R[r].status == HELD:
            late |= now - R[r].arrival_s > min(ttft, e2e)
        elif R[r].status == FINISHED:
            span, later = R[r].finish_s - R[r].first_token_s, R[r].output_tokens - 1
            late |= R[r].finish_s - R[r].arrival_s > e2e
            late |= later > 0 and span - ways > tpot * later
        count += late
    return count
