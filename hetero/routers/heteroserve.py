r"""HeteroServe (section 3) and the baselines of its paper (section 4.1) as routers.

.. math::
    \kappa_i = F_i^\alpha M_i^\beta B_i^\gamma, \qquad
    \tilde\kappa_i = \hat\kappa_i\, e^{-\lambda q_i / Q_{max}}

(HeteroServe, eq. 2, 3, 5) over the devices that admit the length bin of the prompt by
HeteroServe's eq. 4; queue depths are those of the last epoch.

Layout of ``RM``: header of :data:`HEADER` entries, then M queue depths, M rotation credits,
3 M weights by regime, M scratch, K - 1 bin edges, K M admissions, 128 prompt lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetero.catalog import Gpu
from hetero.deployment import Deployment, Replica
from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.errors import require, require_not_negative, require_positive
from hetero.routers.base import (
    HETEROSERVE,
    LATENCY_AWARE,
    LENGTH_AWARE,
    WEIGHTED_RANDOM,
    Builtin,
    Floats,
)
from hetero.routers.rotation import COLUMNS, by_chance, entries

Dispatch: TypeAlias = Literal["proportional", "highest"]
"""Reading of HeteroServe's weights: long-run shares (section 3.2), or the highest wins (3.3)."""
Queue: TypeAlias = Literal["waiting", "outstanding"]
"""What counts as queue depth: requests without a first token, or all unfinished ones."""

#: Exponents of compute, memory and bandwidth for short, medium and long prompts (HeteroServe 3.2).
EXPONENTS = ((0.55, 0.15, 0.30), (0.40, 0.30, 0.30), (0.20, 0.50, 0.30))


def _gpus(deployment: Deployment) -> list[tuple[Replica, Gpu]]:
    gpus = [(replica, replica.gpu) for replica in deployment.replicas if replica.gpu is not None]
    require(
        len(gpus) == len(deployment.replicas),
        f"A replica of {deployment.name} names no GPU, and capability scores need its figures.",
        resolve="set gpu= on every replica.",
    )
    return gpus


def capability_scores(deployment: Deployment, exponents: tuple[float, float, float]) -> Floats:
    r"""Normalised capability of each replica, HeteroServe eq. 2 and 3.

    .. math::
        \hat\kappa_i = F_i^\alpha M_i^\beta B_i^\gamma / \sum_j F_j^\alpha M_j^\beta B_j^\gamma

    with peak compute F [TFLOPS], memory M [GiB] and bandwidth B [GB/s] of all its GPUs.

    Source: HeteroServe, eq. 2: capability score, the weight of a device; kappa, alpha, beta, gamma.
    Source: HeteroServe, eq. 3: capability normalised over the cluster; kappa-hat.
    """
    alpha, beta, gamma = exponents
    score = np.array(
        [
            (r.gpus * g.fp16_tflops) ** alpha
            * (r.gpus * g.mem_gib) ** beta
            * (r.gpus * g.mem_bw_gbs) ** gamma
            for r, g in _gpus(deployment)
        ]
    )
    return np.asarray(score / score.sum())


def _spare_tokens(deployment: Deployment, safety: float) -> Floats:
    """KV cache of each replica [tokens] less a share of its memory, a GB counted as 1e9."""
    return np.array(
        [
            r.kv_tokens - safety * r.gpus * g.mem_gib * 1e9 / max(r.kv_bytes_per_token, 1.0)
            for r, g in _gpus(deployment)
        ]
    )


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


