r"""Which of many replicas can be the best for a request, without a look at most of them.

For a router whose cost of replica i, of kind k, at time t is never below

.. math::
    base_k + \max(end_i - t, rest_i) + \min(\max(rate_k n_i - less_k, 0)
    + gain_k \max(a_i h_k, b_i), gain_k)

a replica has a row with what depends on its state: ``end`` and ``rest`` [s]; the tokens ``n`` to be
prefilled before; the shares of its cache and of its batch slots that are taken, by which it may be
full; and the prices ``a`` and ``b`` of both. Rows of one kind stand together in blocks, and each
block has a row of the least of each column: a block whose bound is beyond the best cost so far is
passed over, and so is a replica in it. Idle replicas of one kind cost the same, so the first stands
for all.

Rows are written anew for replicas that have changed, by the notes of :mod:`hetero.engine.ends`.
Layout from ``x`` in a router's memory: header of :data:`HEADER` entries; the row that each replica
has; the rows of replicas; the rows of blocks.
"""

from __future__ import annotations

import math

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.state import CHUNKED, DECODE_ONLY, DOWN, IDLE, IN_DECODE, IN_PREFILL, NOTED
from hetero.engine.steps import step_s, table_s

# Header: up to which note rows are written, the number of blocks, the steepness of prices.
READ, BLOCKS, STEEPNESS, HEADER = 0, 1, 2, 3
# Columns of all rows; the last is the replica if it is idle, of a block its first idle one.
END, REST, AHEAD, TAKEN, SLOTS, PRICE_A, PRICE_B, IDLE_ONE, SHARED = 0, 1, 2, 3, 4, 5, 6, 7, 8
# Then of a replica's: which it is, and its block; of a block's: its first row and the one behind
# its last, its kind, whether its least may have risen, and its bound for the request in hand.
REPLICA, OF_BLOCK, ROW = 8, 9, 10
FIRST, STOP, KIND, LOOSE, BOUND, BLOCK_ROW = 8, 9, 10, 11, 12, 13
# What a request makes of a kind: terms of the bound, and beyond what a replica is surely none.
BASE, GAIN, PRICE_H, RATE_S, LESS_S, MOST_TAKEN, MOST_SLOTS, MOST_S, LIMITS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
)
_SIZE = 16  # replicas of a block
_FEWEST = 8  # replicas of a kind on average


def size(replicas: int) -> int:
    """Entries of a memory for so many replicas."""
    blocks = replicas // _SIZE + replicas // _FEWEST + 1
    return HEADER + replicas * (1 + ROW) + blocks * BLOCK_ROW


@compiled
def row_of_block(E, x, b):
    """Where the row of a block begins."""
    return x + HEADER + len(E) * (1 + ROW) + b * BLOCK_ROW


@compiled
def row_at(E, x, k):
    """Where row ``k`` of the replicas begins."""
    return x + HEADER + len(E) + k * ROW


@compiled
def arrange(E, RM, x, steepness):
    """Give every replica its row; whether there are few enough kinds for that to be of use."""
    row, b, kind = 0, -1, 0
    while row < len(E):
        if kind * _FEWEST >= len(E):
            return False
        members = 0
        for i in range(len(E)):
            if E[i].kind == kind:
                if members % _SIZE == 0:
                    b += 1
                    RM[row_of_block(E, x, b) + FIRST] = row
                    RM[row_of_block(E, x, b) + KIND] = kind
                RM[x + HEADER + i] = row
                RM[row_at(E, x, row) + REPLICA] = i
                RM[row_at(E, x, row) + OF_BLOCK] = b
                members += 1
                row += 1
                RM[row_of_block(E, x, b) + STOP] = row
        kind += 1
    RM[x + BLOCKS] = b + 1
    RM[x + STEEPNESS] = steepness
    RM[x + READ] = -1.0
    return True


@compiled
def _beside_s(e, FM, b, cached):
    """What steps that prefill beside ``b`` decoding requests take longer for these, at least."""
    least = np.inf
    for p in range(e.pieces):
        count = e.rate_count[p]
        j = e.rates[p] + max(min(b, count) - 1, 0)
        least = min(least, FM[j + 2 * count] + FM[j + count] * cached)
    return least


@compiled
def ahead(R, s):
    """Tokens that a replica will prefill before those of a request that comes now."""
    tokens = s.waiting_tokens + s.staged_tokens
    if s.partial >= 0:
        tokens += R[s.partial].input_tokens - s.partial_tokens
    return tokens


