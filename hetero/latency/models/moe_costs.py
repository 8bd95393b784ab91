"""What a layer costs in the analytic mixture-of-experts model: products, moves, memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.catalog import Llm
from hetero.display import Shown
from hetero.errors import ParameterError
from hetero.latency.models.moe_devices import MoeDevice
from hetero.latency.models.reference_quirks import FAITHFUL, Quirks

#: Share of the peak of fp8 and fp16 units that attention kernels reach.
KERNEL = 0.7
#: Fixed costs [ms]: attention, all-reduce, all-to-all in prefill, and per micro-batch in decode.
ATTENTION_MS, ALL_REDUCE_MS, PREFILL_A2A_MS, DECODE_A2A_MS = 0.05, 0.015, 0.05, 0.005
#: Nodes that a token's experts are limited to.
NODE_LIMIT = 4
#: Share of memory that weights and cache may fill.
MEMORY_SHARE = 0.9
# Efficiency of an expert's product with up to 1, 2, 4, ... tokens; the last value holds on.
_EFFICIENCY = np.array([0.05, 0.05, 0.05, 0.05, 0.08, 0.1, 0.2, 0.35, 0.4, 0.6, 0.7])
_EFFICIENCY_H20 = np.array([0.06, 0.06, 0.06, 0.12, 0.25, 0.45, 0.8, 0.9, 1.0, 1.0, 1.0])
# Constants of the memory rule that the program prints: GB of everything but attention and
# experts, millions of parameters of the attention of a layer, and of an expert.
_MEMORY_RULE = {"DeepSeek-V3-R1-671B": (2.91, 187.17, 44.05)}


@dataclass(frozen=True, slots=True, repr=False)
class MoeCosts(Shown):
    """Costs of the parts of a layer, of which :mod:`hetero.latency.models.moe` makes whole steps.

    Parameters
    ----------
    llm
        Any model of the catalog; weights and cache take one byte per value.
    device
        The GPU, see :func:`~hetero.latency.models.moe_devices.moe_device`.
    quirks
        Which quirks of the original are kept; all by default.
    """

    llm: Llm
    device: MoeDevice
    quirks: Quirks = FAITHFUL

    def __post_init__(self) -> None:
        if not self.llm.moe_layers and self.quirks.dense_undivided:
            raise ParameterError(
                f"{self.llm.name} has dense layers only, which the original model does not "
                "divide over GPUs.",
                resolve="mend at least quirk h, or pass oddities=CORRECTED.",
            )

    # Shape ----------------------------------------------------------------------------------

    @property
    def _projections(self) -> tuple[int, int, int, int]:
        """Parameters: queries, keys and values that a hit saves, their expansion, output."""
        of = self.llm.attention_products()
        if not self.llm.latent:
            return of["q_proj"], of["k_proj"] + of["v_proj"], 0, of["o_proj"]
        query = of["q_a_proj"] + of["q_b_proj"]
        return query, of["kv_a_proj_with_mqa"], of["kv_b_proj"], of["o_proj"]

    @property
    def _absorbed(self) -> tuple[int, int, int]:
        """Decode: parameters of projections and of the output, and values read per pair."""
        m = self.llm
        if not m.latent:
            query, kv, _, output = self._projections
            return query + kv, output, 2 * m.heads * m.head_dim
        rank, nope = m.q_lora_rank or m.hidden, m.qk_nope_head_dim
        query = (m.hidden * m.q_lora_rank) + rank * m.heads * m.qk_rope_head_dim
        query += m.heads * nope * (rank + m.kv_lora_rank)
        output = m.heads * m.v_head_dim * (m.kv_lora_rank + m.hidden)
        return query, output, m.heads * (m.qk_rope_head_dim + 2 * m.kv_lora_rank)

    @property
    def _matrices(self) -> int:
        return 3 if self.llm.gated_mlp else 2

    def _shards(self, tp: Floats) -> Floats | float:
        """GPUs that the cache of a tensor-parallel group is divided over."""
        return 1.0 if self.llm.latent else np.minimum(tp, self.llm.kv_heads)

    # Units ----------------------------------------------------------------------------------

    def _move_ms(self, values: Floats | float, gbs: float | Floats) -> Floats:
        """Time to move one-byte values [ms]."""
        return np.asarray(values / (2**20 if self.quirks.mixed_units else 1e6) / gbs)

    def _cache_ms(self, values: Floats) -> Floats:
        """Time to read the KV cache [ms]."""
        unit = 2**30 / 1e3 if self.quirks.mixed_units else 1e6
        return np.asarray(values / unit / self.device.memory_gbs)

    def _attention(self, gflop: Floats, core_gflop: Floats, *, prefill: bool) -> Floats:
        """T_1: projections of ``gflop`` and attention of ``core_gflop`` [ms]."""
        d = self.device
        core = core_gflop / d.tflops("fp16", prefill=prefill) / KERNEL
        if d.fp4:
            return gflop / d.tflops("fp4", prefill=prefill) + core
        weights = self._move_ms(float(self.llm.attention_params), d.memory_gbs)
        return gflop / d.tflops("fp8", prefill=prefill) / KERNEL + core + weights

    def _split(self, whole: Floats, tokens: Floats, tp: Floats) -> Floats:
        """T_t: attention on ``tp`` GPUs with its all-reduce of ``tokens`` [ms]."""
        reduce = self._move_ms(2.0 * tokens * self.llm.hidden, self.device.link_gbs)
        return np.where(tp > 1, whole / tp + reduce + ALL_REDUCE_MS, whole) + ATTENTION_MS

    def _dense(self, tokens: Floats, tp: Floats, *, prefill: bool) -> Floats:
        if not self.llm.dense_layers:
            return np.zeros_like(tokens * tp)
        values = float(self._matrices * self.llm.hidden * self.llm.intermediate)
        time = 2e-9 * tokens * values / self.device.tflops("fp4", prefill=prefill)
        time = time + self._move_ms(values, self.device.memory_gbs)
        return np.asarray(time if self.quirks.dense_undivided else time / tp)

    # Products of experts and all-to-all ------------------------------------------------------

    def efficiency(self, tokens_per_expert: Floats) -> Floats:
        """Share of peak that an expert's product of so many tokens reaches."""
        whole = np.floor(tokens_per_expert)
        if self.quirks.expert_table_ends and bool(np.any(whole >= 65536)):
            raise ParameterError(
                f"{np.max(whole):.0f} tokens per expert are more than the 65,535 that the "
                "original model knows efficiencies of.",
                resolve="use smaller batches, or mend quirk e.",
            )
        name = self.device.name
        h20 = name.startswith("H20") and (
            self.quirks.h20_table_on_h200 or not name.startswith("H200")
        )
        table = _EFFICIENCY_H20 if h20 else _EFFICIENCY
        # frexp: exponent of the power of two strictly above a whole number.
        return np.asarray(table[np.minimum(np.frexp(whole)[1], len(table) - 1)])

    def _prefill_exchange(self, n: Floats, tp: Floats, dp: Floats) -> tuple[Floats, Floats]:
        m, d = self.llm, self.device
        node = d.gpus_per_node
        if node > 8:
            held = np.ceil(m.experts / node)
            sent = (m.experts - held) / m.experts * m.experts_active * (n / tp) * m.hidden
            size = self._move_ms(sent, d.link_gbs)
        else:
            # Every GPU of a node sends a token once to each other node that it visits.
            nodes: Floats | float = float(min(NODE_LIMIT, m.experts_active))
            if not self.quirks.always_four_nodes:
                nodes = np.minimum(nodes, np.ceil(tp * dp / node))
            size = self._move_ms((nodes - 1.0) * (node / tp) * n * m.hidden, node * d.network_gbs)
            if not self.quirks.always_four_nodes:
                inside = np.minimum(tp * dp, node)
                sent = (1.0 - 1.0 / inside) * m.experts_active * (n / tp) * m.hidden
                size = np.where(nodes > 1, size, self._move_ms(sent, d.link_gbs))
        half = 0.5 if self.quirks.dispatch_halved or d.fp4 else 1.0
        return half * size + PREFILL_A2A_MS, 2.0 * size + PREFILL_A2A_MS

    def _decode_exchange(
        self, b: Floats, e: Floats, fp8_combine: bool, micro_batches: int
    ) -> tuple[Floats, Floats]:
        d, m = self.device, self.llm
        inside = e <= d.gpus_per_node
        if self.quirks.always_four_nodes and d.gpus_per_node <= 8:
            inside = e == d.gpus_per_node
        values = b * m.hidden * m.experts_active
        size = self._move_ms(values, np.where(inside, d.link_gbs, d.network_gbs))
        back = size if fp8_combine and d.fp4 else 2.0 * size
        fixed = DECODE_A2A_MS * micro_batches
        return size + fixed, back + fixed

    # Memory ---------------------------------------------------------------------------------

    def experts_per_gpu(self, gpus: ArrayLike) -> Floats:
        """Routed experts of a layer on each of ``gpus`` GPUs, the last one rounded up."""
        return np.ceil(self.llm.experts / np.asarray(gpus, np.float64))

    def free_bytes(self, *, tp: ArrayLike, gpus: ArrayLike) -> Floats:
        """Memory per GPU that weights leave to the KV cache [bytes]; negative if they do not fit.

        ``gpus`` share the routed experts, ``tp`` of them the attention; 10 % stay unused.
        """
        m, t = self.llm, np.asarray(tp, np.float64)
        held = self.experts_per_gpu(gpus) + m.shared_experts if m.experts else 0.0 * t
        experts = m.moe_layers * (m.experts + m.shared_experts) * m.expert_params
        other, gib = m.params - m.layers * m.attention_params - experts, 2.0**30
        if self.quirks.memory_in_millions:
            exact = (other / gib, m.attention_params / 1e6, m.expert_params / 1e6)
            rest, attention, expert = _MEMORY_RULE.get(m.name, exact)
            used = rest + attention * m.layers / t / 1024 + expert * m.moe_layers * held / 1024
        else:
            used = other + m.layers * m.attention_params / t + m.moe_layers * held * m.expert_params
            used = used / gib
        if not self.quirks.dense_undivided:
            used = used - m.dense_layers * m.mlp_params / gib * (1.0 - 1.0 / t)
        return np.asarray((MEMORY_SHARE * self.device.gpu.mem_gib - used) * gib)

    def cached_bytes_per_token(self, tp: ArrayLike) -> Floats:
        """KV cache per GPU and token of a batch counted per GPU [bytes].

        A group of ``tp`` GPUs serves tp times as many requests; what cannot be divided, such as
        a latent cache, each of them holds for all.
        """
        t = np.asarray(tp, np.float64)
        values = self.llm.layers * self.llm.kv_values_per_token_layer()
        return np.asarray(values * t / self._shards(t))

    def max_batch(
        self, length_tokens: ArrayLike, *, tp: ArrayLike, gpus: ArrayLike, output_tokens: ArrayLike
    ) -> Floats:
        """Largest batch per GPU whose inputs and outputs fit; not rounded, may be negative.

        Source: Rignall, section 4.2.2: largest batch that the memory holds; max_bs.
        """
        tokens = np.asarray(length_tokens, np.float64) + np.asarray(output_tokens, np.float64)
        return self.free_bytes(tp=tp, gpus=gpus) / (tokens * self.cached_bytes_per_token(tp))
