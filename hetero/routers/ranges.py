"""Each range of input lengths to the replicas that a plan gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.routers import kernels, lengths
from hetero.routers.base import Builtin

Floats = NDArray[np.float64]
Among: TypeAlias = Literal["shares", "load"]
"""Which replica of a range serves a request.

``"shares"``: smooth rotation in proportion to the weights. ``"load"``: the one with the fewest
unfinished tokens over its weight in that range.
"""


@dataclass(frozen=True)
class RangeShares(Builtin):
    """A request goes to a prefill and a decode replica of the range of its input length.

    Both phases rotate on their own within each range, so that over any stretch of requests every
    replica gets its share of every range. Lengths between ranges go to the next longer one, those
    beyond the last to the last. Where no replica of a range can take a request, since they are
    down or it is too long, the prefill goes to the replica of the fewest unfinished tokens and
    the decode to that of the emptiest KV cache.

    Parameters
    ----------
    end_tokens
        Shape (J,), rising; range j holds lengths below its end that no earlier range holds.
    prefill_weight, decode_weight
        Shape (J, M); weight of each replica of the deployment in each range, such as the planned
        rate [requests/s]. Only ratios within a range count.
    among
        See :data:`Among`.

    Raises
    ------
    ParameterError
        If the ends do not rise, or, when a run begins, if a weight is negative, no replica serves
        a range, or a replica has a weight in a phase that it does not serve.

    Notes
    -----
    Source: Rignall, section 4.1: requests follow the assignment of ranges to islands.
    The router itself is left to future work (Rignall, section 6.1).

    Examples
    --------
    >>> from hetero.deployment import KvLink, Replica
    >>> from hetero.latency.step import StepModel
    >>> from hetero.simulator import simulate
    >>> from hetero.workload import Trace
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> roles = {"p": "prefill", "q": "prefill", "d": "decode"}
    >>> nodes = tuple(Replica(n, step, 50_000, role=role) for n, role in roles.items())
    >>> split = Deployment("split", nodes, default_link=KvLink(bandwidth_gbs=10.0))
    >>> router = RangeShares([500, 5000], [[1, 0, 0], [1, 2, 0]], [[0, 0, 1], [0, 0, 1]])
    >>> trace = Trace([0, 0, 0, 0], [100, 900, 900, 900], [8, 8, 8, 8])
    >>> simulate(split, trace, router).requests["node"].tolist()
    [0, 1, 0, 1]
    """

    end_tokens: Sequence[int] | NDArray[np.int64]
    prefill_weight: ArrayLike
    decode_weight: ArrayLike
    among: Among = "shares"
    name: str = "range shares"
    code: ClassVar[int] = kernels.RANGE_SHARES

    def __post_init__(self) -> None:
        ends = np.asarray(self.end_tokens, np.float64)
        if ends.ndim != 1 or not len(ends) or ends[0] <= 0 or (np.diff(ends) <= 0).any():
            raise ParameterError(
                f"The ends of the ranges of router '{self.name}' do not rise from above 0: "
                f"{ends.tolist()}.",
                resolve="give rising ends, such as ranges.end_tokens.",
            )
        if self.among not in get_args(Among):
            raise ParameterError(
                f"Router '{self.name}' knows no choice among replicas called '{self.among}'.",
                resolve=f"use {' or '.join(get_args(Among))}.",
            )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.lengths`."""
        ends = np.asarray(self.end_tokens, np.float64)
        weights = [
            self._checked(deployment, np.asarray(given, np.float64), len(ends), other)
            for given, other in ((self.prefill_weight, "decode"), (self.decode_weight, "prefill"))
        ]
        place = lengths.HEADER + len(ends) + lengths.RANGE_COLUMNS * len(ends)
        heads: list[tuple[int, ...]] = []
        entries: list[Floats] = []
        for j in range(len(ends)):
            head: list[int] = []
            for weight in weights:
                used = np.flatnonzero(weight[j])
                rows = np.column_stack([used, weight[j, used], np.zeros(len(used))])
                entries.append(rows.ravel())
                head += [place, len(used)]
                place += rows.size
            heads.append(tuple(head))
        header = [float(len(ends)), float(self.among == "load")]
        return np.concatenate([header, ends, np.ravel(heads), *entries])

    def _checked(self, deployment: Deployment, weight: Floats, ranges: int, other: str) -> Floats:
        """Weights of one phase; ``other`` is the role that does not serve it."""
        phase = "prefill" if other == "decode" else "decode"
        shape = (ranges, len(deployment.replicas))
        if weight.shape != shape or not (np.isfinite(weight) & (weight >= 0)).all():
            raise ParameterError(
                f"The {phase} weights of router '{self.name}' have the shape {weight.shape} for "
                f"{shape[0]} ranges and {shape[1]} replicas, or one is no number of 0 or more.",
                resolve=f"give a matrix of shape {shape} with weights of 0 or more.",
            )
        whole = all(replica.role == "both" for replica in deployment.replicas)
        if whole and phase == "decode" and not weight.any():
            return weight  # who prefills decodes too
        wrong = (other,) if whole and phase == "prefill" else (other, "both")
        if (weight.sum(axis=1) <= 0).any():
            empty = int(np.flatnonzero(weight.sum(axis=1) <= 0)[0])
            raise ParameterError(
                f"No replica is to {phase} range {empty} of router '{self.name}'.",
                resolve="give every range a replica, or leave the range out.",
            )
        for k, replica in enumerate(deployment.replicas):
            if weight[:, k].any() and replica.role in wrong:
                raise ParameterError(
                    f"Replica {replica.name}, which serves {replica.role}, is to {phase} ranges "
                    f"of router '{self.name}'.",
                    resolve="give weights to replicas that serve that phase only.",
                )
        return weight
