"""Machines of one GPU type: every division into replicas, with phases apart or together.

vLLM serves both phases on every replica; DistServe (Zhong et al. 2024) gives each replica one
phase and takes the numbers and parallel configurations of both that maximise goodput, the
largest rate at which the share of requests that meet the targets reaches a goal. Both are found
here by enumeration, each alternative simulated. Replicas of a phase are alike, as both systems
have it, and do not span machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product, starmap

import numpy as np

from hetero.catalog import Llm
from hetero.catalog.engines import Misfit
from hetero.cluster import Cluster
from hetero.costs.cost import CostModel, CostSettings, PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import replica, split
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment, Role
from hetero.errors import InfeasibleError, require
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, planner
from hetero.planners.baselines.plan import BaselinePlan, attained, goodput_rps, plan_of_baseline
from hetero.planners.bound import bound
from hetero.planners.ground import DEGREES
from hetero.plans import Plan
from hetero.question import Question
from hetero.simulator import Slo
from hetero.workload import Trace

_STAGES = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    """A parallel configuration: tensor-parallel degree and number of stages."""

    tensor_parallel: int
    stages: int

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.stages


def colocated(
    cluster: Cluster,
    llm: Llm,
    trace: Trace,
    slo: Slo,
    *,
    goal: float = 0.9,
    rate_rps: float | None = None,
    most_rps: float = np.inf,
    only: Shape | None = None,
    settings: CostSettings | None = None,
    seed: int = 0,
) -> BaselinePlan:
    """vLLM: equal replicas that serve both phases, the division of highest goodput.

    Source: ThunderServe, section 5.1: baseline vLLM.

    Parameters
    ----------
    rate_rps
        Maximise the attainment at this rate instead.
    most_rps
        Rate above which no goodput is looked for.
    only
        Configuration of every replica, where it is given and not to be found.

    Raises
    ------
    InfeasibleError
        If the model fits no replica.

    Examples
    --------
    >>> import numpy as np
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv").sample(1000, np.random.default_rng(0))
    >>> found = colocated(
    ...     cluster("thunderserve-a100-8"), catalog.llm("LLaMA-1-30B"), chats, Slo(e2e_s=40.0)
    ... )
    >>> len(found.deployment.replicas)  # ThunderServe, section 5.2: 4
    4
    """
    costs = _alike(cluster, llm, settings)
    alternatives: list[_Alternative] = []
    for shape in _shapes(costs, only):
        count = costs.machines[0].count // shape.gpus
        places = [(m, n) for m in range(len(costs.machines)) for n in range(count)]
        pipelines = [_pipeline(costs, m, shape) for m, _ in places]
        nodes = [
            replica(one, f"{costs.machines[m].name}/{n}")
            for one, (m, n) in zip(pipelines, places, strict=True)
        ]
        weights = {(node.name, node.name): 1.0 for node in nodes}
        deployment = Deployment("vLLM", tuple(nodes))
        label = f"{len(nodes)} x (TP={shape.tensor_parallel}, PP={shape.stages})"
        alternatives.append((label, deployment, tuple(pipelines), weights))
    return _best("vLLM", alternatives, trace, slo, goal, rate_rps, seed, most_rps)


def distserve(
    cluster: Cluster,
    llm: Llm,
    trace: Trace,
    slo: Slo,
    *,
    goal: float = 0.9,
    rate_rps: float | None = None,
    most_rps: float = np.inf,
    transfer: KvTransfer | None = None,
    only: Shape | None = None,
    settings: CostSettings | None = None,
    seed: int = 0,
) -> BaselinePlan:
    """DistServe: replicas of either phase, numbers and configurations of highest goodput.

    Source: ThunderServe, section 5.1: baseline DistServe.

    Parameters
    ----------
    transfer
        How KV caches travel; by default in 16 bits, as DistServe sends them.
    rate_rps
        Maximise the attainment at this rate instead.
    most_rps
        Rate above which no goodput is looked for.
    only
        Configuration of every replica, where it is given and not to be found.

    Raises
    ------
    InfeasibleError
        If no division leaves room for both phases.
    """
    costs = _alike(cluster, llm, settings)
    transfer = transfer or KvTransfer(bits=16)
    shapes = _shapes(costs, only)
    alternatives = [
        _divided(costs, first, second, counts, transfer)
        for first in shapes
        for second in shapes
        for counts in _splits(costs, first, second)
        if not (_misfit(costs, first, "prefill") or _misfit(costs, second, "decode"))
    ]
    if not alternatives:
        for shape, phase in product(shapes, ("prefill", "decode")):
            if misfit := _misfit(costs, shape, phase):
                raise InfeasibleError(misfit.what, resolve=misfit.resolve)
        raise InfeasibleError(
            f"{llm.name} fits {cluster.name} only once, so its phases cannot be apart.",
            resolve="use more GPUs, or replicas that serve both phases.",
        )
    return _best("DistServe", alternatives, trace, slo, goal, rate_rps, seed, most_rps)


_Alternative = tuple[str, Deployment, tuple[Pipeline, ...], Mapping[tuple[str, str], float]]


def _best(
    system: str,
    alternatives: list[_Alternative],
    trace: Trace,
    slo: Slo,
    goal: float,
    rate_rps: float | None,
    seed: int,
    most_rps: float,
) -> BaselinePlan:
    tried: list[tuple[str, float]] = []
    best, value = alternatives[0], -1.0
    for one in alternatives:
        label, deployment, _, weights = one
        if rate_rps is None:
            start = min(max(value, 0.5), most_rps)
            # Most cannot reach the best so far: one run shows it.
            if value > 0 and attained(deployment, weights, trace, value, slo, seed) < goal:
                tried.append((label, 0.0))
                continue
            limits = {"start_rps": start, "most_rps": most_rps}
            found = goodput_rps(deployment, weights, trace, slo, goal=goal, seed=seed, **limits)
        else:
            found = attained(deployment, weights, trace, rate_rps, slo, seed)
        tried.append((label, found))
        if found > value:
            best, value = one, found
    objective = "goodput [requests/s]" if rate_rps is None else f"attainment at {rate_rps:g} req/s"
    _, deployment, pipelines, weights = best
    return BaselinePlan(system, deployment, pipelines, weights, objective, value, tuple(tried))


def _alike(cluster: Cluster, llm: Llm, settings: CostSettings | None) -> CostModel:
    costs = CostModel(cluster, llm, settings or CostSettings())
    require(
        len({(m.gpu, m.count, m.link) for m in cluster.machines}) <= 1,
        f"{cluster.name} has machines of several kinds; this planner divides equal ones.",
        resolve="choose a cluster of one kind of machine, or a planner for mixed GPUs.",
    )
    return costs


def _shapes(costs: CostModel, only: Shape | None) -> list[Shape]:
    """Configurations that one machine can hold."""
    found = []
    for shape in [only] if only else starmap(Shape, product(DEGREES, _STAGES)):
        if shape.gpus > costs.machines[0].count or not costs.divides(shape.tensor_parallel):
            continue
        if _misfit(costs, shape):
            continue
        try:
            if _pipeline(costs, 0, shape).kv_tokens > 0:
                found.append(shape)
        except InfeasibleError:
            continue
    if not found:
        raise InfeasibleError(
            f"{costs.llm.name} does not fit the GPUs of one machine of {costs.cluster.name}.",
            resolve="use larger machines, or a smaller model.",
        )
    return found


def _misfit(costs: CostModel, shape: Shape, phase: str = "both") -> Misfit | None:
    return costs.misfit([PipelineStage(0, shape.tensor_parallel, 1)] * shape.stages, phase)


def _pipeline(costs: CostModel, machine: int, shape: Shape) -> Pipeline:
    least, over = divmod(costs.llm.layers, shape.stages)
    layers = [least + (k < over) for k in range(shape.stages)]
    return costs.pipeline([PipelineStage(machine, shape.tensor_parallel, held) for held in layers])


def _splits(costs: CostModel, first: Shape, second: Shape) -> Iterator[tuple[int, int]]:
    """Numbers of prefill and decode replicas per machine that leave no room for a further one."""
    count = costs.machines[0].count
    for prefill in range(1, count // first.gpus + 1):
        decode = (count - prefill * first.gpus) // second.gpus
        if decode >= 1 and count - prefill * first.gpus - decode * second.gpus < first.gpus:
            yield prefill, decode


def _divided(
    costs: CostModel, first: Shape, second: Shape, counts: tuple[int, int], transfer: KvTransfer
) -> _Alternative:
    roles: tuple[tuple[Role, Shape, int], ...] = (
        ("prefill", first, counts[0]),
        ("decode", second, counts[1]),
    )
    parts = [
        (f"{machine.name} {role} {n}", _pipeline(costs, m, shape), role)
        for role, shape, count in roles
        for m, machine in enumerate(costs.machines)
        for n in range(count)
    ]
    deployment = split("DistServe", parts, transfer)
    weights = {(a, b): 1.0 for a, b, _ in deployment.links}
    label = " + ".join(
        f"{count} {role} x (TP={shape.tensor_parallel}, PP={shape.stages})"
        for role, shape, count in roles
    )
    return label, deployment, tuple(pipeline for _, pipeline, _ in parts), weights


@planner("vLLM homogeneous")
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Equal replicas on machines of one kind; of a mixed cluster its best kind."""
    return _best_kind(question, plan.name, effort.requests, colocated)


