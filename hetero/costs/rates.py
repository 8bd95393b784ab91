"""What the cost model of a group rests on: its assumptions, stages and rates per layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.engines import PAPERS, EngineSpec
from hetero.errors import require_positive, require_share
from hetero.latency.models.roofline import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Assumptions of the cost model.

    Attributes
    ----------
    engine
        What serves, see :class:`hetero.engines.EngineSpec`; by default the papers' systems.
    network_share
        Share of the line rate that a transfer between machines reaches; ThunderServe's Table 8
        moves 1.64 GB in 584 ms over 40 Gbit/s, 56 %.
    inside_share
        Share of the line rate that a transfer between the GPUs of a machine reaches; PCIe
        reaches 75 to 80 %.
    kv_tokens
        KV caches that engines of the whole model print, as (GPU, number of GPUs, tokens): what is
        held of such GPUs follows from them.
    max_stages
        Largest number of pipeline stages. Long pipelines pool many GPUs into one queue, and one
        failure stops them all; the paper's plans have up to 2.
    max_gpus
        Largest number of GPUs of a group; the paper's plans have up to 4.
    one_degree
        One tensor-parallel degree for all machines of a group, and stages along the path whose
        narrowest link is widest, as ThunderServe's Algorithm 2 has it; else degrees may differ
        between machines, and the path is the shortest.
    efficiency
        Efficiencies of all GPUs; by default those calibrated for each type.
    """

    engine: EngineSpec = PAPERS
    network_share: float = 0.56
    inside_share: float = 0.75
    max_stages: int = 4
    max_gpus: int | None = None
    one_degree: bool = False
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        require_share(network_share=self.network_share, inside_share=self.inside_share)
        require_positive(max_stages=self.max_stages)


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """``gpus`` GPUs of the machine number ``machine`` that share ``layers`` layers."""

    machine: int
    gpus: int
    layers: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Terms of one layer on ``t`` GPUs of one machine, and what they hold at most; see the module.

    ``experts`` are new tokens, and the time of the routed experts of a mixture [s], shape (2, K).
    """

    product_s: float
    padding_tokens: float
    weights_s: float
    cached_s: float
    pair_s: float
    reduce_s: float
    fixed_s: float
    logits_s: float
    step_s: float
    usable_bytes: float
    layer_bytes: float
    kv_layer_bytes: float
    max_batch: int
    experts: Floats | None = field(default=None, compare=False)

    @property
    def bends(self) -> Floats:
        """New tokens at which :meth:`products_s` takes another slope."""
        if self.experts is not None:
            return np.asarray(self.experts[0])
        return np.array([self.weights_s / self.product_s - self.padding_tokens])

    def products_s(self, tokens: ArrayLike) -> Floats:
        """Time [s] of matrix products with so many new tokens, routed experts included."""
        n = np.asarray(tokens, np.float64)
        products = np.maximum(self.product_s * (n + self.padding_tokens), self.weights_s)
        return products if self.experts is None else products + self.experts_s(n)

    def experts_s(self, tokens: Floats) -> Floats:
        """Time [s] of the routed experts; beyond the last of ``experts`` as from the one before."""
        assert self.experts is not None
        n, found = self.experts
        slope = (found[-1] - found[-2]) / (n[-1] - n[-2])
        return np.asarray(np.interp(tokens, n, found) + slope * np.maximum(tokens - n[-1], 0.0))
