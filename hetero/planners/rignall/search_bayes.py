"""Bayesian optimisation of layouts with BoTorch, on candidates that are layouts to begin with.

The expected improvement is maximised over a pool of real points: draws from the whole space,
mutations of the best trials, and mutations of the best of these. So whole numbers and sums are
met by construction, and nothing is rounded or rejected, where gradients would have to move in a
relaxed space under constraints.

A batch is chosen one by one, each as if those before it had come out at their predicted mean
(kriging believer): the mean then stays what it is, and the covariance loses a rank-one term per
choice, so that a batch costs little more than one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from botorch.fit import fit_fully_bayesian_model_nuts, fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.fully_bayesian import SaasFullyBayesianSingleTaskGP
from gpytorch.kernels import MaternKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.special import erfcx, ndtr

from hetero.arrays import Floats, Ints
from hetero.planners.rignall.search import Proposer, Space, alone, fresh

DRAWS = 512  # candidates from the whole space
AROUND = 512  # candidates around the best trials, and in each further round
BEST = 8  # trials that candidates are mutated from
ROUNDS = 2  # rounds in which the best candidates are mutated again
POOL = 512  # candidates that a batch is chosen from
WARMUP, SAMPLES, THINNING = 64, 64, 8  # of the sampler of the fully Bayesian model
REACHES = (0.03, 0.1, 0.3)  # how far mutations go, as a share of the span
_NOISE = 1e-6  # variance of the standardised objective, which has no noise

Model: TypeAlias = Callable[[Any, Any], Any]


class _Matern(MaternKernel):  # type: ignore[misc]
    """The kernel with roots that are the same on every processor.

    torch takes them from MKL, which rounds as the processor's own estimate of 1 / sqrt(x) does;
    that of AMD and Intel differ, and no setting of MKL picks one. NumPy's are exact.
    """

    def covar_dist(self, x1: Any, x2: Any, square_dist: bool = False, **options: Any) -> Any:
        squared = super().covar_dist(x1, x2, square_dist=True, **options)
        if square_dist:
            return squared
        return torch.from_numpy(np.sqrt(squared.detach().clamp_min(1e-30).numpy()))


def gaussian(x: Any, y: Any) -> Any:
    """The standard model: one Gaussian process with fitted length scales.

    Source: Rignall, section 4.9.2: Gaussian process as surrogate model (SingleTaskGP).
    """
    model = SingleTaskGP(x, y, outcome_transform=None)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def saas(x: Any, y: Any) -> Any:
    """The sparse model: length scales sampled by NUTS, most of them such as not to matter.

    Source: Rignall, section 4.9.1: sparse surrogate model (SAASBO).
    """
    model = SaasFullyBayesianSingleTaskGP(x, y)
    fit_fully_bayesian_model_nuts(
        model,
        warmup_steps=WARMUP,
        num_samples=SAMPLES,
        thinning=THINNING,
        disable_progbar=True,
    )
    kernel: Any = model.covar_module.base_kernel
    kernel.__class__ = _Matern
    return model


def log_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    r"""Logarithm of the expected improvement over ``best``, averaged over models.

    :math:`\sigma\, (\varphi(u) + u\, \Phi(u))` with :math:`u = (\mu - f^*) / \sigma`, in
    logarithms so that far candidates still differ. Shapes (models, candidates) in, (candidates,)
    out.

    Examples
    --------
    >>> at = log_improvement(np.array([[0.0, -40.0, -2e3]]), np.ones((1, 3)), 0.0)
    >>> at.round(4).tolist()
    [-0.9189, -808.2986, -2000016.1207]
    """
    u = (mean - best) / deviation
    near = np.maximum(u, -1.0)
    direct = np.log(np.exp(-0.5 * near**2) / np.sqrt(2 * np.pi) + near * ndtr(near))
    far = np.clip(u, -1e3, -1.0)
    tail = np.log1p(far * np.sqrt(np.pi / 2) * erfcx(-far / np.sqrt(2)))
    # Beyond, the bracket is 1 / u^2 to more digits than the difference of near numbers has.
    tail = np.where(u < -1e3, -2.0 * np.log(np.maximum(np.abs(u), 1.0)), tail)
    log_h = np.where(u > -1.0, direct, -0.5 * u**2 - 0.5 * np.log(2 * np.pi) + tail)
    found = log_h + np.log(deviation)
    return np.asarray(np.logaddexp.reduce(found, axis=0) - np.log(len(found)))


def standardised(values: Floats) -> Floats:
    """Values with mean 0 and deviation 1, those far below the rest drawn up to it.

    A layout that cannot serve the workload has throughput 0; left there, a few such cliffs would
    set the scale of a model that is to tell good layouts apart.
    """
    middle, low = np.quantile(values, [0.5, 0.25])
    drawn = np.maximum(values, low - 1.5 * (middle - low))
    return np.asarray((drawn - drawn.mean()) / (float(drawn.std()) or 1.0))


def _unit(space: Space, points: Floats) -> Any:
    span = np.maximum(space.upper - space.lower, 1e-12)
    return torch.from_numpy((points - space.lower) / span)


def _moments(model: Any, x: Any) -> tuple[Floats, Floats]:
    """Mean and standard deviation per model and candidate, shape (models, candidates)."""
    with torch.no_grad():
        posterior = model.posterior(x)
        mean, variance = posterior.mean[..., 0].numpy(), posterior.variance[..., 0].numpy()
    return np.atleast_2d(mean), np.sqrt(np.maximum(np.atleast_2d(variance), 1e-12))


def _covariance(model: Any, x: Any) -> tuple[Floats, Floats]:
    """Mean (models, candidates) and covariance (models, candidates, candidates)."""
    with torch.no_grad():
        joint = model.posterior(x).distribution
        mean, covariance = joint.mean.numpy(), joint.covariance_matrix.numpy()
    return np.atleast_2d(mean), covariance.reshape(-1, len(x), len(x))


def propose(
    model_of: Model,
    space: Space,
    points: Floats,
    values: Floats,
    count: int,
    random: np.random.Generator,
) -> Floats:
    """A batch of layouts with large expected improvement under a model of all trials."""
    with alone(int(random.integers(2**31))):
        y = torch.from_numpy(standardised(values))[:, None]
        model = model_of(_unit(space, points), y)
        best = float(y.max())
        pool = _pool(space, points, values, model, best, count, random)
        return pool[_choose(*_covariance(model, _unit(space, pool)), best, count)]


def _pool(
    space: Space,
    points: Floats,
    values: Floats,
    model: Any,
    best: float,
    count: int,
    random: np.random.Generator,
) -> Floats:
    """Candidates with the largest expected improvement, none of them tried before."""
    tried = [space.layout(point) for point in points]

    def mutated(parents: Floats) -> Floats:
        chosen = parents[random.integers(len(parents), size=AROUND)]
        parts = np.array_split(chosen, len(REACHES))
        return np.concatenate(
            [space.mutated(p, random, r) for p, r in zip(parts, REACHES, strict=True)]
        )

    top = points[np.argsort(-values, kind="stable")[:BEST]]
    pool = np.concatenate([space.from_unit(random.random((DRAWS, len(space.names)))), mutated(top)])
    for turn in range(ROUNDS + 1):
        new = fresh(space, tried, pool)
        # A space with few layouts runs out of new ones; the batch stays full all the same.
        pool = pool[new] if len(new) >= count else pool
        merit = log_improvement(*_moments(model, _unit(space, pool)), best)
        pool = pool[np.argsort(-merit, kind="stable")[:POOL]]
        if turn < ROUNDS:
            pool = np.concatenate([pool, mutated(pool[: 4 * count])])
    return pool


def _choose(mean: Floats, covariance: Floats, best: float, count: int) -> Ints:
    """Greedy batch under the kriging believer."""
    chosen: list[int] = []
    for _ in range(count):
        variance = np.diagonal(covariance, axis1=1, axis2=2)
        merit = log_improvement(mean, np.sqrt(np.maximum(variance, 1e-12)), best)
        if len(chosen) < len(merit):
            merit[chosen] = -np.inf
        pick = int(np.argmax(merit))
        chosen.append(pick)
        best = max(best, float(mean[:, pick].mean()))
        column = covariance[:, :, pick]
        pivot = np.maximum(column[:, pick], 1e-12) + _NOISE
        covariance = covariance - column[:, :, None] * column[:, None, :] / pivot[:, None, None]
    return np.array(chosen, np.int64)


PROPOSERS: dict[str, Proposer] = {
    "bo": partial(propose, gaussian),
    "saasbo": partial(propose, saas),
}
