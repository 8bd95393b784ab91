"""Bayesian optimisation of layouts with Ax as it comes, each batch asked for until it is full.

Ax gives a single trial in the first batch after its initialisation, because it takes the limit of
the exhausted step; asking again for what is missing fills the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

from hetero.arrays import Floats
from hetero.errors import ParameterError
from hetero.planners.rignall.search import Space, alone

_ASKS = 8  # times a batch is asked for before it is given up


def client(space: Space, objective: str, seed: int, *, warm: int = 1) -> Any:
    """An Ax client for a search space; parameters are called x0, x1 and so on."""
    found = Client(random_seed=seed)
    found.configure_experiment(
        parameters=[
            RangeParameterConfig(
                name=f"x{k}",
                bounds=(float(low), float(high)),
                parameter_type="int" if whole else "float",
            )
            for k, (low, high, whole) in enumerate(
                zip(space.lower, space.upper, space.integer, strict=True)
            )
        ],
        parameter_constraints=[
            " + ".join(f"x{k}" for k in columns) + f" <= {total}" for columns, total in space.totals
        ],
    )
    found.configure_optimization(objective)
    found.configure_generation_strategy(
        method="fast",
        initialization_budget=warm,
        initialization_random_seed=seed,
        initialize_with_center=False,
    )
    return found


def parameters(space: Space, point: Floats) -> dict[str, int | float]:
    """A point as Ax writes it."""
    return {
        f"x{k}": round(float(value)) if whole else float(value)
        for k, (value, whole) in enumerate(zip(point, space.integer, strict=True))
    }


def full_batch(found: Any, space: Space, count: int) -> tuple[list[int], Floats]:
    """Numbers and points of a whole batch of new trials."""
    trials: dict[int, Any] = {}
    for _ in range(_ASKS):
        trials |= found.get_next_trials(max_trials=count - len(trials))
        if len(trials) == count:
            order = sorted(trials)
            width = range(len(space.names))
            points = [[float(trials[k][f"x{d}"]) for d in width] for k in order]
            return order, np.array(points)
    raise ParameterError(
        f"Ax gave {len(trials)} of {count} layouts in {_ASKS} requests.",
        resolve="use a smaller batch, or method 'bo'.",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No log of every trial."""
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n[:3] == "ax."]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def propose(
    space: Space, points: Floats, values: Floats, count: int, random: np.random.Generator
) -> Floats:
    """A batch from a client that knows all trials so far.

    Source: Rignall, section 4.9: Bayesian optimisation with Ax and BoTorch.
    """
    seed = int(random.integers(2**31))
    with alone(seed), _quiet():
        found = client(space, "throughput", seed)
        for point, value in zip(points, values, strict=True):
            trial = found.attach_trial(parameters(space, point))
            found.complete_trial(trial, {"throughput": float(value)})
        return full_batch(found, space, count)[1]
