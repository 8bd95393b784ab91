r"""How long replicas take to load their weights from disk.

A GPU group of machine m reads the weights of its stages from the machine's disk. With disk
bandwidth D [bytes/s] and stage weights :math:`W_g` [bytes],

.. math:: T = \max_m \frac{1}{D} \sum_{g \in m} W_g + T_0

where every group reads for itself, or with each layer read once per machine where the operating
system keeps what it has read in main memory. :math:`T_0` is the start of the engine.
ThunderServe's introduction gives 1.2 GB/s and Table 4 a reload of 103 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hetero.costs.pipeline import Pipeline
from hetero.display import Column, Shown, Table
from hetero.errors import require, require_not_negative, require_positive

Reads: TypeAlias = Literal["per replica", "per machine"]
"""Whether every replica reads its layers from disk, or a machine each layer once."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Where weights are loaded from.

    Attributes
    ----------
    bandwidth_gbs
        Of the disk of a machine, shared by its GPUs [10^9 bytes/s].
    reads
        See :data:`Reads`.
    start_s
        Start of the engine beside the loading [s].
    """

    bandwidth_gbs: float = 1.2
    reads: Reads = "per replica"
    start_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(bandwidth_gbs=self.bandwidth_gbs)
        require_not_negative(start_s=self.start_s)
        require(
            self.reads in get_args(Reads),
            f"reads is '{self.reads}'.",
            resolve="use 'per replica' or 'per machine'.",
        )


@dataclass(frozen=True, repr=False)
class Reload(Shown):
    """Time to load weights, machine by machine.

    Attributes
    ----------
    machines
        Name, bytes read and time [s] of each machine that loads.
    """

    disk: Disk
    machines: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> float:
        """Time until the last machine has loaded [s]; 0 if nothing is loaded."""
        return max((time_s for _, _, time_s in self.machines), default=0.0)

    def table(self) -> Table:
        """One row per machine."""
        columns = (
            Column("machine", of=lambda loading: loading[0]),
            Column("read", "GB", of=lambda loading: loading[1] / 1e9),
            Column("time", "s", of=lambda loading: loading[2]),
        )
        note = f"{self.disk.bandwidth_gbs:g} GB/s, read {self.disk.reads}"
        return Table.of(f"Reload: {self.seconds:.0f} s", columns, self.machines, note)


def reload(pipelines: Sequence[Pipeline], disk: Disk | None = None) -> Reload:
    """Time that machines need to load the weights of pipelines.

    Source: ThunderServe, Table 4: time to reload parameters.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.cost import CostModel, PipelineStage
    >>> model = CostModel(cluster("thunderserve-cloud-32"), llm("LLaMA-1-30B"))
    >>> pairs = [model.pipeline([PipelineStage(0, 2, 60)]) for _ in range(2)]
    >>> round(reload(pairs).seconds)  # ThunderServe, Table 4: 103 s
    108
    >>> round(reload(pairs, Disk(reads="per machine")).seconds)
    54
    """
    disk = disk or Disk()
    read: dict[str, float] = {}
    known: dict[str, set[int]] = {}
    for pipeline in pipelines:
        model, start = pipeline.model, 0
        for k, (stage, rates) in enumerate(zip(pipeline.stages, pipeline.rates, strict=True)):
            name = pipeline.machines[k].name
            layers = set(range(start, start + stage.layers))
            start += stage.layers
            # The embedding and the logits' matrix, numbered apart from the layers.
            ends = {-1: model.end_bytes(first=k == 0, last=False)}
            ends[-2] = model.end_bytes(first=False, last=k == len(pipeline.stages) - 1)
            cached = known.setdefault(name, set()) if disk.reads == "per machine" else set()
            size = len(layers - cached) * rates.layer_bytes
            size += sum(each for part, each in ends.items() if part not in cached)
            cached |= layers | {part for part, each in ends.items() if each}
            read[name] = read.get(name, 0.0) + size
    rows = tuple(
        (name, size, size / (disk.bandwidth_gbs * 1e9) + disk.start_s)
        for name, size in read.items()
    )
    return Reload(disk, rows)
