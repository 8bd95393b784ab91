"""Links between GPUs and between machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetero import paths
from hetero.catalog.tables import Records, read_table
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Shown):
    """One kind of link: a message of ``n`` bytes takes ``latency_s + n / bandwidth``.

    Attributes
    ----------
    bandwidth_gbs
        Bandwidth per direction [GB/s, 1e9 bytes per second]; data sheets often print both
        directions together. It is the line rate: what a transfer reaches is a matter of the
        latency model.
    latency_s
        Time before the first byte arrives [s].

    Examples
    --------
    >>> link("NVLink4").bandwidth_gbs
    450.0
    >>> round(link("Ethernet-40G").seconds(1.64e9), 3)
    0.328
    """

    name: str
    bandwidth_gbs: float
    latency_s: float
    kind: str = ""
    source: str = ""
    checked: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if not (self.bandwidth_gbs > 0 and self.latency_s >= 0):
            raise CatalogError(
                f"Link '{self.name}' has bandwidth {self.bandwidth_gbs} GB/s and latency "
                f"{self.latency_s} s.",
                resolve="give a bandwidth above 0 and a latency of 0 or more.",
            )

    @property
    def aliases(self) -> tuple[str, ...]:
        """Links have no other names."""
        return ()

    def seconds(self, size_bytes: float) -> float:
        """Time [s] of one message of ``size_bytes``."""
        return self.latency_s + size_bytes / (self.bandwidth_gbs * 1e9)

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of links shows of each."""
        return (
            Column("link", of="name"),
            Column("kind"),
            Column("bandwidth per direction", "GB/s", of="bandwidth_gbs"),
            Column("latency", "us", of=lambda link: link.latency_s * 1e6),
            Column("source"),
        )

    def table(self) -> Table:
        """The link as one line."""
        return Table.of("", self.columns(), [self], self.notes)


@lru_cache(maxsize=1)
def links() -> Records[Link]:
    """All links of ``data/specs/links.csv``."""
    return read_table(paths.data("specs", "links.csv"), "link", Link)


def link(name: str) -> Link:
    """Link of that name.

    Raises
    ------
    CatalogError
        If there is none, with the nearest names.
    """
    return links().find(name)
