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
from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import FitError, require
from hetero.latency.models.floor import FloorFit
from hetero.latency.models.phase import PhaseFit, fit_phase
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.latency.tables import Measurements

Form = Literal["affine", "bent"]
"""``"affine"`` is eq. 3 and 4 of Xiong et al.; ``"bent"`` is for engines that pay for attention as
if it were one prompt: ``c0 + c1 n + c2 n^2`` of the n tokens of a prefill, and
``d0 + d1 b + d2 c + d3 b c`` of b decoding requests with c cached tokens together. Where both are
bent, n tokens beside decoding requests cost ``c2 n c`` more, with c from the mean context."""


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
    form, decode_form
        The forms of prefill and decode that ``step`` uses.
    held_out_percent, decode_held_out_percent
        Mean error of either form on settings that it was not fitted to [%].
    """

    prefill: PhaseFit
    decode: PhaseFit
    step: StepModel
    form: Form
    held_out_percent: dict[Form, float]
    decode_form: Form
    decode_held_out_percent: dict[Form, float]
    precision: tuple[Precision, ...]
    wanted_percent: float

    def table(self) -> Table:
        """One row per phase: precision, and measurements still due."""
        errors = {"prefill": self.prefill.accuracy, "decode": self.decode.accuracy}
        columns = (
            Column("phase"),
            Column("measurements", of="rows"),
            Column("mean error", "%", 2, of=lambda one: errors[one.phase].mape_percent),
            Column("expected time known to", "± %", 2, of="percent"),
            Column(f"measurements for ± {self.wanted_percent:g} %", of="needed"),
            Column("still due", of=lambda one: max(one.needed - one.rows, 0)),
        )
        return Table.of(
            "Precision",
            columns,
            self.precision,
            f"{self.prefill.linear.confidence:.0%} interval of eq. 3 and 4",
            _chosen("prefill", self.form, self.held_out_percent),
            _chosen("decode", self.decode_form, self.decode_held_out_percent),
        )

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
    require(
        wanted_percent > 0,
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
    prefills, decodes = measured.phase("prefill"), measured.phase("decode")
    held: dict[Form, float] = {
        "affine": _held_out_affine(prefills, decode=False),
        "bent": _held_out_bend(_powers(prefills), prefills),
    }
    form = _better(held)
    later: dict[Form, float] = {
        "affine": _held_out_affine(decodes, decode=True),
        "bent": _held_out_bend(_products(decodes), decodes),
    }
    decode_form = _better(later)
    affine = latency.Affine.from_fits(
        prefill, decode, source=f"profile {file.name}", provenance="measured"
    )
    step = affine.step_model()
    if "bent" in (form, decode_form):
        step = _with_bends(
            step,
            prefills if form == "bent" else None,
            decodes if decode_form == "bent" else None,
            affine.max_batch,
        )
    phases = (("prefill", prefill), ("decode", decode))
    return Fitted(
        prefill,
        decode,
        step,
        form,
        held,
        decode_form,
        later,
        tuple(_precision(name, fit, wanted_percent) for name, fit in phases),
        wanted_percent,
    )


def _better(held: dict[Form, float]) -> Form:
    # Where too few settings are left to judge the printed form, nothing speaks against it.
    return "bent" if held["bent"] < held["affine"] < float("inf") else "affine"


def _chosen(phase: str, form: Form, held: dict[Form, float]) -> str:
    if not math.isfinite(held["affine"]):
        return f"too few settings to leave one out: the {phase} of the step model is '{form}'"
    errors = " and ".join(f"{error:.1f} % ({one})" for one, error in held.items())
    return f"mean {phase} error on a setting left out: {errors}; the step model takes '{form}'"


def _with_bends(
    step: StepModel, prefills: Measurements | None, decodes: Measurements | None, max_batch: int
) -> StepModel:
    """The step model with bent forms in place of the affine ones, where there are rows for them."""
    (piece,) = step.pieces
    first = piece.knots_tokens <= max_batch
    knots, seconds = piece.knots_tokens[first], piece.knots_s[first]
    later, later_s = piece.knots_tokens[~first], piece.knots_s[~first]
    cached = piece.per_cached_token_s
    batches = np.arange(1, max_batch + 1, dtype=np.float64)
    if decodes is not None:
        floor, each, rate, rise = _bend(_products(decodes), decodes.seconds)
        seconds = floor + each * knots
        cached = rate + rise * batches
    mixed = None
    if prefills is not None:
        total = prefills.batch * prefills.length_tokens
        bend = _bend(_powers(prefills), prefills.seconds)
        # Between knots 20 % apart a parabola and its chord are at most 0.3 % apart.
        least = max(total.min(), max_batch + 1.0)
        later = np.geomspace(
            least, total.max() + 1.0, 2 + int(np.log(total.max() / least) / np.log(1.2))
        )
        later_s = np.vander(later, 3, increasing=True) @ bend
        if decodes is not None:
            mixed = Mixed(
                cached, np.zeros(max_batch), bend[2] * batches * float(decodes.length_tokens.mean())
            )
    return StepModel(
        (
            Piece(
                np.concatenate([knots, later]),
                # A larger step never takes less time than the largest decode step.
                np.concatenate([seconds, np.maximum(later_s, seconds[-1])]),
                cached,
                mixed=mixed,
            ),
        ),
        source=step.source,
        provenance=step.provenance,
        max_tokens=step.max_tokens if prefills is None else float(later[-1]),
        max_decoding=step.max_decoding,
    )


def _powers(rows: Measurements) -> Floats:
    """1, n and n^2 of the tokens n of each prefill."""
    return np.vander(rows.batch * rows.length_tokens, 3, increasing=True)


def _products(rows: Measurements) -> Floats:
    """1, b, c and b c of the b requests and c cached tokens of each decode step."""
    batch = rows.batch
    cached = batch * rows.length_tokens
    return np.column_stack([np.ones_like(cached), batch, cached, batch * cached])


def _bend(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 of the columns with the least squared relative error."""
    design = columns / seconds[:, None]
    scale = design.max(axis=0)
    return np.asarray(nnls(design / scale, np.ones_like(seconds))[0] / scale)


