"""Whole replicas inside machines: tensor-parallel search, Mélange, and equal machines alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from hetero.apps.portfolio.base import Adapter
from hetero.apps.portfolio.bound import bound
from hetero.apps.portfolio.build import of_baseline, plan_of
from hetero.apps.portfolio.score import Rank, score
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica
from hetero.deployment import Deployment, Replica
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.baselines import melange
from hetero.planners.baselines.homogeneous import colocated, distserve
from hetero.planners.baselines.plan import BaselinePlan
from hetero.planners.xiong import tensor_parallel
from hetero.plans import Group, Plan
from hetero.question import Question
from hetero.routers import Predictive, Workload

Equal: TypeAlias = Callable[..., BaselinePlan]


@dataclass(frozen=True)
class TensorParallelSearch(Adapter):
    """The degree of every machine by estimate, requests by workload (Xiong et al.)."""

    @property
    def name(self) -> str:
        """Its name."""
        return "tensor-parallel search"

    def _plan(self, question: Question) -> Plan:
        costs = ground.costs(question)
        kinds = alike(question.cluster)
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
            self.name,
            Deployment(f"{self.name} on {question.cluster.name}", tuple(nodes)),
            pipelines,
            Workload(theta=2.0),
            "least of the largest workloads (Xiong et al.), theta 2",
            notes=(f"Estimate of Algorithm 1: {estimate:,.0f} tokens/s.",),
        )


@dataclass(frozen=True)
class Melange(Adapter):
    """Instances of many sizes for requests of many sizes, by integer program (Mélange)."""

    @property
    def name(self) -> str:
        """Its name."""
        return "Mélange"

    def _within_budget(self, question: Question) -> Plan:
        # The program itself chooses the machines that the budget pays for.
        return self._plan(question)

    def _plan(self, question: Question) -> Plan:
        costs = ground.costs(question)
        found = melange.fastest(
            question.cluster,
            question.llm,
            question.trace,
            slo=question.slo,
            usd_per_h=question.budget_usd_per_h,
            settings=costs.settings,
        )
        numbers = {machine.name: k for k, machine in enumerate(costs.machines)}
        pipelines = [
            costs.pipeline([PipelineStage(numbers[machine], degree, question.llm.layers)])
            for machine, degree, _ in found.places()
        ]
        nodes = [
            compared_replica(one, label)
            for one, (_, _, label) in zip(pipelines, found.places(), strict=True)
        ]
        if not nodes:
            raise InfeasibleError(
                f"{question.cluster.name} has no machine that serves {question.llm.name} within "
                "the targets and the budget.",
                resolve="relax the targets, raise the budget, or offer larger GPUs.",
            )
        return plan_of(
            self.name,
            Deployment(f"{self.name} on {question.cluster.name}", tuple(nodes)),
            pipelines,
            found.router(),
            "fixed shares by length of the input",
            bound_rps=found.bound,
            bound="largest rate of its integer program at 85 % load",
            notes=(f"{found.rate_rps:.4g} requests/s by the program, {found.status}.",),
        )


@dataclass(frozen=True)
class Homogeneous(Adapter):
    """Equal replicas on machines of one kind; of a mixed cluster its best kind."""

    @property
    def name(self) -> str:
        """Its name."""
        return "vLLM homogeneous"

    def _plan(self, question: Question) -> Plan:
        return _best_kind(question, self.name, self.effort.requests, colocated)


@dataclass(frozen=True)
class DistServe(Adapter):
    """Replicas of one phase each on machines of one kind; of a mixed cluster its best kind."""

    @property
    def name(self) -> str:
        """Its name."""
        return "DistServe"

    def unfit(self, question: Question) -> str | None:
        """No network, no KV cache on its way."""
        return ground.unfit(question) or ground.unfit_split(question)

    def _plan(self, question: Question) -> Plan:
        return _best_kind(question, self.name, self.effort.requests, distserve)


@dataclass(frozen=True)
class ExpertRanks(Adapter):
    """One replica per machine, its experts spread by as many ranks as are best for its kind."""

    @property
    def name(self) -> str:
        """Its name."""
        return "expert parallelism"

    def unfit(self, question: Question) -> str | None:
        """Dense models have no experts to spread, and the papers' systems no ranks."""
        if not question.llm.experts or question.engine.name == "any":
            return "Ranks spread the experts of a mixture, under an engine that exists."
        return ground.unfit(question)

    def _plan(self, question: Question) -> Plan:
        nodes: list[Replica] = []
        groups: list[Group] = []
        for numbers in alike(question.cluster):
            part, count = only(question, numbers), question.cluster.machines[numbers[0]].count
            found = (_spread(part, d, self.name) for d in range(2, count + 1) if count % d == 0)
            scored = [(Rank(score(one, part, seeds=(part.seed,))), one) for one in found if one]
            if scored:
                _, best = max(scored, key=lambda one: one[0])
                nodes += best.deployment.replicas if best.deployment else ()
                groups += best.groups
        if not nodes:
            raise InfeasibleError(
                f"{question.llm.name} fits no machine of {question.cluster.name} in ranks.",
                resolve="offer larger machines, or plan with tensor parallelism.",
            )
        made = Deployment(f"{self.name} on {question.cluster.name}", tuple(nodes))
        return Plan(self.name, tuple(groups), made, Predictive(), "hetero", made.usd_per_h)


def _spread(question: Question, ranks: int, name: str) -> Plan | None:
    """Every machine as one replica of so many ranks; None where the model does not fit."""
    costs, machines = ground.costs(question), question.cluster.machines
    tensor = machines[0].count // ranks
    if not costs.divides(tensor) or machines[0].count > question.llm.experts:
        return None
    try:
        found = ground.in_ranks(question, {one.name: tensor for one in machines}, ranks)
    except InfeasibleError:
        return None
    nodes = [replace(one, step=replace(one.step, level="")) for one in found.replicas]
    words = f"TP {tensor} x DP {ranks}, EP {tensor * ranks}"
    stages = [((m.name, m.gpu.name, m.count, question.llm.layers),) for m in machines]
    groups = [
        Group(one.name, "both", at, words=words, tensor=tensor)
        for one, at in zip(nodes, stages, strict=True)
    ]
    return Plan(name, tuple(groups), Deployment(name, tuple(nodes)), Predictive(), "hetero", None)


def alike(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Numbers of machines with the same GPUs, link and price, kind by kind."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, machine in enumerate(cluster.machines):
        key = (machine.gpu, machine.count, machine.link, machine.usd_per_h)
        found.setdefault(key, []).append(number)
    return tuple(tuple(numbers) for numbers in found.values())


def only(question: Question, numbers: tuple[int, ...]) -> Question:
    """The case on some of its machines alone."""
    machines = [question.cluster.machines[number] for number in numbers]
    return replace(question, cluster=question.cluster.part(machines))


def _best_kind(question: Question, name: str, requests: int, ask: Equal) -> Plan:
    """The plan of the kind of machines that carries most; goodput by the planner's own account."""
    slo = ground.targets(question)
    costs = ground.costs(question)
    best: tuple[float, BaselinePlan] | None = None
    reasons: list[InfeasibleError] = []
    kinds = alike(question.cluster)
    for numbers in kinds:
        part = only(question, numbers)
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
    return of_baseline(name, best[1], routing="in turn", notes=(note,))


def _linked(machine: Machine) -> Machine:
    """The machine with its link among the figures of its GPU, where estimates look for it."""
    return replace(machine, gpu=machine.linked_gpu)
