"""Which GPUs may share an island: those that fast enough links join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx
import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall.rates import IslandClass, RateTable


@dataclass(frozen=True, slots=True)
class Node:
    """GPUs of one type that a fast link joins, such as a server."""

    gpu: str
    count: int
    link_gbs: float

    def __post_init__(self) -> None:
        if self.count < 1 or not self.link_gbs > 0:
            raise ParameterError(
                f"A node of {self.count} {self.gpu} with a link of {self.link_gbs} GB/s.",
                resolve="give one GPU or more and a bandwidth above 0.",
            )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LinkGraph(Shown):
    """Nodes of GPUs and the bandwidth between nodes.

    Attributes
    ----------
    nodes
        GPUs of each node, by name.
    links_gbs
        Bandwidth per GPU between two nodes [GB/s]; pairs not named are not joined.

    Examples
    --------
    >>> graph = LinkGraph({"s1": Node("H20", 8, 450.0), "s2": Node("H20", 8, 450.0),
    ...                    "s3": Node("H20", 8, 450.0)}, {("s1", "s2"): 50.0, ("s2", "s3"): 10.0})
    >>> [p.count for p in graph.pools(50.0)], [p.count for p in graph.pools(100.0)]
    ([16, 8], [8, 8, 8])
    """

    nodes: Mapping[str, Node]
    links_gbs: Mapping[tuple[str, str], float]

    def __post_init__(self) -> None:
        for pair in self.links_gbs:
            for name in pair:
                if name not in self.nodes:
                    raise ParameterError(
                        f"A link names '{name}', which is no node.",
                        resolve=f"use {', '.join(self.nodes)}.",
                    )

    def pools(self, least_gbs: float) -> tuple[Pool, ...]:
        """GPUs of one type that links of at least this bandwidth join, in the order of the nodes.

        Raises
        ------
        InfeasibleError
            If no node's own link is fast enough.
        """
        graph = nx.Graph()
        graph.add_nodes_from(n for n, node in self.nodes.items() if node.link_gbs >= least_gbs)
        for (one, other), speed in self.links_gbs.items():
            same = self.nodes[one].gpu == self.nodes[other].gpu
            if same and speed >= least_gbs and one in graph and other in graph:
                graph.add_edge(one, other)
        if not len(graph):
            raise InfeasibleError(
                f"No node has a link of {least_gbs:g} GB/s.", resolve="ask for a lower bandwidth."
            )
        found = []
        for members in nx.connected_components(graph):
            names = [name for name in self.nodes if name in members]
            count = sum(self.nodes[name].count for name in names)
            found.append(Pool(names[0], self.nodes[names[0]].gpu, count, tuple(names)))
        order = list(self.nodes)
        return tuple(sorted(found, key=lambda pool: order.index(pool.name)))

    def table(self) -> Table:
        """One row per node."""
        return Table(
            "Nodes",
            (Column("node"), Column("GPU"), Column("count"), Column("link", "GB/s")),
            tuple((name, n.gpu, n.count, n.link_gbs) for name, n in self.nodes.items()),
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs of one type of which islands may be formed freely."""

    name: str
    gpu: str
    count: int
    nodes: tuple[str, ...]


def pooled(rates: RateTable, pools: tuple[Pool, ...]) -> tuple[RateTable, dict[str, int]]:
    """Rates and inventory in which every pool is a type of its own, named after its first node.

    No island then crosses a slow link: :func:`~hetero.planners.rignall.exact.exact` and the
    searches take the two as they are.

    Raises
    ------
    ParameterError
        If the table lacks a pool's GPU.
    InfeasibleError
        If a pool is smaller than every island of its type.
    """
    rows: list[int] = []
    classes: list[IslandClass] = []
    for pool in pools:
        if pool.gpu not in rates.gpus:
            rates.index(pool.gpu, 1)  # raises, naming the GPUs that there are
        fitting = [
            k for k, c in enumerate(rates.classes) if c.gpu == pool.gpu and c.size <= pool.count
        ]
        if not fitting:
            least = min(c.size for c in rates.classes if c.gpu == pool.gpu)
            raise InfeasibleError(
                f"Pool {pool.name} has {pool.count} {pool.gpu}, fewer than the smallest island, "
                f"{least}.",
                resolve="allow smaller islands, slower links, or leave the pool out.",
            )
        rows += fitting
        name = f"{pool.gpu} {pool.name}"
        classes += [IslandClass(name, rates.classes[k].size) for k in fitting]
    pick = np.array(rows)
    table = RateTable(
        tuple(classes),
        rates.ranges,
        rates.prefill_rps[pick],
        rates.decode_rps[pick],
        tuple(rates.prefill_choice[k] for k in rows) if rates.prefill_choice else (),
        tuple(rates.decode_choice[k] for k in rows) if rates.decode_choice else (),
        rates.reading,
    )
    return table, {f"{pool.gpu} {pool.name}": pool.count for pool in pools}


def largest_islands(pools: tuple[Pool, ...]) -> dict[str, int]:
    """GPUs of the largest possible island of each type."""
    found: dict[str, int] = {}
    for pool in pools:
        found[pool.gpu] = max(found.get(pool.gpu, 0), pool.count)
    return found
