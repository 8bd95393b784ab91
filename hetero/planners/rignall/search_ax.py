"""Bayesian optimisation of layouts by Ax, on one of two models of BoTorch.

A client is made anew for every batch and told all trials so far, so that a batch depends on them,
its seed and the release of Ax alone, and a search that was cut off goes on as if it had not been.
As the first batch is drawn at random and told like the rest, Ax never leaves its initialisation
for the model, a step at which it gives a single trial whatever the batch.

Sizes of islands in slots are real numbers to Ax, with their sums as its parameter constraints: of
whole ones it rounds up too, and then gives up, as no candidate meets the sums. Here the GPUs that
a proposal takes of a type are dealt out by the largest remainder.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from ax.adapter.registry import Generators
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.core.data import Data, DataRow
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generators.torch.botorch_modular.surrogate import ModelConfig, SurrogateSpec
from ax.utils.common.logger import set_stderr_log_level
from botorch.exceptions.errors import CandidateGenerationError
from botorch.models import SingleTaskGP
from botorch.models.fully_bayesian import SaasFullyBayesianSingleTaskGP

from hetero.arrays import Flags, Floats
from hetero.errors import SolverError
from hetero.planners.rignall.search import Proposer, Space, alone

RELEASE = f"Ax {version('ax-platform')}"

_ASKS = 8  # times a batch is asked for before it is given up
# Nine tenths of a search are steps from many starts; a third of its time ends as high with fewer
# than Ax's 20 and 1,024. Under constraints each start costs a quadratic program per step too, and
# starts are drawn by a walk whose every step counts: fewer than its 10,000 and 32.
_STARTS = {"num_restarts": 4, "raw_samples": 128}
_CONSTRAINED = {
    "options": {
        "max_optimization_problem_aggregation_size": 1,
        "maxiter": 50,
        "n_burnin": 500,
        "n_thinning": 8,
    },
}


def _strategy(model: type[Any], constrained: bool) -> Any:
    """One step that models from the first trial on, with BoTorch's own fit of the model."""
    sampled = model is SaasFullyBayesianSingleTaskGP
    surrogate = ModelConfig(
        botorch_model_class=model, mll_options={"disable_progbar": True} if sampled else {}
    )
    spec = GeneratorSpec(
        generator_enum=Generators.BOTORCH_MODULAR,
        generator_kwargs={"surrogate_spec": SurrogateSpec(model_configs=[surrogate])},
        generator_gen_kwargs={
            "model_gen_options": {
                "optimizer_kwargs": _STARTS | (_CONSTRAINED if constrained else {})
            }
        },
    )
    node = GenerationNode(name="BoTorch", generator_specs=[spec], should_deduplicate=True)
    return GenerationStrategy(name=model.__name__, nodes=[node])


def _whole(space: Space) -> Flags:
    """Which parameters are whole numbers to Ax."""
    return space.integer & (not space.totals)


def client(space: Space, model: type[Any], seed: int) -> Any:
    """An Ax client for a search space; parameters are called x0, x1 and so on."""
    found = Client(random_seed=seed)
    bounds = zip(space.lower, space.upper, _whole(space), strict=True)
    found.configure_experiment(
        parameters=[
            RangeParameterConfig(
                name=f"x{k}", bounds=(low, high), parameter_type="int" if integer else "float"
            )
            for k, (low, high, integer) in enumerate(bounds)
        ],
        parameter_constraints=[
            " + ".join(f"x{k}" for k in columns) + f" <= {total}" for columns, total in space.totals
        ],
    )
    found.configure_optimization("throughput")
    found.set_generation_strategy(_strategy(model, bool(space.totals)))
    return found


def dealt(space: Space, point: Floats) -> Floats:
    """Whole numbers by the largest remainder, within each sum that bounds them.

    Examples
    --------
    >>> from hetero.planners.rignall.direct import Direct
    >>> dealt(Direct({"H20": 8}, slots=3), np.array([3.6, 1.8, 2.6])).tolist()
    [4.0, 2.0, 2.0]
    """
    found = point.copy()
    for columns, total in space.totals:
        part = np.maximum(point[list(columns)], 0.0)
        down = np.floor(part + 1e-6)
        left = int(min(total, part.sum() + 1e-6) - down.sum())
        down[np.argsort(down - part, kind="stable")[: max(left, 0)]] += 1.0
        found[list(columns)] = down
    return found


def propose(
    model: type[Any],
    space: Space,
    points: Floats,
    values: Floats,
    count: int,
    random: np.random.Generator,
) -> Floats:
    """A batch from a client that knows all trials so far.

    Source: Rignall, section 4.9: Bayesian optimisation with Ax and BoTorch.
    Source: Rignall, section 4.9.1: sparse surrogate model (SAASBO).
    Source: Rignall, section 4.9.2: Gaussian process as surrogate model (SingleTaskGP).
    """
    set_stderr_log_level(logging.ERROR)  # it tells every trial
    names, whole = [f"x{k}" for k in range(len(space.names))], _whole(space)
    for _ in range(_ASKS):
        seed = int(random.integers(2**31))
        with alone(seed):
            asked, rows = client(space, model, seed), []
            experiment = asked._experiment
            for point, value in zip(points, values, strict=True):
                told = (int(x) if w else float(x) for x, w in zip(point, whole, strict=True))
                k = asked.attach_trial(dict(zip(names, told, strict=True)))
                arm = experiment.trials[k].arm.name
                rows.append(DataRow(k, arm, "throughput", "throughput", float(value), np.nan))
            experiment.attach_data(Data(rows))  # one by one, each copies all that came before
            for trial in experiment.trials.values():
                trial.mark_completed()
            try:
                trials = asked.get_next_trials(max_trials=count)
            except CandidateGenerationError:  # no start ended within the constraints
                continue
            finally:
                if "jax" in sys.modules:  # keeps what it compiled for every number of trials
                    sys.modules["jax"].clear_caches()
        if len(trials) == count:
            found = [[float(trials[k][name]) for name in names] for k in sorted(trials)]
            return np.array([dealt(space, point) for point in np.array(found)])
    raise SolverError(
        f"Ax gave no batch of {count} layouts in {_ASKS} requests.",
        resolve="use a smaller batch, or method 'mutation'.",
    )


PROPOSERS: dict[str, Proposer] = {
    "bo": partial(propose, SingleTaskGP),
    "saasbo": partial(propose, SaasFullyBayesianSingleTaskGP),
}
