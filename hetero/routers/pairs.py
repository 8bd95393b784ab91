"""Shares of the requests for pairs of a prefill and a decode replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.routers import kernels, shares
from hetero.routers.base import Builtin

Floats = NDArray[np.float64]
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

    Raises
    ------
    ParameterError
        If the times do not rise, or, when a run begins, if a weight is negative or its pair
        cannot serve a request.

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
    code: ClassVar[int] = kernels.PAIR_SHARES
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        times = [start_s for start_s, _ in self.changes]
        if any(not 0 <= t < np.inf for t in times) or any(np.diff(times) <= 0):
            raise ParameterError(
                f"The shares of router '{self.name}' change at "
                f"{', '.join(f'{t:g}' for t in times)} s.",
                resolve="give times of 0 or more that rise.",
            )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.shares`."""
        parts = [(0.0, self.weights), *self.changes]
        place = shares.HEADER + shares.PART_COLUMNS * len(parts)
        heads, tables = [], []
        for start_s, weights in parts:
            rows = self._pairs(deployment, self._matrix(deployment, weights))
            heads.append((start_s, place, len(rows)))
            tables.append(rows.ravel())
            place += rows.size
        header = [float(self.drawn), float(len(parts)), 0.0]
        return np.concatenate([header, np.ravel(heads), *tables])

    def _matrix(self, deployment: Deployment, weights: PairWeights) -> Floats:
        count = len(deployment.replicas)
        if isinstance(weights, Mapping):
            index = {replica.name: k for k, replica in enumerate(deployment.replicas)}
            matrix = np.zeros((count, count))
            for (first, second), weight in weights.items():
                if first not in index or second not in index:
                    raise ParameterError(
                        f"{deployment.name} has no pair of replicas '{first}' and '{second}'.",
                        resolve=f"use names among {', '.join(index)}.",
                    )
                matrix[index[first], index[second]] = weight
        else:
            matrix = np.asarray(weights, np.float64)
        good = matrix.shape == (count, count) and (matrix >= 0).all() and np.isfinite(matrix).all()
        if not good or not matrix.any():
            raise ParameterError(
                f"The weights of router '{self.name}' have the shape {matrix.shape}, for {count} "
                "replicas, or one of them is no number of 0 or more, or none is above 0.",
                resolve=f"give a matrix of shape ({count}, {count}) with weights of 0 or more.",
            )
        return matrix

    def _pairs(self, deployment: Deployment, matrix: Floats) -> Floats:
        """Of each pair with a share its replicas, weight and credit; shape (P, 4)."""
        rows = []
        for first, second in zip(*np.nonzero(matrix), strict=True):
            one, other = deployment.replicas[first], deployment.replicas[second]
            whole = first == second and one.role == "both"
            if not whole and (one.role, other.role) != ("prefill", "decode"):
                raise ParameterError(
                    f"The pair of {one.name}, which serves {one.role}, and {other.name}, which "
                    f"serves {other.role}, has a share and cannot serve a request.",
                    resolve="give shares to a prefill and a decode replica, or to one that serves "
                    "both phases beside itself.",
                )
            rows.append((first, -1 if whole else second, matrix[first, second], 0.0))
        return np.array(rows, np.float64)