@dataclass(frozen=True)
class HeteroServe(Builtin):
    """Capability-weighted routing with queue feedback (HeteroServe eq. 2 to 5), each switchable.

    The device of highest weight among those that admit the prompt's length bin and queue fewer
    than Q_max requests; the equations stand at the head of this file. Where all
    are full the queue limit is dropped, where none admits the bin the bins are (the paper says
    neither). The fourth part of the ablation, the eviction penalty, is the engine's
    ``swap_s_per_gb``.

    Source: HeteroServe, section 3.6: capability-weighted dispatch over length bins.

    Parameters
    ----------
    bins_tokens
        Edges of the length bins; 256, 512 and 2048 in the paper.
    safety
        delta of eq. 4: share of memory kept free when a bin is admitted.
    queue_max, dampening, epoch_s
        Q_max, lambda and the interval of the queue reports [s].
    footprint_tokens
        Output that eq. 4 adds to the upper edge of a bin, the 90th percentile of the
        workload's outputs; exponential with mean 256 in the paper, so 589.
    longest_tokens
        Upper edge of the last bin.
    dispatch, queue
        Readings, see :data:`Dispatch` and :data:`Queue`.
    feedback, binning, dynamic
        Switches of the ablation: queue awareness (eq. 5 and the test against Q_max; a dampening of
        0 switches eq. 5 off alone), eq. 4, and the exponents by regime (else medium).
    """

    bins_tokens: Sequence[int] = (256, 512, 2048)
    safety: float = 0.1
    queue_max: float = 32.0
    dampening: float = 2.0
    epoch_s: float = 0.1
    footprint_tokens: int = 589
    longest_tokens: int = 4096
    dispatch: Dispatch = "highest"
    queue: Queue = "waiting"
    feedback: bool = True
    binning: bool = True
    dynamic: bool = True
    name: str = "HeteroServe"
    code: ClassVar[int] = HETEROSERVE

    def __post_init__(self) -> None:
        edges = list(self.bins_tokens)
        require(
            edges == sorted(set(edges)) and min(edges, default=1) > 0,
            f"Length bins need increasing edges above 0; received {edges}.",
            resolve="give edges such as 256, 512, 2048.",
        )
        require_positive(queue_max=self.queue_max, epoch_s=self.epoch_s)
        require_not_negative(dampening=self.dampening)

    def admissions(self, deployment: Deployment) -> NDArray[np.bool_]:
        """Which replica admits which bin (eq. 4); shape (bins, M).

        A replica's KV cache is what its memory leaves beside the weights; delta of the whole
        memory comes off it. That is eq. 4 as printed where the cache was counted with a memory
        fraction of 1 and no overhead; other engines keep their own reserve besides delta.

        Source: HeteroServe, eq. 4: bins that a device admits; A_i, delta.
        """
        ends = np.array([*self.bins_tokens, self.longest_tokens])
        spare = _spare_tokens(deployment, self.safety)
        return (ends[:, None] + self.footprint_tokens <= spare) | (not self.binning)

    def memory(self, deployment: Deployment) -> Floats:
        """Layout at the head of this file."""
        count = len(deployment.replicas)
        header = np.zeros(HEADER)
        header[[DAMPENING, QUEUE_MAX, EPOCH_S]] = self.dampening, self.queue_max, self.epoch_s
        header[PROPORTIONAL] = self.dispatch == "proportional"
        header[OUTSTANDING] = self.queue == "outstanding"
        header[[FEEDBACK, DYNAMIC, BINS]] = self.feedback, self.dynamic, len(self.bins_tokens) + 1
        weights = [capability_scores(deployment, exponents) for exponents in EXPONENTS]
        bins = [np.asarray(self.bins_tokens, np.float64), self.admissions(deployment).ravel()]
        return np.concatenate(
            [header, np.zeros(2 * count), *weights, np.zeros(count), *bins, np.zeros(WINDOW)]
        )


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


@dataclass(frozen=True)
class LatencyAware(Builtin):
    """Least queue depth over measured speed of the last epoch (baseline of HeteroServe, 4.1).

    Source: HeteroServe, section 4.1: baseline Latency-Aware.
    """

    speeds: Sequence[float] | None = None
    epoch_s: float = 0.1
    queue: Queue = "waiting"
    name: str = "latency-aware"
    code: ClassVar[int] = LATENCY_AWARE

    def memory(self, deployment: Deployment) -> Floats:
        """Layout at the head of this file; speeds stand where weights do."""
        count = len(deployment.replicas)
        if self.speeds is None:
            # Prefill tokens per second at the median prompt: what TTFT hangs on.
            speeds = [512.0 / float(r.step.prefill_seconds([512])) for r in deployment.replicas]
        else:
            speeds = list(self.speeds)
        require(
            len(speeds) == count and min(speeds) > 0,
            f"{len(speeds)} speeds for {count} replicas: {speeds}.",
            resolve="give one speed above 0 per replica.",
        )
        header = np.zeros(HEADER)
        header[EPOCH_S], header[OUTSTANDING] = self.epoch_s, self.queue == "outstanding"
        return np.concatenate([header, np.zeros(2 * count), speeds])


