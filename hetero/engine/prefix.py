"""Prefix cache of a replica: KV blocks that past prompts left, in one pool with those in use.

As in vLLM a block is free when no request refers to it, and a free block keeps its text until it is
taken for another. Free blocks are taken in the order in which they became free; those of a request
become free from its last to its first, so that a prompt loses its end first. A full block of a
prompt has its name from the moment that a step is composed which computes it. A hit is the longest
run of named blocks at the start of a prompt, less its last token, which is always computed and
gives the next one; the request refers to these blocks and takes new ones for the rest. What is
computed although it has a name already (the end of a prompt of whole blocks that is sent again) is
a copy that nobody finds, and so are generated tokens.

Names come from the prefix blocks of the trace, whose ids stand for a block and all before it: a KV
block is named by the trace's block in which it ends and its place there, so that the two sizes need
not be the same.

The dispatcher keeps records of each cache: the same structure in blocks of the trace, to which
nobody refers, filled with the prompts that it sends there, when it sends them. It needs no word
from the replica. It takes all of the pool for past prompts, its order is that of dispatch and not
of release, and it knows prompts that are still to be prefilled.

Layout from ``c``, which is ``e.prefix`` or ``e.records``: slots, mask of the hash table, oldest and
newest slot of the free blocks, first of the slots without use; by slot the name of its block (-1
for a run of free blocks without), the next older and newer slot, and how many requests refer to it
(or how many blocks the run has); a hash table of slots + 1, 0 where empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.engine.compiled import compiled

_SLOTS, _MASK, _OLDEST, _NEWEST, _UNUSED, _HEADER = 0, 1, 2, 3, 4, 5
_SCATTER = np.int64(-7046029254386353131)  # 2^64 over the golden ratio, as a signed number


def empty(blocks: int) -> NDArray[np.int64]:
    """An empty cache of so many blocks; its hash table is at most half full."""
    table = 1 << (2 * blocks - 1).bit_length()
    cache = np.zeros(_HEADER + 4 * blocks + table, np.int64)
    cache[_SLOTS], cache[_MASK] = blocks, table - 1
    clear(cache, 0)
    return cache


@compiled
def _names(c):
    return c + _HEADER


@compiled
def _older(IM, c):
    return c + _HEADER + IM[c + _SLOTS]


@compiled
def _newer(IM, c):
    return c + _HEADER + 2 * IM[c + _SLOTS]


@compiled
def _counts(IM, c):
    return c + _HEADER + 3 * IM[c + _SLOTS]


@compiled
def _table(IM, c):
    return c + _HEADER + 4 * IM[c + _SLOTS]


@compiled
def _home(IM, c, name):
    return ((name * _SCATTER) >> 32) & IM[c + _MASK]


@compiled
def _find(IM, c, name):
    """Slot of a named block, -1 if there is none."""
    table, names, mask = _table(IM, c), _names(c), IM[c + _MASK]
    j = _home(IM, c, name)
    slot = IM[table + j] - 1
    while slot >= 0 and IM[names + slot] != name:
        j = (j + 1) & mask
        slot = IM[table + j] - 1
    return slot


@compiled
def _forget(IM, c, name):
    """Take a block out of the hash table; later entries of its run close the hole."""
    table, names, mask = _table(IM, c), _names(c), IM[c + _MASK]
    hole = _home(IM, c, name)
    while IM[names + IM[table + hole] - 1] != name:
        hole = (hole + 1) & mask
    j = (hole + 1) & mask
    while IM[table + j] > 0:
        home = _home(IM, c, IM[names + IM[table + j] - 1])
        if (j - home) & mask >= (j - hole) & mask:
            IM[table + hole] = IM[table + j]
            hole = j
        j = (j + 1) & mask
    IM[table + hole] = 0


@compiled
def _use(IM, c, name, count):
    """Put a slot that was without use to one; it is not free."""
    slot = IM[c + _UNUSED]
    IM[c + _UNUSED] = IM[_newer(IM, c) + slot]
    IM[_names(c) + slot] = name
    IM[_counts(IM, c) + slot] = count
    if name >= 0:
        table, mask = _table(IM, c), IM[c + _MASK]
        j = _home(IM, c, name)
        while IM[table + j] > 0:
            j = (j + 1) & mask
        IM[table + j] = slot + 1
    return slot


@compiled
def _unlink(IM, c, slot):
    """A block is no longer free."""
    older, newer = _older(IM, c), _newer(IM, c)
    before, after = IM[older + slot], IM[newer + slot]
    if before >= 0:
        IM[newer + before] = after
    else:
        IM[c + _OLDEST] = after
    if after >= 0:
        IM[older + after] = before
    else:
        IM[c + _NEWEST] = before


@compiled
def _append(IM, c, slot):
    """A block becomes free; all others will be taken before it."""
    older, newer = _older(IM, c), _newer(IM, c)
    newest = IM[c + _NEWEST]
    IM[older + slot] = newest
    IM[newer + slot] = -1
    if newest >= 0:
        IM[newer + newest] = slot
    else:
        IM[c + _OLDEST] = slot
    IM[c + _NEWEST] = slot


@compiled
def _append_nameless(IM, c, count):
    """So many blocks without a name become free."""
    newest = IM[c + _NEWEST]
    if count > 0 and newest >= 0 and IM[_names(c) + newest] < 0:
        IM[_counts(IM, c) + newest] += count
    elif count > 0:
        _append(IM, c, _use(IM, c, -1, count))


@compiled
def take_free(IM, c, count):
    """Take so many free blocks, the longest free first; what is cached there is lost."""
    names, counts = _names(c), _counts(IM, c)
    while count > 0:
        slot = IM[c + _OLDEST]
        name = IM[names + slot]
        part = min(count, IM[counts + slot]) if name < 0 else np.int64(1)
        count -= part
        IM[counts + slot] -= part if name < 0 else 0
        if name >= 0:
            _forget(IM, c, name)
        if name >= 0 or IM[counts + slot] == 0:
            _unlink(IM, c, slot)
            IM[_newer(IM, c) + slot] = IM[c + _UNUSED]
            IM[c + _UNUSED] = slot


@compiled
def clear(IM, c):
    """Empty a cache: all of it is one run of free blocks."""
    slots, newer = IM[c + _SLOTS], _newer(IM, c)
    for slot in range(slots):
        IM[newer + slot] = slot + 1
    IM[c + _OLDEST] = IM[c + _NEWEST] = -1
    IM[c + _UNUSED] = 0
    for j in range(IM[c + _MASK] + 1):
        IM[_table(IM, c) + j] = 0
    _append_nameless(IM, c, slots)


@compiled
def _name(e, IM, r, k):
    """Name of KV block ``k`` of a prompt."""
    which = ((k + 1) * e.block_tokens - 1) // e.prefix_tokens
    first = which * e.prefix_tokens // e.block_tokens  # of those that end in the trace's block
    most = (e.prefix_tokens + e.block_tokens - 1) // e.block_tokens
    return IM[e.chain_blocks + IM[e.chains + r] + which] * most + k - first


@compiled
def _named_blocks(R, e, IM, r, tokens):
    """Full KV blocks among so many tokens of a request that have names."""
    chain = IM[e.chains + r + 1] - IM[e.chains + r]
    inputs = min(np.int64(R[r].input_tokens), chain * e.prefix_tokens)
    return min(inputs, tokens) // e.block_tokens


@compiled
def cached_blocks(R, e, IM, r):
    """KV blocks at the start of a request that are cached, and how many of them are in use."""
    c, hits, used = e.prefix, np.int64(0), np.int64(0)
    most = _named_blocks(R, e, IM, r, np.int64(R[r].input_tokens) + R[r].done_tokens - 1)
    while hits < most:
        slot = _find(IM, c, _name(e, IM, r, hits))
        if slot < 0:
            break
        used += IM[_counts(IM, c) + slot] > 0
        hits += 1
    return hits, used


@compiled
def refer(e, IM, r, hits, size):
    """A request takes ``size`` blocks, the first ``hits`` of them cached; how many were free."""
    c, free = e.prefix, size - hits
    for k in range(hits):
        slot = _find(IM, c, _name(e, IM, r, k))
        if IM[_counts(IM, c) + slot] == 0:
            _unlink(IM, c, slot)
            free += 1
        IM[_counts(IM, c) + slot] += 1
    take_free(IM, c, size - hits)
    IM[e.references + r] = hits
    return free


@compiled
def enlist(R, e, IM, r, tokens):
    """The first tokens of a request are computed by a step: full blocks of them get names."""
    k, most = IM[e.references + r], _named_blocks(R, e, IM, r, tokens)
    while k < most:
        name = _name(e, IM, r, k)
        if _find(IM, e.prefix, name) >= 0:
            break
        _use(IM, e.prefix, name, 1)
        k += 1
    IM[e.references + r] = k


@compiled
def let_go(e, IM, r, size):
    """A request gives up its ``size`` blocks, from the last to the first; how many become free."""
    c, k = e.prefix, IM[e.references + r]
    free = size - k
    _append_nameless(IM, c, free)
    while k > 0:
        k -= 1
        slot = _find(IM, c, _name(e, IM, r, k))
        IM[_counts(IM, c) + slot] -= 1
        if IM[_counts(IM, c) + slot] == 0:
            _append(IM, c, slot)
            free += 1
    IM[e.references + r] = 0
    return free


@compiled
def write_down(e, IM, r):
    """Note in the dispatcher's records the blocks of a prompt that is sent to a replica."""
    c = e.prefix_index
    if c > 0:
        start, stop = IM[e.chains + r], IM[e.chains + r + 1]
        for k in range(min(stop - start, IM[c + _SLOTS]) - 1, -1, -1):
            name = IM[e.chain_blocks + start + k]
            slot = _find(IM, c, name)
            if slot >= 0:
                _unlink(IM, c, slot)
            else:
                take_free(IM, c, 1)
                slot = _use(IM, c, name, 0)
            _append(IM, c, slot)


@compiled
def known_tokens(R, e, IM, r):
    """Tokens of a prompt that need no prefill on a replica, by the dispatcher's records."""
    c = e.prefix_index
    if c == 0:
        return np.int64(0)
    start, stop = IM[e.chains + r], IM[e.chains + r + 1]
    k = start
    while k < stop and _find(IM, c, IM[e.chain_blocks + k]) >= 0:
        k += 1
    inputs = np.int64(R[r].input_tokens)
    most = min(inputs, inputs + R[r].done_tokens - 1)
    return min((k - start) * e.prefix_tokens, most) // e.block_tokens * e.block_tokens
