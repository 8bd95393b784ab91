"""Each pair of a prefill and a decode replica serves its share: rotation through pairs, or draws.

Layout of the router memory ``RM``: [whether pairs are drawn, number of parts, part in force]; of
each part its start [s] and where its pairs begin and end; the pairs as entries of
:mod:`hetero.routers.rotation`, without a decode replica where the first serves both phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hetero.deployment import Deployment
from hetero.engine.compiled import compiled
from hetero.errors import require
from hetero.routers.base import PAIR_SHARES, Builtin, Floats
from hetero.routers.load import least_tokens
from hetero.routers.rotation import DECODE, by_chance, entries, in_turn, places

DRAWN, PARTS, PART, HEADER = 0, 1, 2, 3
PART_COLUMNS = 3


@compiled
def pair_shares(R, E, S, RM, draw, r, t):
    """Prefill replica of the pair to serve; the decode replica is noted in the request."""
    part = int(RM[PART])
    while part + 1 < int(RM[PARTS]) and RM[HEADER + PART_COLUMNS * (part + 1)] <= t:
        part += 1
    RM[PART] = part
    head = HEADER + PART_COLUMNS * part
    first, stop = int(RM[head + 1]), int(RM[head + 2])
    if RM[DRAWN] != 0.0:
        p = by_chance(R, E, S, RM, r, first, stop, draw)
    else:
        p = in_turn(R, E, S, RM, r, first, stop)
    if p < 0:
        return least_tokens(R, E, S, r)
    R[r].decode_node = np.int32(RM[p + DECODE])
    return int(RM[p])


PairWeights: TypeAlias = Mapping[tuple[str, str], float] | ArrayLike
"""Weight by (prefill replica, decode replica) name, or a matrix of shape (M, M).

Row the prefill replica and column the decode replica. A replica that serves both phases stands
in both places. Only ratios count.
"""


@dataclass(frozen=True)
class PairShares(Builtin):
    """Each pair of a prefill and a decode replica serves its share of the requests.

    Smooth interleaved rotation: at every request each pair that can take it earns its weight, and
    the richest serves and pays what all have earned. Every stretch of requests is thus divided
    as closely as whole requests allow, without chance. A request that no pair with a share can
    take, since replicas are down or it is too long, goes to the prefill replica of the fewest
    unfinished tokens and the decode replica of the emptiest KV cache.

    Parameters
    ----------
    weights
        See :data:`PairWeights`.
    changes
        Later weights with the times from which they hold [s], in order of time.
    drawn
        Draw every pair at random with these probabilities instead.

    Notes
    -----
    Source: ThunderServe, section 3.3: routing by the orchestration; X, Y.
    X of all requests to a prefill replica and Y of those to a decode replica is the weight X Y of
    the pair.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.deployment import KvLink, Replica
    >>> from hetero.latency.step import StepModel
    >>> from hetero.simulator import simulate
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> roles = {"p": "prefill", "d": "decode", "e": "decode"}
    >>> nodes = tuple(Replica(n, step, 50_000, role=role) for n, role in roles.items())
    >>> split = Deployment("split", nodes, default_link=KvLink(bandwidth_gbs=10.0))
    >>> router = PairShares({("p", "d"): 3, ("p", "e"): 1})
    >>> run = simulate(split, workload.load("azure2023_conv").head(8), router)
    >>> run.requests["decode_node"].tolist()
    [1, 1, 2, 1, 1, 1, 2, 1]
    """

    weights: PairWeights
    changes: Sequence[tuple[float, PairWeights]] = ()
    drawn: bool = False
    name: str = "pair shares"
    code: ClassVar[int] = PAIR_SHARES
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        times = [start_s for start_s, _ in self.changes]
        require(
            all(0 <= t < np.inf for t in times) and all(np.diff(times) > 0),
            f"The shares of router '{self.name}' change at {', '.join(f'{t:g}' for t in times)} s.",
            resolve="give times of 0 or more that rise.",
        )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout at the head of this file."""
        parts = [(0.0, self.weights), *self.changes]
        tables = [self._pairs(deployment, self._matrix(deployment, each)) for _, each in parts]
        starts_s = np.array([start_s for start_s, _ in parts])
        heads = np.column_stack([starts_s, places(HEADER + PART_COLUMNS * len(parts), tables)])
        header = [float(self.drawn), float(len(parts)), 0.0]
        return np.concatenate([header, heads.ravel(), *tables])

    def _matrix(self, deployment: Deployment, weights: PairWeights) -> Floats:
        count = len(deployment.replicas)
        if isinstance(weights, Mapping):
            index = {replica.name: k for k, replica in enumerate(deployment.replicas)}
            matrix = np.zeros((count, count))
            for (first, second), weight in weights.items():
                require(
                    first in index and second in index,
                    f"{deployment.name} has no pair of replicas '{first}' and '{second}'.",
                    resolve=f"use names among {', '.join(index)}.",
                )
                matrix[index[first], index[second]] = weight
        else:
            matrix = np.asarray(weights, np.float64)
        good = matrix.shape == (count, count) and (matrix >= 0).all() and np.isfinite(matrix).all()
        require(
            bool(good and matrix.any()),
            f"The weights of router '{self.name}' have the shape {matrix.shape}, for {count} "
            "replicas, or one of them is no number of 0 or more, or none is above 0.",
            resolve=f"give a matrix of shape ({count}, {count}) with weights of 0 or more.",
        )
        return matrix

    def _pairs(self, deployment: Deployment, matrix: Floats) -> Floats:
        """Entries of the pairs with a share."""
        firsts, seconds = np.nonzero(matrix)
        roles = np.array([replica.role for replica in deployment.replicas], object)
        whole = (firsts == seconds) & (roles[firsts] == "both")
        good = whole | ((roles[firsts] == "prefill") & (roles[seconds] == "decode"))
        for first, second, serves in zip(firsts, seconds, good, strict=True):
            one, other = deployment.replicas[first], deployment.replicas[second]
            require(
                serves,
                f"The pair of {one.name}, which serves {one.role}, and {other.name}, which "
                f"serves {other.role}, has a share and cannot serve a request.",
                resolve="give shares to a prefill and a decode replica, or to one that serves "
                "both phases beside itself.",
            )
        return entries(firsts, np.where(whole, -1, seconds), matrix[firsts, seconds])
