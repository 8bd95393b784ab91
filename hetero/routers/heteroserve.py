"""HeteroServe and the baselines of its paper as routers (section 3 and 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetero.catalog import Gpu
from hetero.deployment import Deployment, Replica
from hetero.errors import ParameterError
from hetero.routers import capability, kernels
from hetero.routers.base import Builtin

Floats = NDArray[np.float64]
Dispatch: TypeAlias = Literal["proportional", "highest"]
"""Weights as long-run shares (HeteroServe, section 3.2), or the highest wins (3.3 and 3.6)."""
Queue: TypeAlias = Literal["waiting", "outstanding"]
"""What counts as queue depth: requests without a first token, or all unfinished ones."""

#: Exponents of compute, memory and bandwidth for short, medium and long prompts (section 3.2).
EXPONENTS = ((0.55, 0.15, 0.30), (0.40, 0.30, 0.30), (0.20, 0.50, 0.30))


def _gpus(deployment: Deployment) -> list[tuple[Replica, Gpu]]:
    found = []
    for replica in deployment.replicas:
        if replica.gpu is None:
            raise ParameterError(
                f"Replica {replica.name} names no GPU, and capability scores need its figures.",
                resolve="set gpu= on every replica.",
            )
        found.append((replica, replica.gpu))
    return found


def capability_scores(deployment: Deployment, exponents: tuple[float, float, float]) -> Floats:
    r"""Normalised capability of each replica, eq. 2 and 3.

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


@dataclass(frozen=True)
class HeteroServe(Builtin):
    r"""Capability-weighted routing with queue feedback (eq. 2 to 5), each part switchable.

    The device of highest weight

    .. math::
        \tilde\kappa_i(t) = \hat\kappa_i\, e^{-\lambda q_i(t) / Q_{max}}

    among those that admit the prompt's length bin and queue fewer than Q_max requests. Where all
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
        Switches of the ablation: eq. 5, eq. 4, and the exponents by regime (else medium).
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
    code: ClassVar[int] = kernels.HETEROSERVE

    def __post_init__(self) -> None:
        edges = list(self.bins_tokens)
        if edges != sorted(set(edges)) or (edges and edges[0] <= 0):
            raise ParameterError(
                f"Length bins need increasing edges above 0; received {edges}.",
                resolve="give edges such as 256, 512, 2048.",
            )
        if not (self.queue_max > 0 and self.epoch_s > 0 and self.dampening >= 0):
            raise ParameterError(
                f"Q_max {self.queue_max}, lambda {self.dampening} and epoch {self.epoch_s} s "
                "cannot be used together.",
                resolve="give Q_max and the epoch above 0, lambda of 0 or more.",
            )

    def admissions(self, deployment: Deployment) -> NDArray[np.bool_]:
        """Which replica admits which bin (eq. 4); shape (bins, M).

        A replica's KV cache is what its memory leaves beside the weights; delta of the whole
        memory comes off it. That is eq. 4 as printed where the cache was counted with a memory
        fraction of 1 and no overhead; other engines keep their own reserve besides delta.

        Source: HeteroServe, eq. 4: bins that a device admits; A_i, delta.
        """
        ends = [*self.bins_tokens, self.longest_tokens]
        rows = []
        for end in ends:
            need = np.array([end + self.footprint_tokens] * len(deployment.replicas), np.float64)
            # Weights are already out of kv_tokens; delta is a share of the whole memory.
            spare = np.array(
                [
                    r.kv_tokens - self.safety * r.gpus * g.mem_bytes / max(r.kv_bytes_per_token, 1)
                    for r, g in _gpus(deployment)
                ]
            )
            rows.append((need <= spare) | (not self.binning))
        return np.array(rows)

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.capability`."""
        count, bins = len(deployment.replicas), len(self.bins_tokens) + 1
        header = np.zeros(capability.HEADER)
        header[capability.DAMPENING] = self.dampening
        header[capability.QUEUE_MAX] = self.queue_max
        header[capability.EPOCH_S] = self.epoch_s
        header[capability.PROPORTIONAL] = self.dispatch == "proportional"
        header[capability.FEEDBACK] = self.feedback
        header[capability.BINS] = bins
        header[capability.OUTSTANDING] = self.queue == "outstanding"
        header[capability.DYNAMIC] = self.dynamic
        weights = [capability_scores(deployment, exponents) for exponents in EXPONENTS]
        return np.concatenate(
            [
                header,
                np.zeros(2 * count),
                *weights,
                np.zeros(count),
                np.asarray(self.bins_tokens, np.float64),
                self.admissions(deployment).astype(np.float64).ravel(),
                np.zeros(capability.WINDOW),
            ]
        )


