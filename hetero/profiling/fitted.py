"""Coefficients p1 to p8 of a profiled server, their precision, and the step model to plan with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from hetero import latency
from hetero.display import Column, Shown, Table
from hetero.errors import FitError, ParameterError
from hetero.latency.floor import FloorFit
from hetero.latency.phase import PhaseFit, fit_phase
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements

Floats = NDArray[np.float64]

Prefill = Literal["affine", "bent"]
"""``"affine"`` is eq. 3; ``"bent"`` is ``c0 + c1 n + c2 n^2`` of the tokens n of the batch,
for engines that pay for the attention of a batch as if it were one prompt."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How well a phase is known, and what more it takes.

    Attributes
    ----------
    percent
        Largest half-width of the interval of an expected time over the measured settings, of that
        time [%].
    rows, needed
        Measurements there are, and about how many it takes for the precision that was asked for:
        the interval narrows as one over the square root of their number.
    """

    phase: str
    percent: float
    rows: int
    needed: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Fitted(Shown):
    """A server's latency model with its uncertainty.

    Attributes
    ----------
    step
        What the simulator takes.
    form
        The prefill form that ``step`` uses.
    held_out_percent
        Mean error of either form on settings that it was not fitted to [%].
    """

    prefill: PhaseFit
    decode: PhaseFit
    step: StepModel
    form: Prefill
    held_out_percent: dict[Prefill, float]
    precision: tuple[Precision, ...]
    wanted_percent: float

    def table(self) -> Table:
        """One row per phase: precision, and measurements still due."""
        columns = (
            Column("phase"),
            Column("measurements"),
            Column("mean error", "%", 2),
            Column("expected time known to", "± %", 2),
            Column(f"measurements for ± {self.wanted_percent:g} %"),
            Column("still due"),
        )
        errors = {"prefill": self.prefill.accuracy, "decode": self.decode.accuracy}
        rows = tuple(
            (
                one.phase,
                one.rows,
                errors[one.phase].mape_percent,
                one.percent,
                one.needed,
                max(one.needed - one.rows, 0),
            )
            for one in self.precision
        )
        held = " and ".join(
            f"{error:.1f} % ({form})" for form, error in self.held_out_percent.items()
        )
        notes = (
            f"{self.prefill.linear.confidence:.0%} interval of eq. 3 and 4",
            f"mean prefill error on a setting left out: {held}; the step model takes '{self.form}'",
        )
        return Table("Precision", columns, rows, notes)

    def tables(self) -> tuple[Table, ...]:
        """Coefficients of both phases, then the precision."""
        return self.prefill.table(), self.decode.table(), self.table()


def fitted(path: Path | str, *, wanted_percent: float = 5.0, confidence: float = 0.95) -> Fitted:
    """Fit p1 to p8 to the file of a profile (Xiong et al., eq. 3 and 4), and make a step model.

    The step model takes whichever prefill form errs less on settings left out of its fit.

    Parameters
    ----------
    wanted_percent
        Half-width of the interval of an expected time, of that time, that would suffice [%].

    Raises
    ------
    FitError
        If a phase has too few rows, or its rows do not vary batch and length.
    """
    if not wanted_percent > 0:
        raise ParameterError(
            f"A precision of {wanted_percent:g} % cannot be reached.",
            resolve="ask for more than 0 %.",
        )
    file = Path(path)
    measured = latency.read_csv(file)
    prefill, decode = latency.fit(measured, non_negative=True, confidence=confidence)
    # Without a floor the fit of a prefill is linear.
    if decode is None or prefill is None or isinstance(prefill, FloorFit):
        missing = "decode" if decode is None else "prefill"
        raise FitError(
            f"{file.name} has no {missing} rows.",
            resolve="profile longer outputs, or more settings.",
        )
    rows = measured.phase("prefill")
    held: dict[Prefill, float] = {"affine": _held_out_affine(rows), "bent": _held_out_bend(rows)}
    form: Prefill = min(held, key=held.__getitem__)
    affine = latency.Affine.from_fits(
        prefill, decode, source=f"profile {file.name}", provenance="measured"
    )
    step = affine.step_model()
    if form == "bent":
        step = _with_bend(step, rows, affine.max_batch)
    phases = (("prefill", prefill), ("decode", decode))
    return Fitted(
        prefill,
        decode,
        step,
        form,
        held,
        tuple(_precision(name, fit, wanted_percent) for name, fit in phases),
        wanted_percent,
    )


def _with_bend(step: StepModel, rows: Measurements, max_batch: int) -> StepModel:
    """The step model with the bent prefill in place of the line."""
    (piece,) = step.pieces
    decode = piece.knots_tokens <= max_batch
    total = rows.batch * rows.length_tokens
    # Between knots 20 % apart a parabola and its chord are at most 0.3 % apart.
    count = 2 + int(np.log(total.max() / max(total.min(), max_batch + 1.0)) / np.log(1.2))
    knots = np.geomspace(max(total.min(), max_batch + 1.0), total.max() + 1.0, count)
    seconds = np.maximum(_powers(knots) @ _bend(total, rows.seconds), piece.knots_s[decode][-1])
    return StepModel(
        (
            Piece(
                np.concatenate([piece.knots_tokens[decode], knots]),
                np.concatenate([piece.knots_s[decode], seconds]),
                piece.per_cached_token_s,
            ),
        ),
        source=step.source,
        provenance=step.provenance,
        max_tokens=float(knots[-1]),
        max_decoding=step.max_decoding,
    )


def _powers(tokens: Floats) -> Floats:
    return np.column_stack([np.ones_like(tokens), tokens, tokens**2])


def _bend(tokens: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 of 1, n and n^2 with the least squared relative error."""
    design = _powers(tokens) / seconds[:, None]
    scale = design.max(axis=0)
    return np.asarray(nnls(design / scale, np.ones_like(seconds))[0] / scale)


def _left_out(rows: Measurements) -> list[NDArray[np.bool_]]:
    """For every setting, which rows are its own."""
    setting = np.column_stack([rows.batch, np.round(rows.length_tokens)])
    return [np.all(setting == one, axis=1) for one in np.unique(setting, axis=0)]


def _held_out_affine(rows: Measurements) -> float:
    errors = []
    for own in _left_out(rows):
        rest = rows.where(~own)
        try:
            fit = fit_phase(
                rest.batch, rest.length_tokens, rest.seconds, decode=False, non_negative=True
            )
        except FitError:  # too few settings are left to say anything
            return float("inf")
        left = rows.where(own)
        found = fit.expected(left.batch, left.length_tokens).seconds
        errors.append(np.abs(found / left.seconds - 1.0))
    return 100.0 * float(np.concatenate(errors).mean())


def _held_out_bend(rows: Measurements) -> float:
    errors = []
    total = rows.batch * rows.length_tokens
    for own in _left_out(rows):
        found = _powers(total[own]) @ _bend(total[~own], rows.seconds[~own])
        errors.append(np.abs(found / rows.seconds[own] - 1.0))
    return 100.0 * float(np.concatenate(errors).mean())


def _precision(phase: str, fit: PhaseFit, wanted_percent: float) -> Precision:
    found = fit.expected(fit.batch, fit.length_tokens)
    half = (found.high_s - found.low_s) / 2.0
    percent = 100.0 * float(np.max(half / found.seconds))
    rows = len(fit.batch)
    return Precision(phase, percent, rows, math.ceil(rows * (percent / wanted_percent) ** 2))
