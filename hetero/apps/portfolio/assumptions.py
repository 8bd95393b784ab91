r"""The equal ground: one source of step times, one engine and one rule of memory for every plan.

Step times are those of the calibrated roofline (:mod:`hetero.latency.models.roofline`) by way of
the cost model of :mod:`hetero.costs.cost`, which agrees with it to rounding for one stage and adds
pipelines; only :func:`analytic` cases have others. Memory is what the engine's release takes and
leaves (:func:`hetero.memory.engine_room`), for the papers' systems, the engine ``"any"``, 90 % of
each GPU less 2 GiB; the rest after the weights is KV cache. Steps have at most 2,048 tokens, up to
256 requests decode together, and the cache is paged. Engines that exist cut prompts into chunks
beside what decodes; the papers' systems prefill first, and a prompt that is longer than a step goes
through whole.

A pipeline whose stages differ has no single slowest one: it is played with

.. math:: S \max_s T_s(n / S)

over all S stages, so that a plan of mixed stages may be a little slower here than a planner that
takes one stage for the slowest believes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hetero.catalog import serving_engine
from hetero.costs.cost import CostModel, CostSettings, PipelineStage
from hetero.costs.demand import Demand
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import around, engine_of
from hetero.costs.replicas import replica as costed_replica
from hetero.deployment import Deployment, Engine, Replica, Role
from hetero.errors import CatalogError, InfeasibleError
from hetero.latency.models.moe_devices import moe_device
from hetero.latency.resolve import resolved_steps
from hetero.latency.step import Piece, StepModel
from hetero.planners.replicated import StepSource, replicated
from hetero.planners.rignall.model import IslandModel, devices_of
from hetero.planners.thunderserve.budget import part_of
from hetero.question import Question
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace

Floats = NDArray[np.float64]

ENGINE: Final = engine_of(CostSettings())
"""Engine of every replica, where any may run it."""
STEP_TOKENS: Final = (512, 1024, 2048, 4096, 8192)
"""Sizes of steps that are tried where prompts are cut into chunks."""
SMALLEST_ISLAND: Final = 2
"""GPUs of an island at least."""
_RANGES = 12  # ranges of input lengths of islands, as far as the shortest range allows
_SHORTEST = 400  # range [tokens]
_SHORT_S = 20.0


def settings(question: Question) -> CostSettings:
    """Assumptions of the cost model for a case."""
    return CostSettings(
        precision=question.precision,
        kv_precision=question.kv_precision,
        memory_fraction=question.memory_fraction,
        engine=question.engine,
        release=question.release,
        kv_tokens=question.kv_tokens,
        max_step_tokens=question.max_step_tokens or 2048,
        schedule_ahead=question.schedule_ahead,
        prefix_cache=question.prefix_cache,
        speculation=question.speculation,
        held_gib=question.held_gib,
    )


def engine(question: Question) -> Engine:
    """Engine of every replica in a case."""
    return engine_of(settings(question))


@lru_cache(maxsize=16)
def costs(question: Question) -> CostModel:
    """Costs of the model on the machines of the case."""
    return CostModel(question.cluster, question.llm, settings(question))


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


def steps(question: Question, ranks: int = 0) -> StepSource:
    """Step times of replicas of one stage, whose experts so many ranks may share."""
    found = resolved_steps(
        engine=question.engine,
        release=question.release,
        precision=question.precision,
        kv_precision=question.kv_precision,
        trace=question.trace if ranks else None,
        expert_ranks=ranks,
    )
    own = settings(question)
    return lambda gpu, llm, degree: own.speculated(found(gpu, llm, degree))


def in_ranks(question: Question, tensor: Mapping[str, int], ranks: int) -> Deployment:
    """Machines in replicas of so many ranks that share the experts, by their degree.

    Raises
    ------
    InfeasibleError
        If the model leaves one no room for a KV cache.
    """
    return replicated(
        question.cluster,
        question.llm,
        tensor,
        steps=steps(question, ranks),
        engine=engine(question),
        room=costs(question).room,
        weight_precision=question.precision,
        kv_precision=question.kv_precision,
        ranks=ranks,
    )


def requests(question: Question, most: int) -> Trace:
    """At most so many requests of the case, drawn once for all planners."""
    if len(question.trace) <= most:
        return question.trace
    return question.trace.sample(most, stream(question.seed, "planning"))


def short(question: Question, most: int) -> Question:
    """The case with fewer requests and shorter runs, for planners that play what they propose."""
    least_s = min(question.least_s, _SHORT_S)
    return replace(question, trace=requests(question, most), least_s=least_s)


def replica(pipeline: Pipeline, name: str, role: Role = "both") -> Replica:
    """A costed pipeline as it is played in the arena."""
    return grounded(costed_replica(pipeline, name, role), pipeline)


def grounded(made: Replica, pipeline: Pipeline) -> Replica:
    """A planner's replica with the arena's engine and, where its stages differ, step times."""
    made = replace(made, engine=engine_of(pipeline.model.settings))
    if len({(stage.machine, stage.gpus, stage.layers) for stage in pipeline.stages}) == 1:
        return made
    return replace(made, step=_slowest(pipeline, made))


def _slowest(pipeline: Pipeline, made: Replica) -> StepModel:
    """The step model of a pipeline with the slowest of all its stages at every size of step."""
    parts = 1 if made.role == "prefill" else len(pipeline.stages)
    knots = parts * _turns(pipeline)
    times = pipeline.stage_seconds(knots / parts)
    idle = pipeline.stage_seconds([0.0])[:, 0]
    cached = pipeline.stage_seconds([0.0], [1.0])[:, 0] - idle
    pairs = pipeline.stage_seconds([0.0], [0.0], [1.0])[:, 0] - idle
    slowest = Piece(
        knots, parts * times.max(axis=0), np.array([float(cached.max())]), float(pairs.max())
    )
    alone = around(pipeline, replace(made.step, pieces=(slowest,)))
    alone = pipeline.model.settings.speculated(alone)
    return replace(made.step, pieces=(*alone.pieces, *made.step.pieces[1:]))


def _turns(pipeline: Pipeline) -> Floats:
    """New tokens of a stage at which the slowest of all stages may change its slope.

    A stage is the larger of two lines over its new tokens, one for reading weights and one for
    computing; the largest of all lines turns only where two of them cross. In a mixture of experts
    a stage has a line from bend to bend.
    """
    if pipeline.model.llm.experts:
        n = np.unique(np.concatenate([rate.bends for rate in pipeline.rates]))
        turns = [n]
        for a, b in combinations(pipeline.stage_seconds(n), 2):
            k = np.flatnonzero((a - b)[:-1] * (a - b)[1:] < 0)
            share = (a - b)[k] / ((a - b)[k] - (a - b)[k + 1])
            turns.append(n[k] + share * np.diff(n)[k])
        return np.unique(np.concatenate(turns))
    lines = []
    for stage, rate in zip(pipeline.stages, pipeline.rates, strict=True):
        fixed = stage.layers * rate.fixed_s
        lines += [
            (fixed + stage.layers * rate.weights_s, stage.layers * rate.reduce_s),
            (
                fixed + stage.layers * rate.product_s * rate.padding_tokens,
                stage.layers * (rate.product_s + rate.reduce_s),
            ),
        ]
    lines[0] = (lines[0][0] + pipeline.rates[0].step_s, lines[0][1])
    lines[1] = (lines[1][0] + pipeline.rates[0].step_s, lines[1][1])
    lines[-2] = (lines[-2][0] + pipeline.rates[-1].logits_s, lines[-2][1])
    lines[-1] = (lines[-1][0] + pipeline.rates[-1].logits_s, lines[-1][1])
    found = [(a - c) / (d - b) for (a, b), (c, d) in combinations(lines, 2) if abs(d - b) > 1e-15]
    inner = np.unique(np.round([n for n in found if n > 0], 6))
    return np.concatenate([[0.0], inner, [2.0 * max([*inner, 1.0])]])


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
    return replace(question, cluster=part_of(cluster, near))


def analytic(question: Question) -> bool:
    """Whether step times are those of the thesis's latency model for islands (Rignall).

    The engine ``"any"`` stands for the papers' systems, and the mixtures of experts that the thesis
    serves have its model there. All else, and so every plan that an engine can run, is judged by
    the roofline: plans of the two are never ranked against each other.
    """
    return question.engine == "any" and "rignall" in question.llm.in_papers


def island_model(question: Question) -> IslandModel:
    """Latency and throughput of islands of the GPUs of a case, for its requests."""
    longest = int(question.trace.input_tokens.max())
    return IslandModel.of_trace(
        question.trace,
        max(_SHORTEST, -(-longest // _RANGES)),
        model=question.llm,
        devices=devices_of(question.cluster),
    )


def island_inventory(question: Question) -> dict[str, int]:
    """GPUs that the latency model knows, by the name of their device."""
    own = {device.name for device in devices_of(question.cluster)}
    return {
        name: count
        for name, count in question.cluster.gpu_counts.items()
        if count >= SMALLEST_ISLAND and (name in own or _known(name))
    }


def _known(name: str) -> bool:
    try:
        return moe_device(name).name == name
    except CatalogError:
        return False


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
    wanted, gpus = question.precision, question.cluster.gpu_types
    if question.llm.expert_bits and wanted not in ("fp16", "bf16"):
        return f"{question.llm.name} ships with quantised experts and is served as it is: in fp16."
    engine = serving_engine(question.engine)
    if reasons := [why for gpu in gpus.values() if (why := engine.lacks(gpu, wanted))]:
        return f"{'; '.join(reasons)}."
    if wanted == "fp16":
        return None
    lacking = ", ".join(name for name, gpu in gpus.items() if not engine.serves(gpu, wanted))
    if lacking:
        return f"{lacking} of {question.cluster.name} do not compute in {wanted}."
    return None


def unfit_layers(question: Question) -> str | None:
    """Why layers cannot be placed over a network; None if they can."""
    engine = serving_engine(question.engine)
    if not engine.layers_over_network:
        return f"Engines of {engine.title} hold the whole model; layers over a network need 'any'."
    return unfit(question) or unfit_network(question)


def unfit_budget(question: Question) -> str | None:
    """Which machine has no price, where a budget is given; None if all have."""
    if question.budget_usd_per_h is None:
        return None
    for machine in question.cluster.machines:
        if machine.usd_per_h is None:
            return f"A budget needs prices, and machine {machine.name} has none."
    return None


def unfit_network(question: Question) -> str | None:
    """Why machines cannot work together: no network is stated; None if one is."""
    if len(question.cluster.machines) > 1 and question.cluster.network is None:
        return f"{question.cluster.name} states no network between its machines."
    return None


def unfit_split(question: Question) -> str | None:
    """Why prefill and decode are not served apart; None if they may be."""
    return unfit_network(question) if question.split else "Both phases are to be served together."