@compiled
def length_aware(R, E, S, RM, draw, r):
    """A device drawn by the shares of short or of long requests."""
    size = COLUMNS * len(E)
    first = 1 + (size if R[r].input_tokens > RM[0] else 0)
    p = by_chance(R, E, S, RM, r, first, first + size, draw)
    return int(RM[p]) if p >= 0 else -1


@dataclass(frozen=True)
class LengthAware(Builtin):
    """The paper's oracle: fixed shares by bandwidth (short) or compute (long), no feedback.

    Source: HeteroServe, section 4.1: baseline Oracle, the length-aware greedy one.

    Parameters
    ----------
    threshold_tokens
        Longest input of a short request.
    exclusive
        Send long requests to the replicas of the highest compute alone, as HeteroServe section 4.2
        tells; its section 4.1 says in proportion to compute.
    """

    threshold_tokens: int = 2048
    exclusive: bool = False
    name: str = "oracle (length-aware)"
    code: ClassVar[int] = LENGTH_AWARE
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """Threshold, entries for short requests, entries for long ones."""
        gpus = _gpus(deployment)
        bandwidth = np.array([r.gpus * g.mem_bw_gbs for r, g in gpus])
        compute = np.array([r.gpus * g.fp16_tflops for r, g in gpus])
        if self.exclusive:
            compute = np.where(compute == compute.max(), compute, 0.0)
        tables = [entries(np.arange(len(gpus)), -1, weight) for weight in (bandwidth, compute)]
        return np.concatenate([[float(self.threshold_tokens)], *tables])


@dataclass(frozen=True)
class CapacityProportional(Builtin):
    """Random shares in proportion to memory, no feedback (baseline of HeteroServe, 4.1).

    Source: HeteroServe, section 4.1: baseline Capacity-proportional.
    """

    name: str = "capacity-proportional"
    code: ClassVar[int] = WEIGHTED_RANDOM
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """One entry per replica, which weighs its memory."""
        memory_gib = [r.gpus * g.mem_gib for r, g in _gpus(deployment)]
        return entries(np.arange(len(memory_gib)), -1, memory_gib)


def batch_limits(
    deployment: Deployment, *, safety: float = 0.1, sequence_tokens: float = 1300.0
) -> Deployment:
    r"""Give every replica the batch limit of HeteroServe eq. 6.

    .. math:: B_i^{max} = \lfloor ((1 - \delta) M_i - W) / C \rfloor

    with memory M, weights W and KV cache C of a sequence of ``sequence_tokens`` [bytes]; 1,300 is
    the mean prompt of 1,052 plus the mean generation of 256 of the paper's workload. As printed
    where the KV cache was counted with a memory fraction of 1 and no overhead.

    Source: HeteroServe, eq. 6: batch size adaptation; B_i^max.
    """
    spare = _spare_tokens(deployment, safety)
    return _limited(deployment, [max(1, int(tokens / sequence_tokens)) for tokens in spare])


def uniform_limits(deployment: Deployment) -> Deployment:
    """Give every replica the smallest batch limit of all (baseline of HeteroServe, 4.1).

    Source: HeteroServe, section 4.1: baseline Uniform.
    """
    least = min(replica.engine.max_batch for replica in deployment.replicas)
    return _limited(deployment, [least] * len(deployment.replicas))


def _limited(deployment: Deployment, limits: Sequence[int]) -> Deployment:
    """The deployment with a batch limit per replica."""
    limited = [
        replace(replica, engine=replace(replica.engine, max_batch=limit))
        for replica, limit in zip(deployment.replicas, limits, strict=True)
    ]
    return replace(deployment, replicas=tuple(limited))
