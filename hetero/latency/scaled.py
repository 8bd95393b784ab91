"""Step models whose times are multiplied, prefill, decode and front end each by its own factor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.latency.step import Mixed, Piece, StepModel

# A step of up to this many tokens decodes, one of more than that many prefills.
_DECODE_TOKENS, _PREFILL_TOKENS = 256.0, 1024.0


def scaled(step: StepModel, prefill: float, decode: float, front: float = 1.0) -> StepModel:
    """The step model with prefill and decode times multiplied, and the time per request.

    Steps of up to 256 tokens take the factor of decoding, those of 1,024 and more that of prefill,
    in between it goes over in the logarithm of the tokens.

    Examples
    --------
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> twice = scaled(step, 1.0, 2.0)
    >>> round(float(twice.decode_seconds([100]) / step.decode_seconds([100])), 9)
    2.0
    >>> round(float(twice.prefill_seconds([4096]) / step.prefill_seconds([4096])), 9)
    1.0
    """
    pieces = tuple(_scaled(piece, prefill, decode) for piece in step.pieces)
    request_s, token_s = front * step.request_s, front * step.prompt_token_s
    return replace(step, pieces=pieces, request_s=request_s, prompt_token_s=token_s)


def _scaled(piece: Piece, prefill: float, decode: float) -> Piece:
    span = np.log([_DECODE_TOKENS, _PREFILL_TOKENS])
    x = piece.knots_tokens
    # Knots of the change itself, and one beyond, where the last slope would go on.
    top = max(float(x[-1]), _PREFILL_TOKENS)
    knots = np.unique([*x, *np.geomspace(_DECODE_TOKENS, _PREFILL_TOKENS, 5), top, 2 * top])
    share = np.interp(np.log(np.maximum(knots, 1.0)), span, [0.0, 1.0])
    times = piece.seconds(knots, 0, 0.0, 0.0) * decode ** (1.0 - share) * prefill**share
    # Where the last slope falls (a reduction may end so), more tokens still take no less time.
    times[-1] = max(times[-1], times[-2])
    mixed = piece.mixed
    if mixed is not None:
        mixed = Mixed(
            decode * mixed.per_cached_token_s,
            decode * mixed.level_s,
            prefill * mixed.per_token_s,
        )
    level, bends = piece.decode_level_s, piece.bends
    return Piece(
        knots,
        times,
        decode * piece.per_cached_token_s,
        prefill * piece.per_pair_s,
        mixed,
        None if level is None else decode * level,
        None if bends is None else replace(bends, extra_s=decode * bends.extra_s),
    )
