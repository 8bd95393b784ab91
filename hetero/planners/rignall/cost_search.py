"""Throughput against cost by Ax's multi-objective search; the exact front is in ``cost``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.planners.rignall.assignment import gpus_used
from hetero.planners.rignall.cost import Prices
from hetero.planners.rignall.search import Floats, Objective, Space
from hetero.streams import stream


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tradeoff(Shown):
    """Layouts tried by a search for both objectives.

    Attributes
    ----------
    points
        Shape (trials, parameters).
    throughput_rps, usd_per_h
        Shape (trials,); what each layout carries [requests/s] and costs [$/h].
    """

    points: Floats
    throughput_rps: Floats
    usd_per_h: Floats

    @property
    def front(self) -> list[int]:
        """Trials that no other beats in one objective without losing in the other, by cost."""
        order = np.lexsort((-self.throughput_rps, self.usd_per_h))
        found: list[int] = []
        best = 0.0
        for k in order:
            if self.throughput_rps[k] > best:
                best = float(self.throughput_rps[k])
                found.append(int(k))
        return found

    def table(self) -> Table:
        """One row per layout of the front."""
        return Table(
            f"Front of {len(self.points)} layouts",
            (Column("trial"), Column("cost", "$/h"), Column("throughput", "requests/s")),
            tuple((k, float(self.usd_per_h[k]), float(self.throughput_rps[k])) for k in self.front),
        )


def tradeoff(
    space: Space,
    objective: Objective,
    prices: Prices,
    *,
    batch: int = 8,
    iterations: int = 5,
    seed: int = 0,
) -> Tradeoff:
    """Search for layouts that carry more or cost less (Ax, expected hypervolume improvement).

    The first batch is drawn at random. GPUs that a layout leaves unused cost nothing, so the
    direct space is the one to search: the divider uses every GPU.

    Raises
    ------
    ParameterError
        If batch or iterations are below 1, or Ax is not installed.
    """
    if batch < 1 or iterations < 1:
        raise ParameterError(
            f"{iterations} batches of {batch} layouts are no search.", resolve="give 1 or more."
        )
    try:
        from hetero.planners.rignall.search_ax import alone, client, full_batch, parameters
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"A search for both objectives needs {error.name}, which is not installed.",
            resolve="install the extra: pip install 'hetero[ax]', or use cost.front.",
        ) from error
    random = stream(seed, "tradeoff")
    points: list[Floats] = []
    values: list[tuple[float, float]] = []
    with alone(seed):
        found = client(space, "throughput, -cost", seed)
        for k in range(iterations):
            if k == 0:
                new = space.from_unit(random.random((batch, len(space.names))))
                trials = [found.attach_trial(parameters(space, point)) for point in new]
            else:
                trials, new = full_batch(found, space, batch)
            for trial, point in zip(trials, new, strict=True):
                layout = space.layout(point)
                cost = sum(prices[gpu] * n for gpu, n in gpus_used(layout).items())
                values.append((objective(layout), float(cost)))
                points.append(point)
                found.complete_trial(trial, {"throughput": values[-1][0], "cost": values[-1][1]})
    both = np.array(values)
    return Tradeoff(np.array(points), both[:, 0], both[:, 1])
