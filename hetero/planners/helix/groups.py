"""Equal nodes counted instead of named: what the planner's programs are about."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.arrays import Floats
from hetero.grouping import grouped
from hetero.placement import Problem


@dataclass(frozen=True, slots=True, eq=False)
class NodeGroup:
    """Nodes of one region with one table of throughput.

    Attributes
    ----------
    tokens_per_s
        T(k), shape (max_layers + 1,), entry 0 is 0.
    members
        Indices of the nodes.
    """

    region: str
    tokens_per_s: Floats
    members: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.members)

    @property
    def max_layers(self) -> int:
        """Most layers that one of them holds."""
        return len(self.tokens_per_s) - 1


def groups(problem: Problem, *, by_region: bool = True) -> tuple[NodeGroup, ...]:
    """Nodes grouped by their table of throughput and, if asked for, their region."""
    found = grouped(
        ((node.region if by_region else "", node.tokens_per_s.tobytes()), k)
        for k, node in enumerate(problem.nodes)
        if node.max_layers
    )
    return tuple(
        NodeGroup(region, problem.nodes[members[0]].tokens_per_s, tuple(members))
        for (region, _), members in found.items()
    )
