"""Each range of input lengths is served by the replicas that a plan gives to it.

Layout of the router memory ``RM``: [number of ranges J, whether the least loaded is taken]; the J
ends of the ranges [tokens], rising; of each range where its prefill entries begin and end and where
its decode entries do; the entries of :mod:`hetero.routers.rotation`, each of one phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.deployment import Deployment
from hetero.engine.compiled import compiled
from hetero.errors import require
from hetero.routers.base import RANGE_SHARES, Builtin, Floats
from hetero.routers.load import least_tokens
from hetero.routers.rotation import (
    COLUMNS,
    DECODE,
    PREFILL,
    WEIGHT,
    can_serve,
    entries,
    in_turn,
    places,
)

RANGES, BY_LOAD, HEADER = 0, 1, 2
RANGE_COLUMNS = 4


@compiled
def _range_of(RM, tokens):
    """Number of the first range that ends beyond a length; the last one holds what is longer."""
    low, high = 0, int(RM[RANGES]) - 1
    while low < high:
        middle = (low + high) // 2
        if RM[HEADER + middle] > tokens:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _least_loaded(R, E, S, RM, r, first, stop):
    """Place of the entry with the fewest unfinished tokens over its weight; -1 for none."""
    best, least = -1, np.inf
    for p in range(first, stop, COLUMNS):
        if can_serve(R, E, S, RM, r, p):
            i = int(max(RM[p + PREFILL], RM[p + DECODE]))
            queue = (S[i].outstanding_tokens + R[r].input_tokens) / RM[p + WEIGHT]
            if queue < least:
                best, least = p, queue
    return best


@compiled
def _of_range(R, E, S, RM, r, head):
    """Place of the entry to serve a phase, whose entries begin and end as ``head`` says."""
    first, stop = int(RM[head]), int(RM[head + 1])
    if RM[BY_LOAD] != 0.0:
        return _least_loaded(R, E, S, RM, r, first, stop)
    return in_turn(R, E, S, RM, r, first, stop)


@compiled
def range_shares(R, E, S, RM, r):
    """Prefill replica of the request's range; its decode replica is noted in the request."""
    head = HEADER + int(RM[RANGES]) + RANGE_COLUMNS * _range_of(RM, R[r].input_tokens)
    p = _of_range(R, E, S, RM, r, head)
    if p < 0:
        return least_tokens(R, E, S, r)
    q = _of_range(R, E, S, RM, r, head + 2)
    if q >= 0:
        R[r].decode_node = np.int32(RM[q + DECODE])
    return int(RM[p])


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
    code: ClassVar[int] = RANGE_SHARES

    def __post_init__(self) -> None:
        ends = np.asarray(self.end_tokens, np.float64)
        require(
            ends.ndim == 1 and len(ends) > 0 and bool(ends[0] > 0 and (np.diff(ends) > 0).all()),
            f"The ends of the ranges of router '{self.name}' do not rise from above 0: "
            f"{ends.tolist()}.",
            resolve="give rising ends, such as ranges.end_tokens.",
        )
        require(
            self.among in get_args(Among),
            f"Router '{self.name}' knows no choice among replicas called '{self.among}'.",
            resolve=f"use {' or '.join(get_args(Among))}.",
        )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout at the head of this file."""
        ends = np.asarray(self.end_tokens, np.float64)
        prefill, decode = (
            self._checked(deployment, np.asarray(given, np.float64), len(ends), other)
            for given, other in ((self.prefill_weight, "decode"), (self.decode_weight, "prefill"))
        )
        tables = []
        for first, second in zip(prefill, decode, strict=True):
            tables += [
                entries(np.flatnonzero(first), -1, first[first > 0]),
                entries(-1, np.flatnonzero(second), second[second > 0]),
            ]
        heads = places(HEADER + len(ends) + RANGE_COLUMNS * len(ends), tables)
        header = [float(len(ends)), float(self.among == "load")]
        return np.concatenate([header, ends, heads.ravel(), *tables])

    def _checked(self, deployment: Deployment, weight: Floats, ranges: int, other: str) -> Floats:
        """Weights of one phase; ``other`` is the role that does not serve it."""
        phase = "prefill" if other == "decode" else "decode"
        shape = (ranges, len(deployment.replicas))
        require(
            weight.shape == shape and bool((np.isfinite(weight) & (weight >= 0)).all()),
            f"The {phase} weights of router '{self.name}' have the shape {weight.shape} for "
            f"{shape[0]} ranges and {shape[1]} replicas, or one is no number of 0 or more.",
            resolve=f"give a matrix of shape {shape} with weights of 0 or more.",
        )
        whole = all(replica.role == "both" for replica in deployment.replicas)
        if whole and phase == "decode" and not weight.any():
            return weight  # who prefills decodes too
        wrong = (other,) if whole and phase == "prefill" else (other, "both")
        empty = np.flatnonzero(weight.sum(axis=1) <= 0)
        require(
            not len(empty),
            f"No replica is to {phase} range {', '.join(map(str, empty))} of router '{self.name}'.",
            resolve="give every range a replica, or leave the range out.",
        )
        for k, replica in enumerate(deployment.replicas):
            require(
                replica.role not in wrong or not weight[:, k].any(),
                f"Replica {replica.name}, which serves {replica.role}, is to {phase} ranges "
                f"of router '{self.name}'.",
                resolve="give weights to replicas that serve that phase only.",
            )
        return weight
