"""Step models whose prompts, decoding and requests take longer or shorter than told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.latency.step import Bends, Mixed, Piece, StepModel


def refitted(
    step: StepModel,
    prefill: float,
    decode: float,
    front_s: float,
    batch: int = 256,
    *,
    floor: float = 1.0,
    growth: float | None = None,
) -> StepModel:
    r"""A step model whose prompts, decoding and requests take longer or shorter.

    .. math::
        step\_s'(n) = f_0\, step\_s(1) + f_p (step\_s(n) - step\_s(1)), \quad
        d'(b, c) = f_d\, d(1, 0) + f_g (d(b, c) - d(1, 0))

    for prompts of ``n`` tokens and decode steps ``d`` of up to ``batch`` requests with ``c`` cached
    tokens; prompts beside ``b`` decoding requests take what such a step takes longer than
    :math:`f_0\,step\_s(b)` more, never less.

    Parameters
    ----------
    prefill, decode
        The factors :math:`f_p` and :math:`f_d`.
    front_s
        Time per request beside its steps [s].
    floor, growth
        The factors :math:`f_0`, and :math:`f_g`, by default that of ``decode``.

    Examples
    --------
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-3, per_cached_token_s=1e-6)
    >>> slower = refitted(step, 2.0, 3.0, 0.1)
    >>> round(float(slower.decode_seconds([100, 100]) / step.decode_seconds([100, 100])), 9)
    3.0
    >>> round(float(slower.prefill_seconds([101])), 6), slower.request_s
    (0.221, 0.1)
    """
    factors = floor, prefill, decode, decode if growth is None else growth
    pieces = tuple(_refitted(piece, batch, *factors) for piece in step.pieces)
    return replace(step, pieces=pieces, request_s=front_s)


def _refitted(
    piece: Piece, batch: int, floor: float, prefill: float, decode: float, growth: float
) -> Piece:
    count = max(len(piece.per_cached_token_s), batch)
    at = np.minimum(np.arange(count), len(piece.per_cached_token_s) - 1)
    b = np.arange(1.0, count + 1.0)
    top = max(float(piece.knots_tokens[-1]), count)
    knots = np.unique([*piece.knots_tokens, 1.0, top, 2.0 * top])
    one, times = piece.seconds(1.0, 0, 0.0, 0.0), piece.seconds(knots, 0, 0.0, 0.0)
    times = np.where(
        knots > 1.0, np.maximum(floor * one + prefill * (times - one), 0.0), floor * times
    )
    base = piece.seconds(b, 0, 0.0, 0.0)
    alone = base + piece.levels[at]
    alone = np.maximum(growth * alone + (decode - growth) * alone[0], 0.0)
    level = alone - np.interp(b, knots, times)
    per_cached, mixed_level, per_token = piece.mixed_rows[:, at]
    beside = np.maximum(
        growth * mixed_level + ((growth - floor) * base + (decode - growth) * base[0]), 0.0
    )
    bends = piece.bends and Bends(piece.bends.context_tokens, growth * piece.bends.extra_s[at])
    mixed = Mixed(growth * per_cached, beside, prefill * per_token)
    return Piece(
        knots,
        times,
        growth * piece.per_cached_token_s[at],
        prefill * piece.per_pair_s,
        mixed,
        level,
        bends,
    )