@dataclass(frozen=True)
class LatencyAware(Builtin):
    """Least queue depth over measured speed, refreshed each epoch (baseline of section 4.1).

    Source: HeteroServe, section 4.1: baseline Latency-Aware.
    """

    speeds: Sequence[float] | None = None
    epoch_s: float = 0.1
    queue: Queue = "waiting"
    name: str = "latency-aware"
    code: ClassVar[int] = kernels.LATENCY_AWARE

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.capability`; speeds stand where weights do."""
        count = len(deployment.replicas)
        if self.speeds is None:
            # Prefill tokens per second at the median prompt: what TTFT hangs on.
            speeds = [512.0 / float(r.step.prefill_seconds([512])) for r in deployment.replicas]
        else:
            speeds = list(self.speeds)
        if len(speeds) != count or min(speeds) <= 0:
            raise ParameterError(
                f"{len(speeds)} speeds for {count} replicas: {speeds}.",
                resolve="give one speed above 0 per replica.",
            )
        header = np.zeros(capability.HEADER)
        header[capability.EPOCH_S] = self.epoch_s
        header[capability.OUTSTANDING] = self.queue == "outstanding"
        return np.concatenate([header, np.zeros(2 * count), speeds])


@dataclass(frozen=True)
class LengthAware(Builtin):
    """The paper's oracle: fixed shares by bandwidth (short) or compute (long), no feedback.

    Source: HeteroServe, section 4.1: baseline Oracle, the length-aware greedy one.

    Parameters
    ----------
    threshold_tokens
        Longest input of a short request.
    exclusive
        Send long requests to the replicas of the highest compute alone, as section 4.2 tells;
        section 4.1 says in proportion to compute.
    """

    threshold_tokens: int = 2048
    exclusive: bool = False
    name: str = "oracle (length-aware)"
    code: ClassVar[int] = kernels.LENGTH_AWARE
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """Threshold, shares of short requests, shares of long ones."""
        gpus = _gpus(deployment)
        bandwidth = np.array([r.gpus * g.mem_bw_gbs for r, g in gpus])
        compute = np.array([r.gpus * g.fp16_tflops for r, g in gpus])
        if self.exclusive:
            compute = np.where(compute == compute.max(), compute, 0.0)
        return np.concatenate([[float(self.threshold_tokens)], bandwidth, compute])


@dataclass(frozen=True)
class CapacityProportional(Builtin):
    """Random shares in proportion to memory, no feedback (baseline of section 4.1).

    Source: HeteroServe, section 4.1: baseline Capacity-proportional.
    """

    name: str = "capacity-proportional"
    code: ClassVar[int] = kernels.WEIGHTED_RANDOM
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """Memory of each replica."""
        return np.array([r.gpus * g.mem_gib for r, g in _gpus(deployment)])


def batch_limits(
    deployment: Deployment, *, safety: float = 0.1, sequence_tokens: float = 1300.0
) -> Deployment:
    r"""Give every replica the batch limit of eq. 6.

    .. math:: B_i^{max} = \lfloor ((1 - \delta) M_i - W) / C \rfloor

    with memory M, weights W and KV cache C of a sequence of ``sequence_tokens`` [bytes]; 1,300 is
    the mean prompt of 1,052 plus the mean generation of 256 of the paper's workload. As printed
    where the KV cache was counted with a memory fraction of 1 and no overhead.

    Source: HeteroServe, eq. 6: batch size adaptation; B_i^max.
    """
    limited = []
    for replica, gpu in _gpus(deployment):
        spare = safety * replica.gpus * gpu.mem_bytes / max(replica.kv_bytes_per_token, 1.0)
        limit = max(1, int((replica.kv_tokens - spare) / sequence_tokens))
        limited.append(replace(replica, engine=replace(replica.engine, max_batch=limit)))
    return replace(deployment, replicas=tuple(limited))


def uniform_limits(deployment: Deployment) -> Deployment:
    """Give every replica the smallest batch limit of all (baseline Uniform of section 4.1).

    Source: HeteroServe, section 4.1: baseline Uniform.
    """
    least = min(replica.engine.max_batch for replica in deployment.replicas)
    return replace(
        deployment,
        replicas=tuple(
            replace(r, engine=replace(r.engine, max_batch=least)) for r in deployment.replicas
        ),
    )
