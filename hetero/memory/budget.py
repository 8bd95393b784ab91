"""Memory of one instance: engine, weights and what is left for KV cache, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from hetero.catalog import Gpu, KvFormula, Llm
from hetero.catalog.engines import EngineMemory, Sampler
from hetero.catalog.models import LayerParams
from hetero.display import Column, Shown, Table
from hetero.errors import require, require_not_negative, require_positive, require_share

OverheadPer: TypeAlias = Literal["gpu", "instance"]
"""Whether the engine's static memory counts once per GPU or once per instance."""

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage of an instance: its layers, and the bytes on all its GPUs together."""

    layers: int
    usable_bytes: float
    overhead_bytes: float
    weight_bytes: int

    @property
    def free_bytes(self) -> float:
        """Bytes left for KV cache; negative if the weights do not fit."""
        return self.usable_bytes - self.overhead_bytes - self.weight_bytes


@dataclass(frozen=True, slots=True)
class Budget(Shown):
    r"""Memory of one instance: a model on ``tensor_parallel * pipeline_parallel`` equal GPUs.

    .. math:: KVSize = t\,d\,\phi - \delta - \Phi\,b^{bytes}

    with tensor-parallel degree t, GPU memory d [bytes], usable fraction phi, engine overhead
    delta [bytes] and Phi parameters of b bytes. With p pipeline stages each has this budget for
    its own layers, and the stage that fills first decides:
    :math:`KVSize = l \min_s (free_s / l_s)` over stages of :math:`l_s` of the l layers.

    Tensor parallelism copies what it cannot divide: with fewer KV heads than GPUs, their
    projections and their cache; with latent attention, its down-projections and the whole cache.
    Norms and biases, which are copied too, count once. Where ``ranks`` of so many GPUs share out
    the routed experts, each has the rest of the weights and a KV cache of its own.

    Attributes
    ----------
    memory_fraction
        Share of each GPU's memory the engine may use (phi).
    overhead_gib, overhead_per
        Static memory of the engine (delta) [GiB], per GPU or per instance.
    weight_precision, kv_precision
        Data types of weights and KV cache.
    kv_formula
        ``"model"`` or ``"full"``, see :mod:`hetero.memory`.
    ranks
        Ranks that share out the routed experts; figures but ``gpus`` and ``max_tokens`` are of one.
    request_tokens
        Length of a mean request: windows and states, which it holds besides, take from the tokens
        that fit.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> budget = Budget(llm("Llama-3-8B"), gpu("V100-SXM2-32GB"))
    >>> budget.max_tokens, budget.max_batch(512, 256)
    (97013, 126)

    Notes
    -----
    Source: Xiong et al., eq. 1: memory of an instance for KV caches; KVSize(s), phi_usage.
    """

    llm: Llm
    gpu: Gpu
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    memory_fraction: float = 0.9
    overhead_gib: float = 2.0
    overhead_per: OverheadPer = "gpu"
    weight_precision: str = "fp16"
    kv_precision: str = "fp16"
    kv_formula: KvFormula = "model"
    ranks: int = 1
    request_tokens: float = 0.0

    def __post_init__(self) -> None:
        require_positive(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            ranks=self.ranks,
        )
        require(
            self.pipeline_parallel <= self.llm.layers,
            f"{self.pipeline_parallel} pipeline stages for the {self.llm.layers} layers of "
            f"{self.llm.name}.",
            resolve="use no more stages than layers.",
        )
        require_share(memory_fraction=self.memory_fraction)
        require_not_negative(overhead_gib=self.overhead_gib)
        require(
            self.overhead_per in ("gpu", "instance"),
            f"overhead_per is '{self.overhead_per}'.",
            resolve="use 'gpu' or 'instance'.",
        )

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tensor_parallel * self.pipeline_parallel * self.ranks

    @property
    def stages(self) -> tuple[StageMemory, ...]:
        """Its pipeline stages, in order.

        Layers are divided evenly; those that remain go one each to the stages before the last,
        from the back, because the last one also holds the product for the logits (as vLLM does).
        """
        p = self.pipeline_parallel
        least, over = divmod(self.llm.layers, p)
        counts = [least + (p - 1 - over <= k < p - 1) for k in range(p)]
        usable = self.tensor_parallel * self.gpu.mem_bytes * self.memory_fraction
        overhead = self.overhead_gib * _GIB
        per_stage = overhead * self.tensor_parallel if self.overhead_per == "gpu" else overhead / p
        kept, stages, start = self.llm.format(self.weight_precision), [], 0
        for k, count in enumerate(counts):
            params = self._padded(self.llm.layer_params(start, count, self.tensor_parallel))
            routed = kept.bytes(LayerParams(experts=params.experts))
            weights = kept.bytes(params) - routed + math.ceil(routed / self.ranks)
            weights += self.llm.end_bytes(self.weight_precision, first=k == 0, last=k == p - 1)
            stages.append(StageMemory(count, usable, per_stage, weights))
            start += count
        return tuple(stages)

    def _padded(self, params: LayerParams) -> LayerParams:
        """Parameters with the experts' matrices as an engine pads them."""
        kept, llm, t = self.llm.format(self.weight_precision), self.llm, self.tensor_parallel
        hidden, width = llm.expert_hidden or llm.hidden, llm.moe_intermediate
        if not params.experts or kept.hidden_multiple * kept.width_multiple == 1:
            return params
        wide = t * kept.width_multiple * math.ceil(width / t / kept.width_multiple)
        high = kept.hidden_multiple * math.ceil(hidden / kept.hidden_multiple)
        return params._replace(experts=params.experts * wide * high // (width * hidden))

    @property
    def weight_bytes(self) -> int:
        """Weights on all GPUs [bytes], copies included."""
        return sum(stage.weight_bytes for stage in self.stages)

    @property
    def kv_capacity_bytes(self) -> float:
        """Largest KV cache [bytes] (Xiong et al., eq. 1); negative: the weights do not fit."""
        return self.llm.layers * min(stage.free_bytes / stage.layers for stage in self.stages)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token on all GPUs [bytes], copies included."""
        return self.llm.kv_bytes_per_token(self.kv_precision, self.kv_formula, self.tensor_parallel)

    @property
    def held_bytes_per_token(self) -> float:
        """The same with windows and states of a mean request, by its tokens [bytes]."""
        length = self.request_tokens if self.kv_formula == "model" else 0.0
        beside = self._beside_bytes(length) / length if length else 0.0
        return self.kv_bytes_per_token + beside

    @property
    def max_tokens(self) -> int:
        """Tokens that the KV caches of all ranks hold; 0 if the weights do not fit."""
        fitting = math.floor(self.kv_capacity_bytes / self.held_bytes_per_token)
        return self.ranks * max(0, fitting)

    def _beside_bytes(self, tokens: float, step_tokens: int = 0) -> int:
        return self.llm.request_bytes(
            int(tokens),
            self.kv_precision,
            step_tokens=step_tokens,
            tensor_parallel=self.tensor_parallel,
        )

    def max_requests(self, tokens: int, step_tokens: int = 0) -> float:
        """Requests of a length that the caches hold at once, as engines print it.

        Parameters
        ----------
        step_tokens
            Tokens of a step, which a windowed layer holds before they leave its window.
        """
        each = tokens * self.kv_bytes_per_token + self._beside_bytes(tokens, step_tokens)
        return max(0.0, self.ranks * self.kv_capacity_bytes / each)

    def max_batch(self, input_tokens: int, output_tokens: int) -> int:
        r"""Requests of one size that fit at once.

        .. math:: b_r = KVSize / (2 (I_r + O_r)\, l\, h\, b^{bytes}), rounded down

        (Xiong et al., eq. 5, which omits the bytes of a value). 0 if not even one fits.
        """
        size = input_tokens + output_tokens
        require(
            size >= 1 and min(input_tokens, output_tokens) >= 0,
            f"A request of {input_tokens} input and {output_tokens} output tokens.",
            resolve="give lengths of 0 or more, together above 0.",
        )
        return self.max_tokens // size

    def why_not(self, longest_tokens: int = 1) -> str | None:
        """Constraint that keeps the instance from serving a request of that length, or None.

        Checked in this order: heads that the tensor-parallel degree cannot divide, a data type
        the GPU lacks, weights, and the KV cache of the longest request (Xiong et al., eq. 1 and 2).

        Source: Xiong et al., eq. 2: constraint that the longest request fits; I_max, O_max.
        """
        llm, t = self.llm, self.tensor_parallel
        if llm.heads % t:
            return f"{llm.heads} attention heads cannot be divided over {t} GPUs."
        if self.weight_precision == "bf16" and "bf16" not in self.gpu.precisions:
            return f"{self.gpu.name} does not compute in bf16."
        stage = min(self.stages, key=lambda s: s.free_bytes / s.layers)
        if stage.free_bytes <= 0:
            what = f"{stage.layers} layers of " if self.pipeline_parallel > 1 else ""
            return (
                f"The weights of {what}{llm.name} in {self.weight_precision} take "
                f"{_gib(stage.weight_bytes)}, but {t} x {self.gpu.name} offer "
                f"{_gib(stage.usable_bytes - stage.overhead_bytes)} "
                f"({self.memory_fraction:g} of the memory less {_gib(stage.overhead_bytes)} for "
                f"the engine): {_gib(-stage.free_bytes)} short."
            )
        needed = longest_tokens * self.kv_bytes_per_token
        if needed > self.kv_capacity_bytes:
            return (
                f"A request of {longest_tokens:,} tokens needs {_gib(needed)} of KV cache, but "
                f"{_gib(self.kv_capacity_bytes)} ({self.max_tokens:,} tokens) are left beside the "
                f"weights of {llm.name} on {self.gpus} x {self.gpu.name}."
            )
        return None

    def table(self) -> Table:
        """Where the memory goes, stage by stage, and what the rest holds."""
        memory = self.tensor_parallel * self.gpu.mem_bytes
        columns = (
            Column("stage", of=lambda stage: stage[0]),
            Column("layers", of=lambda stage: stage[1].layers),
            Column("memory", "GiB", of=lambda _: memory / _GIB),
            Column("left unused", "GiB", of=lambda _: memory * (1 - self.memory_fraction) / _GIB),
            Column("engine", "GiB", of=lambda stage: stage[1].overhead_bytes / _GIB),
            Column("weights", "GiB", of=lambda stage: stage[1].weight_bytes / _GIB),
            Column("KV cache", "GiB", of=lambda stage: stage[1].free_bytes / _GIB),
        )
        rest = (
            f"KV cache of the instance: {_gib(self.kv_capacity_bytes)}, {self.max_tokens:,} tokens "
            f"of {self.kv_bytes_per_token:,} bytes ({self.kv_precision}, {self.kv_formula})."
        )
        title = (
            f"{self.llm.name} in {self.weight_precision} on {self.gpus} x {self.gpu.name} "
            f"(tensor parallel {self.tensor_parallel}, pipeline {self.pipeline_parallel})"
        )
        return Table.of(title, columns, enumerate(self.stages, start=1), self.why_not() or rest)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:,.2f} GiB"


_GIB = 2**30


class Room(NamedTuple):
    """Share of each GPU's nominal memory that an engine takes, and what it holds of it [GiB]."""

    memory_fraction: float
    overhead_gib: float


RoomSource: TypeAlias = Callable[[Gpu, Llm, int], Room]
"""Room on some GPUs of one type: ``(gpu, llm, degree)``."""


def engine_room(
    rule: EngineMemory,
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    max_batch: int,
    max_step_tokens: int,
    share: float | None = None,
    sampler: Sampler = "",
) -> Room:
    r"""What an engine takes of the memory of a GPU, and holds beside weights and KV cache.

    Of the visible memory V it takes the share u. It runs a step of the most tokens n and samples
    for the most requests b, and what that holds at its peak is not given to the KV cache:

    .. math::
        held = \max\big(n\,\phi\,(6 i / t + 4 h),\; b\,v\,s\big) + o + o_t [t > 1] + g\,l

    with the feed-forward width i (of the experts that a token visits), hidden size h, degree t and
    vocabulary v; \phi is the live factor, s the bytes per logit, o and o_t what it holds besides,
    and g the CUDA graphs of each of the l layers [bytes]. Two bytes each: gate and up with their
    product are 6 i, the hidden states and the residual 4 h.

    Parameters
    ----------
    rule
        Of the engine's release, see :class:`hetero.catalog.engines.EngineMemory`.
    max_batch, max_step_tokens
        Limits that the engine runs with.
    share
        Share of the visible memory; by default the engine's own.
    sampler
        That is installed, see :class:`hetero.engines.EngineSpec`.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm, serving_engine
    >>> from hetero.memory import Budget
    >>> rule = serving_engine("vllm").memory_of("0.19")
    >>> limits = {"max_batch": 128, "max_step_tokens": 2048}
    >>> model, card = llm("Llama-3.1-8B"), gpu("RTX-PRO-6000-Server")
    >>> room = engine_room(rule, card, model, **limits)
    >>> Budget(model, card, **room._asdict()).max_tokens
    574025
    """
    taken = rule.share if share is None else share
    require_share(memory_fraction=taken)
    width = max(llm.intermediate, llm.moe_intermediate * (llm.experts_active + llm.shared_experts))
    live = rule.live_factor * (6.0 * width / tensor_parallel + 4.0 * llm.hidden)
    own = rule.flashinfer_bytes if sampler else None
    logit_bytes = rule.logit_bytes if own is None else own
    peak = max(max_step_tokens * live, max_batch * llm.vocab * logit_bytes)
    several = rule.several_gib if tensor_parallel > 1 else 0.0
    return Room(
        taken * gpu.visible_bytes / gpu.mem_bytes,
        peak / _GIB + rule.engine_gib + several + rule.layer_graphs_gib * llm.layers,
    )


_UNITS = {"GB": 10**9, "GiB": 2**30}


def minimum_gpus(
    llm: Llm,
    gpu: Gpu,
    *,
    weight_share: float = 0.5,
    weight_precision: str = "fp16",
    unit: Literal["GB", "GiB"] = "GB",
) -> int:
    r"""Fewest GPUs whose memory holds the weights in a given share of it (Helix, Table 1).

    .. math:: N = \lceil \Phi\, b^{bytes} / (share \cdot d) \rceil

    The table of the paper comes out with d in decimal gigabytes (an L4 has 24e9 bytes), the
    default; with GiB only three of its twelve entries do. Parameters counted from the shape and the
    nominal ones (70, 175, 314, 405 billion) give the same numbers.

    Source: Helix, Table 1: fewest GPUs that hold a model.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> [minimum_gpus(llm("Llama-2-70B"), gpu(g)) for g in ("L4", "A100-40", "H100-SXM")]
    [12, 7, 4]
    """
    held = _share_bytes(gpu, weight_share, unit)
    return math.ceil(llm.weight_bytes(weight_precision) / held)


def max_layers(
    llm: Llm,
    gpu: Gpu,
    *,
    gpus: int = 1,
    weight_share: float = 0.5,
    weight_precision: str = "fp16",
    unit: Literal["GB", "GiB"] = "GB",
) -> int:
    """Most layers whose weights fit into a given share of a node's memory (Helix, section 6.2).

    The limits in Helix's artifact follow no rule that is stated. With decimal gigabytes this one
    gives the same for 11 of its 14 combinations of model and node, and one layer less for the
    other three (70B on A100; 30B on two and on four T4).

    Source: Helix, section 6.2: layers of a node that leave half of its memory to the KV cache.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> [max_layers(llm("LLaMA-1-30B"), gpu(g)) for g in ("A100-40", "V100-16", "L4", "T4")]
    [18, 7, 11, 7]
    """
    held = gpus * _share_bytes(gpu, weight_share, unit)
    return min(llm.layers, math.floor(held / llm.layer_weight_bytes(weight_precision)))


def _share_bytes(gpu: Gpu, weight_share: float, unit: str) -> float:
    require_share(weight_share=weight_share)
    require(unit in _UNITS, f"unit is '{unit}'.", resolve="use 'GB' or 'GiB'.")
    return weight_share * gpu.mem_gib * _UNITS[unit]
