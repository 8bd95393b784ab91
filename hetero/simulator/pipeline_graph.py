"""The graph that pipelines run on: nodes and edges that lie on a way through every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Flags
from hetero.errors import InfeasibleError
from hetero.placement.network import FlowNetwork


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes and edges of a network as the simulator holds them.

    Attributes
    ----------
    connections
        Valid connections over links with bandwidth, that lie on a way from the coordinator
        through every layer back to it; shape (n + 1, n + 1).
    nodes
        Indices of the nodes that take part.
    pairs
        Source and target of every edge, shape (E, 2), by source.
    """

    network: FlowNetwork
    connections: Flags = field(init=False)

    def __post_init__(self) -> None:
        problem = self.network.placement.problem
        valid = self.network.valid() & (problem.links.bandwidth_bytes_s > 0)
        found = complete(valid)
        if not found.any():
            self.network.max_flow()  # says which layer or link is missing
            raise InfeasibleError(
                f"No way leads through every layer of {problem.name}.",
                resolve="place every layer on nodes that links connect.",
            )
        object.__setattr__(self, "connections", found)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Indices of the nodes that take part."""
        return tuple(int(k) for k in np.flatnonzero(self.connections[:-1].any(axis=1)))

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """Source and target of every edge as indices of the problem, by source; shape (E, 2)."""
        found = np.argwhere(self.connections)
        rank = {link: k for k, link in enumerate(self.network.order)}
        ranks = np.array([rank.get((a, b), len(rank)) for a, b in found.tolist()])
        return found[np.lexsort((ranks, found[:, 0]))]

    @cached_property
    def depth(self) -> int:
        """Edges of the longest path."""
        placement = self.network.placement
        longest = {len(placement.ranges): 0}
        order = sorted(self.nodes, key=lambda k: placement.ranges[k] or (0, 0), reverse=True)
        order.sort(key=lambda k: -(placement.ranges[k] or (0, 0))[1])
        for k in order:
            longest[k] = 1 + max(longest[int(j)] for j in np.flatnonzero(self.connections[k]))
        return 1 + max(longest[int(j)] for j in np.flatnonzero(self.connections[-1]))


def complete(connections: Flags) -> Flags:
    """Those connections that lie on a way from the coordinator, the last index, back to it."""
    n = len(connections) - 1
    forward, backward = np.zeros(n + 1, bool), np.zeros(n + 1, bool)
    forward[n] = backward[n] = True
    for reached, step in ((forward, connections), (backward, connections.T)):
        while True:
            further = step[reached].any(axis=0) & ~reached
            if not further.any():
                break
            reached |= further
    return connections & forward[:, None] & backward[None, :]
