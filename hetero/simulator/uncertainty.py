"""What the error of step times does to plans: intervals, rankings that flip, robust choices.

A step model is never exact: its source errs (see :mod:`hetero.latency.calibration.expected`), and a
fit knows its coefficients only so far. Both are drawn here, every plan is evaluated with the same
draws, and what comes out is the distribution of whatever the plans are judged by. Errors of one GPU
type are common to all replicas of that type and to all plans, so that plans on the same GPUs are
compared with the same error, and only differences between types can turn a ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Literal, TypeAlias, get_args

import numpy as np

from hetero.arrays import Floats
from hetero.catalog import Gpu
from hetero.deployment import Deployment, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError, require
from hetero.latency.calibration.expected import (
    StepError,
    error_of,
    expected_error,
    level_named,
)
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from hetero.routers import Builtin, Router
from hetero.simulator import Slo, metrics, simulate
from hetero.streams import stream
from hetero.workload import Trace

Rule: TypeAlias = Literal["nominal", "best mean", "best worst case"]
"""How to choose among plans: by the step times as they are, by the mean over draws, or by the
worst draw, cut at the share that an interval leaves out on that side."""


@dataclass(frozen=True, slots=True)
class JudgedPlan:
    """A plan and how it is judged.

    Attributes
    ----------
    deployment
        Its replicas; their GPU types name the errors that apply.
    evaluate
        Measures of the deployment by name, such as throughput and cost; called with copies of it
        that have other step times, so it must not hold on to the deployment itself.
    """

    deployment: Deployment
    evaluate: Callable[[Deployment], Mapping[str, float]]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Outcomes(Shown):
    """Measures of plans over draws of the step times.

    Attributes
    ----------
    names, measures
        Plans (C) and measures (M).
    nominal
        Shape (C, M): with the step times as they are.
    values
        Shape (C, D, M): with those of each draw.
    """

    names: tuple[str, ...]
    measures: tuple[str, ...]
    nominal: Floats
    values: Floats

    def of(self, name: str, measure: str) -> Floats:
        """Values of one plan and measure; shape (D,)."""
        return np.asarray(self.values[self._plan(name), :, self._measure(measure)])

    def interval(self, name: str, measure: str, share: float = 0.9) -> tuple[float, float]:
        """Central interval that holds ``share`` of the draws."""
        low, high = np.quantile(self.of(name, measure), [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)

    def flips(self, first: str, second: str, measure: str) -> float:
        """Probability that two plans stand in the other order than they nominally do.

        A tie, nominal or drawn, counts as half.
        """
        k = self._measure(measure)
        gap = self.nominal[self._plan(first), k] - self.nominal[self._plan(second), k]
        drawn = self.of(first, measure) - self.of(second, measure)
        return float(np.mean(0.5 * (1.0 - np.sign(gap) * np.sign(drawn))))

    def best(
        self, measure: str, rule: Rule = "best mean", *, largest: bool = True, share: float = 0.9
    ) -> str:
        """The plan that a rule chooses, the largest or the smallest measure being the better."""
        k = self._measure(measure)
        sign = 1.0 if largest else -1.0
        if rule == "nominal":
            score = sign * self.nominal[:, k]
        elif rule == "best mean":
            score = sign * self.values[:, :, k].mean(axis=1)
        elif rule == "best worst case":
            score = np.quantile(sign * self.values[:, :, k], (1 - share) / 2, axis=1)
        else:
            raise ParameterError(
                f"There is no rule '{rule}'.",
                resolve=f"use one of {', '.join(get_args(Rule))}.",
            )
        return self.names[int(np.argmax(score))]

    def wins(self, measure: str, *, largest: bool = True) -> dict[str, float]:
        """Probability of each plan to be the best of all; ties go to the one named first."""
        values = self.values[:, :, self._measure(measure)]
        first = np.argmax(values if largest else -values, axis=0)
        share = np.bincount(first, minlength=len(self.names)) / values.shape[1]
        return dict(zip(self.names, share.tolist(), strict=True))

    def rankings(self, measure: str) -> Table:
        """Probability that each pair of plans changes its order."""
        columns = (
            Column("plan", of=lambda pair: pair[0]),
            Column("against", of=lambda pair: pair[1]),
            Column(
                "probability of the other order",
                of=lambda pair: self.flips(pair[0], pair[1], measure),
            ),
        )
        return Table.of(f"Orders by {measure}", columns, combinations(self.names, 2))

    def table(self) -> Table:
        """Nominal value, mean and 90 % interval of every plan and measure."""
        rows = []
        for i, name in enumerate(self.names):
            for k, measure in enumerate(self.measures):
                low, high = self.interval(name, measure)
                mean = float(self.values[i, :, k].mean())
                rows.append((name, measure, float(self.nominal[i, k]), mean, low, high))
        labels = ("plan", "measure", "nominal", "mean", "5 %", "95 %")
        notes = (f"{self.values.shape[1]} draws of the step times, the same for every plan",)
        return Table("Plans under uncertainty", tuple(map(Column, labels)), tuple(rows), notes)

    def _plan(self, name: str) -> int:
        return _index(self.names, name, "plan")

    def _measure(self, name: str) -> int:
        return _index(self.measures, name, "measure")


def _index(names: Sequence[str], name: str, what: str) -> int:
    require(
        name in names, f"There is no {what} '{name}'.", resolve=f"use one of {', '.join(names)}."
    )
    return names.index(name)


def propagate(
    cases: Mapping[str, JudgedPlan],
    *,
    draws: int = 200,
    seed: int = 0,
    errors: Mapping[str, StepError] | None = None,
    common: float = 0.0,
) -> Outcomes:
    """Evaluate plans with step times drawn from their expected errors.

    Parameters
    ----------
    cases
        Plans by name. A router, an engine or a whole planner may differ between them as well.
    draws
        Number of draws; each plan is evaluated once per draw and once as it is.
    errors
        Expected error per GPU type; by default that of the level of each step model, else
        :func:`~hetero.latency.calibration.expected.expected_error`.
    common
        Correlation of the errors of different GPU types, from 0 to 1: an engine that is slower
        everywhere, say.
    """
    require(bool(cases), "There is no plan to evaluate.", resolve="give at least one.")
    given = errors or {}

    @cache
    def factors(gpu: str, level: str, vendor: str) -> Floats:
        known = error_of(level_named(level), vendor=vendor) if level else expected_error(gpu)
        return draw_factors({gpu: given.get(gpu, known)}, draws, seed=seed, common=common)[gpu]

    nominal = {name: dict(case.evaluate(case.deployment)) for name, case in cases.items()}
    measures = tuple(next(iter(nominal.values())))
    values = np.empty((len(cases), draws, len(measures)))
    for i, (name, case) in enumerate(cases.items()):
        require(
            tuple(nominal[name]) == measures,
            f"Plan {name} is judged by {', '.join(nominal[name])}, another by "
            f"{', '.join(measures)}.",
            resolve="let every plan give the same measures in the same order.",
        )
        for d in range(draws):
            row = {}
            for one in case.deployment.replicas:
                gpu = _gpu(one)
                row[one.name] = factors(gpu.name, one.step.level, gpu.vendor)[d]
            found = case.evaluate(perturbed(case.deployment, row))
            values[i, d] = [found[measure] for measure in measures]
    table = np.array([[nominal[name][m] for m in measures] for name in cases])
    return Outcomes(tuple(cases), measures, table, values)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Choice(Shown):
    """The plan that a rule chooses among several, and what that rests on.

    Attributes
    ----------
    name
        The plan chosen.
    nominal
        The plan that step times as they are would choose.
    measure, largest
        What the plans are compared by, and whether more of it is better.
    """

    name: str
    nominal: str
    rule: Rule
    measure: str
    largest: bool
    outcomes: Outcomes

    def table(self) -> Table:
        """Every plan's nominal value, mean and worst case of the measure, and how often it wins."""
        of, low = self.outcomes, 0.05 if self.largest else 0.95
        wins = of.wins(self.measure, largest=self.largest)
        k = of.measures.index(self.measure)
        rows = []
        for i, name in enumerate(of.names):
            drawn = of.values[i, :, k]
            row = (of.nominal[i, k], drawn.mean(), np.quantile(drawn, low), 100.0 * wins[name])
            rows.append((name, *map(float, row), "chosen" if name == self.name else ""))
        columns = (
            Column("plan"),
            Column("nominal"),
            Column("mean"),
            Column("worst of 95 %"),
            Column("best of all", "%", 3),
            Column(""),
        )
        notes = (
            f"Chosen by {self.rule} of {of.values.shape[1]} draws of the step times, the same for "
            f"every plan; {'largest' if self.largest else 'smallest'} first.",
        )
        return Table(f"{self.measure}: {self.name}", columns, tuple(rows), notes)


