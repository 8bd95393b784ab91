"""What a router is, and what the built-in ones share.

A built-in router is one compiled kernel. The simulator calls it from compiled code; its
:meth:`Builtin.live` form has the ``choose`` of any other router and calls the same kernel on the
records that a :class:`FleetState` carries, so that a live dispatcher decides by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment
from hetero.engine import state
from hetero.engine.compiled import interpreted
from hetero.errors import require

if TYPE_CHECKING:
    from hetero.workload import Trace


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

# By which the compiled switch of hetero.routers.kernels knows the built-in routers.
ROUND_ROBIN, WEIGHTED_RANDOM, INTERLEAVED, SINGLE = 0, 1, 2, 3
LEAST_REQUESTS, LEAST_TOKENS, POWER_OF_TWO = 4, 5, 6
WORKLOAD, HETEROSERVE, LATENCY_AWARE, LENGTH_AWARE, PREDICTIVE = 7, 8, 9, 10, 11
PAIR_SHARES, CACHE_AWARE, RANGE_SHARES = 12, 13, 14


def _unseen(what: str, of: Any, name: str) -> AttributeError:
    known = ", ".join(one.name for one in fields(of))
    return AttributeError(f"A router sees no {what}.{name}. Resolve: use one of {known}.")


@dataclass(frozen=True, slots=True)
class Request:
    """What a dispatcher knows of a request when it arrives; never its true output length."""

    index: int
    arrival_s: float
    input_tokens: int
    predicted_tokens: int
    if not TYPE_CHECKING:  # types know what there is

        def __getattr__(self, name: str) -> Any:
            raise _unseen("request", self, name)


@dataclass(frozen=True, slots=True)
class FleetState:
    """What a dispatcher knows of the replicas; arrays of shape (M,), live read-only views.

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
        cache, by the dispatcher's own records of what it sent there (:mod:`hetero.engine.prefix`).
    records
        The records behind these figures, which the built-in routers read. They hold true output
        lengths: another router has None, unless it says ``oracle = True``.
    """

    now_s: float
    outstanding: NDArray[np.int64]
    outstanding_tokens: NDArray[np.int64]
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    eligible: NDArray[np.bool_]
    known_tokens: NDArray[np.int64]
    records: Records | None = field(default=None, repr=False)
    if not TYPE_CHECKING:  # types know what there is

        def __getattr__(self, name: str) -> Any:
            raise _unseen("fleet", self, name)


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
        require(
            rng is not None or not self.draws,
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
    >>> from hetero.routers import LeastTokens
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> pair = Deployment("pair", tuple(Replica(n, step, kv_tokens=50_000) for n in "ab"))
    >>> router = LeastTokens().live(pair)
    >>> isinstance(router, Router), router.name
    (True, 'least tokens')
    """

    def __init__(self, router: Builtin, memory: Floats, rng: np.random.Generator | None) -> None:
        from hetero.routers.kernels import pair  # the switch knows every router, all know this file

        self.name, self._router, self._rng, self._pair = router.name, router, rng, pair
        self._memory: Any = memory.tolist() if interpreted() else memory

    def renumber(self, by: int) -> None:
        """Requests lose ``by`` of their index from now on."""
        self._router.renumber(self._memory, by)

    def choose(self, request: Request, fleet: FleetState) -> Choice:
        """Replica, or prefill and decode replica, of the request; -1 if none can hold it."""
        records = fleet.records or ()
        require(
            bool(records),
            f"Router '{self.name}' reads the records of the fleet, and this state has none.",
            resolve="say oracle = True in a router that asks it, or pass FleetState(records=...).",
        )
        return self.decide(records, request.index, fleet.now_s)

    def decide(self, records: Any, index: int, now_s: float) -> Choice:
        """The same for a request of the records themselves."""
        first, second = (0.0, 0.0) if self._rng is None else self._rng.random(2).tolist()
        records[4][state.EVENTS] += 1  # who asks may do something else than told
        i, j = self._pair(self._router.code, *records, self._memory, first, second, index, now_s)
        return int(i) if j < 0 else (int(i), int(j))


Ints32 = NDArray[np.int32]


class Predictor(Protocol):
    """Predicts the output tokens of every request of a trace."""

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """Predicted output tokens, at least 1; shape (N,)."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """The true output length."""

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """True output tokens, at least 1."""
        return np.maximum(trace.output_tokens, 1)


@dataclass(frozen=True, slots=True)
class Normal:
    """Independent normal draws with the mean and deviation of a sample (Xiong et al., 5.2).

    Source: Xiong et al., section 4.1: output length predictor, from the distribution of a data set.

    Parameters
    ----------
    sample
        Number of requests of the trace whose outputs are known beforehand.
    """

    sample: int = 200

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """Rounded draws, at least 1."""
        known = rng.choice(trace.output_tokens, min(self.sample, len(trace)), replace=False)
        draws = rng.normal(known.mean(), known.std(), len(trace))
        return np.maximum(np.rint(draws), 1).astype(np.int32)


DEFAULT: Final[Predictor] = Normal()
"""What is believed where nobody says: what a dispatcher has, and not the truth."""


PREDICTORS: Final[Mapping[str, Predictor]] = {"guess": DEFAULT, "oracle": Oracle()}
"""By the names that are typed."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """One length for all: a quantile of the outputs of a sample of requests."""

    quantile: float = 0.5
    sample: int = 200

    def __post_init__(self) -> None:
        require(
            0 <= self.quantile <= 1,
            f"A quantile of {self.quantile} does not exist.",
            resolve="give one in 0 to 1.",
        )

    def predict(self, trace: Trace, rng: np.random.Generator) -> Ints32:
        """The quantile, at least 1, for every request."""
        known = rng.choice(trace.output_tokens, min(self.sample, len(trace)), replace=False)
        value = max(1, round(float(np.quantile(known, self.quantile))))
        return np.full(len(trace), value, np.int32)
