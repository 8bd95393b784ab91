"""Links that Helix's planner keeps: the fastest of every node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.placement import Problem

Flags = NDArray[np.bool_]


def pruned(problem: Problem, degree: int = 12) -> Flags:
    """Links kept when every node keeps its ``degree`` fastest ones, shape (n + 1, n + 1).

    A link stays if either end keeps it; the coordinator keeps its ``degree`` fastest links each
    way. Among equally fast ones the artifact keeps those whose name "Link-i-j", i < j, comes last
    as text (of the coordinator's, the highest number), so that with equal links a few nodes
    become arbitrary hubs.

    Notes
    -----
    Source: Helix section 4.5 (the average degree of each node is 12) and its artifact.

    Examples
    --------
    >>> from hetero.placement.published import problem
    >>> int(pruned(problem("hetero-42", "70B")).sum())
    876
    """
    n = len(problem.nodes)
    bandwidth = problem.links.bandwidth_bytes_s
    kept = np.zeros((n + 1, n + 1), dtype=bool)
    for node in range(n):
        others = sorted(
            (k for k in range(n) if k != node),
            key=lambda k: (bandwidth[node, k], _name(node, k)),
            reverse=True,
        )[:degree]
        kept[node, others] = True
        kept[others, node] = True
    kept[n, _fastest(bandwidth[n, :n], degree)] = True
    kept[_fastest(bandwidth[:n, n], degree), n] = True
    return kept


def all_links(problem: Problem) -> Flags:
    """Every link between different nodes and with the coordinator, shape (n + 1, n + 1)."""
    kept = ~np.eye(len(problem.nodes) + 1, dtype=bool)
    return kept & (problem.links.bandwidth_bytes_s > 0)


def _fastest(bandwidth: NDArray[np.float64], degree: int) -> list[int]:
    order = sorted(range(len(bandwidth)), key=lambda k: (bandwidth[k], k), reverse=True)
    return order[:degree]


def _name(a: int, b: int) -> str:
    low, high = sorted((a, b))
    return f"Link-{low}-{high}"
