"""Kinds of machines, and the instances of a model that one can be divided into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetero.catalog import Llm
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import CostModel, CostSettings, PipelineStage
from hetero.costs.replicas import replica as costed_replica
from hetero.deployment import Replica
from hetero.errors import InfeasibleError
from hetero.planners import ground

DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are tried."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Machines that are alike, and the instances that one can be divided into.

    Attributes
    ----------
    machines
        Their numbers in the cluster.
    instances
        One instance of each degree that the model fits, by degree.
    divisions
        Degrees of the instances of a whole machine, largest first.
    """

    machine: Machine
    machines: tuple[int, ...]
    instances: dict[int, Replica]
    divisions: tuple[tuple[int, ...], ...]


def kinds(cluster: Cluster, llm: Llm, settings: CostSettings | None = None) -> tuple[Kind, ...]:
    """Kinds of machines of a cluster with the instances of a model that fit them.

    Raises
    ------
    InfeasibleError
        If the model fits no machine on its own.
    """
    costs = CostModel(cluster, llm, settings or CostSettings())
    found = []
    for numbers in ground.alike(cluster):
        machine = cluster.machines[numbers[0]]
        instances = {}
        for degree in DEGREES:
            if degree > machine.count or not costs.divides(degree):
                continue
            try:
                pipeline = costs.pipeline([PipelineStage(numbers[0], degree, llm.layers)])
            except InfeasibleError:
                continue
            if pipeline.kv_tokens >= 1:
                instances[degree] = costed_replica(pipeline, f"{machine.gpu.name} t={degree}")
        if instances:
            parts = divisions(machine.count, tuple(instances))
            found.append(Kind(machine, numbers, instances, parts))
    if not found:
        raise InfeasibleError(
            f"{llm.name} fits no machine of {cluster.name} on its own.",
            resolve="use larger machines, or a planner that spans machines.",
        )
    return tuple(found)


@lru_cache(maxsize=256)
def divisions(gpus: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to divide a machine into instances that leaves no room for a further one.

    Examples
    --------
    >>> divisions(4, (2, 4))
    ((4,), (2, 2))
    """

    def fill(left: int, largest: int) -> list[tuple[int, ...]]:
        usable = [d for d in sorted(degrees, reverse=True) if d <= min(left, largest)]
        rest = [(d, *more) for d in usable for more in fill(left - d, d)]
        # What a smaller instance could still use must not stay idle.
        return rest if left >= min(degrees) and usable else [()] if left < min(degrees) else []

    return tuple(fill(gpus, max(degrees)))
