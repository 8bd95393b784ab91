"""The workload scheduler of Xiong et al. as a router (section 4, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment, Replica
from hetero.errors import ParameterError
from hetero.latency.models.affine import Affine
from hetero.latency.models.phase import fit_phase
from hetero.latency.step import StepModel
from hetero.routers import kernels, workload
from hetero.routers.base import Builtin

Floats = NDArray[np.float64]
Ties: TypeAlias = Literal["first", "least"]
"""Which instance wins when several keep the largest workload equally small.

``"first"``: the one of lowest number, as Xiong et al.'s Algorithm 2 compares strictly.
``"least"``: the one whose own workload stays smallest, which is what the text wants.
"""


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
    return _fitted(
        replica.step, replica.kv_tokens, tuple(batches), tuple(lengths_tokens), replica.name
    )


@lru_cache(maxsize=1024)  # optimisers start thousands of runs with the same replicas
def _fitted(
    step: StepModel,
    kv_tokens: int,
    batches: tuple[int, ...],
    lengths_tokens: tuple[int, ...],
    name: str,
) -> Affine:
    points = [(b, n) for b in batches for n in lengths_tokens if b * n <= kv_tokens]
    if len({b for b, _ in points}) < 2 or len({n for _, n in points}) < 2:
        raise ParameterError(
            f"The KV cache of {name} ({kv_tokens} tokens) is too small to profile.",
            resolve="profile smaller batches and lengths, or leave the replica out.",
        )
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
    r"""Xiong et al.'s scheduler (OS): least of the largest workloads, see the kernel.

    Source: Xiong et al., section 5.2: their scheduler (OS) and the memory-based one (MB); theta.

    Parameters
    ----------
    theta
        Weight of the KV usage in eq. 7; 2 in the paper.
    memory_based
        Set every T to 1, so that only the KV usage counts (MB in the paper).
    ties
        See :data:`Ties`.
    coefficients
        p1 to p8 of each replica; by default each is profiled and fitted.

    Examples
    --------
    >>> Workload(theta=2.0).name, Workload(memory_based=True).name
    ('workload', 'memory-based')
    """

    theta: float = 2.0
    memory_based: bool = False
    ties: Ties = "least"
    coefficients: Sequence[Affine] | None = None
    name: str = ""
    code: ClassVar[int] = kernels.WORKLOAD

    def __post_init__(self) -> None:
        if not self.theta >= 0:
            raise ParameterError(
                f"theta is {self.theta}.", resolve="give 0 or more; the paper uses 2."
            )
        if not self.name:
            object.__setattr__(self, "name", "memory-based" if self.memory_based else "workload")

    def memory(self, deployment: Deployment) -> Floats:
        """theta, flags, then p1 to p8 of every replica."""
        fits = self.coefficients
        if fits is None:
            seen: dict[tuple[int, int], Affine] = {}
            for replica in deployment.replicas:
                key = (id(replica.step), replica.kv_tokens)
                if key not in seen:
                    seen[key] = profile(replica)
            fits = [seen[id(r.step), r.kv_tokens] for r in deployment.replicas]
        if len(fits) != len(deployment.replicas):
            raise ParameterError(
                f"{len(fits)} sets of coefficients for {len(deployment.replicas)} replicas.",
                resolve="give one per replica, or none to have them profiled.",
            )
        header = [self.theta, float(self.memory_based), float(self.ties == "least")]
        rows = [
            (
                fit.per_batch_token_s,
                fit.per_request_s,
                fit.per_longest_token_s,
                fit.prefill_s,
                fit.per_cached_token_s,
                fit.per_decoding_s,
                fit.per_context_token_s,
                fit.decode_s,
            )
            for fit in fits
        ]
        assert len(header) == workload.HEADER
        return np.concatenate([header, np.array(rows).ravel()])
