"""Binary heaps inside the flat memories: of running requests, and of times."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled, inlined
from hetero.engine.state import KEY_BITS, KEY_ITEM


@compiled
def entry(due, later, r):
    """Heap entry of a request due at a step; of those due together ``later`` ones come last.

    One integer orders by step, then finishes before what has outgrown its reservation, then by
    request, so that nothing depends on the history of the heap.
    """
    return (np.int64(due) << KEY_BITS) | (np.int64(later) << (KEY_BITS - 1)) | np.int64(r)


@compiled
def due_step(key):
    """Step at which a heap entry is due."""
    return key >> KEY_BITS


@compiled
def item_of(key):
    """Request of a heap entry."""
    return key & KEY_ITEM


@compiled
def _sift_up(IM, base, j, k):
    while j > 0:
        up = (j - 1) >> 1
        if IM[base + up] <= k:
            break
        IM[base + j] = IM[base + up]
        j = up
    IM[base + j] = k


@compiled
def _sift_down(IM, base, size, j, k):
    child = 2 * j + 1
    while child < size:
        if child + 1 < size and IM[base + child + 1] < IM[base + child]:
            child += 1
        if IM[base + child] >= k:
            break
        IM[base + j] = IM[base + child]
        j = child
        child = 2 * j + 1
    IM[base + j] = k


@compiled
def heap_push(IM, base, size, key):
    """Push an entry on a heap of ``size`` entries."""
    _sift_up(IM, base, size, key)


@compiled
def heap_pop(IM, base, size):
    """Remove the root of a heap of ``size`` entries."""
    size -= 1
    if size > 0:
        _sift_down(IM, base, size, 0, IM[base + size])


@compiled
def heap_remove(IM, base, size, r):
    """Remove the entry of request ``r`` from a heap of ``size`` entries and return it."""
    j = 0
    while item_of(IM[base + j]) != r:
        j += 1
    found = IM[base + j]
    size -= 1
    if j < size:
        k = IM[base + size]
        if j > 0 and k < IM[base + ((j - 1) >> 1)]:
            _sift_up(IM, base, j, k)
        else:
            _sift_down(IM, base, size, j, k)
    return found


@inlined
def _before(t, r, u, q):
    return t < u or (t == u and r < q)


@inlined
def times_push(FM, IM, fb, ib, size, t, r):
    """Push a time and its request; equal times are ordered by request."""
    j = size
    while j > 0:
        up = (j - 1) >> 1
        if _before(FM[fb + up], IM[ib + up], t, r):
            break
        FM[fb + j] = FM[fb + up]
        IM[ib + j] = IM[ib + up]
        j = up
    FM[fb + j] = t
    IM[ib + j] = r


@inlined
def times_pop(FM, IM, fb, ib, size):
    """Remove the earliest time of a heap of ``size`` entries."""
    if size > 1:
        times_replace(FM, IM, fb, ib, size - 1, FM[fb + size - 1], IM[ib + size - 1])


@inlined
def times_replace(FM, IM, fb, ib, size, t, r):
    """Put a time and its request in the place of the earliest of a heap of ``size`` entries."""
    j = 0
    child = 1
    while child < size:
        other = child + 1
        if other < size and _before(FM[fb + other], IM[ib + other], FM[fb + child], IM[ib + child]):
            child = other
        if _before(t, r, FM[fb + child], IM[ib + child]):
            break
        FM[fb + j] = FM[fb + child]
        IM[ib + j] = IM[ib + child]
        j = child
        child = 2 * j + 1
    FM[fb + j] = t
    IM[ib + j] = r
