"""One machine with GPUs of one type, and how lists of machines are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.catalog import Gpu, Link, links
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError


@dataclass(frozen=True, slots=True)
class Machine(Shown):
    """One machine: ``count`` GPUs of one type.

    Attributes
    ----------
    usd_per_h
        Price of the whole machine [$/h]; by default ``count`` times the price of its GPU, None
        where the catalog knows none.
    link
        Link between its GPUs where that is not the GPU's own, such as PCIe between GPUs that
        could have NVLink.

    Examples
    --------
    >>> from hetero.catalog import gpu
    >>> round(Machine("node", gpu("A40"), 8).usd_per_h, 3)
    3.224
    """

    name: str
    gpu: Gpu
    count: int = 1
    region: str = "local"
    usd_per_h: float | None = None
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise CatalogError(
                f"Machine '{self.name}' has {self.count} GPUs.",
                resolve="give a whole number above 0.",
            )
        if self.usd_per_h is None and self.gpu.usd_per_h is not None:
            object.__setattr__(self, "usd_per_h", self.count * self.gpu.usd_per_h)

    @property
    def gpu_link(self) -> Link:
        """Link between the GPUs of this machine."""
        if self.link is not None:
            return self.link
        kind = self.gpu.link_type
        known = {link.name: link.latency_s for link in links()}
        return Link(
            name=kind,
            bandwidth_gbs=self.gpu.link_gbs,
            latency_s=known.get(kind, known["PCIe4-x16"]),
            source=self.gpu.source,
        )

    @property
    def linked_gpu(self) -> Gpu:
        """Its GPU with the machine's link among its figures, where estimates look for it."""
        return self.gpu if self.link is None else self.gpu.linked(self.link)

    @property
    def mem_bytes(self) -> int:
        """Memory of all its GPUs [bytes]."""
        return self.count * self.gpu.mem_bytes

    def table(self) -> Table:
        """The machine as one line."""
        return Table.of("", COLUMNS, [[self]])


def _names(run: Sequence[Machine]) -> str:
    return run[0].name if len(run) == 1 else f"{run[0].name} ... {run[-1].name}"


COLUMNS = (
    Column("machines", of=_names),
    Column("number", of=len),
    Column("GPU", of=lambda run: run[0].gpu.name),
    Column("GPUs each", of=lambda run: run[0].count),
    Column("memory each", "GiB", 5, of=lambda run: run[0].mem_bytes / 2**30),
    Column("link inside", of=lambda run: run[0].gpu_link.name if run[0].count > 1 else None),
    Column("region", of=lambda run: run[0].region),
    Column("price each", "$/h", of=lambda run: run[0].usd_per_h),
)
"""What a list of machines shows of each run of equal ones."""
