"""Xiong et al.: every machine divided by its best tensor-parallel degree, requests by workload."""

from __future__ import annotations

from dataclasses import replace

from hetero.cluster import Cluster, Machine
from hetero.costs.cost import PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica
from hetero.deployment import Deployment, Replica
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.base import plan_of, planner
from hetero.planners.effort import NORMAL, Effort
from hetero.planners.xiong import tensor_parallel
from hetero.plans import Plan
from hetero.question import Question
from hetero.routers import Workload

NAME = "tensor-parallel search"


@planner(NAME)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """The degree of every machine by estimate, requests by workload (Xiong et al.)."""
    costs = ground.costs(question)
    kinds = ground.alike(question.cluster)
    one_each = Cluster(
        question.cluster.name, tuple(_linked(question.cluster.machines[of[0]]) for of in kinds)
    )
    try:
        found = tensor_parallel.search(
            one_each,
            question.llm,
            ground.requests(question, 200),
            latency=tensor_parallel.padded(question.engine.source(question.trace)),
            weight_precision=question.engine.precision,
            room=question.engine.room,
            require_longest=False,
            divides=costs.divides,
        )
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{question.llm.name} fits no machine of {question.cluster.name} on its own.",
            resolve=error.resolve,
        ) from None
    degrees = {degree.machine.name: degree.tensor_parallel for degree in found.best}
    pipelines: list[Pipeline] = []
    nodes: list[Replica] = []
    for numbers in kinds:
        degree = degrees.get(costs.machines[numbers[0]].name)
        if degree is None:
            continue
        for m in numbers:
            for k in range(costs.machines[m].count // degree):
                stage = PipelineStage(m, degree, question.llm.layers)
                pipelines.append(costs.pipeline([stage]))
                nodes.append(compared_replica(pipelines[-1], f"{costs.machines[m].name}/{k}"))
    estimate = sum(
        len(numbers) * one.system_tps
        for numbers in kinds
        for one in found.best
        if one.machine.name == costs.machines[numbers[0]].name
    )
    return plan_of(
        NAME,
        Deployment(f"{NAME} on {question.cluster.name}", tuple(nodes)),
        pipelines,
        Workload(theta=2.0),
        "least of the largest workloads (Xiong et al.), theta 2",
        notes=(f"Estimate of Algorithm 1: {estimate:,.0f} tokens/s.",),
        evidence=found,
    )


def _linked(machine: Machine) -> Machine:
    """The machine with its link among the figures of its GPU, where estimates look for it."""
    return replace(machine, gpu=machine.linked_gpu)
