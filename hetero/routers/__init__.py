"""Routers: which replica, or pair of replicas, serves a request."""

from hetero.routers.base import (
    DEFER,
    REJECT,
    Builtin,
    CacheAware,
    Choice,
    FleetState,
    LeastRequests,
    LeastTokens,
    Live,
    PowerOfTwo,
    Predictive,
    Request,
    RoundRobin,
    Router,
    SingleInstance,
    WeightedRandom,
    WeightedRoundRobin,
)
from hetero.routers.heteroserve import (
    CapacityProportional,
    HeteroServe,
    LatencyAware,
    LengthAware,
    batch_limits,
    uniform_limits,
)
from hetero.routers.pairs import PairShares
from hetero.routers.predictors import Normal, Oracle, Predictor, Quantile
from hetero.routers.ranges import RangeShares
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
