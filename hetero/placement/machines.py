"""Kinds of nodes: time per layer, KV cache and batch limits over the number of layers held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetero import paths
from hetero.arrays import Ints
from hetero.catalog import Gpu
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.models.layers import LayerLatency, layer_latencies

BLOCK_TOKENS = 16
"""Tokens of one block of the KV cache (vLLM)."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MachineKind(Shown):
    """One kind of node for one model: GPUs of one type that share every layer they hold.

    Arrays have one entry per number of layers held, from 1 to ``max_layers``.

    Attributes
    ----------
    latency
        Time per layer over prompt tokens and over decoding requests.
    kv_blocks
        Blocks of 16 tokens that the KV cache of every layer has.
    prompt_max_requests, decode_max_requests
        Largest batches of prompts and of decoding requests.
    typical_layers
        Number of layers that the operating point of the throughput assumes on such a node.
    spec
        Figures of the GPU where they are not those of the catalog.

    Examples
    --------
    >>> kind = machine_kind("L4", "Llama-2-70B")
    >>> kind.max_layers, kind.typical_layers, kind.kv_tokens(7)
    (7, 4, 250144)
    """

    gpu: str
    tensor_parallel: int
    llm: str
    latency: LayerLatency
    kv_blocks: Ints
    prompt_max_requests: Ints
    decode_max_requests: Ints
    typical_layers: int
    spec: Gpu | None = None

    @property
    def name(self) -> str:
        """GPU and, where there are several, their number."""
        return self.gpu if self.tensor_parallel == 1 else f"{self.tensor_parallel}x{self.gpu}"

    @property
    def max_layers(self) -> int:
        """Largest number of layers that leaves half of the memory to the KV cache."""
        return len(self.kv_blocks)

    def kv_entries(self, layers: int) -> int:
        """KV cache of a node [tokens times layers].

        The cache gives up the same memory for every further layer, so a node that holds more than
        ``max_layers`` (as Helix's separate pipelines do) is on the line through the last two
        entries of the table.

        Raises
        ------
        InfeasibleError
            If nothing is left for a cache.
        """
        counts = np.arange(1, self.max_layers + 1)
        entries = BLOCK_TOKENS * self.kv_blocks * counts
        if 1 <= layers <= self.max_layers:
            return int(entries[layers - 1])
        slope = int(entries[-1] - entries[-2]) if self.max_layers > 1 else -int(entries[-1])
        left = int(entries[-1]) + (layers - self.max_layers) * slope
        if layers < 1 or left < BLOCK_TOKENS * layers:
            raise InfeasibleError(
                f"{layers} layers of {self.llm} leave no KV cache on {self.name}.",
                resolve=f"place from 1 to {self.max_layers} layers on it.",
            )
        return left

    def kv_tokens(self, layers: int) -> int:
        """KV cache of every layer of a node that holds ``layers`` of them [tokens]."""
        return self.kv_entries(layers) // layers

    def batch_limits(self, layers: int) -> tuple[int, int]:
        """Most prompts and most decoding requests in one batch, those of the last row beyond it."""
        k = min(max(layers, 1), self.max_layers) - 1
        return int(self.prompt_max_requests[k]), int(self.decode_max_requests[k])

    def table(self) -> Table:
        """One row per number of layers."""
        columns = (
            Column("layers held", of=int),
            Column("KV cache", "tokens", of=self.kv_tokens),
            Column("prompt batch", "requests", of=lambda k: self.batch_limits(k)[0]),
            Column("decode batch", "requests", of=lambda k: self.batch_limits(k)[1]),
        )
        return Table.of(f"{self.llm} on {self.name}", columns, range(1, self.max_layers + 1))


@lru_cache(maxsize=2)
def machine_kinds(*, raw: bool = False) -> tuple[MachineKind, ...]:
    """Every kind of node that Helix measured, for LLaMA-1-30B and Llama-2-70B.

    Parameters
    ----------
    raw
        Time per layer from the published tables instead of their knots.
    """
    import pandas as pd

    frame = pd.read_csv(paths.data("measured", "helix_machine_limits.csv"))
    limits = dict(list(frame.groupby(["gpu", "llm", "tensor_parallel"])))
    found = []
    for latency in layer_latencies(raw=raw):
        rows = limits[latency.gpu, latency.llm, latency.tensor_parallel].sort_values("layers")
        kv_blocks, prompts, decoding = (
            rows[name].to_numpy(dtype=np.int64)
            for name in ("kv_blocks", "prompt_max_requests", "decode_max_requests")
        )
        typical = int(rows.loc[rows["typical"] == 1, "layers"].iloc[0])
        of = latency.gpu, latency.tensor_parallel, latency.llm
        found.append(MachineKind(*of, latency, kv_blocks, prompts, decoding, typical))
    return tuple(found)


def machine_kind(gpu: str, llm: str, gpus: int = 1, *, raw: bool = False) -> MachineKind:
    """Kind of a node of ``gpus`` GPUs."""
    for kind in machine_kinds(raw=raw):
        if (kind.gpu, kind.llm, kind.tensor_parallel) == (gpu, llm, gpus):
            return kind
    known = sorted({kind.name for kind in machine_kinds(raw=raw)})
    models = sorted({kind.llm for kind in machine_kinds(raw=raw)})
    raise ParameterError(
        f"No time per layer of {llm} on {gpus} x {gpu} is measured.",
        resolve=f"use {', '.join(known)} with {' or '.join(models)}.",
    )
