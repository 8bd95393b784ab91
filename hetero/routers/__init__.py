"""Routers: which replica, or pair of replicas, serves a request."""

from hetero.routers.base import (
    DEFER,
    REJECT,
    Builtin,
    Choice,
    FleetState,
    Live,
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
from hetero.routers.predictors import Normal, Oracle, Predictor, Quantile
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
    "uniform_limits",
]
