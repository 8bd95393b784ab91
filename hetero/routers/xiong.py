r"""The workload scheduler of Xiong et al. (section 4, Algorithm 2; OS in their figures).

Sending request r to instance s adds the workload

.. math::
    w = T\,e^{\theta\,kvusage(s)}, \qquad T = \frac{T_{prefill} + T_{decode}}{b}, \qquad
    b = \frac{KV_s}{I + \tilde O}

with Xiong et al. eq. 3 and 4 for a batch of b requests like r (eq. 5-7), and kvusage the inputs
and predicted outputs of unfinished requests over the KV cache (Xiong et al. eq. 8). With every T
set to 1 it is their memory-based scheduler (MB). The instance is the one that leaves the largest
workload smallest; a finished request takes its workload away again.

Layout of ``RM``: [theta, memory based, tie rule, then per replica p1 to p8 and the tokens that the
scheduler counts in a cache that holds one].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from hetero.deployment import Deployment, Replica
from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.errors import require
from hetero.latency.models.affine import Affine
from hetero.latency.models.phase import fit_phase
from hetero.latency.step import StepModel
from hetero.routers.base import WORKLOAD, Builtin, Floats

Ties: TypeAlias = Literal["first", "least"]
"""Which instance wins when several keep the largest workload equally small.

``"first"``: the one of lowest number, as Xiong et al.'s Algorithm 2 compares strictly.
``"least"``: the one whose own workload stays smallest, which is what the text wants.
"""

HEADER, COEFFICIENTS = 3, 8  # p1 to p8 are the first fields of Affine, in order
WIDTH = COEFFICIENTS + 1


@compiled
def batch_share_s(RM, i, capacity, inputs, outputs):
    """Time T of one request in a full batch of its like (Xiong et al. eq. 5 and 6).

    Source: Xiong et al., eq. 5: ideal batch of identical requests; b_r^s.
    Source: Xiong et al., eq. 6: processing time of a request in that batch; T_r^s.
    """
    p = HEADER + WIDTH * i
    b = max(capacity / max(inputs + outputs, 1.0), 1.0)
    prefill = RM[p] * b * inputs + RM[p + 1] * b + RM[p + 2] * inputs + RM[p + 3]
    lengths = inputs * outputs + outputs * (outputs + 1.0) / 2.0
    decode = (RM[p + 4] * b + RM[p + 6]) * lengths + (RM[p + 5] * b + RM[p + 7]) * outputs
    return (prefill + decode) / b


@compiled
def workload(R, E, S, RM, r):
    """The instance that keeps the largest workload smallest (Xiong et al. Algorithm 2).

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
        capacity = E[i].kv_tokens * RM[HEADER + WIDTH * i + COEFFICIENTS]
        time = 1.0 if RM[1] != 0.0 else batch_share_s(RM, i, capacity, inputs, outputs)
        weight = time * math.exp(min(RM[0] * S[i].outstanding_tokens / capacity, 700.0))
        after = S[i].load + weight
        worst = max(after, second if i == top else largest)
        if worst < least or (RM[2] != 0.0 and worst == least and after < own):
            best, least, own, credit = i, worst, after, weight
    if best >= 0:
        R[r].credit = credit
    return best


def profile(
    replica: Replica,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    lengths_tokens: Sequence[int] = (16, 64, 128, 256, 512, 1024, 2048),
) -> Affine:
    """The instance profiler: fit p1 to p8 to times of the replica's step model.

    Notes
    -----
    Source: Xiong et al., section 4.1: instance profiler; p1 to p8.
    Weights are relative, and no coefficient is negative.
    """
    points = tuple((b, n) for b in batches for n in lengths_tokens if b * n <= replica.kv_tokens)
    require(
        min(len({b for b, _ in points}), len({n for _, n in points})) > 1,
        f"The KV cache of {replica.name} ({replica.kv_tokens} tokens) is too small to profile.",
        resolve="profile smaller batches and lengths, or leave the replica out.",
    )
    return _fitted(replica.step, points)


@lru_cache(maxsize=1024)  # optimisers start thousands of runs with the same replicas
def _fitted(step: StepModel, points: tuple[tuple[int, int], ...]) -> Affine:
    batch, length = (np.array(column, np.float64) for column in zip(*points, strict=True))
    prefill_s = step.seconds(batch * length, 0, 0.0, batch * length * length / 2.0)
    decode_s = step.seconds(batch, batch, batch * length)
    return Affine.from_fits(
        fit_phase(batch, length, prefill_s, decode=False, non_negative=True),
        fit_phase(batch, length, decode_s, decode=True, non_negative=True),
        source=f"p1 to p8 fitted to {step.source}",
    )


@dataclass(frozen=True)
class Workload(Builtin):
    """Xiong et al.'s scheduler: least of the largest workloads, as at the head of this file.

    Source: Xiong et al., section 5.2: their scheduler (OS) and the memory-based one (MB); theta.

    Parameters
    ----------
    theta
        Weight of the KV usage in Xiong et al. eq. 7; 2 in the paper.
    memory_based
        Set every T to 1, so that only the KV usage counts.
    ties
        See :data:`Ties`.
    coefficients
        p1 to p8 of each replica; by default each is profiled and fitted.
    kv_bytes
        KV cache of a token as Xiong et al. eq. 5 and 8 count it, 2 l h values [bytes]; by default
        as the engine stores it.

    Examples
    --------
    >>> Workload(theta=2.0).name, Workload(memory_based=True).name
    ('workload', 'memory-based')
    """

    theta: float = 2.0
    memory_based: bool = False
    ties: Ties = "least"
    coefficients: Sequence[Affine] | None = None
    kv_bytes: float | None = None
    name: str = ""
    code: ClassVar[int] = WORKLOAD

    def __post_init__(self) -> None:
        require(
            self.theta >= 0, f"theta is {self.theta}.", resolve="give 0 or more; the paper uses 2."
        )
        if not self.name:
            object.__setattr__(self, "name", "memory-based" if self.memory_based else "workload")

    def memory(self, deployment: Deployment) -> Floats:
        """theta, flags, then p1 to p8 of every replica."""
        fits = self.coefficients
        if fits is None:
            fits = [profile(replica) for replica in deployment.replicas]
        require(
            len(fits) == len(deployment.replicas),
            f"{len(fits)} sets of coefficients for {len(deployment.replicas)} replicas.",
            resolve="give one per replica, or none to have them profiled.",
        )
        flags = [self.theta, float(self.memory_based), float(self.ties == "least")]
        names = [field.name for field in fields(Affine)[:COEFFICIENTS]]
        for fit, replica in zip(fits, deployment.replicas, strict=True):
            share = replica.kv_bytes_per_token / self.kv_bytes if self.kv_bytes else 1.0
            flags += [*(getattr(fit, name) for name in names), share]
        return np.array(flags)
