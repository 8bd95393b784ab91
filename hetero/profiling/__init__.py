"""Latency of a running server, measured by requests: the profiling step of Xiong et al."""

from hetero.profiling.endpoint import Endpoint, Reply
from hetero.profiling.fitted import Fitted, fitted
from hetero.profiling.rounds import Limits, Profile, profile
from hetero.profiling.settings import Prompts, Setting, grid

__all__ = [
    "Endpoint",
    "Fitted",
    "Limits",
    "Profile",
    "Prompts",
    "Reply",
    "Setting",
    "fitted",
    "grid",
    "profile",
]
