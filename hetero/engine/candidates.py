"""Which replicas may take a request, and the decode replica beside a prefill replica."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.kv import fits
from hetero.engine.state import DECODE_ONLY, DOWN, NO_REPLICA, PREFILL_ONLY, TOO_LONG


@compiled
def takes_more(s):
    """Whether a replica is up and does not drain."""
    return s.mode != DOWN and s.draining == 0


@compiled
def may_take(R, E, S, r, i):
    """Whether replica ``i`` takes more, serves prefill and could hold the request.

    One that only prefills needs a decode replica that can take it on, see :func:`look_ahead`.
    """
    return (
        takes_more(S[i])
        and E[i].role != DECODE_ONLY
        and fits(R, E[i], r)
        and (E[i].role != PREFILL_ONLY or R[r].decode_node >= 0)
    )


@compiled
def emptiest_decode(R, E, S, r):
    """Decode replica with the emptiest KV cache by dispatched tokens, -1 if none can take it."""
    best, least = -1, np.inf
    for j in range(len(E)):
        if E[j].role == DECODE_ONLY and takes_more(S[j]) and fits(R, E[j], r):
            filled = S[j].outstanding_tokens / E[j].kv_tokens
            if filled < least:
                best, least = j, filled
    return best


@compiled
def look_ahead(R, E, S, r):
    """Note the decode replica of a request before its prefill replica is chosen."""
    R[r].decode_node = emptiest_decode(R, E, S, r) if E[0].split else -1


@compiled
def decode_replica(R, E, S, r, i):
    """Decode replica beside replica ``i``; -1 where ``i`` decodes itself."""
    return emptiest_decode(R, E, S, r) if E[i].role == PREFILL_ONLY else -1


@compiled
def candidates(R, E, S, r, eligible):
    """Fill in which replicas may take a request; shape (M,)."""
    look_ahead(R, E, S, r)
    for i in range(len(E)):
        eligible[i] = may_take(R, E, S, r, i)


@compiled
def why_nowhere(R, E, S, r):
    """Reason why no replica can take a request, 0 if one can."""
    decode = reason = TOO_LONG
    for j in range(len(E)):
        if E[j].role == DECODE_ONLY and fits(R, E[j], r):
            if takes_more(S[j]):
                decode = 0
            elif decode == TOO_LONG:
                decode = NO_REPLICA
    for i in range(len(E)):
        if E[i].role != DECODE_ONLY and fits(R, E[i], r):
            one = 0 if takes_more(S[i]) else NO_REPLICA
            if E[i].role == PREFILL_ONLY and decode != 0:
                one = decode
            if one == 0:
                return 0
            if one == NO_REPLICA:
                reason = NO_REPLICA
    return reason
