"""Helix's planner as printed, its heuristics, and our own, which proves how good it is.

Read in this order: :mod:`planner` (our planner and what it returns), :mod:`bound` (why nothing
better can be), :mod:`blocks` (where its placements come from), :mod:`milp`
(Helix, section 4.4), :mod:`heuristics`.
"""

from hetero.planners.helix.planner import (
    FlowPlan,
    PlacementCandidate,
    PlannerStep,
    place,
    search,
    with_partial_inference,
)
from hetero.planners.helix.regions import PlacementEffort

__all__ = [
    "FlowPlan",
    "PlacementCandidate",
    "PlacementEffort",
    "PlannerStep",
    "place",
    "search",
    "with_partial_inference",
]
