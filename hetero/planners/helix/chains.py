"""One chain: every node of it carries the whole flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.planners.helix.groups import NodeGroup


def chain(found: Sequence[NodeGroup], layers: int) -> tuple[float, list[tuple[int, int]]] | None:
    r"""Largest flow of a single chain, and its nodes as pairs (group, layers held).

    The largest F with :math:`\sum_j \max\{k : T_j(k) \ge F\} \ge L`; nodes that hold most
    come first, and the last one is cut to what is left. None if the nodes hold too few layers.
    """
    values = np.unique(np.concatenate([g.tokens_per_s[1:] for g in found]))
    low, high = -1, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        reach = sum(g.count * _most(g, values[middle]) for g in found)
        low, high = (middle, high) if reach >= layers else (low, middle)
    if low < 0:
        return None
    flow = float(values[low])
    order = sorted(range(len(found)), key=lambda t: -_most(found[t], flow))
    left, nodes = layers, []
    for t in order:
        for _ in range(found[t].count):
            most = min(_most(found[t], flow), left)
            # Throughput need not fall with every layer: cut only to what still carries the flow.
            while most > 0 and found[t].tokens_per_s[most] < flow:
                most -= 1
            if most > 0:
                nodes.append((t, most))
                left -= most
    return (flow, nodes) if left == 0 else None


def _most(group: NodeGroup, flow: float) -> int:
    """Most layers with which one node of a group carries a flow."""
    fitting = np.flatnonzero(group.tokens_per_s >= flow)
    return int(fitting[-1]) if len(fitting) else 0
