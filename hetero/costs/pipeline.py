"""Pipelines over stages of mixed GPUs: what a costed copy of a model does, see the cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.catalog import Gpu
from hetero.cluster import Machine
from hetero.deployment import Engine
from hetero.display import Column, Shown, Table
from hetero.engines import PAPERS, EngineSpec
from hetero.errors import require_positive, require_share
from hetero.grouping import summed
from hetero.latency.models.roofline import Efficiency

if TYPE_CHECKING:
    from hetero.costs.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """Assumptions of the cost model.

    Attributes
    ----------
    engine
        What serves; :data:`IN_PAPERS` has the papers' systems.
    network_share
        Share of the line rate that a transfer between machines reaches; ThunderServe's Table 8
        moves 1.64 GB in 584 ms over 40 Gbit/s, 56 %.
    inside_share
        Share of the line rate that a transfer between the GPUs of a machine reaches; PCIe
        reaches 75 to 80 %.
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

    engine: EngineSpec = field(default_factory=EngineSpec)
    network_share: float = 0.56
    inside_share: float = 0.75
    max_stages: int = 4
    max_gpus: int | None = None
    one_degree: bool = False
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        require_share(network_share=self.network_share, inside_share=self.inside_share)
        require_positive(max_stages=self.max_stages)


IN_PAPERS: Final = CostSettings(engine=PAPERS)
"""Of systems as the papers have them."""


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


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(Shown):
    """One copy of a model on a group of GPUs, costed; made by :meth:`CostModel.pipeline`.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.cost import CostModel
    >>> model = CostModel(cluster("thunderserve-a100-8"), llm("LLaMA-1-30B"))
    >>> pair = model.pipeline([PipelineStage(0, 2, 60)])
    >>> pair.label, pair.gpus, pair.kv_tokens > 30_000
    ('2xA100-SXM-80GB', 2, True)
    >>> bool(0.015 < pair.decode_step_s(1, 1024) < 0.03)
    True
    """

    model: CostModel
    stages: tuple[PipelineStage, ...]

    # Shape ----------------------------------------------------------------------------------

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """Machine of each stage."""
        return tuple(self.model.machines[stage.machine] for stage in self.stages)

    @property
    def where(self) -> str:
        """Names of its machines, each once."""
        return ", ".join(dict.fromkeys(machine.name for machine in self.machines))

    @property
    def gpus(self) -> int:
        """GPUs of all stages."""
        return sum(stage.gpus for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, int]:
        """Largest tensor-parallel degree and number of stages, as the paper writes a replica."""
        return max(stage.gpus for stage in self.stages), len(self.stages)

    @property
    def gpu_counts(self) -> dict[str, int]:
        """GPUs of each type."""
        stages = zip(self.stages, self.machines, strict=True)
        return summed((machine.gpu.name, stage.gpus) for stage, machine in stages)

    @property
    def gpu(self) -> Gpu | None:
        """Type of its GPUs, None if they are of several."""
        kinds = {machine.gpu for machine in self.machines}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def label(self) -> str:
        """GPUs of its stages in order, such as ``2xA40+2xRTX-3090Ti``."""
        parts = zip(self.stages, self.machines, strict=True)
        return "+".join(f"{stage.gpus}x{machine.gpu.name}" for stage, machine in parts)

    @property
    def usd_per_h(self) -> float | None:
        """Price of its GPUs as shares of their machines [$/h]; None if one is unknown."""
        total = 0.0
        for stage, machine in zip(self.stages, self.machines, strict=True):
            if machine.usd_per_h is None:
                return None
            total += machine.usd_per_h * stage.gpus / machine.count
        return total

    # Time -----------------------------------------------------------------------------------

    @cached_property
    def rates(self) -> tuple[Rates, ...]:
        """Rates of each stage."""
        piped = len(self.stages) > 1
        return tuple(self.model.rates(one.machine, one.gpus, piped) for one in self.stages)

    @cached_property
    def _columns(self) -> dict[str, Floats]:
        """Terms of each stage with all its layers, shape (S, 1)."""
        layers = np.array([stage.layers for stage in self.stages], dtype=np.float64)
        names = ("product_s", "weights_s", "cached_s", "pair_s", "reduce_s", "fixed_s")
        found = {
            name: (layers * np.array([getattr(rate, name) for rate in self.rates]))[:, None]
            for name in names
        }
        found["padding_tokens"] = np.array([[rate.padding_tokens] for rate in self.rates])
        found["fixed_s"][0] += self.rates[0].step_s
        found["fixed_s"][-1] += self.rates[-1].logits_s
        return found

    def stage_seconds(
        self, tokens: ArrayLike, cached: ArrayLike = 0.0, pairs: ArrayLike = 0.0
    ) -> Floats:
        """Time of each stage [s] for new tokens, cached tokens and pairs; shape (S, N)."""
        n, c, q = (np.atleast_1d(np.asarray(a, np.float64)) for a in (tokens, cached, pairs))
        one = self._columns
        products = np.maximum(one["product_s"] * (n + one["padding_tokens"]), one["weights_s"])
        if self.model.llm.experts:
            held = zip(self.stages, self.rates, strict=True)
            products = products + [stage.layers * rate.experts_s(n) for stage, rate in held]
        rest = one["cached_s"] * c + one["pair_s"] * q + one["reduce_s"] * n + one["fixed_s"]
        return np.asarray(products + rest)

    @cached_property
    def _each_hop(self) -> list[tuple[float, float]]:
        """Time per token [s] and latency [s] of every hop between stages."""
        size = self.model.llm.activation_bytes_per_token("fp16")
        pairs = [(a.machine, b.machine) for a, b in pairwise(self.stages)]
        bandwidth, latency = self.model.bandwidth_gbs, self.model.latency_s
        return [(size / (1e9 * float(bandwidth[at])), float(latency[at])) for at in pairs]

    @cached_property
    def hops(self) -> tuple[float, float]:
        """Latency [s] and time per token [s] of all hops between stages together."""
        fixed, per_token = 0.0, 0.0
        for each, latency in self._each_hop:
            fixed += latency
            per_token += each
        return fixed, per_token

    def prefill_latency_s(self, tokens: ArrayLike) -> Floats:
        """Time [s] from the start of the prefill of one prompt to its first token."""
        n = np.asarray(tokens, np.float64)
        fixed, per_token = self.hops
        total = self.stage_seconds(n, 0.0, n * n / 2).sum(axis=0) + fixed + per_token * n
        return np.asarray(total.reshape(n.shape))

    def prefill_occupancy_s(self, tokens: ArrayLike) -> Floats:
        """Time [s] after which the next prompt of as many tokens can follow: its slowest stage."""
        n = np.asarray(tokens, np.float64)
        per_token, fixed = max(self._each_hop, default=(0.0, 0.0))
        slowest = self.stage_seconds(n, 0.0, n * n / 2).max(axis=0)
        return np.asarray(np.maximum(slowest, fixed + per_token * n).reshape(n.shape))

    def decode_step_s(self, batch: ArrayLike, cached_tokens: ArrayLike) -> Floats:
        """Time [s] between two tokens of a request when ``batch`` decode in rotating microbatches.

        Parameters
        ----------
        batch
            Requests that decode, in all microbatches together.
        cached_tokens
            Cached tokens of all of them together.
        """
        b, c = np.broadcast_arrays(
            np.asarray(batch, np.float64), np.asarray(cached_tokens, np.float64)
        )
        count = len(self.stages)
        times = self.stage_seconds(b.ravel() / count, c.ravel() / count)
        fixed, per_token = self.hops
        rotation = times.sum(axis=0) + fixed + self.return_s + per_token * b.ravel() / count
        return np.asarray(np.maximum(rotation, count * times.max(axis=0)).reshape(b.shape))

    @property
    def return_s(self) -> float:
        """Latency of the sampled token's way back to the first stage [s]."""
        if len(self.stages) == 1:
            return 0.0
        return float(self.model.latency_s[self.stages[-1].machine, self.stages[0].machine])

    # Memory ---------------------------------------------------------------------------------

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache holds; the stage that fills first decides."""
        found = []
        for k, (stage, rates) in enumerate(zip(self.stages, self.rates, strict=True)):
            ends = self.model.end_bytes(first=k == 0, last=k == len(self.stages) - 1)
            free = rates.usable_bytes - ends - stage.layers * rates.layer_bytes
            found.append(free / (stage.layers * rates.kv_layer_bytes))
        return max(0, int(min(found)))

    @cached_property
    def max_batch(self) -> int:
        """Requests that its engine decodes together, at most."""
        return min(rate.max_batch for rate in self.rates)

    @cached_property
    def engine(self) -> Engine:
        """How its engine forms steps."""
        gpus, piped = (machine.gpu for machine in self.machines), len(self.stages) > 1
        return self.model.settings.engine.limits(*gpus, piped=piped)

    def decode_batch(self, context_tokens: float) -> int:
        """Requests of so many tokens that decode at once: what memory and the engine allow."""
        return min(self.max_batch, int(self.kv_tokens / max(context_tokens, 1.0)))

    def decode_tps(self, context_tokens: float) -> float:
        """Tokens per second with the batch that memory allows (ThunderServe, appendix B)."""
        batch = self.decode_batch(context_tokens)
        if batch < 1:
            return 0.0
        return batch / float(self.decode_step_s(batch, batch * context_tokens))

    def table(self) -> Table:
        """One row per stage."""

        def ms(tokens: float, cached: float, pairs: float = 0.0) -> Callable[[int], float]:
            return lambda k: 1e3 * float(self.stage_seconds(tokens, cached, pairs)[k, 0])

        columns = (
            Column("stage", of=lambda k: k + 1),
            Column("machine", of=lambda k: self.machines[k].name),
            Column("GPUs", of=lambda k: f"{self.stages[k].gpus} x {self.machines[k].gpu.name}"),
            Column("layers", of=lambda k: self.stages[k].layers),
            Column("prefill of 1,024", "ms", 3, ms(1024, 0, 1024**2 / 2)),
            Column("decode, batch 1", "ms", 3, ms(1, 1024)),
        )
        note = (
            f"first token of 1,024 after {1e3 * float(self.prefill_latency_s(1024)):.0f} ms; KV "
            f"cache of {self.kv_tokens:,} tokens; {self.decode_tps(1024):,.0f} tokens/s of decode "
            "at contexts of 1,024"
        )
        title = f"{self.model.llm.name} on {self.label}"
        return Table.of(title, columns, range(len(self.stages)), note)


def table_of_shares(
    title: str,
    what: str,
    parts: Iterable[tuple[str, Pipeline, str]],
    weights: Mapping[tuple[str, str], float],
    *notes: str,
) -> Table:
    """One row per pipeline with a name and a phase, and its share of the requests.

    Parameters
    ----------
    what
        What a pipeline is called.
    weights
        Share of the requests by pair of names; (it, it) where one serves both phases.
    """
    shares = summed((name, weight) for pair, weight in weights.items() for name in set(pair))
    total = sum(weights.values())
    columns = (
        Column(what, of=lambda part: part[0]),
        Column("GPUs by stage", of=lambda part: part[1].label),
        Column("strategy", of=lambda part: "TP={}, PP={}".format(*part[1].degrees)),
        Column("phase", of=lambda part: part[2]),
        Column("requests", "%", 3, lambda part: 100.0 * shares.get(part[0], 0.0) / total),
    )
    return Table.of(title, columns, parts, *notes)
