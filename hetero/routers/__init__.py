"""Routers: which replica, or pair of replicas, serves a request."""

from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches

import numpy as np

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
    "fresh",
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

    ``algorithm-2`` and ``xiong`` are names of :class:`Workload`, too.

    Examples
    --------
    >>> router_of("round-robin") == router_of(RoundRobin) == RoundRobin()
    True
    """
    if isinstance(given, str):
        known = factories()
        known |= dict.fromkeys(("algorithm-2", "xiong"), known["workload"])
        name = given.lower().replace(" ", "-").replace("_", "-")
        near = f"use one of {', '.join(known)}."
        for one in get_close_matches(name, known, n=1):
            near = f"did you mean '{one}'? {near}"
        require(name in known, f"No router is called '{given}'.", resolve=near)
        return known[name]()
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


def fresh(router: Router | Builtin) -> Router | Builtin:
    """A copy that remembers nothing of other runs: lists and the like of its class are its own.

    Examples
    --------
    >>> class Listing:
    ...     name, seen = "listing", []
    >>> fresh(Listing()).seen is Listing.seen
    False
    """
    made = deepcopy(router)
    for name in dir(type(made)) if hasattr(made, "__dict__") else ():
        shared = getattr(type(made), name)
        if isinstance(shared, list | dict | set | np.ndarray) and not name.startswith("__"):
            made.__dict__.setdefault(name, deepcopy(shared))
    return made
