"""Xiong et al.: every machine divided by its best tensor-parallel degree, requests by workload."""

from __future__ import annotations

from dataclasses import replace

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.costs.cost import PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica
from hetero.deployment import Deployment, Replica
from hetero.engines import EngineSpec
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, plan_of, planner
from hetero.planners.xiong import tensor_parallel
from hetero.planners.xiong.tensor_parallel import DegreeSearch
from hetero.plans import Plan
from hetero.question import Question
from hetero.routers import Workload
from hetero.streams import stream
from hetero.workload import Trace

NAME = "tensor-parallel search"
_SAMPLE = 200  # requests, as in the paper


@planner(NAME)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """The degree of every machine by estimate, requests by workload (Xiong et al.)."""
    costs, kinds = ground.costs(question), ground.alike(question.cluster)
    asked = (question.cluster, question.llm, question.trace, question.engine)
    try:
        found = search(*asked, seed=question.seed)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"{question.llm.name} fits no machine of {question.cluster.name} on its own.",
            resolve=error.resolve,
        ) from None
    chosen = degrees(question.cluster, found)
    pipelines: list[Pipeline] = []
    nodes: list[Replica] = []
    for numbers in kinds:
        degree = chosen.get(costs.machines[numbers[0]].name)
        if degree is None:
            continue
        for m in numbers:
            for k in range(costs.machines[m].count // degree):
                pipelines.append(costs.pipeline([PipelineStage(m, degree, question.llm.layers)]))
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


def search(
    cluster: Cluster, llm: Llm, trace: Trace, engine: EngineSpec, *, seed: int = 0
) -> DegreeSearch:
    """Degrees of one machine of each kind by Xiong et al., for 200 requests of a trace.

    Raises
    ------
    InfeasibleError
        If the model fits no machine on its own.
    """
    linked = (
        replace(cluster.machines[of[0]], gpu=cluster.machines[of[0]].linked_gpu)
        for of in ground.alike(cluster)
    )
    return tensor_parallel.search(
        Cluster(cluster.name, tuple(linked)),
        llm,
        trace.sample(min(_SAMPLE, len(trace)), stream(seed, "planning")),
        latency=tensor_parallel.padded(engine.source(trace)),
        weight_precision=engine.precision,
        kv_precision=engine.kv_precision,
        room=engine.room,
        require_longest=False,
        divides=lambda gpus: engine.serving.divides(llm, gpus),
    )


def degrees(cluster: Cluster, found: DegreeSearch) -> dict[str, int]:
    """Degree of every machine of a cluster by name; machines that the model does not fit are out.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> fleet, model = cluster.cluster("xiong-v100-a800"), catalog.llm("Llama-3-8B")
    >>> chats = workload.load("azure2023_conv")
    >>> degrees(fleet, search(fleet, model, chats, EngineSpec()))
    {'v100': 1, 'a800': 1}
    """
    best = {one.machine.name: one.tensor_parallel for one in found.best}
    chosen: dict[str, int] = {}
    for numbers in ground.alike(cluster):
        first = cluster.machines[numbers[0]].name
        if first in best:
            chosen |= {cluster.machines[m].name: best[first] for m in numbers}
    return {m.name: chosen[m.name] for m in cluster.machines if m.name in chosen}
