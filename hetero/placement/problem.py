"""What a placement is sought for: a model, the nodes that may hold its layers, and their links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetero.arrays import Floats
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.placement.links import Links
from hetero.placement.machines import MachineKind, machine_kind
from hetero.placement.throughput import HELIX_POINT, OperatingPoint, throughput

TOKEN_BYTES = 2
"""Bytes of a token id on the links to and from the coordinator."""
NIC_BYTES_S = 10e9
"""Network interface of every node in Helix's machine profiles [bytes/s]."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A machine that may hold layers.

    Attributes
    ----------
    tokens_per_s
        Throughput T(k) when it holds k layers, shape (max_layers + 1,), entry 0 is 0.
    """

    name: str
    region: str
    kind: MachineKind
    tokens_per_s: Floats

    @property
    def max_layers(self) -> int:
        """Largest number of layers that it may hold."""
        return len(self.tokens_per_s) - 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Problem(Shown):
    """Nodes with their throughput, and the links between them and to the coordinator.

    Attributes
    ----------
    nodes
        In the order of the links.
    activation_bytes
        Bytes of what one token carries from layer to layer.
    raw
        Whether times per layer are the published ones instead of their knots.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> problem = Problem.of(cluster("helix-single-24"), llm("Llama-2-70B"))
    >>> len(problem.nodes), round(problem.link_tokens_per_s[0, 1])
    (24, 61035)
    """

    name: str
    llm: Llm
    nodes: tuple[Node, ...]
    links: Links
    point: OperatingPoint = HELIX_POINT
    activation_bytes: float = 0.0
    token_bytes: float = TOKEN_BYTES
    raw: bool = False
    link_tokens_per_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        require(
            len(self.links.bandwidth_bytes_s) == len(self.nodes) + 1,
            f"{self.name} has {len(self.nodes)} nodes and links between "
            f"{len(self.links.bandwidth_bytes_s) - 1}.",
            resolve="give a row of links per node and a last one for the coordinator.",
        )
        if not self.activation_bytes:
            object.__setattr__(self, "activation_bytes", 2.0 * self.llm.hidden)
        capacity = self.links.bandwidth_bytes_s / self.activation_bytes
        capacity[-1, :] = self.links.bandwidth_bytes_s[-1, :] / self.token_bytes
        capacity[:, -1] = self.links.bandwidth_bytes_s[:, -1] / self.token_bytes
        object.__setattr__(self, "link_tokens_per_s", capacity)
        if not any(node.max_layers for node in self.nodes):
            raise InfeasibleError(
                f"No node of {self.name} can hold a layer of {self.llm.name}.",
                resolve="use nodes with more memory, or a smaller model.",
            )

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        llm: Llm,
        *,
        links: Links | None = None,
        point: OperatingPoint = HELIX_POINT,
        raw: bool = False,
    ) -> Problem:
        """Problem of a cluster: one node per machine, its GPUs sharing every layer.

        Parameters
        ----------
        links
            Links in the order of the machines, where they are not those of the cluster file.

        Raises
        ------
        CatalogError
            If the cluster states no link between two machines.
        """
        kinds = []
        for machine in cluster.machines:
            try:
                kinds.append(machine_kind(machine.gpu.name, llm.name, machine.count, raw=raw))
            except ParameterError as error:
                raise ParameterError(
                    f"Node '{machine.name}' of {cluster.name}: {error.what}", resolve=error.resolve
                ) from None
        places = [(machine.name, machine.region) for machine in cluster.machines]
        return cls(
            name=cluster.name,
            llm=llm,
            nodes=_nodes(places, kinds, llm, point),
            links=links or Links.of(cluster),
            point=point,
            raw=raw,
        )

    @classmethod
    def of_kinds(
        cls,
        name: str,
        llm: Llm,
        places: Sequence[tuple[str, str]],
        kinds: Sequence[MachineKind],
        links: Links,
        *,
        point: OperatingPoint = HELIX_POINT,
    ) -> Problem:
        """Problem of nodes of any kind.

        Parameters
        ----------
        places
            Name and region of each node.
        kinds
            Kind of each node.
        links
            In the order of the nodes, the coordinator last.
        """
        return cls(name, llm, _nodes(places, kinds, llm, point), links, point)

    def subset(self, names: Sequence[str]) -> Problem:
        """The problem of some nodes alone, whose throughput follows from their own composition."""
        kept = [self.index(name) for name in names]
        places = [(self.nodes[k].name, self.nodes[k].region) for k in kept]
        kinds = [self.nodes[k].kind for k in kept]
        nodes = _nodes(places, kinds, self.llm, self.point)
        name = f"{self.name}, {len(kept)} nodes"
        return replace(self, name=name, nodes=nodes, links=self.links.subset(kept))

    def only(self, nodes: Sequence[int]) -> Problem:
        """The problem of some nodes, whose throughput stays as it is in the whole cluster."""
        kept = list(nodes)
        return replace(
            self, nodes=tuple(self.nodes[k] for k in kept), links=self.links.subset(kept)
        )

    def index(self, name: str) -> int:
        """Place of a node in the order of ``nodes``."""
        for k, node in enumerate(self.nodes):
            if node.name == name:
                return k
        raise ParameterError(
            f"{self.name} has no node '{name}'.",
            resolve=f"use one of {', '.join(node.name for node in self.nodes)}.",
        )

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in the order of the nodes."""
        return tuple(dict.fromkeys(node.region for node in self.nodes))

    @property
    def compute_bound_tokens_per_s(self) -> float:
        r"""Sum over nodes of max_k k T(k), divided by the layers of the model.

        Every token takes each layer once, so no flow is above it (Helix section 4.5).

        Source: Helix, section 4.5: upper bound by compute alone, the early stop.
        """
        work = sum(
            float((node.tokens_per_s * np.arange(len(node.tokens_per_s))).max())
            for node in self.nodes
        )
        return work / self.llm.layers

    def table(self) -> Table:
        """One row per kind of node and region."""
        groups: dict[tuple[str, str], list[Node]] = {}
        for node in self.nodes:
            groups.setdefault((node.kind.name, node.region), []).append(node)

        def tokens_per_s(layers: int) -> Callable[[list[Node]], float | None]:
            return lambda of: float(of[0].tokens_per_s[layers]) if of[0].max_layers else None

        columns = (
            Column("node", of=lambda of: of[0].kind.name),
            Column("region", of=lambda of: of[0].region),
            Column("number", of=len),
            Column("most layers", of=lambda of: of[0].max_layers),
            Column("with one layer", "tokens/s", of=tokens_per_s(1)),
            Column("with the most", "tokens/s", of=tokens_per_s(-1)),
        )
        return Table.of(f"{self.llm.name} on {self.name}", columns, groups.values())


def _nodes(
    places: Sequence[tuple[str, str]],
    kinds: Sequence[MachineKind],
    llm: Llm,
    point: OperatingPoint,
) -> tuple[Node, ...]:
    tables = throughput(kinds, llm.layers, point=point)
    most = NIC_BYTES_S / (2.0 * llm.hidden)
    return tuple(
        Node(name, region, kind, np.minimum(tables[kind.name], most))
        for (name, region), kind in zip(places, kinds, strict=True)
    )
