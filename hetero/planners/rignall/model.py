"""From a model, a workload and GPUs to the rate table: islands timed once per type and size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from hetero.arrays import Ints
from hetero.catalog import Llm, gpu, llm
from hetero.cluster import Cluster
from hetero.errors import CatalogError, ParameterError
from hetero.latency.models.moe import MoeModel
from hetero.latency.models.moe_devices import MoeDevice, moe_device
from hetero.latency.models.reference_quirks import FAITHFUL, Quirks
from hetero.planners.rignall.parallelism import (
    READINGS,
    Benchmark,
    Reading,
    benchmark_decode,
    benchmark_prefill,
)
from hetero.planners.rignall.rates import IslandClass, Phase, RateTable, occupied
from hetero.question import Question
from hetero.workload.lengths import LengthRanges, Source, ranges
from hetero.workload.trace import Trace

SMALLEST_ISLAND: Final = 2
"""GPUs of an island at least."""
_RANGES = 12  # ranges of input lengths of islands, as far as the shortest range allows
_SHORTEST = 400  # range [tokens]


@dataclass(frozen=True, slots=True, eq=False)
class IslandModel:
    """Times islands on the ranges of a workload, each GPU type and size once (section 4.8.3).

    Source: Rignall, section 4.8.3: islands of the same type and size benchmarked once.

    Attributes
    ----------
    llm
        The model that is served.
    ranges
        Ranges of input lengths that hold requests.
    output_tokens, max_output_tokens
        Mean output, which sets the time of a decode, and largest, which memory must hold
        (section 4.3.2). The thesis takes one mean for all lengths; an array of shape (J,) has
        one per range.
    reading, quirks
        What throughput counts, and which quirks of the latency model are kept.
    devices
        GPUs of the user's own, found before those of the catalog, such as :func:`devices_of`
        a cluster file.

    Examples
    --------
    >>> from hetero.workload.synthetic import RIGNALL_INPUT
    >>> model = IslandModel.of(RIGNALL_INPUT, 500, limit_tokens=8001, output_tokens=100,
    ...                        max_output_tokens=1000)
    >>> model.rates([("H200", 32), ("H20", 32)]).classes
    (IslandClass(gpu='H200-SXM', size=32), IslandClass(gpu='H20', size=32))
    """

    llm: Llm
    ranges: LengthRanges
    output_tokens: int | Ints
    max_output_tokens: int
    reading: Reading = READINGS["fitting"]
    quirks: Quirks = FAITHFUL
    devices: tuple[MoeDevice, ...] = ()
    _timed: dict[tuple[str, int, Phase], Benchmark] = field(default_factory=dict)

    def __post_init__(self) -> None:
        means = np.asarray(self.output_tokens)
        if means.shape not in ((), (len(self.ranges),)):
            raise ParameterError(
                f"{len(means)} mean outputs for {len(self.ranges)} ranges.",
                resolve="give one for all lengths, or one per range.",
            )
        wrong = (means < 1) | (means > self.max_output_tokens)
        if wrong.any():
            raise ParameterError(
                f"A mean output of {np.atleast_1d(means)[np.atleast_1d(wrong)][0]} and a largest "
                f"of {self.max_output_tokens} tokens do not go together.",
                resolve="give 1 <= output_tokens <= max_output_tokens.",
            )

    @classmethod
    def of(
        cls,
        source: Source,
        width_tokens: int,
        *,
        output_tokens: int,
        max_output_tokens: int,
        limit_tokens: int | None = None,
        model: Llm | None = None,
        reading: Reading = READINGS["fitting"],
        quirks: Quirks = FAITHFUL,
        devices: tuple[MoeDevice, ...] = (),
    ) -> IslandModel:
        """Islands for input lengths in ranges of ``width_tokens``; empty ranges are left out.

        ``model`` is DeepSeek-V3 by default.
        """
        return cls(
            model or llm("DeepSeek-V3"),
            occupied(ranges(source, width_tokens, limit_tokens=limit_tokens)),
            output_tokens,
            max_output_tokens,
            reading,
            quirks,
            devices,
        )

    @classmethod
    def of_trace(
        cls,
        trace: Trace,
        width_tokens: int,
        *,
        by_range: bool = False,
        model: Llm | None = None,
        reading: Reading = READINGS["fitting"],
        quirks: Quirks = FAITHFUL,
        devices: tuple[MoeDevice, ...] = (),
    ) -> IslandModel:
        """Islands for the lengths of a trace: its mean output, rounded, and its largest.

        ``by_range`` takes the mean output of each range, for replies that grow or shrink with
        their prompts.
        """
        made = cls.of(
            trace.input_tokens,
            width_tokens,
            output_tokens=max(1, round(float(trace.output_tokens.mean()))),
            max_output_tokens=int(trace.output_tokens.max()),
            model=model,
            reading=reading,
            quirks=quirks,
            devices=devices,
        )
        if not by_range:
            return made
        of = made.ranges.index(trace.input_tokens)
        means = np.bincount(of, trace.output_tokens) / np.bincount(of)
        return replace(made, output_tokens=np.maximum(1, np.rint(means).astype(np.int64)))

    def device(self, gpu: str) -> MoeDevice:
        """Device of a GPU name: one of the user's own, else of the catalog.

        Raises
        ------
        CatalogError
            If there is none, with the nearest names.
        """
        return next((d for d in self.devices if d.name == gpu), None) or moe_device(gpu)

    def latency(self, gpu: str) -> MoeModel:
        """Latency model of the GPU."""
        return MoeModel(self.llm, self.device(gpu), self.quirks)

    def benchmark(self, gpu: str, size: int, phase: Phase) -> Benchmark:
        """Throughput of all configurations of an island; timed on the first call."""
        island = IslandClass(self.device(gpu).name, size)
        key = (island.gpu, island.size, phase)
        if key not in self._timed:
            model, where = self.latency(gpu), self.ranges
            if phase == "prefill":
                found = benchmark_prefill(
                    model, size, where.middle_tokens, where.share, self.reading
                )
            else:
                found = benchmark_decode(
                    model,
                    size,
                    where.middle_tokens,
                    where.share,
                    self.reading,
                    output_tokens=self.output_tokens,
                    max_output_tokens=self.max_output_tokens,
                )
            self._timed[key] = found
        return self._timed[key]

    def rates(self, classes: Iterable[IslandClass | tuple[str, int]]) -> RateTable:
        """Rates of these island classes with the parallelism chosen for each phase.

        Raises
        ------
        CatalogError
            If a GPU is unknown.
        InfeasibleError
            If no class can prefill, or decode, some range.
        """
        wanted = [
            IslandClass(self.device(gpu).name, size)
            for gpu, size in ((c.gpu, c.size) if isinstance(c, IslandClass) else c for c in classes)
        ]
        prefill = [self.benchmark(c.gpu, c.size, "prefill") for c in wanted]
        decode = [self.benchmark(c.gpu, c.size, "decode") for c in wanted]
        shape = (len(wanted), len(self.ranges))
        return RateTable(
            tuple(wanted),
            self.ranges,
            np.array([b.rps[b.chosen] for b in prefill]).reshape(shape),
            np.array([b.rps[b.chosen] for b in decode]).reshape(shape),
            tuple(b.choice for b in prefill),
            tuple(b.choice for b in decode),
            self.reading.text,
        )

    def on(self, ranges: LengthRanges) -> IslandModel:
        """The same islands timed on other ranges, such as every single length (5.2.2)."""
        outputs = self.output_tokens
        if not isinstance(outputs, int):
            outputs = outputs[self.ranges.index(ranges.start_tokens)]
        return replace(self, ranges=ranges, output_tokens=outputs, _timed={})


def layout_of(cluster: Cluster) -> dict[IslandClass, int]:
    """Islands of a cluster whose machines are islands, as in Rignall's Table 5.2.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> layout_of(cluster("rignall-islands-a"))
    {IslandClass(gpu='B300-SXM', size=32): 8}
    """
    return dict(Counter(IslandClass(m.gpu.name, m.count) for m in cluster.machines))


def devices_of(cluster: Cluster) -> tuple[MoeDevice, ...]:
    """GPUs that a cluster file defines itself, as islands take them; none of the catalog's.

    A node has as many GPUs as the largest machine with that type, and ``pcie_gbs`` is the
    bandwidth between nodes per GPU.

    Examples
    --------
    >>> from hetero.catalog import Gpu
    >>> from hetero.cluster import Machine
    >>> own = Gpu(name="X1", mem_gib=192, mem_bw_gbs=5000, fp16_tflops=800, fp8_tflops=1600,
    ...           link_type="X-link", link_gbs=500, pcie_gbs=50)
    >>> fleet = Cluster("own", (Machine("a", own, 16), Machine("b", gpu("H20"), 8)))
    >>> [(device.name, device.gpus_per_node) for device in devices_of(fleet)]
    [('X1', 16)]
    """

    def own(name: str) -> bool:
        try:
            return gpu(name, preset=cluster.preset or None) != cluster.gpu_types[name]
        except CatalogError:
            return True

    return tuple(
        MoeDevice.of(
            cluster.gpu_types[name],
            gpus_per_node=max(m.count for m in cluster.machines if m.gpu.name == name),
        )
        for name in cluster.gpu_types
        if own(name)
    )


def island_model(question: Question) -> IslandModel:
    """Latency and throughput of islands of the GPUs of a case, for its requests."""
    longest = int(question.trace.input_tokens.max())
    return IslandModel.of_trace(
        question.trace,
        max(_SHORTEST, -(-longest // _RANGES)),
        model=question.llm,
        devices=devices_of(question.cluster),
    )


def island_inventory(question: Question) -> dict[str, int]:
    """GPUs that the latency model knows, by the name of their device."""
    own = {device.name for device in devices_of(question.cluster)}
    return {
        name: count
        for name, count in question.cluster.gpu_counts.items()
        if count >= SMALLEST_ISLAND and (name in own or _known(name))
    }


def _known(name: str) -> bool:
    try:
        return moe_device(name).name == name
    except CatalogError:
        return False
