"""Routers by the names that command lines and files give them."""

from __future__ import annotations

from collections.abc import Callable

from hetero import routers
from hetero.errors import ParameterError, require
from hetero.routers.base import Builtin, Router


def factories() -> dict[str, Callable[..., Builtin]]:
    """Makers of the routers that serve whole replicas: their own names, with hyphens.

    Examples
    --------
    >>> factories()["round-robin"]().name
    'round robin'
    """
    kinds: list[Callable[..., Builtin]] = [
        routers.RoundRobin,
        routers.WeightedRandom,
        routers.WeightedRoundRobin,
        routers.LeastRequests,
        routers.LeastTokens,
        routers.CacheAware,
        routers.PowerOfTwo,
        routers.Workload,
        lambda **options: routers.Workload(memory_based=True, **options),
        routers.CapacityProportional,
        routers.LatencyAware,
        routers.HeteroServe,
        routers.Predictive,
    ]
    return {kind().name.lower().replace(" ", "-"): kind for kind in kinds}


def router_of(given: object) -> Router | Builtin:
    """A router as it is, or made: by its name, by its class or by a function.

    Examples
    --------
    >>> router_of("round-robin") == router_of(routers.RoundRobin) == routers.RoundRobin()
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
