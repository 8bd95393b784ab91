"""A baseline's plan: replicas with fixed shares of the requests, and how good it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.costs.pipeline import Pipeline, table_of_shares
from hetero.deployment import Deployment
from hetero.display import Shown, Table
from hetero.errors import require, require_positive, require_share
from hetero.grouping import summed
from hetero.planners.base import plan_of
from hetero.plans import Plan
from hetero.routers import PairShares
from hetero.simulator import Run, Slo, simulate
from hetero.simulator.metrics import attainment, largest_rate
from hetero.streams import stream
from hetero.workload import Trace


@dataclass(frozen=True, repr=False)
class BaselinePlan(Shown):
    """What a baseline deploys.

    Attributes
    ----------
    system
        Name of the system.
    deployment
        Its replicas.
    pipelines
        Configuration of each replica, in their order.
    weights
        Share of the requests by pair of replicas; (it, it) where one serves both phases.
    objective, value
        What was maximised, in words with its unit, and what was reached.
    tried
        Every alternative that was evaluated, with its value.
    """

    system: str
    deployment: Deployment
    pipelines: tuple[Pipeline, ...]
    weights: Mapping[tuple[str, str], float]
    objective: str
    value: float
    tried: tuple[tuple[str, float], ...] = ()

    def router(self, *, drawn: bool = False) -> PairShares:
        """The plan's shares as a router; ``drawn`` at random instead of in rotation."""
        return PairShares(self.weights, drawn=drawn, name=f"shares of {self.system}")

    @property
    def usd_per_h(self) -> float | None:
        """Price of its GPUs [$/h]."""
        return self.deployment.usd_per_h

    def table(self) -> Table:
        """One row per replica."""
        parts = [
            (node.name, pipeline, node.role)
            for node, pipeline in zip(self.deployment.replicas, self.pipelines, strict=True)
        ]
        note = f"{self.objective}: {self.value:.4g}; {len(self.tried):,} alternatives evaluated"
        return table_of_shares(self.system, "replica", parts, self.weights, note)


def _run(
    deployment: Deployment,
    weights: Mapping[tuple[str, str], float],
    trace: Trace,
    rate_rps: float,
    seed: int,
) -> Run:
    arrivals = trace.poisson(rate_rps, stream(seed, "arrivals"))
    return simulate(deployment, arrivals, PairShares(weights), seed=seed)


def attained(
    deployment: Deployment,
    weights: Mapping[tuple[str, str], float],
    trace: Trace,
    rate_rps: float,
    slo: Slo,
    seed: int = 0,
) -> float:
    """Attainment of a deployment at a rate of Poisson arrivals; the same draws for every one."""
    return attainment(_run(deployment, weights, trace, rate_rps, seed), slo)


def goodput_rps(
    deployment: Deployment,
    weights: Mapping[tuple[str, str], float],
    trace: Trace,
    slo: Slo,
    *,
    goal: float = 0.9,
    start_rps: float = 1.0,
    precision: float = 0.02,
    most_rps: float = np.inf,
    seed: int = 0,
) -> float:
    """Largest rate of Poisson arrivals at which the goal of attainment is met; 0 if at none.

    Every rate plays the same requests with the same gaps, stretched.

    Parameters
    ----------
    start_rps
        Where to look first.
    precision
        Width of the last bracket over its lower end.
    most_rps
        Rate above which none is looked for.
    """
    require_share(goal=goal)
    require_positive(start_rps=start_rps, precision=precision)

    found = largest_rate(
        lambda rate_rps: attained(deployment, weights, trace, rate_rps, slo, seed) >= goal,
        start_rps,
        precision=precision,
        least_rps=1e-3 * start_rps,
        most_rps=most_rps,
    )
    require(
        found < np.inf,
        "The targets are met at any rate.",
        resolve="give a longer trace, or targets that bind.",
    )
    return found


def plan_of_baseline(
    planner: str, plan: BaselinePlan, *, routing: str = "", notes: Sequence[str] = ()
) -> Plan:
    """A baseline's plan with its fixed shares."""
    total = sum(plan.weights.values())
    return plan_of(
        planner,
        plan.deployment,
        plan.pipelines,
        plan.router(),
        routing or "fixed shares in rotation",
        shares=summed((one, w / total) for pair, w in plan.weights.items() for one in set(pair)),
        notes=(f"{plan.objective}: {plan.value:.4g} by the planner's own account.", *notes),
        evidence=plan,
    )
