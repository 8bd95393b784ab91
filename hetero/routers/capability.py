r"""HeteroServe and the baselines of its paper.

.. math::
    \kappa_i = F_i^\alpha M_i^\beta B_i^\gamma, \qquad
    \tilde\kappa_i = \hat\kappa_i\, e^{-\lambda q_i / Q_{max}}

over the devices that admit the length bin of the prompt (HeteroServe, eq. 2 to 5); queue depths are
those of the last epoch.

Layout of ``RM``: header of :data:`HEADER` entries, then M queue depths, M rotation credits,
3 M weights by regime, M scratch, K - 1 bin edges, K M admissions, 128 prompt lengths.
"""

from __future__ import annotations

import math

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled

# Header entries.
DAMPENING, QUEUE_MAX, EPOCH_S, NEXT_EPOCH_S = 0, 1, 2, 3
PROPORTIONAL, FEEDBACK, BINS, OUTSTANDING, DYNAMIC = 4, 5, 6, 7, 8
SEEN, SHORT, MEDIUM = 9, 10, 11  # prompts seen, short and at most medium ones in the window
HEADER = 12
WINDOW = 128
SHORT_TOKENS, MEDIUM_TOKENS = 192, 768


@compiled
def _observe(RM, window, tokens):
    """Keep the counts of short and medium prompts among the last 128."""
    k = int(RM[SEEN]) % WINDOW
    if RM[SEEN] >= WINDOW:
        old = RM[window + k]
        RM[SHORT] -= 1.0 if old <= SHORT_TOKENS else 0.0
        RM[MEDIUM] -= 1.0 if old <= MEDIUM_TOKENS else 0.0
    RM[window + k] = tokens
    RM[SHORT] += 1.0 if tokens <= SHORT_TOKENS else 0.0
    RM[MEDIUM] += 1.0 if tokens <= MEDIUM_TOKENS else 0.0
    RM[SEEN] += 1.0


@compiled
def _regime(RM):
    """0, 1, 2 for a short, medium or long (lower) median prompt in the window; 1 while empty.

    Source: HeteroServe, section 3.2: regime of the last 128 prompts, which chooses the exponents.
    """
    half = min(RM[SEEN], float(WINDOW)) / 2.0
    if RM[DYNAMIC] == 0.0 or RM[SEEN] == 0.0:
        return 1
    if RM[SHORT] >= half:
        return 0
    return 1 if RM[MEDIUM] >= half else 2


@compiled
def heteroserve(R, E, S, RM, r):
    """The admitting device of highest weight, or devices in proportion to their weights.

    Source: HeteroServe, eq. 5: queue-depth feedback with dampening (damping); lambda, Q_max.
    """
    count = len(E)
    queues, credits = HEADER, HEADER + count
    weights, scratch = HEADER + 2 * count, HEADER + 5 * count
    bins = int(RM[BINS])
    edges = HEADER + 6 * count
    admits = edges + bins - 1
    window = admits + bins * count
    tokens = R[r].input_tokens
    which = 0
    while which < bins - 1 and tokens >= RM[edges + which]:
        which += 1
    regime = weights + _regime(RM) * count
    best = -1
    for attempt in range(3):
        # First within bins and queue limits, then without the limit, then without the bins.
        for i in range(count):
            weight = RM[regime + i]
            if RM[FEEDBACK] != 0.0:
                weight *= math.exp(-RM[DAMPENING] * RM[queues + i] / RM[QUEUE_MAX])
            full = RM[FEEDBACK] != 0.0 and RM[queues + i] >= RM[QUEUE_MAX]
            barred = RM[admits + which * count + i] == 0.0
            open_ = not ((attempt < 1 and full) or (attempt < 2 and barred))
            RM[scratch + i] = weight if open_ and may_take(R, E, S, r, i) else 0.0
            if RM[scratch + i] > 0.0 and (best < 0 or RM[scratch + i] > RM[scratch + best]):
                best = i
        if best >= 0:
            break
    if best >= 0 and RM[PROPORTIONAL] != 0.0:
        total = 0.0
        for i in range(count):
            total += RM[scratch + i]
        best = -1
        for i in range(count):
            if RM[scratch + i] > 0.0:
                RM[credits + i] += RM[scratch + i] / total
                if best < 0 or RM[credits + i] > RM[credits + best]:
                    best = i
        RM[credits + best] -= 1.0
    _observe(RM, window, tokens)
    return best


@compiled
def refresh(S, RM, t):
    """Take the queue depths that devices broadcast at the last epoch."""
    if t >= RM[NEXT_EPOCH_S]:
        for i in range(len(S)):
            depth = S[i].outstanding if RM[OUTSTANDING] != 0.0 else S[i].waiting
            RM[HEADER + i] = depth
        RM[NEXT_EPOCH_S] = (math.floor(t / RM[EPOCH_S]) + 1.0) * RM[EPOCH_S]


@compiled
def latency_aware(R, E, S, RM, r):
    """The device of smallest queue depth over measured speed, both as of the last epoch."""
    count = len(E)
    best, least = -1, np.inf
    for i in range(count):
        if may_take(R, E, S, r, i):
            wait = RM[HEADER + i] / RM[HEADER + 2 * count + i]
            if wait < least:
                best, least = i, wait
    return best
