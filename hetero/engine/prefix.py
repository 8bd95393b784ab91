"""Prefix cache of a replica: blocks of past prompts, the least recently used evicted first.

The cache is a pool of its own, so that a hit saves the time of the prefill and not the memory of
the request. Blocks are kept when a prefill ends: from the last block of the prompt to the first,
each becomes the newest, so that a prompt loses its last blocks first. A hit is the longest run of
blocks at the start of a prompt that are all in the cache when its prefill begins; an id names a
block together with all before it, as in the hash chains of engines.

The dispatcher keeps books of each cache: the same structure, filled with the prompts that it sends
there, when it sends them. It needs no word from the replica. Its order is that of dispatch and not
of prefill, so the two may differ in what was last used, and the books know prompts that are still
to be prefilled.

Layout from ``c``, which is ``e.prefix`` or ``e.books``: blocks held, oldest and newest slot; by
slot its block, the next older and the next newer slot; a hash table of slots + 1, 0 where empty.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled

HEADER = 3
_HELD, _OLDEST, _NEWEST = 0, 1, 2
_SCATTER = np.int64(-7046029254386353131)  # 2^64 over the golden ratio, as a signed number


def table_size(blocks: int) -> int:
    """Entries of the hash table for so many blocks: a power of two, at most half full."""
    return 1 << (2 * blocks - 1).bit_length()


@compiled
def _home(e, block):
    return ((block * _SCATTER) >> 32) & (e.prefix_table - 1)


@compiled
def _table(e, c):
    return c + HEADER + 3 * e.prefix_blocks


@compiled
def _find(e, IM, c, block):
    """Slot of a block, -1 if it is not held."""
    table, keys = _table(e, c), c + HEADER
    j = _home(e, block)
    slot = IM[table + j] - 1
    while slot >= 0 and IM[keys + slot] != block:
        j = (j + 1) & (e.prefix_table - 1)
        slot = IM[table + j] - 1
    return slot


@compiled
def _forget(e, IM, c, block):
    """Take a block out of the hash table; later entries of its run close the hole."""
    table, keys, mask = _table(e, c), c + HEADER, e.prefix_table - 1
    hole = _home(e, block)
    while IM[keys + IM[table + hole] - 1] != block:
        hole = (hole + 1) & mask
    j = (hole + 1) & mask
    while IM[table + j] > 0:
        home = _home(e, IM[keys + IM[table + j] - 1])
        if (j - home) & mask >= (j - hole) & mask:
            IM[table + hole] = IM[table + j]
            hole = j
        j = (j + 1) & mask
    IM[table + hole] = 0


@compiled
def _unlink(e, IM, c, slot):
    older, newer = c + HEADER + e.prefix_blocks, c + HEADER + 2 * e.prefix_blocks
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
def _make_newest(e, IM, c, slot):
    older, newer = c + HEADER + e.prefix_blocks, c + HEADER + 2 * e.prefix_blocks
    newest = IM[c + _NEWEST]
    IM[older + slot] = newest
    IM[newer + slot] = -1
    if newest >= 0:
        IM[newer + newest] = slot
    else:
        IM[c + _OLDEST] = slot
    IM[c + _NEWEST] = slot


@compiled
def _keep(e, IM, c, block):
    """Make a block the newest; where there is no place for it, the oldest goes."""
    slot = _find(e, IM, c, block)
    if slot >= 0:
        _unlink(e, IM, c, slot)
        _make_newest(e, IM, c, slot)
        return
    keys = c + HEADER
    if IM[c + _HELD] < e.prefix_blocks:
        slot = IM[c + _HELD]
        IM[c + _HELD] += 1
    else:
        slot = IM[c + _OLDEST]
        _unlink(e, IM, c, slot)
        _forget(e, IM, c, IM[keys + slot])
    IM[keys + slot] = block
    j = _home(e, block)
    while IM[_table(e, c) + j] > 0:
        j = (j + 1) & (e.prefix_table - 1)
    IM[_table(e, c) + j] = slot + 1
    _make_newest(e, IM, c, slot)


@compiled
def clear(e, IM, c):
    """Empty a prefix cache."""
    if c > 0:
        IM[c + _HELD] = 0
        IM[c + _OLDEST] = IM[c + _NEWEST] = -1
        for j in range(e.prefix_table):
            IM[_table(e, c) + j] = 0


@compiled
def remember(R, e, IM, c, r):
    """Keep the blocks of a prompt that has just been prefilled, or sent."""
    if c > 0:
        start, stop = IM[e.chains + r], IM[e.chains + r + 1]
        for k in range(min(stop - start, e.prefix_blocks) - 1, -1, -1):
            _keep(e, IM, c, IM[e.chain_blocks + start + k])


@compiled
def hit_tokens(R, e, IM, c, r):
    """Tokens at the start of a request's prompt that need no prefill on a replica."""
    if c == 0:
        return np.int64(0)
    start, stop = IM[e.chains + r], IM[e.chains + r + 1]
    k = start
    while k < stop and _find(e, IM, c, IM[e.chain_blocks + k]) >= 0:
        k += 1
    inputs = np.int64(R[r].input_tokens)
    # The last token is always prefilled: it gives the next one.
    return min((k - start) * e.prefix_tokens, inputs - 1 if R[r].done_tokens == 0 else inputs)
