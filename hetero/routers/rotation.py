"""Routers that look at no state: rotation, chance, weights, one replica; and entries in turn.

An entry is a replica, or a pair of a prefill and a decode replica, with a weight. Routers that keep
entries lay them out in the router memory ``RM`` with :func:`entries`; their kernels choose the one
whose turn it is with :func:`in_turn`, or draw one with :func:`by_chance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from hetero.deployment import Deployment
from hetero.engine.candidates import may_take, takes_more
from hetero.engine.compiled import compiled
from hetero.engine.kv import fits
from hetero.engine.state import DECODE_ONLY, DEFER, REJECT
from hetero.errors import require
from hetero.routers.base import (
    INTERLEAVED,
    ROUND_ROBIN,
    SINGLE,
    WEIGHTED_RANDOM,
    Builtin,
    Floats,
)

# Of an entry: its prefill and its decode replica, -1 where it has none; what it weighs; and the
# credit that it has gathered.
PREFILL, DECODE, WEIGHT, CREDIT, COLUMNS = 0, 1, 2, 3, 4


def entries(prefill: ArrayLike, decode: ArrayLike, weight: ArrayLike) -> Floats:
    """Entries one after another, of which none has gathered credit yet; flat."""
    columns = np.broadcast_arrays(prefill, decode, weight, 0.0)
    return np.column_stack(columns).astype(np.float64).ravel()


def places(first: int, tables: Sequence[Floats]) -> Floats:
    """Where each table of entries begins and ends, the first at ``first``; shape (T, 2)."""
    sizes = np.array([table.size for table in tables])
    ends = first + np.cumsum(sizes)
    return np.column_stack([ends - sizes, ends]).astype(np.float64)


@compiled
def can_serve(R, E, S, RM, r, p):
    """Whether the replicas of the entry at ``p`` can take their phases of a request."""
    i, j = int(RM[p + PREFILL]), int(RM[p + DECODE])
    good = i < 0 or may_take(R, E, S, r, i)
    return good and (j < 0 or (takes_more(S[j]) and fits(R, E[j], r)))


@compiled
def in_turn(R, E, S, RM, r, first, stop):
    """Smooth interleaved rotation: every entry earns its weight, the richest serves and pays.

    Place of the entry among those from ``first`` to before ``stop``; -1 if none can serve.
    """
    best = -1
    total = 0.0
    for p in range(first, stop, COLUMNS):
        if can_serve(R, E, S, RM, r, p):
            total += RM[p + WEIGHT]
            RM[p + CREDIT] += RM[p + WEIGHT]
            if best < 0 or RM[p + CREDIT] > RM[best + CREDIT]:
                best = p
    if best >= 0:
        RM[best + CREDIT] -= total
    return best


@compiled
def by_chance(R, E, S, RM, r, first, stop, draw):
    """The same by chance: each entry with probability proportional to its weight."""
    total = 0.0
    for p in range(first, stop, COLUMNS):
        if can_serve(R, E, S, RM, r, p):
            total += RM[p + WEIGHT]
    target = draw * total
    last = -1
    for p in range(first, stop, COLUMNS):
        if RM[p + WEIGHT] > 0.0 and can_serve(R, E, S, RM, r, p):
            last = p
            target -= RM[p + WEIGHT]
            if target < 0.0:
                return p
    return last


@compiled
def round_robin(R, E, S, RM, r):
    """The next replica in turn that could hold the request."""
    count = len(E)
    start = int(RM[0])
    for k in range(count):
        i = start + k
        if i >= count:
            i -= count
        if may_take(R, E, S, r, i):
            RM[0] = i + 1 if i + 1 < count else 0
            return i
    return -1


@dataclass(frozen=True)
class RoundRobin(Builtin):
    """Each replica in turn.

    Source: Xiong et al., section 5.2: round-robin scheduling (RR).
    """

    code: ClassVar[int] = ROUND_ROBIN
    name: str = "round robin"


@compiled
def weighted_random(R, E, S, RM, draw, r):
    """A replica with probability proportional to its weight, among those that could hold it."""
    p = by_chance(R, E, S, RM, r, 0, len(RM), draw)
    return int(RM[p]) if p >= 0 else -1


@dataclass(frozen=True)
class WeightedRandom(Builtin):
    """Independent draws with fixed probabilities; equal ones by ``weights=[1] * M``."""

    weights: Sequence[float] | None = None
    name: str = "weighted random"
    code: ClassVar[int] = WEIGHTED_RANDOM
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """One entry per replica."""
        return _weighted(self.weights, deployment)


@compiled
def interleaved(R, E, S, RM, r):
    """The replica whose turn it is."""
    p = in_turn(R, E, S, RM, r, 0, len(RM))
    return int(RM[p]) if p >= 0 else -1


@dataclass(frozen=True)
class WeightedRoundRobin(Builtin):
    """Smooth interleaved rotation in proportion to weights; by default the number of GPUs.

    Source: Xiong et al., section 5.2: weighted round-robin scheduling (WRR).
    """

    weights: Sequence[float] | None = None
    name: str = "weighted round robin"
    code: ClassVar[int] = INTERLEAVED

    def memory(self, deployment: Deployment) -> Floats:
        """One entry per replica."""
        return _weighted(self.weights, deployment)


def _weighted(weights: Sequence[float] | None, deployment: Deployment) -> Floats:
    """One entry per replica; by default each weighs its number of GPUs."""
    count = len(deployment.replicas)
    chosen = [r.gpus for r in deployment.replicas] if weights is None else list(weights)
    good = len(chosen) == count and all(0 <= w < float("inf") for w in chosen)
    require(
        good and sum(chosen) > 0,
        f"{len(chosen)} weights for {count} replicas: {chosen}.",
        resolve="give one weight >= 0 per replica, at least one of them above 0.",
    )
    return entries(np.arange(count), -1, chosen)


@compiled
def single(R, E, S, RM, r):
    """Always the same replica, if it could hold the request; while it is down they wait."""
    i = int(RM[0])
    if not takes_more(S[i]) and E[i].role != DECODE_ONLY and fits(R, E[i], r):
        return DEFER
    return i if may_take(R, E, S, r, i) else REJECT


@dataclass(frozen=True)
class SingleInstance(Builtin):
    """Everything to one replica (Xiong et al., SI); while it is down, requests are held.

    Source: Xiong et al., section 5.2: single-instance scheduling (SI).
    """

    replica: int = 0
    name: str = "single instance"
    code: ClassVar[int] = SINGLE

    def memory(self, deployment: Deployment) -> Floats:
        """Index of the replica."""
        require(
            0 <= self.replica < len(deployment.replicas),
            f"There is no replica {self.replica} among {len(deployment.replicas)}.",
            resolve="count replicas from 0.",
        )
        return np.array([float(self.replica)])
