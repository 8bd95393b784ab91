"""Costed pipelines as replicas of a deployment, so that plans are simulated like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from hetero.arrays import Floats
from hetero.costs.pipeline import Pipeline
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment, Engine, Replica, Role
from hetero.latency.overheads import with_overheads
from hetero.latency.step import Piece, StepModel

_PROMPTS = (256.0, 2048.0)  # between these the lag of a pipeline is a straight line


@lru_cache(maxsize=4096)  # searches put the same pipelines into many deployments
def step_model(pipeline: Pipeline, role: Role = "both") -> StepModel:
    """The step model of a pipeline that serves a phase: of one stage its table, where it has one.

    A replica that only prefills is busy as long as its slowest stage, which is chosen at a prompt
    of 1,024 tokens; what the other stages take is its :func:`lag`. Else ``S`` microbatches rotate:
    the larger of one rotation and ``S`` times the slowest stage. That is exact for decode, unless
    another stage becomes the slowest as batch and contexts change; a prompt is then cut into ``S``
    chunks, which makes a lone first token early by less than the pipeline takes to fill.
    """
    table = pipeline.model.measured(pipeline.machines[0], pipeline.stages[0].gpus)
    if table and len(pipeline.stages) == 1:
        return _drafting(pipeline, table.step)
    parts = 1 if role == "prefill" else len(pipeline.stages)
    knots = _knots(pipeline, parts)
    times = pipeline.stage_seconds(knots / parts)
    idle = pipeline.stage_seconds([0.0])[:, 0]
    cached = pipeline.stage_seconds([0.0], [1.0])[:, 0] - idle
    pairs = pipeline.stage_seconds([0.0], [0.0], [1.0])[:, 0] - idle
    slowest = _slowest(pipeline, role)
    pieces = [
        Piece(
            knots,
            parts * times[slowest],
            np.array([float(cached[slowest])]),
            float(pairs[slowest]),
        )
    ]
    if parts > 1:
        fixed, per_token = pipeline.hops
        rotation = times.sum(axis=0) + fixed + pipeline.return_s + per_token * knots / parts
        rates = np.array([cached.sum() / parts])
        pieces.append(Piece(knots, rotation, rates, float(pairs.sum() / parts)))
    found = StepModel(
        tuple(pieces),
        source=f"roofline of {pipeline.model.llm.name} on {pipeline.label}",
        provenance="derived",
    )
    return _drafting(pipeline, around(pipeline, found))


def _drafting(pipeline: Pipeline, step: StepModel) -> StepModel:
    gpus = (machine.gpu for machine in pipeline.machines)
    return pipeline.model.settings.engine.drafting(step, *gpus)


def around(pipeline: Pipeline, step: StepModel) -> StepModel:
    """A step model of a pipeline's terms with what its engine takes per request.

    What it takes per step is a term of its first stage.
    """
    model = pipeline.model
    overheads = model.overheads(pipeline.machines[0], len(pipeline.stages) > 1)
    if overheads is None:
        return step
    return with_overheads(step, replace(overheads, step_s=0.0, worker_s=0.0), model.llm)


def _slowest(pipeline: Pipeline, role: Role) -> int:
    if role != "decode":
        return int(pipeline.stage_seconds(1024.0, 0.0, 1024.0**2 / 2)[:, 0].argmax())
    batch = max(1, pipeline.decode_batch(1024.0)) / len(pipeline.stages)
    return int(pipeline.stage_seconds(batch, 1024.0 * batch)[:, 0].argmax())


def _knots(pipeline: Pipeline, parts: int) -> Floats:
    """New tokens at which a stage turns from reading weights to computing."""
    bends = np.concatenate([parts * rate.bends for rate in pipeline.rates])
    inner = sorted({float(bend) for bend in bends if bend > 0})
    return np.array([0.0, *inner, 2.0 * inner[-1] if inner else 1.0])


def lag(pipeline: Pipeline) -> tuple[float, float]:
    """Latency of a prefill beyond its occupancy, as time [s] and time per token [s].

    A straight line through prompts of 256 and 2,048 tokens; 0 for one stage.
    """
    step, prompts = step_model(pipeline, "prefill"), np.array(_PROMPTS)
    busy = np.array([float(step.prefill_seconds([n])) for n in prompts])
    low, high = np.maximum(pipeline.prefill_latency_s(prompts) - busy, 0.0)
    if len(pipeline.stages) == 1:
        return 0.0, 0.0
    slope = max(0.0, float(high - low) / float(prompts[1] - prompts[0]))
    return max(0.0, float(low) - slope * float(prompts[0])), slope


def replica(
    pipeline: Pipeline, name: str, role: Role = "both", *, engine: Engine | None = None
) -> Replica:
    """A pipeline as a replica that serves a phase, by default under its engine.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.cost import CostModel, PipelineStage
    >>> model = CostModel(cluster("thunderserve-a40-3090ti-40gbit"), llm("LLaMA-1-30B"))
    >>> stages = [PipelineStage(0, 2, 36), PipelineStage(1, 2, 24)]
    >>> mixed = replica(model.pipeline(stages), "mixed", "prefill")
    >>> mixed.gpus, round(mixed.usd_per_h, 2), mixed.lag_s_per_token > 0
    (4, 1.42, True)
    """
    spec, ends = pipeline.model.settings.engine, (pipeline.stages[0], pipeline.stages[-1])
    fixed, per_token = lag(pipeline) if role == "prefill" else (0.0, 0.0)
    parts = zip(pipeline.stages, pipeline.machines, pipeline.rates, strict=True)
    errors = [
        stage.gpus * spec.room_error_gib(one.gpu) * 2**30 / (stage.layers * rates.kv_layer_bytes)
        for stage, one, rates in parts
    ]
    return Replica(
        name=name,
        step=step_model(pipeline, role),
        kv_tokens=pipeline.kv_tokens,
        kv_bytes_per_token=float(pipeline.model.llm.kv_bytes_per_token(spec.kv_precision)),
        engine=engine or pipeline.engine,
        role=role,
        kv_error_tokens=max(errors),
        gpu=pipeline.gpu,
        gpus=pipeline.gpus,
        usd_per_h=pipeline.usd_per_h,
        lag_s=fixed,
        lag_s_per_token=per_token,
        network_s=sum(pipeline.model.reach_s(one.machine) for one in ends) / 2.0,
    )


def compared_replica(pipeline: Pipeline, name: str, role: Role = "both") -> Replica:
    """A pipeline as a replica that plans are compared by, see :func:`grounded`."""
    return grounded(replica(pipeline, name, role), pipeline)


def grounded(made: Replica, pipeline: Pipeline) -> Replica:
    r"""A replica of a pipeline as plans are compared by.

    It has its engine's own limits and, where its stages differ, no single slowest one: it takes

    .. math:: S \max_s T_s(n / S)

    over all S stages, so that a plan of mixed stages may be a little slower than a planner that
    takes one stage for the slowest believes.
    """
    made = replace(made, engine=pipeline.engine)
    if len({(stage.machine, stage.gpus, stage.layers) for stage in pipeline.stages}) == 1:
        return made
    return replace(made, step=_slowest_of_all(pipeline, made))


def _slowest_of_all(pipeline: Pipeline, made: Replica) -> StepModel:
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
    alone = _drafting(pipeline, alone)
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
            turns.append(n[k] + ((a - b)[k] / ((a - b)[k] - (a - b)[k + 1])) * np.diff(n)[k])
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


def split(
    name: str,
    parts: Sequence[tuple[str, Pipeline, Role]],
    transfer: KvTransfer,
    *,
    engine: Engine | None = None,
) -> Deployment:
    """Pipelines that prefill and pipelines that decode, with a KV link between each two of them."""
    nodes = tuple(replica(pipeline, label, role, engine=engine) for label, pipeline, role in parts)
    links = tuple(
        (a, b, transfer.link(source, target))
        for a, source, first in parts
        for b, target, second in parts
        if (first, second) == ("prefill", "decode")
    )
    return Deployment(name, nodes, links)
