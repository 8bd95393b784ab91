"""All planners by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hetero.errors import ParameterError
from hetero.planners.base import Planner
from hetero.planners.baselines import hexgen, homogeneous, melange, ranks
from hetero.planners.effort import NORMAL, Effort
from hetero.planners.helix import plan as helix
from hetero.planners.rignall import plan as rignall
from hetero.planners.thunderserve import plan as thunderserve
from hetero.planners.xiong import plan as xiong

PLANNERS: Final[tuple[Planner, ...]] = (
    xiong.plan,
    melange.plan,
    homogeneous.plan,
    homogeneous.split_plan,
    hexgen.plan,
    thunderserve.plan,
    thunderserve.tabu,
    rignall.plan,
    rignall.bayes,
    helix.plan,
    helix.separate,
    helix.swarm,
    helix.petals,
)
"""Those of the papers and of earlier systems, in the order that they are asked in."""


def planners(effort: Effort = NORMAL, *, experts: bool = False) -> tuple[Planner, ...]:
    """Every planner, with so much effort each, and those of experts under engines that exist.

    Examples
    --------
    >>> [planner.name for planner in planners()][:3]
    ['tensor-parallel search', 'Mélange', 'vLLM homogeneous']
    """
    chosen = (*PLANNERS, ranks.plan) if experts else PLANNERS
    return tuple(replace(one, effort=effort) for one in chosen)


def planner(name: str, effort: Effort = NORMAL) -> Planner:
    """The planner of a name."""
    for one in planners(effort, experts=True):
        if one.name == name:
            return one
    raise ParameterError(
        f"No planner is called '{name}'.",
        resolve=f"use one of {', '.join(one.name for one in planners())}.",
    )