@planner("DistServe", lambda question: ground.unfit(question) or ground.unfit_split(question))
def split_plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Replicas of one phase each on machines of one kind; of a mixed cluster its best kind."""
    return _best_kind(question, split_plan.name, effort.requests, distserve)


def _best_kind(
    question: Question, name: str, requests: int, ask: Callable[..., BaselinePlan]
) -> Plan:
    """The plan of the kind of machines that carries most; goodput by the planner's own account."""
    slo, costs = ground.targets(question), ground.costs(question)
    best: tuple[float, BaselinePlan] | None = None
    reasons: list[InfeasibleError] = []
    kinds = ground.alike(question.cluster)
    for numbers in kinds:
        part = ground.only(question, numbers)
        limit = bound(part)
        try:
            found = ask(
                part.cluster,
                question.llm,
                ground.requests(question, requests),
                slo,
                goal=question.goal,
                most_rps=limit.rps(question.goal) if limit else float("inf"),
                settings=costs.settings,
                seed=question.seed,
            )
        except InfeasibleError as error:
            reasons.append(error)
            continue
        if best is None or found.value > best[0]:
            # The same pipelines as parts of the whole cluster.
            stages = (
                [PipelineStage(numbers[s.machine], s.gpus, s.layers) for s in one.stages]
                for one in found.pipelines
            )
            best = found.value, replace(found, pipelines=tuple(map(costs.pipeline, stages)))
    if best is None:
        raise reasons[0]
    note = ""
    if len(kinds) > 1:
        used = best[1].pipelines[0]
        note = f"The best of {len(kinds)} kinds of machines: {', '.join(used.gpu_counts)}."
    return plan_of_baseline(name, best[1], routing="in turn", notes=(note,))
