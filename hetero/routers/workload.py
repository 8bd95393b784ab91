r"""The workload scheduler of Xiong et al. (section 4, Algorithm 2).

Sending request r to instance s adds the workload

.. math::
    w = T\,e^{\theta\,kvusage(s)}, \qquad T = \frac{T_{prefill} + T_{decode}}{b}, \qquad
    b = \frac{KV_s}{I + \tilde O}

with the times of a batch of b requests like r (Xiong et al., eq. 3 to 7), and kvusage the inputs
and predicted outputs of unfinished requests over the KV cache. The instance is the one that leaves
the largest workload smallest; a finished request takes its workload away again.

Layout of ``RM``: [theta, memory based, tie rule, then 8 coefficients per replica].
"""

from __future__ import annotations

import math

import numpy as np

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled

HEADER = 3


@compiled
def batch_share_s(RM, i, capacity, inputs, outputs):
    """Time T of one request in a full batch of its like (eq. 5 and 6).

    Source: Xiong et al., eq. 5: ideal batch of identical requests; b_r^s.
    Source: Xiong et al., eq. 6: processing time of a request in that batch; T_r^s.
    """
    p = HEADER + 8 * i
    b = max(capacity / max(inputs + outputs, 1.0), 1.0)
    prefill = RM[p] * b * inputs + RM[p + 1] * b + RM[p + 2] * inputs + RM[p + 3]
    lengths = inputs * outputs + outputs * (outputs + 1.0) / 2.0
    decode = (RM[p + 4] * b + RM[p + 6]) * lengths + (RM[p + 5] * b + RM[p + 7]) * outputs
    return (prefill + decode) / b


@compiled
def workload(R, E, S, RM, r):
    """The instance that keeps the largest workload smallest (Algorithm 2).

    The printed algorithm starts its minimum at 0 and could never assign; infinity is meant. Tie
    rule 0 keeps the first instance, as its strict comparison does; 1 takes the smallest own load.

    Source: Xiong et al., Algorithm 2: request scheduling, the mapper.
    Source: Xiong et al., eq. 7: workload that a request adds to an instance; w_r^s, theta.
    Source: Xiong et al., eq. 8: usage of the KV cache; kvusage(s).
    """
    inputs = float(R[r].input_tokens)
    outputs = float(R[r].predicted_tokens)
    largest = second = -np.inf
    top = -1
    for i in range(len(E)):
        if S[i].load > largest:
            second, largest, top = largest, S[i].load, i
        elif S[i].load > second:
            second = S[i].load
    best, least, own, credit = -1, np.inf, np.inf, 0.0
    for i in range(len(E)):
        if not may_take(R, E, S, r, i):
            continue
        capacity = float(E[i].kv_tokens)
        time = 1.0 if RM[1] != 0.0 else batch_share_s(RM, i, capacity, inputs, outputs)
        weight = time * math.exp(RM[0] * S[i].outstanding_tokens / capacity)
        after = S[i].load + weight
        worst = max(after, second if i == top else largest)
        if worst < least or (RM[2] != 0.0 and worst == least and after < own):
            best, least, own, credit = i, worst, after, weight
    if best >= 0:
        R[r].credit = credit
    return best
