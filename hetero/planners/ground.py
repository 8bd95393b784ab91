"""The equal ground of all planners: what they cost plans with, and which questions they can take.

A plan is costed by :class:`hetero.costs.cost.CostModel` under the engine of the question, with the
requests of the question; only :func:`analytic` questions have other step times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from hetero.catalog import Llm
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import CostModel, CostSettings, PipelineStage
from hetero.costs.demand import Demand
from hetero.costs.replicas import replica as costed_replica
from hetero.deployment import Deployment, Replica
from hetero.engines import replicated
from hetero.errors import InfeasibleError
from hetero.grouping import grouped
from hetero.plans import Plan
from hetero.question import Question
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace

STEP_TOKENS: Final = (512, 1024, 2048, 4096, 8192)
"""Sizes of steps that are tried where prompts are cut into chunks."""
BATCHES: Final = (64, 128, 256, 512, 1024)
"""Requests of a batch that are tried there."""
_SHORT_S = 20.0


@lru_cache(maxsize=16)
def costs(question: Question) -> CostModel:
    """Costs of the model on the machines of the case."""
    return CostModel(
        question.cluster, question.llm, CostSettings(engine=question.engine), question.trace
    )


@lru_cache(maxsize=16)
def demand(question: Question) -> Demand:
    """The case's rate and the kinds of its requests."""
    return Demand.of(question.trace, question.rate_rps)


@lru_cache(maxsize=16)
def targets(question: Question) -> Slo:
    """Targets that planners plan for: those of the case or, where it has none, lenient ones.

    The lenient one: ten times the end-to-end time of a mean request alone on the fastest machine
    that holds the model, or a minute where none does.
    """
    if question.slo != Slo():
        return question.slo
    model, wanted = costs(question), demand(question)
    best = np.inf
    for number, machine in enumerate(model.machines):
        for gpus in (t for t in (1, 2, 4, 8) if t <= machine.count and model.divides(t)):
            if model.most_layers(number, gpus, first=True, last=True) < question.llm.layers:
                continue
            alone = model.pipeline([PipelineStage(number, gpus, question.llm.layers)])
            token_s = float(alone.decode_step_s(1, wanted.context_tokens))
            first_s = float(alone.prefill_latency_s(wanted.mean_input))
            best = min(best, first_s + token_s * wanted.mean_output)
    return Slo(e2e_s=10.0 * best if np.isfinite(best) else 60.0)


def shares_prefixes(question: Question) -> bool:
    """Whether prompts share blocks that the engine finds in its cache."""
    gpus = question.cluster.gpu_types.values()
    return question.trace.prefix_ids is not None and question.engine.limits(*gpus).prefix_cache


def in_ranks(question: Question, tensor: Mapping[str, int], ranks: int) -> Deployment:
    """Machines in replicas of so many ranks that share the experts, by their degree.

    Raises
    ------
    InfeasibleError
        If the model leaves one no room for a KV cache.
    """
    spread = replace(question.engine, expert_ranks=ranks)
    return replicated(question.cluster, question.llm, tensor, spread, trace=question.trace)


