"""What a router is, and the built-in ones as objects.

A built-in router is one compiled kernel. The simulator calls it from compiled code; its
:meth:`Builtin.live` form has the ``choose`` of any other router and calls the same kernel on the
records that a :class:`FleetState` carries, so that a live dispatcher decides by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment
from hetero.engine import state
from hetero.errors import ParameterError
from hetero.routers import kernels, predictive

Floats = NDArray[np.float64]
Records: TypeAlias = tuple[Any, Any, Any, Floats, NDArray[np.int64]]
"""Request, engine and replica records and the two memories, see :mod:`hetero.engine.state`."""
Choice: TypeAlias = int | tuple[int, int]
"""What becomes of a request: a replica; a prefill and a decode replica; ``REJECT``; ``DEFER``.

For a prefill replica alone, the decode replica is the one of the emptiest KV cache. ``DEFER``
holds the request at the dispatcher. Held requests are offered again, the oldest first and until one
is deferred, when any request gets its first or last token and when a replica fails or recovers.
"""
REJECT: Final = state.REJECT
DEFER: Final = state.DEFER


@dataclass(frozen=True, slots=True)
class Request:
    """What a dispatcher knows of a request when it arrives; never its true output length."""

    index: int
    arrival_s: float
    input_tokens: int
    predicted_tokens: int


@dataclass(frozen=True, slots=True)
class FleetState:
    """What a dispatcher knows of the replicas; arrays of shape (M,), live views, not to be written.

    Attributes
    ----------
    now_s
        Time of the decision.
    outstanding, outstanding_tokens
        Requests dispatched to each replica and not finished, and their inputs and predicted
        outputs [tokens].
    waiting, running
        Of these, those without their first token, and those that decode.
    kv_tokens
        Capacity of each KV cache [tokens].
    eligible
        Whether each replica is up, serves prefill and could ever hold the request.
    known_tokens
        Tokens at the start of the prompt that each replica is believed to have in its prefix
        cache, by the dispatcher's own books of what it sent there (:mod:`hetero.engine.prefix`).
    records
        The books behind these figures, which the built-in routers read; None where there are
        none.
    """

    now_s: float
    outstanding: NDArray[np.int64]
    outstanding_tokens: NDArray[np.int64]
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    eligible: NDArray[np.bool_]
    known_tokens: NDArray[np.int64]
    records: Records | None = None


@runtime_checkable
class Router(Protocol):
    """Anything with a name and a ``choose``; subclassing is not needed.

    Examples
    --------
    >>> class Emptiest:
    ...     name = "emptiest"
    ...     def choose(self, request, fleet):
    ...         free = fleet.kv_tokens - fleet.outstanding_tokens
    ...         return int(np.where(fleet.eligible, free, -np.inf).argmax())
    >>> isinstance(Emptiest(), Router)
    True
    """

    name: str

    def choose(self, request: Request, fleet: FleetState) -> Choice:
        """Index of the replica that serves the request, or what else is to become of it."""


class Builtin:
    """A router whose decision is a compiled kernel; subclasses say which, and its memory."""

    code: ClassVar[int]
    draws: ClassVar[bool] = False  # whether it needs random numbers
    name: str

    def memory(self, deployment: Deployment) -> Floats:
        """Parameters and state of the kernel at the start of a run."""
        return np.zeros(1)

    def renumber(self, memory: Floats, by: int) -> None:
        """Requests lose ``by`` of their index: a dispatcher has dropped the oldest records."""

    def live(self, deployment: Deployment, rng: np.random.Generator | None = None) -> Live:
        """The router with a memory of its own, for one dispatcher of a deployment.

        Parameters
        ----------
        rng
            Source of its draws; needed by the routers that draw.
        """
        if self.draws and rng is None:
            raise ParameterError(
                f"Router '{self.name}' draws random numbers and was given no generator.",
                resolve="pass rng=np.random.default_rng(seed).",
            )
        return Live(self, self.memory(deployment), rng if self.draws else None)


class Live:
    """A built-in router that keeps its memory between decisions, called one by one.

    Examples
    --------
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> pair = Deployment("pair", tuple(Replica(n, step, kv_tokens=50_000) for n in "ab"))
    >>> router = LeastTokens().live(pair)
    >>> isinstance(router, Router), router.name
    (True, 'least tokens')
    """

    def __init__(self, router: Builtin, memory: Floats, rng: np.random.Generator | None) -> None:
        self.name, self._code, self._memory, self._rng = router.name, router.code, memory, rng
        self._router = router

    def renumber(self, by: int) -> None:
        """Requests lose ``by`` of their index from now on."""
        self._router.renumber(self._memory, by)

    def choose(self, request: Request, fleet: FleetState) -> Choice:
        """Replica, or prefill and decode replica, of the request; -1 if none can hold it."""
        if fleet.records is None:
            raise ParameterError(
                f"Router '{self.name}' reads the records of the fleet, and this state has none.",
                resolve="pass FleetState(records=...), or route with a router of plain Python.",
            )
        first, second = (0.0, 0.0) if self._rng is None else self._rng.random(2).tolist()
        i, j = kernels.pair(
            self._code, *fleet.records, self._memory, first, second, request.index, fleet.now_s
        )
        return int(i) if j < 0 else (int(i), int(j))


def shares(weights: Sequence[float] | None, deployment: Deployment) -> Floats:
    """One positive weight per replica; by default the number of GPUs of each."""
    count = len(deployment.replicas)
    chosen = [r.gpus for r in deployment.replicas] if weights is None else list(weights)
    good = len(chosen) == count and all(0 <= w < float("inf") for w in chosen)
    if not good or sum(chosen) <= 0:
        raise ParameterError(
            f"{len(chosen)} weights for {count} replicas: {chosen}.",
            resolve="give one weight >= 0 per replica, at least one of them above 0.",
        )
    return np.asarray(chosen, np.float64)


@dataclass(frozen=True)
class RoundRobin(Builtin):
    """Each replica in turn.

    Source: Xiong et al., section 5.2: round-robin scheduling (RR).
    """

    code: ClassVar[int] = kernels.ROUND_ROBIN
    name: str = "round robin"


@dataclass(frozen=True)
class WeightedRandom(Builtin):
    """Independent draws with fixed probabilities; equal ones by ``weights=[1] * M``."""

    weights: Sequence[float] | None = None
    name: str = "weighted random"
    code: ClassVar[int] = kernels.WEIGHTED_RANDOM
    draws: ClassVar[bool] = True

    def memory(self, deployment: Deployment) -> Floats:
        """One weight per replica."""
        return shares(self.weights, deployment)


@dataclass(frozen=True)
class WeightedRoundRobin(Builtin):
    """Smooth interleaved rotation in proportion to weights; by default the number of GPUs.

    Source: Xiong et al., section 5.2: weighted round-robin scheduling (WRR).
    """

    weights: Sequence[float] | None = None
    name: str = "weighted round robin"
    code: ClassVar[int] = kernels.INTERLEAVED

    def memory(self, deployment: Deployment) -> Floats:
        """Weights, then the credit each replica has gathered."""
        weight = shares(self.weights, deployment)
        return np.concatenate([weight, np.zeros_like(weight)])


@dataclass(frozen=True)
class SingleInstance(Builtin):
    """Everything to one replica (Xiong et al., SI); while it is down, requests are held.

    Source: Xiong et al., section 5.2: single-instance scheduling (SI).
    """

    replica: int = 0
    name: str = "single instance"
    code: ClassVar[int] = kernels.SINGLE

    def memory(self, deployment: Deployment) -> Floats:
        """Index of the replica."""
        if not 0 <= self.replica < len(deployment.replicas):
            raise ParameterError(
                f"There is no replica {self.replica} among {len(deployment.replicas)}.",
                resolve="count replicas from 0.",
            )
        return np.array([float(self.replica)])


@dataclass(frozen=True)
class LeastRequests(Builtin):
    """The replica with the fewest unfinished requests."""

    name: str = "least requests"
    code: ClassVar[int] = kernels.LEAST_REQUESTS


@dataclass(frozen=True)
class LeastTokens(Builtin):
    """The replica with the fewest tokens in unfinished requests."""

    name: str = "least tokens"
    code: ClassVar[int] = kernels.LEAST_TOKENS


@dataclass(frozen=True)
class PowerOfTwo(Builtin):
    """The less loaded of two replicas drawn at random."""

    name: str = "power of two"
    code: ClassVar[int] = kernels.POWER_OF_TWO
    draws: ClassVar[bool] = True


@dataclass(frozen=True)
class CacheAware(Builtin):
    """The least tokens, less a weight per token of the prompt that a replica has cached.

    What is cached where is taken from the dispatcher's own books: the blocks of the prompts it
    sent, aged as the replica's cache ages them (:mod:`hetero.engine.prefix`). Without prefix
    caches, or a trace without blocks, it is least tokens.

    Parameters
    ----------
    hit_weight
        omega: tokens of load that one cached token outweighs; infinity follows the longest
        prefix.
    """

    hit_weight: float = 4.0
    name: str = "cache aware"
    code: ClassVar[int] = kernels.CACHE_AWARE

    def __post_init__(self) -> None:
        if not self.hit_weight >= 0:
            raise ParameterError(
                f"The weight of a cached token is {self.hit_weight}.",
                resolve="give 0 for least tokens, infinity for the longest prefix, or between.",
            )

    def memory(self, deployment: Deployment) -> Floats:
        """The weight."""
        return np.array([self.hit_weight])


@dataclass(frozen=True)
class Predictive(Builtin):
    """Least predicted time to first token, plus the price of what the request takes from others.

    While every replica is full, requests wait at the dispatcher, the oldest first, for the first
    that has room. Equation and reasons: :mod:`hetero.routers.predictive`. Throughput, attainment
    and tail change little when a parameter is halved or doubled; none is set by cluster or
    workload.

    Parameters
    ----------
    price_s
        kappa [s]: time to first token that an average request forgoes to spare a full replica;
        a few times the prefill of a long prompt.
    steepness
        theta: the price grows e-fold per 1/theta of the KV cache or batch in use.
    long_reply
        eta: weight of the completion of replies longer than average.
    target_s
        Target for the time to first token that as many requests as possible should meet, at the
        expense of the tail; none by default. A request that would miss it everywhere waits for a
        replica that has room to spare. A little below the promised time leaves room for what
        cannot be predicted.
    """

    price_s: float = 2.0
    steepness: float = 6.0
    long_reply: float = 0.005
    target_s: float | None = None
    name: str = "hetero"
    code: ClassVar[int] = kernels.PREDICTIVE

    def __post_init__(self) -> None:
        if not all(x >= 0 for x in (self.price_s, self.steepness, self.long_reply)):
            raise ParameterError(
                f"price_s {self.price_s}, steepness {self.steepness} and long_reply "
                f"{self.long_reply} must be 0 or more.",
                resolve="leave them at their defaults, or give 0 to switch a term off.",
            )
        if self.target_s is not None and not self.target_s > 0:
            raise ParameterError(
                f"The target for the first token is {self.target_s} s.",
                resolve="give a time above 0 s, or none.",
            )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.predictive`."""
        memory = np.zeros(predictive.HEADER + len(deployment.replicas))
        memory[: predictive.ARRIVED] = (
            self.price_s,
            self.steepness,
            self.long_reply,
            self.target_s or 0.0,
        )
        return memory

    def renumber(self, memory: Floats, by: int) -> None:
        """The next request to learn from has another index."""
        memory[predictive.NEXT] = max(memory[predictive.NEXT] - by, 0.0)
