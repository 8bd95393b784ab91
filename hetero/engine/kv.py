"""KV cache of a replica: what an admission needs, what is free, and when it will be full."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.prefix import cached_blocks, let_go, refer, take_free
from hetero.engine.state import (
    AT_HAND,
    EXPECT_KNOWN,
    EXPECT_PREDICTED,
    PAGED,
    PREFILL_ONLY,
    SWAPPED,
)

_WATERMARK = 0.01  # share of the KV blocks that a paged engine keeps free when it admits


@compiled
def fits(R, e, r):
    """Whether a replica could ever hold a request; one that only prefills holds its prompt."""
    size = np.int64(R[r].input_tokens) + R[r].output_tokens
    if e.role == PREFILL_ONLY:
        size = np.int64(R[r].input_tokens) + R[r].done_tokens + 1
    return size <= e.kv_tokens


@compiled
def expected(R, e, r):
    """Output tokens that an engine expects of a request, at least 1."""
    tokens = np.int64(R[r].predicted_tokens)
    if e.expects == EXPECT_KNOWN:
        tokens = np.int64(R[r].output_tokens)
    elif e.expects != EXPECT_PREDICTED:
        tokens = max(np.int64(R[r].output_tokens), e.max_output)
    return max(tokens, np.int64(1))


@compiled
def unknown_tokens(R, r):
    """Tokens of a prompt that the dispatcher believes in no prefix cache where it was sent."""
    return np.int64(R[r].input_tokens) - R[r].believed_tokens


@compiled
def at_hand(R, r):
    """Whether the KV cache of a waiting request exists: swapped out, or transferred."""
    return R[r].status == SWAPPED or R[r].status == AT_HAND


@compiled
def blocks(e, tokens):
    """KV blocks that hold so many tokens."""
    return (tokens + e.block_tokens - 1) // e.block_tokens


@compiled
def grows(e, s, IM, ahead):
    """Blocks that the batch allocates in its decode step number ``ahead`` from now."""
    return IM[e.residues + (-(s.steps + ahead)) % e.block_tokens]


@compiled
def steps_until_full(e, s, IM, limit):
    """Decode steps, at most ``limit``, that the free blocks allow."""
    size = e.block_tokens
    free = e.kv_tokens // size - s.used
    n = (free // s.running) * size
    if n >= limit:
        return limit
    free -= (n // size) * s.running
    while n < limit:
        free -= grows(e, s, IM, n)
        if free < 0:
            return n
        n += 1
    return limit


@compiled
def growth(e, s, IM, n):
    """Blocks that the batch allocates in its next ``n`` decode steps."""
    size = e.block_tokens
    more = (n // size) * s.running
    for k in range(n - n % size, n):
        more += grows(e, s, IM, k)
    return more


@compiled
def grow(e, s, IM, n):
    """Allocate the blocks of ``n`` decode steps."""
    if e.admission == PAGED:
        more = growth(e, s, IM, n)
        s.used += more
        if e.prefix > 0:
            take_free(IM, e.prefix, more)


@compiled
def need(R, e, r):
    """KV cache to reserve for a request on admission: final tokens, or blocks of its prompt."""
    held = np.int64(R[r].input_tokens) + R[r].done_tokens
    if e.admission == PAGED:
        # A cache at hand lacks its newest token, which the next step stores.
        return blocks(e, held - 1 if at_hand(R, r) else held)
    if e.role == PREFILL_ONLY:
        return min(held + 1, e.kv_tokens)
    ahead = expected(R, e, r)
    if ahead > R[r].done_tokens:
        ahead -= R[r].done_tokens
    return min(held + ahead, e.kv_tokens)


@compiled
def room(R, e, s, IM, r):
    """Whether the KV cache admits a request now; an empty replica admits any that fits it."""
    if e.admission == PAGED:
        size = blocks(e, np.int64(R[r].input_tokens) + R[r].done_tokens)
        if e.prefix > 0 and not at_hand(R, r):
            size -= cached_blocks(R, e, IM, r)[1]
        total = e.kv_tokens // e.block_tokens
        if s.used == 0:
            return size <= total
        spare = max(np.int64(_WATERMARK * total), grows(e, s, IM, 0) if s.running else 0)
        return s.used + size + spare <= total
    return s.used + need(R, e, r) <= e.kv_tokens


@compiled
def hold(R, e, s, IM, r, hits):
    """Give a request the KV cache that it needs, of which ``hits`` blocks are cached."""
    size = need(R, e, r)
    R[r].reserved = size
    s.used += refer(e, IM, r, hits, size) if e.prefix > 0 else size


@compiled
def vacate(R, e, s, IM, r, size):
    """Free the KV cache of a request, so many tokens or blocks."""
    R[r].reserved = 0
    s.used -= let_go(e, IM, r, size) if e.prefix > 0 else size
