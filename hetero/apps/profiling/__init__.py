"""Latency of a running server, measured by requests: the profiling step of Xiong et al."""

from hetero.apps.profiling.checked import Checked, checked
from hetero.apps.profiling.endpoint import Endpoint, Reply
from hetero.apps.profiling.fitted import Fitted, fitted
from hetero.apps.profiling.rounds import Profile, ProfileLimits, profile
from hetero.apps.profiling.settings import Prompts, Setting, between, grid

__all__ = [
    "Checked",
    "Endpoint",
    "Fitted",
    "Profile",
    "ProfileLimits",
    "Prompts",
    "Reply",
    "Setting",
    "between",
    "checked",
    "fitted",
    "grid",
    "profile",
]
