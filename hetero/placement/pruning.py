"""Links that Helix keeps: the fastest of every node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.arrays import Flags, Floats
from hetero.placement.problem import Problem

DEGREE = 12
"""Fastest links that pruning keeps at every node (Helix section 4.5)."""


def pruned(problem: Problem, degree: int = DEGREE, order: Sequence[int] | None = None) -> Flags:
    """Links kept when every node keeps its ``degree`` fastest ones, shape (n + 1, n + 1).

    A link stays if either end keeps it; the coordinator keeps its ``degree`` fastest links each
    way. Among equally fast ones the artifact keeps those whose name "Link-i-j", i < j, comes last
    as text (of the coordinator's, the highest number), so that with equal links a few nodes
    become arbitrary hubs.

    Parameters
    ----------
    order
        Nodes in the order of the numbers that decide among equally fast links; by default their
        own. The artifact's is :func:`pipelines.studies.helix_artifact.numbering`.

    Notes
    -----
    Source: Helix, section 4.5: pruning of slow links, to an average degree of 12.
    Read as in its artifact.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> int(pruned(problem("hetero-42", "70B")).sum())
    876
    """
    n = len(problem.nodes)
    at = np.arange(n) if order is None else np.asarray(order, dtype=np.int64)
    speed = problem.links.bandwidth_bytes_s
    between = speed[np.ix_(at, at)]
    kept = np.zeros((n + 1, n + 1), dtype=bool)
    for i, node in enumerate(at):
        others = sorted(
            (k for k in range(n) if k != i),
            key=lambda k: (between[i, k], _name(i, k)),
            reverse=True,
        )[:degree]
        kept[node, at[others]] = True
        kept[at[others], node] = True
    kept[n, at[_fastest(speed[n, at], degree)]] = True
    kept[at[_fastest(speed[at, n], degree)], n] = True
    return kept


def all_links(problem: Problem) -> Flags:
    """Every link between different nodes and with the coordinator, shape (n + 1, n + 1)."""
    kept = ~np.eye(len(problem.nodes) + 1, dtype=bool)
    return kept & (problem.links.bandwidth_bytes_s > 0)


def _fastest(bandwidth: Floats, degree: int) -> list[int]:
    order = sorted(range(len(bandwidth)), key=lambda k: (bandwidth[k], k), reverse=True)
    return order[:degree]


def _name(a: int, b: int) -> str:
    low, high = sorted((a, b))
    return f"Link-{low}-{high}"