def _left_out(rows: Measurements) -> list[NDArray[np.bool_]]:
    """For every setting, which rows are its own."""
    setting = np.column_stack([rows.batch, np.round(rows.length_tokens)])
    return [np.all(setting == one, axis=1) for one in np.unique(setting, axis=0)]


def _held_out_affine(rows: Measurements, *, decode: bool) -> float:
    errors = []
    for own in _left_out(rows):
        rest = rows.where(~own)
        try:
            fit = fit_phase(
                rest.batch, rest.length_tokens, rest.seconds, decode=decode, non_negative=True
            )
        except FitError:  # too few settings are left to say anything
            return float("inf")
        left = rows.where(own)
        errors.append(
            np.abs(fit.expected(left.batch, left.length_tokens).seconds / left.seconds - 1.0)
        )
    return 100.0 * float(np.concatenate(errors).mean())


def _held_out_bend(columns: Floats, rows: Measurements) -> float:
    errors = []
    for own in _left_out(rows):
        found = columns[own] @ _bend(columns[~own], rows.seconds[~own])
        errors.append(np.abs(found / rows.seconds[own] - 1.0))
    return 100.0 * float(np.concatenate(errors).mean())


def _precision(phase: str, fit: PhaseFit, wanted_percent: float) -> Precision:
    found = fit.expected(fit.batch, fit.length_tokens)
    percent = 100.0 * float(np.max((found.high_s - found.low_s) / 2.0 / found.seconds))
    rows = len(fit.batch)
    return Precision(phase, percent, rows, math.ceil(rows * (percent / wanted_percent) ** 2))