@compiled
def prefill_floor(e, FM, tokens, pairs):
    """What a prefill takes at least, whatever its replica does beside it, and what more tokens add.

    These are given as a rate per token and by how much less than that all of them may add. Chunks
    that share their steps take no less than so many tokens more would alone.
    """
    most, whole, left = np.inf, 0.0, tokens
    if e.batching == CHUNKED:
        most = max(float(e.max_step_tokens), 1.0)
        whole = math.floor(tokens / most)
        left = tokens - whole * most
        pairs *= 0.5  # the rest may be left out where chunks fill their steps
    floor = rate = less = 0.0
    for p in range(e.pieces):
        j, count = e.floors[p], e.knot_count[p]
        if j == 0:
            return -np.inf, 0.0, 0.0
        steepest = FM[j + 3 * count - 1]
        time = table_s(FM, j, count, left) if left > 0.0 else 0.0
        if e.batching == CHUNKED:
            full = table_s(FM, j, count, most)
            steepest = full / most
            time += whole * full
        time += e.pair_s[p] * pairs
        floor = max(floor, time)
        if steepest > rate:
            rate, less = steepest, -e.pair_s[p] * pairs
            below = 0.0 if e.batching == CHUNKED else -np.inf
            for k in range(j, j + 3 * count, 3):
                if FM[k] < most:
                    below = max(below, steepest * FM[k] - FM[k + 1])
            less += below
    return floor, rate, max(floor + less - rate * tokens, 0.0)


@compiled
def _write(R, E, S, FM, RM, x, i):
    """Write the row of a replica, and lower that of its block."""
    e, s = E[i], S[i]
    end, rest, taken, slots, price_a, price_b = np.inf, np.inf, np.inf, np.inf, np.inf, np.inf
    idle = before = np.inf
    if s.mode == DOWN or e.role == DECODE_ONLY:
        pass
    elif s.mode == IDLE and s.outstanding == 0 and s.running == 0 and ahead(R, s) == 0:
        idle = float(i)
    else:
        end, rest, before = -np.inf, 0.0, float(ahead(R, s))
        if e.batching == CHUNKED and s.running > 0:
            rest = _beside_s(e, FM, s.running, s.cached)
            if s.running < e.max_step_tokens:
                before += s.running  # which share a step at least
        if s.mode == IN_PREFILL:
            end = FM[i] + rest
        elif s.mode == IN_DECODE and s.running > 0:
            rest += 0.5 * step_s(e, FM, s.running, s.running, s.cached, 0.0)
        taken = s.outstanding_tokens / e.kv_tokens
        slots = (s.outstanding + 1) / e.max_batch
        price_a = math.exp(RM[x + STEEPNESS] * min(taken, 2.0))
        price_b = math.exp(RM[x + STEEPNESS] * (min(slots, 1.0) - 1.0))
        if s.waiting > 0 and s.mode == IN_DECODE:
            price_b, slots = 1.0, np.inf
        if ahead(R, s) < 0:
            end = rest = -np.inf  # a prompt with what was generated before a failure: no bound
        if s.outstanding == 0:
            taken = slots = -np.inf  # whoever comes is admitted
    q = row_at(E, x, int(RM[x + HEADER + i]))
    RM[q + END], RM[q + REST], RM[q + AHEAD] = end, rest, before
    RM[q + TAKEN], RM[q + SLOTS] = taken, slots
    RM[q + PRICE_A], RM[q + PRICE_B] = price_a, price_b
    RM[q + IDLE_ONE] = idle
    b = row_of_block(E, x, int(RM[q + OF_BLOCK]))
    for k in range(SHARED):
        RM[b + k] = min(RM[b + k], RM[q + k])
    RM[b + LOOSE] = 1.0


@compiled
def update(R, E, S, FM, IM, RM, x):
    """Bring the rows to the present state of the fleet."""
    ring = E[0].note_mask + 1
    start = np.int64(RM[x + READ])
    stop = IM[NOTED]
    if start < 0 or stop - start > ring:
        for b in range(int(RM[x + BLOCKS])):
            for k in range(SHARED):
                RM[row_of_block(E, x, b) + k] = np.inf
        for i in range(len(E)):
            _write(R, E, S, FM, RM, x, i)
    else:
        for k in range(start, stop):
            _write(R, E, S, FM, RM, x, IM[E[0].notes + (k & E[0].note_mask)])
    RM[x + READ] = stop


@compiled
def tighten(E, RM, x, b):
    """Find the least of each column of a block again, where a row may have risen."""
    if RM[b + LOOSE] != 0.0:
        RM[b + LOOSE] = 0.0
        for k in range(SHARED):
            RM[b + k] = np.inf
        for row in range(int(RM[b + FIRST]), int(RM[b + STOP])):
            q = row_at(E, x, row)
            for k in range(SHARED):
                RM[b + k] = min(RM[b + k], RM[q + k])


@compiled
def bound_s(RM, q, c, t):
    """The bound of a row on the cost, infinite where all that it stands for is surely excluded."""
    if RM[q + TAKEN] > RM[c + MOST_TAKEN] or RM[q + SLOTS] > RM[c + MOST_SLOTS]:
        return np.inf
    time = max(RM[q + END] - t, RM[q + REST])
    if time == np.inf or time > RM[c + MOST_S]:
        return np.inf
    price = RM[c + GAIN] * max(RM[q + PRICE_A] * RM[c + PRICE_H], RM[q + PRICE_B])
    before = max(RM[c + RATE_S] * RM[q + AHEAD] - RM[c + LESS_S], 0.0)
    # Where it is full, other things count than what is to be prefilled before.
    return RM[c + BASE] + time + min(before + price, RM[c + GAIN])
