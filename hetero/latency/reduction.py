"""From measured tables and other latency models to the step model, with the error this costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import FitError
from hetero.latency.accuracy import Accuracy
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements, Phase

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reduction(Shown):
    """A step model and how far it lies from what it stands for.

    Attributes
    ----------
    model
        The step model.
    accuracy
        Per phase, error of the step model against the rows or the model it was made from.
    note
        What the step model cannot carry, in words.
    """

    model: StepModel
    accuracy: dict[Phase, Accuracy]
    note: str = ""

    def table(self) -> Table:
        """Error of the reduction per phase."""
        rows = tuple(
            (phase, a.rows, a.mape_percent, a.bias_percent, a.max_percent)
            for phase, a in self.accuracy.items()
        )
        columns = (
            Column("phase"),
            Column("rows"),
            Column("mean error", "%", 3),
            Column("bias", "%", 3),
            Column("largest error", "%", 3),
        )
        title = f"Reduction to a step model: {self.model.source}"
        return Table(title, columns, rows, (self.note,) if self.note else ())


def reduce_table(measured: Measurements) -> Reduction:
    r"""Step model through measured prefills and decode steps.

    Prefill times are split as ``g(n) + per_pair_s * pairs`` with one free value ``g`` per total
    ``n`` of new tokens and one common rate, by least squares of the relative error; without two
    prompts of different length at the same total, or where the rate comes out negative, it is 0.
    Decode times at ``b`` requests are split as ``a_b + r_b b L`` the same way; a batch measured
    at one length only takes the rate of the nearest batch measured at several. Knots are ``(n,
    g(n))`` and, below the smallest ``n``, ``(b, a_b)``, because steps that small are decode steps;
    what a decode step differs by from a prefill of as many tokens is its level.

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
    model = StepModel(
        (replace(piece, decode_level_s=level) if bool(np.any(level)) else piece,),
        source=f"{measured.label}, {measured.engine}",
        provenance=measured.provenance,
        max_tokens=float(max(totals.max(initial=0.0), largest)),
        max_decoding=float(largest),
    )
    return Reduction(model, measured.accuracy(model))


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
