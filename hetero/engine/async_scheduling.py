"""Asynchronous scheduling: a step is composed when the one before it begins.

While step k runs, step k + 1 is already composed of what was known when step k began: the queue
of that instant, and the places and the memory that were free then. A request that decodes in step
k is taken to decode in step k + 1; one that gets its last token in step k does not, but holds its
place and its cache until step k ends. Requests whose decode steps need blocks are made room for
when the step begins. An engine that has nothing to run starts what it has just composed, and
composes the next step at the same instant.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.batch import into_batch, resume, unlink
from hetero.engine.compiled import compiled
from hetero.engine.compose import compose, make_room
from hetero.engine.kv import at_hand


@compiled
def clear_stage(s):
    """Forget the step that was composed ahead."""
    s.staged_head = s.staged_tail = -1
    s.staged_count = s.staged_tokens = 0
    s.staged_pairs = 0.0


@compiled
def _start(R, e, s, IM):
    """Turn the step that was composed into the one that begins.

    Returns its prefill tokens and pairs, and whether requests were evicted for it.
    """
    tokens, pairs = s.staged_tokens, s.staged_pairs
    r = np.int64(s.staged_head)
    clear_stage(s)
    while r >= 0:
        following = np.int64(R[r].link)
        if at_hand(R, r):
            resume(R, e, s, IM, r)
        else:
            into_batch(R, s, r)
        r = following
    return tokens, pairs, make_room(R, e, s, IM)


@compiled
def _stage(R, e, s, IM, evicted):
    """Compose the step after the one that begins."""
    head, tail = s.batch_head, s.batch_tail
    joining = np.int64(0)
    r = np.int64(head)
    while r >= 0:
        joining += 1
        r = np.int64(R[r].link)
    s.batch_head = s.batch_tail = -1
    budget = e.max_step_tokens - s.running - joining
    s.staged_tokens, s.staged_pairs = compose(R, e, s, IM, budget, joining, evicted)
    s.partial_tokens += s.chunk_tokens
    s.chunk_tokens = 0
    s.staged_head, s.staged_tail = s.batch_head, s.batch_tail
    s.batch_head, s.batch_tail = head, tail
    s.staged_count = 0
    r = np.int64(s.staged_head)
    while r >= 0:
        s.staged_count += 1
        r = np.int64(R[r].link)


@compiled
def next_step(R, e, s, IM):
    """Begin the step that was composed, and compose the next; prefill tokens and pairs of it."""
    tokens, pairs, evicted = _start(R, e, s, IM)
    _stage(R, e, s, IM, evicted)
    if tokens == 0 and s.running == 0 and (s.staged_count > 0 or s.staged_tokens > 0):
        tokens, pairs, evicted = _start(R, e, s, IM)
        _stage(R, e, s, IM, evicted)
    return tokens, pairs


@compiled
def unstage(R, s, r):
    """Take a request out of the step composed ahead, whose tokens stay; whether it was there."""
    there, s.staged_head, before = unlink(R, s.staged_head, r)
    if there and s.staged_tail == r:
        s.staged_tail = before
    s.staged_count -= np.int64(there)
    return there
