"""Measured tables as step models, with the error this costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np

from hetero.arrays import Floats
from hetero.errors import FitError
from hetero.latency.reduction import Reduction, with_bends
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements

# Of decode steps, as shares: a bend is added where a line errs by more.
_LARGEST_ERROR, _MEAN_ERROR = 0.04, 0.008


def reduce_table(measured: Measurements) -> Reduction:
    r"""Step model through measured prefills and decode steps.

    Prefill times are split as ``g(n) + per_pair_s * pairs`` with one free value ``g`` per total
    ``n`` of new tokens and one common rate, by least squares of the relative error; without two
    prompts of different length at the same total, or where the rate comes out negative, it is 0.
    Decode times at ``b`` requests are split as ``a_b + r_b b L`` the same way; a batch measured
    at one length only takes the rate of the nearest batch measured at several. Knots are ``(n,
    g(n))`` and, below the smallest ``n``, ``(b, a_b)``, because steps that small are decode steps;
    what a decode step differs by from a prefill of as many tokens is its level. Where a line over
    the cached tokens is off by more than 4 % at a point or 0.8 % in the mean, as few lengths as
    bring it below become bends, through the times there; a time that falls with the length, which
    is noise, is evened out with the one before (the isotonic regression of least largest error).

    Raises
    ------
    FitError
        If there is no decode row, or no batch with two cached lengths.
    """
    prefill, decode = measured.phase("prefill"), measured.phase("decode")
    if not len(decode.batch):
        raise FitError(
            f"{measured.label}: a step model needs decode steps; the table has none.",
            resolve="add decode rows.",
        )
    totals, values, per_pair = _split_prefill(prefill)
    batches, levels, rates = _split_decode(decode)

    largest = batches[-1]
    small = batches < totals.min(initial=np.inf)
    knots = np.concatenate([batches[small], totals])
    times = np.concatenate([levels[small], values])
    decoding = np.arange(1, int(largest) + 1)
    piece = Piece(knots, times, np.interp(decoding, batches, rates), per_pair)
    # Between the batches that were measured the sum of both is linear, whatever knots lie there.
    level = np.interp(decoding, batches, levels) - piece.seconds(decoding, 0, 0.0, 0.0)
    piece = replace(piece, decode_level_s=level) if bool(np.any(level)) else piece
    model = StepModel(
        (_bent(piece, decode),),
        source=f"{measured.label}, {measured.engine}",
        provenance=measured.provenance,
        max_tokens=float(max(totals.max(initial=0.0), largest)),
        max_decoding=float(largest),
    )
    return Reduction(model, measured.accuracy(model))


def _bent(piece: Piece, decode: Measurements) -> Piece:
    """The piece with the fewest bends that bring the error of decode steps below the limits."""
    arguments, seconds = decode.step_arguments, decode.seconds
    batches, lengths = np.unique(decode.batch), np.unique(decode.length_tokens)
    table = np.full((len(batches), len(lengths)), np.nan)
    rows = np.searchsorted(batches, decode.batch), np.searchsorted(lengths, decode.length_tokens)
    table[rows] = seconds

    def errors(found: Piece) -> tuple[float, float]:
        error = np.abs(found.seconds(*arguments) / seconds - 1.0)
        return float(error.max()), float(error.mean())

    def judged(found: Piece) -> tuple[bool, float]:
        largest, mean = errors(found)
        return not (largest <= _LARGEST_ERROR and mean <= _MEAN_ERROR), largest

    whole = len(np.unique(seconds)) > 2 and bool(np.all(lengths == np.round(lengths)))
    if not whole or not judged(piece)[0] or len(lengths) < 2:
        return piece
    even = np.array([_monotone(row) for row in table])
    best = piece
    for count in range(2, len(lengths) + 1):
        tries = [
            _through(piece, batches, lengths, even, list(chosen))
            for chosen in combinations(range(len(lengths)), count)
        ]
        best = min([best, *tries], key=judged)
        if not judged(best)[0]:
            break
    return best


def _monotone(times: Floats) -> Floats:
    """Times that never fall along the row, with the least largest relative error; NaN stay."""
    known = np.isfinite(times)
    found = times.copy()
    kept = times[known]
    found[known] = np.sqrt(np.maximum.accumulate(kept) * np.minimum.accumulate(kept[::-1])[::-1])
    return found


def _through(
    piece: Piece, batches: Floats, lengths: Floats, times: Floats, chosen: list[int]
) -> Piece:
    """The piece with bends at the chosen lengths, through the times there."""
    contexts = lengths[chosen]
    plain = piece.seconds(batches[:, None], batches[:, None], batches[:, None] * contexts, 0.0)
    extra = times[:, chosen] - plain
    for row, all_times, batch in zip(extra, times, batches, strict=True):
        known = np.isfinite(row)
        if not known.any():  # the batch fits the memory at other lengths only
            held = np.isfinite(all_times)
            line = piece.seconds(batch, batch, batch * lengths[held], 0.0)
            row[:] = float(np.mean(all_times[held] - line))
        else:  # what does not fit the memory keeps the extra of the longest that does
            row[~known] = np.interp(contexts[~known], contexts[known], row[known])
    least = extra.min(axis=1)
    sizes = np.arange(1.0, len(piece.per_cached_token_s) + 1.0)
    level = piece.levels + np.interp(sizes, batches, least)
    return with_bends(
        replace(piece, decode_level_s=level), batches, contexts, extra - least[:, None]
    )


def _split_prefill(prefill: Measurements) -> tuple[Floats, Floats, float]:
    tokens, _, _, pairs = prefill.step_arguments
    totals, group = np.unique(tokens, return_inverse=True)
    if not len(totals):
        return totals, totals, 0.0
    weight = prefill.seconds**-2.0
    sums = np.bincount(group, weight)

    def centred(values: Floats) -> Floats:
        return np.asarray(values - (np.bincount(group, weight * values) / sums)[group])

    p, t = centred(pairs), centred(prefill.seconds)
    square = float((weight * p * p).sum())
    rate = max(0.0, float((weight * p * t).sum()) / square) if square > 0 else 0.0
    with np.errstate(divide="ignore"):
        rate = min(rate, float((prefill.seconds / pairs).min()))  # g(n) must not be negative
    rest = np.maximum(prefill.seconds - rate * pairs, 0.0)
    return totals, np.bincount(group, weight * rest) / sums, rate


def _split_decode(decode: Measurements) -> tuple[Floats, Floats, Floats]:
    batches = np.unique(decode.batch)
    levels, rates = np.zeros(len(batches)), np.full(len(batches), np.nan)
    for k, b in enumerate(batches):
        rows = decode.batch == b
        cached, seconds = b * decode.length_tokens[rows], decode.seconds[rows]
        if len(np.unique(cached)) > 1:
            x = np.column_stack([np.ones_like(cached), cached]) / seconds[:, None]
            level, rate = np.linalg.lstsq(x, np.ones(len(seconds)), rcond=None)[0]
            if rate < 0:
                level, rate = float(x[:, 0].sum() / (x[:, 0] ** 2).sum()), 0.0
            levels[k], rates[k] = max(level, 0.0), rate
    known = np.isfinite(rates)
    if not known.any():
        raise FitError(
            f"{decode.label}: no batch was measured at two cached lengths, so the time per cached "
            "token is not determined.",
            resolve="measure one batch size at two lengths.",
        )
    for k in np.flatnonzero(~known).tolist():
        rates[k] = rates[known][np.abs(np.flatnonzero(known) - k).argmin()]
        rows = decode.batch == batches[k]
        cached, seconds = batches[k] * decode.length_tokens[rows], decode.seconds[rows]
        rest = np.maximum(seconds - rates[k] * cached, 0.0)
        levels[k] = float((rest / seconds**2).sum() / (seconds**-2.0).sum())
    return batches, levels, rates
