"""Latency of a running server, measured by requests: the profiling step of Xiong et al."""

from hetero.profiling.checked import Checked, checked
from hetero.profiling.endpoint import Endpoint, Reply
from hetero.profiling.fitted import Fitted, fitted
from hetero.profiling.rounds import Limits, Profile, profile
from hetero.profiling.settings import Prompts, Setting, between, grid

__all__ = [
    "Checked",
    "Endpoint",
    "Fitted",
    "Limits",
    "Profile",
    "Prompts",
    "Reply",
    "Setting",
    "between",
    "checked",
    "fitted",
    "grid",
    "profile",
]
