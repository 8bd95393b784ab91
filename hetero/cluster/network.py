"""Links between the machines of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hetero.catalog import Link
from hetero.cluster.machine import Machine


@dataclass(frozen=True, slots=True)
class Network:
    """Links between machines; the most specific one holds.

    Attributes
    ----------
    within_region, between_regions
        Link between machines of the same region, and of different ones.
    regions, machines
        Links of certain pairs of regions or machines, keyed by the set of the two names.
    coordinator
        Link between the coordinator and every machine, where it is the same for all.
    coordinator_region
        Region where the coordinator stands; its links are then those of a machine there.
    """

    within_region: Link | None = None
    between_regions: Link | None = None
    regions: Mapping[frozenset[str], Link] = field(default_factory=dict)
    machines: Mapping[frozenset[str], Link] = field(default_factory=dict)
    coordinator: Link | None = None
    coordinator_region: str = ""

    def between(self, a: Machine, b: Machine) -> Link | None:
        """Link between two different machines, None where none is stated."""
        pair = self.machines.get(frozenset((a.name, b.name)))
        return pair if pair is not None else self.across(a.region, b.region)

    def across(self, a: str, b: str) -> Link | None:
        """Link between machines of two regions, or of one if both are the same."""
        if a == b:
            return self.within_region
        return self.regions.get(frozenset((a, b)), self.between_regions)

    def among(self, machines: Iterable[Machine]) -> Network:
        """The links between some machines, and of the coordinator if they share its region."""
        present = list(machines)
        names, regions = {m.name for m in present}, {m.region for m in present}
        at = self.coordinator_region
        return replace(
            self,
            regions={pair: link for pair, link in self.regions.items() if pair <= regions},
            machines={pair: link for pair, link in self.machines.items() if pair <= names},
            coordinator_region=at if at in regions else "",
        )