def robust(
    cases: Mapping[str, JudgedPlan],
    measure: str,
    rule: Rule = "best worst case",
    *,
    largest: bool = True,
    draws: int = 40,
    seed: int = 0,
    errors: Mapping[str, StepError] | None = None,
) -> Choice:
    """Choose among plans by a rule that knows how far step times err.

    Parameters
    ----------
    cases
        Plans by name, such as the best few that a planner found; :func:`served` judges
        deployments by simulation.
    measure, largest
        What to compare them by, one of the measures of the cases, and whether more is better.
    """
    outcomes = propagate(cases, draws=draws, seed=seed, errors=errors)
    name, nominal = (outcomes.best(measure, by, largest=largest) for by in (rule, "nominal"))
    return Choice(name, nominal, rule, measure, largest, outcomes)


def served(
    router: Builtin | Router, trace: Trace, slo: Slo | None = None, *, seed: int = 0
) -> Callable[[Deployment], Mapping[str, float]]:
    """Judge deployments by serving a trace: throughput, requests within targets, P95 TTFT and cost.

    The measures are ``throughput [tokens/s]``, ``within targets [requests/s]`` (with
    targets), ``P95 TTFT [s]`` and ``cost [$/Mtok]`` (where every GPU has a price).
    """

    def evaluate(deployment: Deployment) -> Mapping[str, float]:
        seen = metrics(simulate(deployment, trace, router, seed=seed), slo)
        found = {
            "throughput [tokens/s]": seen.total_tps,
            "P95 TTFT [s]": seen.percentiles["ttft_s"][95],
        }
        if seen.within_targets_rps is not None:
            found["within targets [requests/s]"] = seen.within_targets_rps
        if seen.usd_per_mtok is not None:
            found["cost [$/Mtok]"] = seen.usd_per_mtok
        return found

    return evaluate


