"""A cluster: machines and the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, groupby
from pathlib import Path
from typing import NoReturn

import numpy as np

from hetero import paths
from hetero.arrays import Floats
from hetero.catalog import Gpu, Link, Records, links
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, require
from hetero.grouping import summed


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


@dataclass(frozen=True, slots=True, repr=False)
class Cluster(Shown):
    """Machines and the links between them.

    Attributes
    ----------
    network
        Links between machines; None where the source states none, and asking for a link is
        then an error.
    preset
        Paper whose printed GPU figures hold here, empty for those of the data sheets.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> fleet = cluster("thunderserve-cloud-32")
    >>> fleet.gpus, round(fleet.usd_per_h, 3)
    (32, 11.328)
    >>> fleet.gpu_counts["A40"]
    8
    """

    name: str
    machines: tuple[Machine, ...]
    network: Network | None = None
    title: str = ""
    source: str = ""
    preset: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines:
            self._refuse("has no machine", "list at least one")
        for name, times in Counter(m.name for m in self.machines).items():
            if times > 1:
                self._refuse(f"has {times} machines called '{name}'", "give each its own name")
        if self.network is None:
            return
        at = frozenset({self.network.coordinator_region} - {""})
        for what, known, pairs in (
            ("machine", {m.name for m in self.machines}, [*self.network.machines]),
            ("region", {m.region for m in self.machines}, [*self.network.regions, at]),
        ):
            for name in frozenset().union(*pairs) - known:
                self._refuse(
                    f"links the {what} '{name}', which it does not have",
                    f"use {', '.join(sorted(known))}",
                )
        for a, b in combinations(self.machines, 2):
            if self.network.between(a, b) is None:
                self._refuse(
                    f"states no link between '{a.name}' ({a.region}) and '{b.name}' ({b.region})",
                    "add network.within_region, network.between_regions or the pair",
                )

    def _refuse(self, what: str, how: str) -> NoReturn:
        raise CatalogError(f"Cluster '{self.name}' {what}.", resolve=f"{how}.")

    def part(self, machines: Iterable[Machine]) -> Cluster:
        """Some of its machines, with the links between them."""
        names = {machine.name for machine in machines}
        kept = tuple(machine for machine in self.machines if machine.name in names)
        if len(kept) == len(self.machines):
            return self
        network = None if self.network is None else self.network.among(kept)
        return replace(self, machines=kept, network=network)

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        """Cluster from a YAML file, see :mod:`hetero.cluster.file` for its form.

        Raises
        ------
        CatalogError
            If the file is missing or wrong, in one sentence that names file, place and remedy.
        """
        from hetero.cluster import file as cluster_file

        return cluster_file.load(Path(path))

    # What is in it --------------------------------------------------------------------------

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(machine.count for machine in self.machines)

    @property
    def gpu_counts(self) -> dict[str, int]:
        """Number of GPUs of each type, in the order of the machines."""
        return summed((machine.gpu.name, machine.count) for machine in self.machines)

    @property
    def gpu_types(self) -> dict[str, Gpu]:
        """The GPU types by name, in the order of the machines."""
        return {machine.gpu.name: machine.gpu for machine in self.machines}

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in the order of the machines."""
        return tuple(dict.fromkeys(machine.region for machine in self.machines))

    @property
    def mem_bytes(self) -> int:
        """Memory of all GPUs [bytes]."""
        return sum(machine.mem_bytes for machine in self.machines)

    @property
    def usd_per_h(self) -> float | None:
        """Price of the cluster [$/h]; None if the price of any machine is unknown."""
        prices = [machine.usd_per_h for machine in self.machines]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def machine(self, name: str) -> Machine:
        """Machine of that name.

        Raises
        ------
        CatalogError
            If there is none.
        """
        for machine in self.machines:
            if machine.name == name:
                return machine
        names = ", ".join(m.name for m in self.machines)
        raise CatalogError(
            f"Cluster '{self.name}' has no machine '{name}'.", resolve=f"use one of {names}."
        )

    # Links ----------------------------------------------------------------------------------

    def link(self, a: str, b: str) -> Link:
        """Link between two machines, or between the GPUs of one if both names are the same.

        Raises
        ------
        CatalogError
            If a name is unknown, or the cluster states no network.
        """
        first, second = self.machine(a), self.machine(b)
        if first is second:
            return first.gpu_link
        found = self.network.between(first, second) if self.network else None
        if found is None:
            raise CatalogError(
                f"Cluster '{self.name}' states no network between its machines.",
                resolve="add a 'network' section to its file, or give Cluster a Network.",
            )
        return found

    def coordinator_link(self, machine: str) -> Link:
        """Link between the coordinator, which receives all requests, and a machine.

        Without a word about the coordinator it stands beside the machine, in the same region.

        Raises
        ------
        CatalogError
            If the name is unknown, or the cluster states no such link.
        """
        region = self.machine(machine).region
        found = None
        if self.network is not None:
            found = self.network.coordinator or self.network.across(
                self.network.coordinator_region or region, region
            )
        if found is None:
            self._refuse(
                f"states no link between its coordinator and '{machine}'",
                "add network.coordinator to its file",
            )
        return found

    def reach_s(self, machine: str) -> float:
        """Way of a request from the coordinator to a machine [s]; 0 where no link is stated."""
        if self.network is None or not (
            self.network.coordinator or self.network.coordinator_region
        ):
            return 0.0
        return self.coordinator_link(machine).latency_s

    def _matrix(self, value: Callable[[Link], float]) -> Floats:
        names = [machine.name for machine in self.machines]
        return np.array([[value(self.link(a, b)) for b in names] for a in names])

    def bandwidth_gbs(self) -> Floats:
        """Bandwidth between machines per direction [GB/s].

        Shape (M, M) in the order of ``machines``; the diagonal is the link between the GPUs
        inside each machine.
        """
        return self._matrix(lambda link: link.bandwidth_gbs)

    def latency_s(self) -> Floats:
        """Latency between machines [s], as :meth:`bandwidth_gbs`."""
        return self._matrix(lambda link: link.latency_s)

    # Display --------------------------------------------------------------------------------

    aliases = ()  # shipped clusters have no other names

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of clusters shows of each."""
        return (
            Column("cluster", of="name"),
            Column("GPUs", of="gpus"),
            Column(
                "what",
                of=lambda c: ", ".join(f"{count} {name}" for name, count in c.gpu_counts.items()),
            ),
            Column("regions", of=lambda c: len(c.regions)),
            Column("price", "$/h", of="usd_per_h"),
            Column("source"),
        )

    def table(self) -> Table:
        """One line per run of equal machines, and the network below."""
        alike = groupby(self.machines, lambda m: (m.gpu, m.count, m.region, m.usd_per_h))
        price = "price unknown" if self.usd_per_h is None else f"{self.usd_per_h:,.3f} $/h"
        total = f"{self.gpus} GPUs, {self.mem_bytes / 2**30:,.0f} GiB, {price}."
        figures = f"GPU figures as printed by {self.preset}." if self.preset else ""
        source = f"Source: {self.source}." if self.source else ""
        notes = (total, *self._network_lines(), figures, self._price_line(), source, *self.notes)
        heading = f"{self.name}: {self.title}" if self.title else self.name
        return Table.of(heading, COLUMNS, [list(run) for _, run in alike], *notes)

    def _price_line(self) -> str:
        """Where prices come from, when they come from several places and dates."""
        places = {
            m.gpu.price_source: m.gpu.name
            for m in self.machines
            if m.gpu.usd_per_h is not None and m.usd_per_h == m.count * m.gpu.usd_per_h
        }
        if len(places) < 2:
            return ""
        listed = "; ".join(f"{name}: {place}" for place, name in places.items())
        return f"Prices come from different places and dates ({listed})."

    def _network_lines(self) -> list[str]:
        if self.network is None:
            return ["Network between machines: not stated."] if len(self.machines) > 1 else []
        named = [
            ("within a region", self.network.within_region),
            ("between regions", self.network.between_regions),
            ("to the coordinator", self.network.coordinator),
        ]
        for pairs in (self.network.regions, self.network.machines):
            named += [(" and ".join(sorted(pair)), link) for pair, link in pairs.items()]
        return [
            f"Network {where}: {link.bandwidth_gbs:g} GB/s ({link.bandwidth_gbs * 8:g} Gbit/s), "
            f"{link.latency_s * 1e3:g} ms."
            for where, link in named
            if link is not None
        ]


@lru_cache(maxsize=1)
def clusters() -> Records[Cluster]:
    """All clusters that hetero ships: those of the five papers, and three current fleets."""
    files = sorted(paths.data("clusters").glob("*.yaml"))
    return Records("cluster", [Cluster.load(path) for path in files])


def cluster(name: str) -> Cluster:
    """Shipped cluster of that name.

    Raises
    ------
    CatalogError
        If there is none, with the nearest names.
    """
    return clusters().find(name)


def find(name: str | Path) -> Cluster:
    """Shipped cluster of that name, or that of a file or folder, :mod:`hetero.cluster.found`.

    Raises
    ------
    CatalogError
        If there is neither.
    """
    shipped = None if isinstance(name, Path) else clusters().get(name)
    require(
        shipped is not None or (bool(str(name).strip()) and Path(name) != Path()),
        f"'{name}' is no cluster.",
        resolve="give a cluster file, such as my_fleet.yaml, or the name of a shipped cluster.",
    )
    if shipped is None and (Path(name).suffix or Path(name).exists()):
        return Cluster.load(name)
    return shipped or cluster(str(name))
