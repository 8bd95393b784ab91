"""Placements: which node holds which layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.placement.problem import Node, Problem

LayerRange: TypeAlias = tuple[int, int]
"""Layers from the first up to but without the second."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Placement(Shown):
    """Layers [start, stop) of every node, None for a node that holds none.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> problem = Problem.of(cluster("helix-10"), llm("LLaMA-1-30B"))
    >>> placement = Placement.of(problem, {f"l4-{k + 1}": (15 * k, 15 * k + 15) for k in range(4)})
    Traceback (most recent call last):
    hetero.errors.InfeasibleError: Node 'l4-1' cannot hold 15 layers ... at most 11 layers on it.
    """

    problem: Problem
    ranges: tuple[LayerRange | None, ...]
    name: str = ""
    allow_overfull: bool = False

    def __post_init__(self) -> None:
        require(
            len(self.ranges) == len(self.problem.nodes),
            f"A placement on {self.problem.name} has {len(self.ranges)} ranges for "
            f"{len(self.problem.nodes)} nodes.",
            resolve="give one range per node, None for a node that holds no layer.",
        )
        depth = self.problem.llm.layers
        for node, held in zip(self.problem.nodes, self.ranges, strict=True):
            if held is None:
                continue
            start, stop = held
            require(
                0 <= start < stop <= depth,
                f"Node '{node.name}' holds the layers [{start}, {stop}) of a model of {depth}.",
                resolve=f"give a start below the stop, within 0 and {depth}.",
            )
            if stop - start > node.max_layers and not self.allow_overfull:
                raise InfeasibleError(
                    f"Node '{node.name}' cannot hold {stop - start} layers of "
                    f"{self.problem.llm.name} and a KV cache.",
                    resolve=f"place at most {node.max_layers} layers on it.",
                )

    @classmethod
    def of(
        cls,
        problem: Problem,
        ranges: Mapping[str, LayerRange],
        name: str = "",
        *,
        allow_overfull: bool = False,
    ) -> Placement:
        """Placement from ranges by node name; other nodes hold nothing."""
        held: list[LayerRange | None] = [None] * len(problem.nodes)
        for node, layers in ranges.items():
            held[problem.index(node)] = layers
        return cls(problem, tuple(held), name, allow_overfull)

    @property
    def used(self) -> tuple[int, ...]:
        """Indices of the nodes that hold layers."""
        return tuple(k for k, held in enumerate(self.ranges) if held is not None)

    def layers(self, node: int) -> int:
        """Number of layers that a node holds."""
        held = self.ranges[node]
        return 0 if held is None else held[1] - held[0]

    def tokens_per_s(self, node: int) -> float:
        """Throughput of a node with the layers it holds, T(k) [tokens/s].

        Nodes that hold more layers than half of their memory takes are outside the table of T(k);
        they are on k T(k) = constant, which flatters them a little.
        """
        k, table = self.layers(node), self.problem.nodes[node].tokens_per_s
        return float(table[k]) if k < len(table) else float(table[-1]) * (len(table) - 1) / k

    def nodes(self) -> Iterable[tuple[int, Node, LayerRange]]:
        """Index, node and layers of every node that holds some."""
        for k in self.used:
            held = self.ranges[k]
            assert held is not None
            yield k, self.problem.nodes[k], held

    @property
    def copies(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Number of nodes that hold each layer, shape (layers,)."""
        count = np.zeros(self.problem.llm.layers, dtype=np.int64)
        for _, _, (start, stop) in self.nodes():
            count[start:stop] += 1
        return count

    def by_layer(self) -> list[int]:
        """Indices of the nodes that hold layers, by their first layer."""
        return [k for k, _, _ in sorted(self.nodes(), key=lambda item: (item[2], item[0]))]

    def columns(self) -> tuple[Column, Column, Column, Column, Column]:
        """Columns of a table of nodes by index: name, GPUs, layers, throughput and region."""

        def node(k: int) -> Node:
            return self.problem.nodes[k]

        def span(k: int) -> str:
            start, stop = self.ranges[k] or (0, 0)
            return f"{start}-{stop - 1}"

        return (
            Column("node", of=lambda k: node(k).name),
            Column("GPUs", of=lambda k: node(k).kind.name),
            Column("layers", of=span),
            Column("throughput", "tokens/s", of=self.tokens_per_s),
            Column("region", of=lambda k: node(k).region),
        )

    def table(self) -> Table:
        """One row per node that holds layers, by their first layer."""
        node, gpus, layers, throughput, region = self.columns()
        number = Column("number", of=self.layers)
        cache = Column(
            "KV cache",
            "tokens",
            of=lambda k: self.problem.nodes[k].kind.kv_tokens(self.layers(k)),
        )
        idle = [self.problem.nodes[k].name for k, held in enumerate(self.ranges) if held is None]
        return Table.of(
            self.name or f"{self.problem.llm.name} on {self.problem.name}",
            (node, gpus, region, layers, number, throughput, cache),
            self.by_layer(),
            f"Idle: {', '.join(idle)}." if idle else "",
        )