def alike(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Numbers of machines with the same GPUs, link and price, kind by kind."""
    found = grouped(
        ((machine.gpu, machine.count, machine.link, machine.usd_per_h), number)
        for number, machine in enumerate(cluster.machines)
    )
    return tuple(map(tuple, found.values()))


def only(question: Question, numbers: tuple[int, ...]) -> Question:
    """The case on some of its machines alone."""
    machines = [question.cluster.machines[number] for number in numbers]
    return replace(question, cluster=question.cluster.part(machines))


def requests(question: Question, most: int) -> Trace:
    """At most so many requests of the case, drawn once for all planners."""
    if len(question.trace) <= most:
        return question.trace
    return question.trace.sample(most, stream(question.seed, "planning"))


def short(question: Question, most: int) -> Question:
    """The case with fewer requests and shorter runs, for planners that play what they propose."""
    least_s = min(question.least_s, _SHORT_S)
    return replace(question, trace=requests(question, most), least_s=least_s)


def within_reach(question: Question) -> Question:
    """The question on the machines that a first token can come from in time.

    Raises
    ------
    InfeasibleError
        If the way to every machine and back takes longer than the target.
    """
    cluster, target_s = question.cluster, question.slo.ttft_s or question.slo.e2e_s
    if target_s is None:
        return question
    near = [m for m in cluster.machines if 2.0 * cluster.reach_s(m.name) < target_s]
    if not near:
        raise InfeasibleError(
            f"The way to every machine of {cluster.name} and back takes longer than {target_s:g} "
            "s, the target of the first token.",
            resolve="relax the target, or place machines near the coordinator.",
        )
    if len(near) == len(cluster.machines):
        return question
    return replace(question, cluster=cluster.part(near))


def analytic(question: Question) -> bool:
    """Whether step times are those of the thesis's latency model for islands (Rignall).

    The engine ``"any"`` stands for the papers' systems, and the mixtures of experts that the thesis
    serves have its model there. All else, and so every plan that an engine can run, is judged by
    the roofline: plans of the two are never ranked against each other.
    """
    return question.engine.name == "any" and "rignall" in question.llm.in_papers


def unfit(question: Question) -> str | None:
    """Why no planner of tensor and pipeline parallelism can take a case; None if they can."""
    if analytic(question):
        return (
            f"{question.llm.name} is a mixture of experts, which the engine 'any' serves by the "
            "analytic model of islands alone: name an engine, such as vllm."
        )
    return unfit_precision(question) or unfit_budget(question)


def unfit_precision(question: Question) -> str | None:
    """Which GPUs do not serve the precision of a case, or not by its engine; None if all do."""
    wanted, gpus = question.engine.precision, question.cluster.gpu_types
    if question.llm.expert_bits and wanted not in ("fp16", "bf16"):
        return f"{question.llm.name} ships with quantised experts and is served as it is: in fp16."
    engine = question.engine.serving
    if reasons := [why for gpu in gpus.values() if (why := engine.lacks(gpu, wanted))]:
        return f"{'; '.join(reasons)}."
    if wanted == "fp16":
        return None
    lacking = ", ".join(name for name, gpu in gpus.items() if not engine.serves(gpu, wanted))
    return f"{lacking} of {question.cluster.name} do not compute in {wanted}." if lacking else None


def unfit_layers(question: Question) -> str | None:
    """Why layers cannot be placed over a network; None if they can."""
    engine = question.engine.serving
    if not engine.layers_over_network:
        return f"Engines of {engine.title} hold the whole model; layers over a network need 'any'."
    return unfit(question) or unfit_network(question)


def unfit_budget(question: Question) -> str | None:
    """Which machine has no price, where a budget is given; None if all have."""
    unpriced = [one.name for one in question.cluster.machines if one.usd_per_h is None]
    if question.budget_usd_per_h is None or not unpriced:
        return None
    return f"A budget needs prices, and machine {unpriced[0]} has none."


def unfit_network(question: Question) -> str | None:
    """Why machines cannot work together: no network is stated; None if one is."""
    if len(question.cluster.machines) > 1 and question.cluster.network is None:
        return f"{question.cluster.name} states no network between its machines."
    return None


def spanned(plan: Plan, question: Question) -> str:
    """A machine that layers over several ones stand on, and that holds the model; else empty."""
    if analytic(question):
        return ""
    made, layers = costs(question), question.llm.layers
    names = [{machine for machine, *_ in group.stages} for group in plan.groups]
    whole = set().union(*names) if plan.deployment is None else set()
    over = whole.union(*(some for some in names if len(some) > 1))
    for k, one in enumerate(made.machines):
        degrees = filter(made.divides, range(1, one.count + 1)) if one.name in over else ()
        if any(made.most_layers(k, n, first=True, last=True) >= layers for n in degrees):
            return one.name
    return ""


def unfit_split(question: Question) -> str | None:
    """Why prefill and decode are not served apart; None if they may be."""
    return unfit_network(question) if question.split else "Phases stay together without `--split`."


DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are tried."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Machines that are alike, and the instances that one can be divided into.

    Attributes
    ----------
    machines
        Their numbers in the cluster.
    instances
        One instance of each degree that the model fits, by degree.
    divisions
        Degrees of the instances of a whole machine, largest first.
    """

    machine: Machine
    machines: tuple[int, ...]
    instances: dict[int, Replica]
    divisions: tuple[tuple[int, ...], ...]


def kinds(cluster: Cluster, llm: Llm, settings: CostSettings | None = None) -> tuple[Kind, ...]:
    """Kinds of machines of a cluster with the instances of a model that fit them.

    Raises
    ------
    InfeasibleError
        If the model fits no machine on its own.
    """
    costs = CostModel(cluster, llm, settings or CostSettings())
    found = []
    for numbers in alike(cluster):
        machine = cluster.machines[numbers[0]]
        instances = {}
        for degree in DEGREES:
            if degree > machine.count or not costs.divides(degree):
                continue
            try:
                pipeline = costs.pipeline([PipelineStage(numbers[0], degree, llm.layers)])
            except InfeasibleError:
                continue
            if pipeline.kv_tokens >= 1:
                instances[degree] = costed_replica(pipeline, f"{machine.gpu.name} t={degree}")
        if instances:
            parts = divisions(machine.count, tuple(instances))
            found.append(Kind(machine, numbers, instances, parts))
    if not found:
        raise InfeasibleError(
            f"{llm.name} fits no machine of {cluster.name} on its own.",
            resolve="use larger machines, or a planner that spans machines.",
        )
    return tuple(found)


@lru_cache(maxsize=256)
def divisions(gpus: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to divide a machine into instances that leaves no room for a further one.

    Examples
    --------
    >>> divisions(4, (2, 4))
    ((4,), (2, 2))
    """

    def fill(left: int, largest: int) -> list[tuple[int, ...]]:
        usable = [d for d in sorted(degrees, reverse=True) if d <= min(left, largest)]
        rest = [(d, *more) for d in usable for more in fill(left - d, d)]
        # What a smaller instance could still use must not stay idle.
        return rest if left >= min(degrees) and usable else [()] if left < min(degrees) else []

    return tuple(fill(gpus, max(degrees)))
