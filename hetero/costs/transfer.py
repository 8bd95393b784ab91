r"""The KV cache on its way from a prefill to a decode group: bytes, bits, codec and overlap.

A prompt of ``s`` tokens takes (alpha-beta model, ThunderServe eq. 1, which omits the layers)

.. math:: T_{ij} = \alpha_{ij} + 2\, l\, h_{kv}\, s\, N_{bytes} / \beta_{ij} + codec

Every layer goes from the stage that computed it to the stage that needs it. Transfers between
different pairs of machines run side by side, but a machine sends and receives one byte at a time;
the machine that is busiest decides. With 8 or 4 bits the sender quantises and the receiver turns
the values back into 16 bits, so only the transfer is compressed, not the cache. While it is under
way the cache stays in the memory of the prefill group (the simulator holds it there).
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.catalog.engines import Bits as Bits
from hetero.costs.pipeline import Pipeline
from hetero.deployment import KvLink
from hetero.errors import require, require_not_negative, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """How KV caches travel.

    Source: ThunderServe, section 4: KV compression to few bits on the way; N_bytes.

    Attributes
    ----------
    bits
        Bits per value on the link; caches are computed with 16.
    scale_bits
        Bits per value that scales and zero points of the quantised groups add; 1 for groups of
        32 values with two 16-bit constants each. The paper counts none.
    compress_gbs, decompress_gbs
        16-bit cache that one GPU quantises, or restores, per second [GB/s]. Table 8: with 4 bits
        the prefill of 1.64 GB of cache on four A40 takes 14 ms longer, the decode on four 3090Ti
        18 ms.
    overlap
        Whether layers are sent while later ones are computed; the time that prefill hides is then
        not counted.
    shared
        Whether links of a deployment share the interfaces of machines, and lines between regions;
        else each pair has its own, as eq. 1 has it and planners assume.

    Examples
    --------
    >>> KvTransfer(bits=4).ratio
    0.25
    """

    bits: Bits = 4
    scale_bits: float = 0.0
    compress_gbs: float = 29.0
    decompress_gbs: float = 23.0
    overlap: bool = False
    shared: bool = True

    def __post_init__(self) -> None:
        require(
            self.bits in (16, 8, 4),
            f"KV caches of {self.bits} bits per value cannot be sent.",
            resolve="send 16, 8 or 4 bits.",
        )
        require_not_negative(scale_bits=self.scale_bits)
        require_positive(compress_gbs=self.compress_gbs, decompress_gbs=self.decompress_gbs)

    @property
    def ratio(self) -> float:
        """Bytes on the link over bytes of the cache."""
        return 1.0 if self.bits == 16 else (self.bits + self.scale_bits) / 16.0

    def seconds(self, source: Pipeline, target: Pipeline) -> tuple[float, float]:
        """Latency [s] and time per token [s] of a transfer between two groups.

        Source: ThunderServe, eq. 1: time of a KV transfer, the alpha-beta model; T_ij^(kv_comm).

        Examples
        --------
        >>> from hetero.catalog import llm
        >>> from hetero.cluster import cluster
        >>> from hetero.costs.cost import CostModel, PipelineStage
        >>> model = CostModel(cluster("thunderserve-a40-3090ti-40gbit"), llm("LLaMA-1-30B"))
        >>> ends = [model.pipeline([PipelineStage(k, 4, 60)]) for k in (0, 1)]
        >>> fixed, per_token = KvTransfer(bits=16).seconds(*ends)  # Table 8: 584 ms
        >>> round(1e3 * (fixed + 1024 * per_token))
        584
        """
        model = source.model
        layer = model.llm.kv_bytes_per_token(model.settings.engine.kv_precision) / model.llm.layers
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        latency = 0.0
        for a, b, layers in _shared_layers(source, target):
            seconds = self.ratio * layers * layer / (1e9 * float(model.bandwidth_gbs[a, b]))
            sent[a] = sent.get(a, 0.0) + seconds
            received[b] = received.get(b, 0.0) + seconds
            latency = max(latency, float(model.latency_s[a, b]))
        per_token = max(*sent.values(), *received.values())
        if self.bits < 16:
            whole = layer * model.llm.layers / 1e9
            per_token += whole / (self.compress_gbs * source.gpus)
            per_token += whole / (self.decompress_gbs * target.gpus)
        if self.overlap:
            computed = float(source.prefill_latency_s(1024.0)) / 1024.0
            last = 1.0 / model.llm.layers
            per_token = max(per_token * last, per_token - computed * (1.0 - last))
        return latency, per_token

    def link(self, source: Pipeline, target: Pipeline) -> KvLink:
        """The same as the KV link of a deployment, its bandwidth being what is left of it all."""
        model = source.model
        latency, per_token = self.seconds(source, target)
        size = self.ratio * model.llm.kv_bytes_per_token(model.settings.engine.kv_precision)
        media = _media(source, target) if self.shared else ()
        return KvLink(size / per_token / 1e9, latency, self.ratio, media)


def _media(source: Pipeline, target: Pipeline) -> tuple[str, ...]:
    """What a transfer takes for itself, by the machines that share most layers.

    The line between two regions or, inside one, the interfaces of both machines; nothing inside a
    machine.
    """
    a, b, _ = max(_shared_layers(source, target), key=lambda shared: shared[2])
    first, second = source.model.machines[a], source.model.machines[b]
    if first.region != second.region:
        return (f"{first.region} to {second.region}",)
    return () if a == b else (f"out of {first.name}", f"into {second.name}")


def _shared_layers(source: Pipeline, target: Pipeline) -> list[tuple[int, int, int]]:
    """Layers that go from a machine to a machine, as (from, to, layers)."""
    found = []
    begin = 0
    for a in source.stages:
        start = 0
        for b in target.stages:
            both = min(begin + a.layers, start + b.layers) - max(begin, start)
            if both > 0:
                found.append((a.machine, b.machine, both))
            start += b.layers
        begin += a.layers
    return found
