"""GPUs as the analytic mixture-of-experts model sees them: rates, multiprocessors, node size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetero import paths
from hetero.catalog import Gpu, gpu, gpus
from hetero.catalog.tables import Records
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, ParameterError
from hetero.rows import read_records

#: Share of every peak rate that is reached (eta of the model).
DISCOUNT = 0.85
#: Share of multiprocessors that communicate during prefill where no source says it.
COMM_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDevice(Shown):
    """A GPU with what the mixture-of-experts model needs beside its peak rates.

    Attributes
    ----------
    gpu
        Peak rates, memory, links; ``pcie_gbs`` is the bandwidth to the network.
    sm_count, comm_sm_count
        Multiprocessors, and those of them that move data during prefill and do not compute.
    gpus_per_node
        GPUs joined by the fast link.
    source
        Where these three come from.

    Examples
    --------
    >>> moe_device("H800").sm_count, moe_device("GB200-NVL72").gpus_per_node
    (132, 72)
    """

    gpu: Gpu
    sm_count: int
    comm_sm_count: int
    gpus_per_node: int
    source: str = "given"

    def __post_init__(self) -> None:
        if not (0 <= self.comm_sm_count < self.sm_count and self.gpus_per_node >= 1):
            raise ParameterError(
                f"{self.gpu.name} with {self.comm_sm_count} of {self.sm_count} multiprocessors "
                f"on communication and {self.gpus_per_node} GPUs per node does not exist.",
                resolve="give fewer multiprocessors for communication than there are, and nodes "
                "of 1 GPU or more.",
            )

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        *,
        sm_count: int = 100,
        comm_sm_count: int | None = None,
        gpus_per_node: int = 8,
    ) -> MoeDevice:
        """Device of any GPU; without figures, 15 % of its multiprocessors communicate."""
        return cls(
            gpu=gpu,
            sm_count=sm_count,
            comm_sm_count=round(COMM_SHARE * sm_count) if comm_sm_count is None else comm_sm_count,
            gpus_per_node=gpus_per_node,
            source="assumed",
        )

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return self.gpu.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the GPU."""
        return self.gpu.aliases

    @property
    def fp4(self) -> bool:
        """Whether the GPU computes in 4-bit floating point."""
        return bool(self.gpu.fp4_tflops)

    def tflops(self, precision: str, *, prefill: bool) -> float:
        """Rate of matrix products that is reached [TFLOPS]; in prefill some SMs communicate.

        A GPU without fp8 units computes fp8 weights at its fp16 rate.
        """
        peak = self.gpu.fp16_tflops
        if precision == "fp8":
            peak = self.gpu.fp8_tflops or peak
        elif precision == "fp4":
            peak = self.gpu.fp4_tflops or self.gpu.fp8_tflops or peak
        busy = self.comm_sm_count if prefill else 0
        return DISCOUNT * peak * (self.sm_count - busy) / self.sm_count

    @property
    def memory_gbs(self) -> float:
        """Memory bandwidth that is reached [GB/s]."""
        return DISCOUNT * self.gpu.mem_bw_gbs

    @property
    def link_gbs(self) -> float:
        """Bandwidth to the GPUs of the same node that is reached [GB/s]."""
        return DISCOUNT * self.gpu.link_gbs

    @property
    def network_gbs(self) -> float:
        """Bandwidth to other nodes that is reached, per GPU [GB/s]."""
        return DISCOUNT * self.gpu.pcie_gbs

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of devices shows of each."""
        return (
            Column("GPU", of="name"),
            Column("fp16", "TFLOPS", of="gpu.fp16_tflops"),
            Column("fp8", "TFLOPS", of="gpu.fp8_tflops"),
            Column("fp4", "TFLOPS", of="gpu.fp4_tflops"),
            Column("memory", "GiB", of="gpu.mem_gib"),
            Column("bandwidth", "GB/s", of="gpu.mem_bw_gbs"),
            Column("link", "GB/s", of="gpu.link_gbs"),
            Column("network", "GB/s", of="gpu.pcie_gbs"),
            Column("GPUs per node", of="gpus_per_node"),
            Column("SMs", of="sm_count"),
            Column("of them on communication", of="comm_sm_count"),
        )

    def table(self) -> Table:
        """The device as one line."""
        return Table.of("", self.columns(), [self], f"Source: {self.source}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of moe_devices.csv."""

    gpu: str
    sm_count: int
    comm_sm_count: int
    gpus_per_node: int
    source: str
    notes: str | None = None


@lru_cache(maxsize=1)
def moe_devices() -> Records[MoeDevice]:
    """The twelve GPUs of the model's own table, with its figures (preset ``rignall``)."""
    found = []
    for row in read_records(paths.data("specs", "moe_devices.csv"), _Row):
        row.pop("notes", None)
        row["gpu"] = gpu(str(row["gpu"]), preset="rignall")
        found.append(MoeDevice(**row))  # type: ignore[arg-type]
    return Records("GPU of the mixture-of-experts model", found)


def moe_device(name: str) -> MoeDevice:
    """Device of that name: of the model's own table, else of the catalog with assumed figures.

    Raises
    ------
    CatalogError
        If neither has it, with the nearest names.

    Examples
    --------
    >>> moe_device("H100-SXM").source
    'assumed'
    """
    try:
        return moe_devices().find(name)
    except CatalogError:
        return MoeDevice.of(gpus().find(name))
