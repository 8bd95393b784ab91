"""All planners of the arena by name."""

from __future__ import annotations

from hetero.apps.portfolio.base import Adapter, Planner
from hetero.apps.portfolio.effort import NORMAL, Effort
from hetero.apps.portfolio.islands import Islands
from hetero.apps.portfolio.layers import Heuristics, LayerPlacement
from hetero.apps.portfolio.phases import HexGen, PhaseSplitting
from hetero.apps.portfolio.replicas import (
    DistServe,
    ExpertRanks,
    Homogeneous,
    Melange,
    TensorParallelSearch,
)
from hetero.errors import ParameterError


def planners(effort: Effort = NORMAL, *, experts: bool = False) -> tuple[Planner, ...]:
    """Every planner, with so much effort each, and those of experts under engines that exist.

    Examples
    --------
    >>> [planner.name for planner in planners()][:3]
    ['tensor-parallel search', 'Mélange', 'vLLM homogeneous']
    """
    found: tuple[Adapter, ...] = (
        TensorParallelSearch(effort),
        Melange(effort),
        Homogeneous(effort),
        DistServe(effort),
        HexGen(effort),
        PhaseSplitting(effort),
        PhaseSplitting(effort, "tabu"),
        Islands(effort, "exact"),
        Islands(effort, "BO"),
        LayerPlacement(effort),
        Heuristics(effort, "separate pipelines"),
        Heuristics(effort, "Swarm"),
        Heuristics(effort, "Petals"),
    )
    return (*found, ExpertRanks(effort)) if experts else found


def planner(name: str, effort: Effort = NORMAL) -> Planner:
    """The planner of a name."""
    for one in planners(effort, experts=True):
        if one.name == name:
            return one
    raise ParameterError(
        f"No planner is called '{name}'.",
        resolve=f"use one of {', '.join(one.name for one in planners())}.",
    )