def _gpu(replica: Replica) -> Gpu:
    if replica.gpu is None:
        raise ParameterError(
            f"Replica {replica.name} names no GPU, so that no error of its step times is known.",
            resolve="give the replica its gpu.",
        )
    return replica.gpu


def draw_factors(
    errors: Mapping[str, StepError], draws: int, *, seed: int = 0, common: float = 0.0
) -> dict[str, Floats]:
    """Factors of prefill, decode and front-end times per GPU type; medians are 1.

    The front end is what an engine takes per request, beside its steps. Shape (draws, 3) each.

    Parameters
    ----------
    common
        Correlation between the logarithms of different types; each keeps its own deviation.

    Examples
    --------
    >>> from hetero.latency.calibration.expected import expected_error
    >>> found = draw_factors({"T4": expected_error("T4")}, 1000)["T4"]
    >>> found.shape, bool(0.9 < np.median(found) < 1.1)
    ((1000, 3), True)
    """
    require(
        draws >= 1 and 0.0 <= common <= 1.0,
        f"{draws} draws with a common share of {common} cannot be taken.",
        resolve="give at least one draw, and a correlation from 0 to 1.",
    )
    shared = stream(seed, "step times").standard_normal((draws, 2))
    shared_front = stream(seed, "front ends").standard_normal(draws)
    found = {}
    for name, error in errors.items():
        own = stream(seed, f"step times of {name}").standard_normal((draws, 2))
        z = np.sqrt(common) * shared + np.sqrt(1.0 - common) * own
        rho = error.correlation
        decode = rho * z[:, 0] + np.sqrt(1.0 - rho**2) * z[:, 1]
        front = np.sqrt(common) * shared_front
        front += np.sqrt(1.0 - common) * stream(seed, f"front end of {name}").standard_normal(draws)
        logs = [error.prefill_sd * z[:, 0], error.decode_sd * decode, error.front_sd * front]
        found[name] = np.exp(np.column_stack(logs))
    return found


def perturbed(deployment: Deployment, factors: Mapping[str, Floats]) -> Deployment:
    """The deployment with the step times of each replica times its factors, see `draw_factors`."""
    # Replicas often share a step model: one scaled copy serves them all.
    known: dict[Hashable, StepModel] = {}
    replicas = []
    for replica in deployment.replicas:
        own = [float(factor) for factor in factors[replica.name]]
        key = (id(replica.step), *own)
        if key not in known:
            known[key] = scaled(replica.step, *own)
        replicas.append(replace(replica, step=known[key]))
    return replace(deployment, replicas=tuple(replicas))
