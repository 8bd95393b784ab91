"""Static batching: a padded batch runs to its end before the next one forms (Orca's baseline).

Every place of the batch costs as much as the longest input and lasts as long as the longest
output; a request has its last token when it is generated, but its place stays taken.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.batch import into_batch, pop_waiting
from hetero.engine.compiled import compiled
from hetero.engine.ends import set_end
from hetero.engine.state import IDLE, IN_PREFILL
from hetero.engine.steps import step_s


@compiled
def begin_padded(R, e, s, FM):
    """Form a batch from the head of the queue: all inputs, and the longest output for each."""
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
    set_end(e, FM, s.clock_s + step_s(e, FM, tokens, 0, 0, tokens * (longest_input * 0.5)))
