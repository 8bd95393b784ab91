"""Costed pipelines as replicas of a deployment, so that plans are simulated like any other."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Engine, Replica, Role
from hetero.latency.step import Piece, StepModel
from hetero.planners.phases.pipeline import Pipeline

Floats = NDArray[np.float64]
PrefillStep: TypeAlias = Literal["occupancy", "latency"]
"""Which of a pipeline's two prefill times a simulated step takes."""


def step_model(pipeline: Pipeline, prefill: PrefillStep = "occupancy") -> StepModel:
    """The step model of a pipeline: a rotation of microbatches and S times its slowest stage.

    Parameters
    ----------
    prefill
        ``"occupancy"``: prompts follow each other as stages come free, so throughput is right and
        the time to the first token of a lone prompt is that of one cut into S chunks, about
        twice its slowest stage too small for two stages at most. ``"latency"``: a prompt leaves
        the last stage before the next enters the first, so the first token of a lone prompt is
        right and throughput too low. Equal for one stage.

    Notes
    -----
    Exact for decode, and for the latency reading of prefill. The second piece follows the stage
    that is slowest for a prompt of 1,024 tokens.
    """
    count = len(pipeline.stages)
    parts = count if prefill == "occupancy" else 1
    fixed, per_token = pipeline.hops
    back = pipeline.return_s
    knots = _knots(pipeline, parts)
    share = knots / parts
    times = pipeline.stage_seconds(share)
    cached = pipeline.stage_seconds([0.0], [1.0])[:, 0] - pipeline.stage_seconds([0.0])[:, 0]
    pairs = pipeline.stage_seconds([0.0], [0.0], [1.0])[:, 0] - pipeline.stage_seconds([0.0])[:, 0]
    rotation = Piece(
        knots,
        times.sum(axis=0) + fixed + back + per_token * share,
        np.array([cached.sum() / parts]),
        float(pairs.sum() / parts),
    )
    pieces: tuple[Piece, ...] = (rotation,)
    if parts > 1:
        n = 1024.0
        slowest = int(pipeline.stage_seconds(n, 0.0, n * n / 2)[:, 0].argmax())
        pieces += (
            Piece(
                knots,
                count * times[slowest],
                np.array([float(cached[slowest])]),
                float(pairs[slowest]),
            ),
        )
    return StepModel(
        pieces,
        source=f"roofline of {pipeline.model.llm.name} on {pipeline.label}",
        provenance="derived",
    )


def _knots(pipeline: Pipeline, parts: int) -> Floats:
    """New tokens at which a stage turns from reading weights to computing."""
    bends = [
        parts * (rate.weights_s / rate.product_s - rate.padding_tokens) for rate in pipeline.rates
    ]
    inner = sorted({float(bend) for bend in bends if bend > 0})
    top = 2.0 * inner[-1] if inner else 1.0
    return np.array([0.0, *inner, top])


def replica(
    pipeline: Pipeline,
    name: str,
    role: Role = "both",
    *,
    engine: Engine | None = None,
    prefill: PrefillStep = "occupancy",
) -> Replica:
    """A pipeline as a replica that serves a phase.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.planners.phases.cost import CostModel, Stage
    >>> model = CostModel(cluster("thunderserve-a40-3090ti-40gbit"), llm("LLaMA-1-30B"))
    >>> mixed = replica(model.pipeline([Stage(0, 2, 36), Stage(1, 2, 24)]), "mixed", "decode")
    >>> mixed.role, mixed.gpus, round(mixed.usd_per_h, 2)
    ('decode', 4, 1.42)
    """
    settings = pipeline.model.settings
    return Replica(
        name=name,
        step=step_model(pipeline, prefill),
        kv_tokens=pipeline.kv_tokens,
        kv_bytes_per_token=float(pipeline.model.llm.kv_bytes_per_token(settings.kv_precision)),
        engine=engine or Engine(max_batch=settings.max_batch, max_step_tokens=2048),
        role=role,
        gpu=pipeline.gpu,
        gpus=pipeline.gpus,
        usd_per_h=pipeline.usd_per_h,
    )
