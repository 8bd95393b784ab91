"""Equal replicas divided between the phases (ThunderServe Fig. 6 and 14)."""

from __future__ import annotations

from hetero.costs.cost import CostModel
from hetero.costs.groups import Design, Group, design, group
from hetero.errors import ParameterError


def equal_groups(model: CostModel, gpus: int) -> list[Group]:
    """Every machine of a cluster divided into groups of so many GPUs.

    Raises
    ------
    ParameterError
        If a machine cannot be divided that way.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> equal_groups(CostModel(cluster("thunderserve-a5000-8"), llm("LLaMA-1-13B")), 2)
    [((0, 2),), ((0, 2),), ((1, 2),), ((1, 2),)]
    """
    found = []
    for m, machine in enumerate(model.machines):
        if gpus < 1 or machine.count % gpus:
            raise ParameterError(
                f"Machine {machine.name} has {machine.count} GPUs, which groups of {gpus} cannot "
                "share out.",
                resolve=f"choose a size that divides {machine.count}.",
            )
        found += [group([(m, gpus)])] * (machine.count // gpus)
    return found


def divided(groups: list[Group], prefill: int) -> Design:
    """The first ``prefill`` groups prefill, the others decode.

    Raises
    ------
    ParameterError
        If a phase would have none.
    """
    if not 0 < prefill < len(groups):
        raise ParameterError(
            f"{prefill} of {len(groups)} groups for prefill leave a phase with none.",
            resolve=f"choose 1 to {len(groups) - 1}.",
        )
    return design((one, "prefill" if k < prefill else "decode") for k, one in enumerate(groups))
