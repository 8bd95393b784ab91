"""Searches without a model of the objective, on the same budget."""

from __future__ import annotations

import numpy as np

from hetero.arrays import Floats
from hetero.planners.rignall.search import Proposer, Space, fresh

PARENTS = 6  # layouts that survive in the mutation search
_TRIES = 20  # rounds of draws before a batch is filled with layouts tried before


def random(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """Layouts drawn uniformly."""
    return space.from_unit(generator.random((count, len(space.names))))


def sobol(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """The next points of one Sobol sequence, the same for every seed."""
    from scipy.stats import qmc  # takes a second

    sequence = qmc.Sobol(len(space.names), scramble=False)
    sequence.fast_forward(len(points))
    return space.from_unit(sequence.random(count))


def mutation(
    space: Space, points: Floats, values: Floats, count: int, generator: np.random.Generator
) -> Floats:
    """Mutations of the best layouts so far, none of them tried before."""
    best = np.argsort(-values, kind="stable")[:PARENTS]
    tried = [space.layout(point) for point in points]
    found: list[Floats] = []
    for _ in range(_TRIES):
        parents = points[generator.choice(best, size=count)]
        reach = float(generator.choice([0.05, 0.15, 0.4]))
        new = space.mutated(parents, generator, reach)
        for row in fresh(space, tried, new)[: count - len(found)]:
            found.append(new[row])
            tried.append(space.layout(new[row]))
        if len(found) == count:
            return np.array(found)
    rest = space.from_unit(generator.random((count - len(found), len(space.names))))
    return np.array([*found, *rest])


PROPOSERS: dict[str, Proposer] = {"random": random, "sobol": sobol, "mutation": mutation}
