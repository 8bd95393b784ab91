"""From what planners return to plans of the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import grounded
from hetero.deployment import Deployment
from hetero.planners.baselines.plan import BaselinePlan
from hetero.plans import Group, Plan
from hetero.routers import Builtin


def plan_of(
    planner: str,
    deployment: Deployment,
    pipelines: Sequence[Pipeline],
    router: Builtin,
    routing: str,
    *,
    shares: Mapping[str, float] | None = None,
    bound_rps: float | None = None,
    bound: str = "",
    notes: Sequence[str] = (),
    options: Mapping[str, float | str] | None = None,
) -> Plan:
    """A plan of costed pipelines, replica by replica, played on equal ground.

    Parameters
    ----------
    pipelines
        Configuration of each replica of the deployment, in their order.
    shares
        Share of the requests by replica, where it is fixed.
    """
    played = Deployment(
        deployment.name,
        tuple(
            grounded(one, pipeline)
            for one, pipeline in zip(deployment.replicas, pipelines, strict=True)
        ),
        deployment.links,
        deployment.default_link,
    )
    return Plan(
        planner=planner,
        groups=tuple(
            group_of(one.name, one.role, pipeline, (shares or {}).get(one.name, float("nan")))
            for one, pipeline in zip(played.replicas, pipelines, strict=True)
        ),
        routing=routing,
        usd_per_h=played.usd_per_h,
        bound_rps=bound_rps,
        bound=bound,
        serving=played,
        router=router,
        pipelines=tuple(pipelines),
        notes=tuple(filter(None, notes)) + idle(pipelines),
        options=dict(options or {}),
    )


def group_of(name: str, phase: str, pipeline: Pipeline, share: float) -> Group:
    """The GPUs of a pipeline, stage by stage."""
    machines = pipeline.model.machines
    stages = tuple(
        (machines[s.machine].name, machines[s.machine].gpu.name, s.gpus, s.layers)
        for s in pipeline.stages
    )
    return Group(name, phase, stages, share)


def idle(pipelines: Sequence[Pipeline]) -> tuple[str, ...]:
    """Which GPUs of the cluster no pipeline uses, in one sentence; nothing where all are used."""
    if not pipelines:
        return ()
    machines = pipelines[0].model.machines
    left = [machine.count for machine in machines]
    for pipeline in pipelines:
        for stage in pipeline.stages:
            left[stage.machine] -= stage.gpus
    counts: dict[str, int] = {}
    for machine, free in zip(machines, left, strict=True):
        counts[machine.gpu.name] = counts.get(machine.gpu.name, 0) + free
    unused = [f"{n} x {gpu}" for gpu, n in counts.items() if n]
    return (f"Idle: {', '.join(unused)}.",) if unused else ()


def of_baseline(
    planner: str, plan: BaselinePlan, *, routing: str = "", notes: Sequence[str] = ()
) -> Plan:
    """A baseline's plan with its fixed shares."""
    total = sum(plan.weights.values())
    shares: dict[str, float] = {}
    for (a, b), weight in plan.weights.items():
        for name in {a, b}:
            shares[name] = shares.get(name, 0.0) + weight / total
    return plan_of(
        planner,
        plan.deployment,
        plan.pipelines,
        plan.router(),
        routing or "fixed shares in rotation",
        shares=shares,
        notes=(f"{plan.objective}: {plan.value:.4g} by the planner's own account.", *notes),
    )
