"""Every design of a small fleet: the reference that searches are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hetero.costs.groups import PHASES, Design, Fleet, Group, design, group
from hetero.errors import InfeasibleError, require
from hetero.planners.thunderserve.evaluate import Evaluator, Value


@dataclass(frozen=True, slots=True)
class Enumeration:
    """The best of all designs.

    Attributes
    ----------
    best, value
        A best design and its value; of equal ones the first in order.
    designs
        Number of different designs, mirror images under machines of a kind counted once.
    """

    best: Design
    value: Value
    designs: int


def partitions(fleet: Fleet) -> Iterator[tuple[Group, ...]]:
    """All ways to divide all GPUs into groups that can each hold the model.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.cost import IN_PAPERS, CostModel
    >>> two = cluster("thunderserve-a40-3090ti-40gbit")
    >>> len(list(partitions(Fleet(CostModel(two, llm("LLaMA-1-30B"), IN_PAPERS)))))
    14
    """
    yield from _divide(fleet, fleet.inventory, None)


def _divide(
    fleet: Fleet, left: tuple[int, ...], most: tuple[int, ...] | None
) -> Iterator[tuple[Group, ...]]:
    """Divisions of what is left into groups that are not above ``most``, in falling order."""
    if not any(left):
        yield ()
        return
    for counts in sorted(product(*(range(n + 1) for n in left)), reverse=True):
        if not any(counts) or (most is not None and counts > most):
            continue
        # The largest of what is left comes first, so it holds a GPU of the first machine left.
        if counts[next(k for k, n in enumerate(left) if n > 0)] == 0:
            return
        one = group(enumerate(counts))
        if fleet.fits(one):
            rest = tuple(a - b for a, b in zip(left, counts, strict=True))
            for others in _divide(fleet, rest, counts):
                yield (one, *others)


def designs(fleet: Fleet, limit: int = 200_000) -> list[Design]:
    """Every design of a fleet, mirror images once."""
    found: dict[Design, None] = {}
    seen = 0
    for groups in partitions(fleet):
        seen += 2 ** len(groups)
        require(
            seen <= limit,
            f"{fleet.model.cluster.name} has more than {limit:,} designs for "
            f"{fleet.model.llm.name}.",
            resolve="enumerate smaller fleets, and search this one.",
        )
        found |= dict.fromkeys(map(fleet.canonical, phase_choices(groups)))
    return list(found)


def phase_choices(groups: Sequence[Group]) -> list[Design]:
    """Designs of some groups with all choices of phases that have both."""
    return [
        design(zip(groups, phases, strict=True))
        for phases in product(PHASES, repeat=len(groups))
        if set(phases) == set(PHASES)
    ]


def enumerate_all(evaluator: Evaluator, *, limit: int = 200_000, jobs: int = 1) -> Enumeration:
    """Evaluate every design.

    Raises
    ------
    InfeasibleError
        If there is none.
    """
    every = designs(evaluator.fleet, limit)
    if not every:
        raise InfeasibleError(
            f"{evaluator.model.cluster.name} cannot hold {evaluator.model.llm.name} twice, once "
            "for each phase.",
            resolve="add GPUs, or use a smaller model or precision.",
        )
    values = evaluator.values(every, jobs)
    k = max(range(len(every)), key=lambda k: values[k].score)
    return Enumeration(every[k], values[k], len(every))
