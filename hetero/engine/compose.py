"""What a step is made of: which requests join it, and how much of their prompts it prefills."""

from __future__ import annotations

import numpy as np

from hetero.engine.batch import append, evict, into_batch, pop_waiting, resume, take
from hetero.engine.compiled import compiled
from hetero.engine.heaps import heap_remove
from hetero.engine.kv import at_hand, room, steps_until_full
from hetero.engine.prefix import cached_blocks, enlist
from hetero.engine.state import CHUNKED, IDLE, IN_PREFILL, PAGED, RUNNING
from hetero.engine.steps import step_s


@compiled
def make_room(R, e, s, IM):
    """Evict requests until the next decode step has its KV blocks.

    Those that are served last go first, and of one priority the last admitted. Returns whether any
    was; nothing joins the step then.
    """
    s.evicted = 0
    while e.admission == PAGED and s.running > 0 and steps_until_full(e, s, IM, 1) == 0:
        last = IM[e.order + s.running - 1]
        for k in range(s.running - 2, -1, -1):
            r = IM[e.order + k]
            last = r if R[r].priority > R[last].priority else last
        key = heap_remove(IM, e.keys, s.running, last)
        s.running -= 1
        evict(R, e, s, IM, key)
        s.evicted = 1
    return s.evicted > 0


@compiled
def compose(R, e, s, IM, budget, taken, shut):
    """Let prompts join a step, in the order of the queue; its new tokens and pairs.

    Parameters
    ----------
    budget
        Tokens that they may have together.
    taken
        Places of the batch that are taken by requests that do not decode yet.
    shut
        Whether none may join but the one whose prompt is partly prefilled.
    """
    chunked = e.batching == CHUNKED
    tokens = np.int64(0)
    pairs = 0.0
    count = np.int64(taken)
    if s.partial >= 0:
        r = s.partial
        count += 1
        q = min(np.int64(R[r].input_tokens) + R[r].done_tokens - s.partial_tokens, budget)
        if q > 0:
            tokens += q
            pairs += q * (s.partial_tokens + q * 0.5)
            s.chunk_tokens = q
            if e.prefix > 0:
                enlist(R, e, IM, r, s.partial_tokens + q)
            if s.partial_tokens + q == np.int64(R[r].input_tokens) + R[r].done_tokens:
                s.partial = -1
                s.partial_tokens = 0
                s.chunk_tokens = 0
                into_batch(R, s, r)
    while not shut and s.waiting > s.unseen and s.partial < 0 and s.running + count < e.max_batch:
        r = s.head
        if not room(R, e, s, IM, r):
            break
        if at_hand(R, r):
            if chunked and budget - tokens < 1:
                break
            take(R, e, s, IM, 0)
            if e.ahead:
                append(R, s, r)
                count += 1
            else:
                resume(R, e, s, IM, r)
            budget -= 1 if chunked else 0
            continue
        hits = cached_blocks(R, e, IM, r)[0] if e.prefix > 0 else np.int64(0)
        known = hits * e.block_tokens
        whole = np.int64(R[r].input_tokens) + R[r].done_tokens - known
        q = whole
        if chunked:
            q = min(whole, budget - tokens)
            if q <= 0:
                break
        elif tokens > 0 and tokens + whole > budget:
            break
        take(R, e, s, IM, hits)
        if e.prefix > 0:
            enlist(R, e, IM, r, known + q)
        R[r].hit_tokens = known
        count += 1
        tokens += q
        pairs += q * (known + q * 0.5)
        if q < whole:
            R[r].link = -1
            R[r].status = RUNNING
            s.partial = r
            s.partial_tokens = known
            s.chunk_tokens = q
        else:
            into_batch(R, s, r)
    return tokens, pairs


@compiled
def begin_padded(R, e, s, FM):
    """Form a batch from the head of the queue: all inputs, and the longest output for each.

    Static batching (Orca's baseline): a padded batch runs to its end before the next one forms.
    Every place costs as much as the longest input and lasts as long as the longest output; a
    request has its last token when it is generated, but its place stays taken.
    """
    inputs = longest_input = longest_output = count = np.int64(0)
    r = np.int64(s.head)
    while r >= 0 and count < e.max_batch:
        tokens = np.int64(R[r].input_tokens) + R[r].done_tokens
        output = max(longest_output, np.int64(R[r].output_tokens) - R[r].done_tokens)
        if count > 0 and inputs + tokens + (count + 1) * output > e.kv_tokens:
            break
        inputs += tokens
        longest_input = max(longest_input, tokens)
        longest_output = output
        count += 1
        r = np.int64(R[r].link)
    if count == 0:
        s.mode = IDLE
        FM[e.index] = np.inf
        return
    for _ in range(count):
        r = pop_waiting(R, s)
        R[r].reserved = np.int64(R[r].input_tokens) + R[r].done_tokens + longest_output
        s.used += R[r].reserved
        into_batch(R, s, r)
    s.padded = count
    # What a decode step of the batch will read first; kept here while the prefill runs.
    s.cached = count * (longest_input + 1)
    s.step_tokens = inputs
    s.mode = IN_PREFILL
    tokens = count * longest_input
    FM[e.index] = s.clock_s + step_s(e, FM, tokens, 0, 0, tokens * (longest_input * 0.5))
