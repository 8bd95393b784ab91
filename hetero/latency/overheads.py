r"""What an engine's steps take beside their kernels.

Tables of operators and rooflines know the GPU; the engine schedules, prepares inputs, launches and
samples around it. With ``l`` layers on ``t`` GPUs and ``b`` decoding requests a step takes

.. math::
    step\_s' = \max(step\_s,\; l\,k) + o + w\,[t > 1] + r\,b

with the time per step ``o``, of handing it to several workers ``w``, per decoding request ``r``,
and the launch of a layer ``k`` in releases that launch layers one by one (a floor: kernels are
launched while others run, so that it shows only where they are shorter). ``o``, ``w`` and ``r``
pass while a step runs, and are 0, where the next step is prepared ahead. A request with a prompt of
``n`` tokens takes

.. math:: f + p\,n\,[mixture of experts]

besides, before its first step and after its first token, while the engine goes on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.catalog import Llm
from hetero.catalog.engines import EngineOverheads
from hetero.latency.step import Bends, Mixed, Piece, StepModel

_MOST_DECODING = 1024


def with_overheads(
    step: StepModel,
    overheads: EngineOverheads,
    llm: Llm,
    tensor_parallel: int = 1,
    ranks: int = 1,
) -> StepModel:
    """The step model of a replica under an engine that takes such times beside its kernels.

    Parameters
    ----------
    step
        Of the kernels alone.
    ranks
        Engines in lockstep that share out the requests.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> kernels = StepModel.affine(floor_s=0.01, per_token_s=0.0, per_cached_token_s=0.0)
    >>> slow = EngineOverheads(engine="mine", releases="1", step_s=1e-3, decoding_s=1e-4, source="")
    >>> step = with_overheads(kernels, slow, llm("Llama-3-8B"))
    >>> round(float(step.decode_seconds([100] * 20)), 6), round(float(step.prefill_seconds([9])), 6)
    (0.013, 0.011)
    """
    fixed = overheads.step_s + (overheads.worker_s if tensor_parallel > 1 else 0.0)
    pieces = [_on_top(one, fixed, overheads.decoding_s, ranks) for one in step.pieces]
    floor = llm.layers * overheads.launch_s
    if floor > 0 and len(pieces) == 1:
        launched = Piece(np.array([0.0, 1.0]), np.full(2, floor), np.zeros(1))
        pieces.append(_on_top(launched, fixed, overheads.decoding_s, ranks))
    source = f"{step.source}, with the overheads of {overheads.name}"
    return replace(
        step,
        pieces=tuple(pieces),
        source=source,
        request_s=step.request_s + overheads.request_s,
        prompt_token_s=step.prompt_token_s + bool(llm.experts) * overheads.prompt_token_s,
    )


def _on_top(piece: Piece, fixed_s: float, decoding_s: float, ranks: int) -> Piece:
    known = len(piece.per_cached_token_s)
    count = max(known, _MOST_DECODING) if decoding_s else known
    at = np.minimum(np.arange(count), known - 1)
    busy = decoding_s * np.ceil(np.arange(1.0, count + 1.0) / ranks)
    per_cached, level, per_token = piece.mixed_rows[:, at]
    # Beyond the batches that are known, bends stay at the mean context of the last.
    bends = piece.bends and Bends(piece.bends.context_tokens, piece.bends.extra_s[at])
    mixed = Mixed(per_cached, level + busy, per_token)
    return Piece(
        piece.knots_tokens,
        piece.knots_s + fixed_s,
        piece.per_cached_token_s[at],
        piece.per_pair_s,
        mixed if decoding_s or piece.mixed else None,
        piece.levels[at] + busy,
        bends,
    )
