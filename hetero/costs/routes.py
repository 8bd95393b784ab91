r"""The order of pipeline stages: the path with the least communication, by dynamic programming.

Stages on one machine are alike, so a subset of stages is a number of stages per machine. With
``C(v, a)`` the least cost of a path that has visited the subset ``v`` and ends on machine ``a``

.. math:: C(v + e_b, b) = \min_a\; C(v, a) + \alpha_{ab} + n\, h\, 2 / \beta_{ab}

ThunderServe's Appendix B has this recursion for the path whose narrowest link is widest: ``C`` is
the largest :math:`-\beta_{ab}` on the path. Where coming back to a machine never pays,

.. math:: hop_{ab} + hop_{cc} \le hop_{ac} + hop_{cb}, \qquad hop_{cc} \le hop_{ac}

for all machines, the stages of each stand together and the subsets are those of the machines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from hetero.arrays import Floats


def shortest(counts: Sequence[int], hop_s: Floats) -> tuple[tuple[int, ...], float]:
    """Order of stages with the least total time of hops, and that time [s].

    Parameters
    ----------
    counts
        Stages on each machine, above 0, shape (M,).
    hop_s
        Time of a hop from machine to machine [s], shape (M, M); inside on the diagonal.

    Returns
    -------
    Indices of the machines along the path, one per stage; of equal paths the first in order.

    Examples
    --------
    >>> hop = np.array([[1.0, 9.0, 2.0], [9.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    >>> shortest([2, 1, 1], hop)
    ((0, 0, 2, 1), 5.0)
    """
    inside = float(sum((n - 1) * hop_s[m, m] for m, n in enumerate(counts)))
    if _never_back(hop_s):
        across = hop_s[~np.eye(len(hop_s), dtype=bool)]
        if len(across) == 0 or float(across.min()) == float(across.max()):
            order = tuple(range(len(counts)))
            cost = float(across[0]) * (len(counts) - 1) if len(across) else 0.0
        else:
            order, cost = _recursion([1] * len(counts), hop_s)
        return tuple(m for m in order for _ in range(counts[m])), cost + inside
    return _recursion(counts, hop_s)


def widest(counts: Sequence[int], bandwidth_gbs: Floats) -> tuple[tuple[int, ...], float]:
    """Order of stages whose narrowest link has the most bandwidth, and that bandwidth [GB/s].

    Source: ThunderServe, appendix B: pipeline route by dynamic programming over subsets.

    Parameters
    ----------
    counts
        Stages on each machine, above 0, shape (M,).
    bandwidth_gbs
        Bandwidth from machine to machine [GB/s], shape (M, M); inside on the diagonal.

    Returns
    -------
    As :func:`shortest`; the bandwidth of a single stage is infinite.

    Examples
    --------
    >>> link = np.array([[9.0, 1.0, 5.0], [1.0, 9.0, 4.0], [5.0, 4.0, 9.0]])
    >>> widest([2, 1, 1], link)
    ((0, 0, 2, 1), 4.0)
    """
    path, cost = _recursion(counts, -bandwidth_gbs, max, -np.inf)
    return path, -cost


def _never_back(hop_s: Floats) -> bool:
    """Whether leaving a machine and coming back to it never costs less than staying."""
    around = hop_s[:, :, None] + hop_s[None, :, :]  # a -> c -> b
    direct = hop_s[:, None, :] + np.diag(hop_s)[None, :, None]
    return bool(np.all(direct <= around) and np.all(np.diag(hop_s)[None, :] <= hop_s))


def _recursion(
    counts: Sequence[int],
    hops: Floats,
    join: Callable[[float, float], float] = operator.add,
    alone: float = 0.0,
) -> tuple[tuple[int, ...], float]:
    size = len(counts)
    hop = hops.tolist()
    full = tuple(int(count) for count in counts)
    best: dict[tuple[tuple[int, ...], int], tuple[float, tuple[int, ...]]] = {}
    for visited in sorted(product(*(range(count + 1) for count in full)), key=sum):
        for b in range(size):
            if visited[b] == 0:
                continue
            before = (*visited[:b], visited[b] - 1, *visited[b + 1 :])
            if not any(before):
                best[visited, b] = (alone, (b,))
                continue
            options = []
            for a in range(size):
                if before[a] > 0:
                    cost, path = best[before, a]
                    options.append((join(cost, hop[a][b]), (*path, b)))
            best[visited, b] = min(options)
    cost, path = min(best[full, b] for b in range(size) if full[b] > 0)
    return path, cost
