"""Routers: which replica, or pair of replicas, serves a request."""

from collections.abc import Callable

from hetero.errors import ParameterError, require
from hetero.routers.base import (
    DEFER,
    REJECT,
    Builtin,
    Choice,
    FleetState,
    Live,
    Normal,
    Oracle,
    Predictor,
    Quantile,
    Request,
    Router,
)
from hetero.routers.cache_aware import CacheAware
from hetero.routers.heteroserve import (
    CapacityProportional,
    HeteroServe,
    LatencyAware,
    LengthAware,
    batch_limits,
    uniform_limits,
)
from hetero.routers.load import LeastRequests, LeastTokens, PowerOfTwo
from hetero.routers.pairs import PairShares
from hetero.routers.predictive import Predictive
from hetero.routers.ranges import RangeShares
from hetero.routers.rotation import (
    RoundRobin,
    SingleInstance,
    WeightedRandom,
    WeightedRoundRobin,
)
from hetero.routers.xiong import Workload

__all__ = [
    "DEFER",
    "REJECT",
    "Builtin",
    "CacheAware",
    "CapacityProportional",
    "Choice",
    "FleetState",
    "HeteroServe",
    "LatencyAware",
    "LeastRequests",
    "LeastTokens",
    "LengthAware",
    "Live",
    "Normal",
    "Oracle",
    "PairShares",
    "PowerOfTwo",
    "Predictive",
    "Predictor",
    "Quantile",
    "RangeShares",
    "Request",
    "RoundRobin",
    "Router",
    "SingleInstance",
    "WeightedRandom",
    "WeightedRoundRobin",
    "Workload",
    "batch_limits",
    "factories",
    "router_of",
    "uniform_limits",
]


def factories() -> dict[str, Callable[..., Builtin]]:
    """Makers of the routers that serve whole replicas: their own names, with hyphens.

    Examples
    --------
    >>> factories()["round-robin"]().name
    'round robin'
    """
    kinds: list[Callable[..., Builtin]] = [
        RoundRobin,
        WeightedRandom,
        WeightedRoundRobin,
        LeastRequests,
        LeastTokens,
        CacheAware,
        PowerOfTwo,
        Workload,
        lambda **options: Workload(memory_based=True, **options),
        CapacityProportional,
        LatencyAware,
        HeteroServe,
        Predictive,
    ]
    return {kind().name.lower().replace(" ", "-"): kind for kind in kinds}


def router_of(given: object) -> Router | Builtin:
    """A router as it is, or made: by its name, by its class or by a function.

    Examples
    --------
    >>> router_of("round-robin") == router_of(RoundRobin) == RoundRobin()
    True
    """
    if isinstance(given, str):
        known = factories()
        require(
            given in known,
            f"No router is called '{given}'.",
            resolve=f"use one of {', '.join(known)}.",
        )
        return known[given]()
    # A class has the attributes of its instances.
    made = given
    if callable(given) and (isinstance(given, type) or not isinstance(given, Builtin | Router)):
        made = given()
    if isinstance(made, Builtin | Router):
        return made
    raise ParameterError(
        f"{made!r} is no router.",
        resolve="pass a name, or an object with a name and choose(request, fleet).",
    )
