"""Routers by the names that command lines and files give them."""

from __future__ import annotations

from collections.abc import Callable

from hetero import routers
from hetero.routers.base import Builtin


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
