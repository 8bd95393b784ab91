"""Fit of one phase, prefill or decode, in the columns of Xiong et al. eq. 3-4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.display import Shown, Table
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.fitting import (
    Identifiability,
    LinearFit,
    Prediction,
    Term,
    Weights,
    fit_linear,
    identifiability,
)

Form = Literal["full", "cross", "tokens"]
"""``full`` has the four coefficients of the paper, ``cross`` the three that a cross of settings
determines, ``tokens`` only the total number of tokens and a constant."""

PREFILL = (
    Term("p1", "b I", "s/token", "per prompt token of the batch"),
    Term("p2", "b", "s/request", "per request of the batch"),
    Term("p3", "I", "s/token", "per token of the longest prompt"),
    Term("p4", "1", "s", "per prefill"),
)
DECODE = (
    Term("p5", "b L", "s/token", "per cached token of the batch"),
    Term("p6", "b", "s/request", "per request of the batch"),
    Term("p7", "L", "s/token", "per cached token of one request"),
    Term("p8", "1", "s", "per decode step"),
)

_OTHER_FORM = (
    "vary batch size and length independently, or fit what these rows do determine with "
    "form='cross' (hetero fit --form cross)."
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PhaseFit(Shown):
    """Fit of one phase: the linear fit and the columns it stands for.

    Attributes
    ----------
    reference
        Batch and length that the ``cross`` form counts from; unused otherwise.
    """

    decode: bool
    form: Form
    linear: LinearFit
    batch: Floats
    length_tokens: Floats
    reference: tuple[float, float] = (1.0, 0.0)

    @property
    def accuracy(self) -> Accuracy:
        """Error of the fit on its own rows."""
        return self.linear.accuracy

    def predict(self, batch: ArrayLike, length_tokens: ArrayLike) -> Prediction:
        """Time [s] and prediction interval at batch sizes and lengths per request (broadcast)."""
        return self.linear.predict(self._rows(batch, length_tokens))

    def expected(self, batch: ArrayLike, length_tokens: ArrayLike) -> Prediction:
        """Expected time [s] and its own interval, without the scatter of one measurement."""
        return self.linear.expected(self._rows(batch, length_tokens))

    def _rows(self, batch: ArrayLike, length_tokens: ArrayLike) -> Floats:
        return _design(self.decode, self.form, batch, length_tokens, self.reference)[0]

    def four(self) -> tuple[float, float, float, float]:
        """The coefficients of Xiong et al.'s eq. 3 (p1..p4) or eq. 4 (p5..p8).

        A cross does not determine the first three singly. The reading taken sets p3 (p7) to 0:
        time then follows the tokens of the batch, as in an engine that does not pad.
        """
        values = [float(v) for v in self.linear.coefficients]
        if self.form == "full":
            return (values[0], values[1], values[2], values[3])
        if self.form == "tokens":
            return (values[0], 0.0, 0.0, values[1])
        level, along_length, along_batch = values
        b0, length0 = self.reference
        per_token = along_length / b0
        per_request = along_batch - per_token * length0
        return (per_token, per_request, 0.0, level - per_request * b0 - per_token * b0 * length0)

    def table(self) -> Table:
        """Coefficients with intervals and the errors of the fit."""
        return self.linear.table()


def _design(
    decode: bool,
    form: Form,
    batch: ArrayLike,
    length: ArrayLike,
    reference: tuple[float, float],
) -> tuple[Floats, tuple[Term, ...]]:
    b, i = np.broadcast_arrays(
        np.asarray(batch, dtype=np.float64), np.asarray(length, dtype=np.float64)
    )
    b, i = b.ravel(), i.ravel()
    one = np.ones_like(b)
    full = DECODE if decode else PREFILL
    if form == "full":
        return np.column_stack([b * i, b, i, one]), full
    if form == "tokens":
        return np.column_stack([b * i, one]), (full[0], full[3])
    b0, i0 = reference
    letter = "L" if decode else "I"
    terms = (
        Term("T0", "1", "s", f"at b = {b0:g}, {letter} = {i0:g}"),
        Term("s1", f"{letter} - {i0:g}", "s/token", f"slope along {letter} at b = {b0:g}"),
        Term("s2", f"b - {b0:g}", "s/request", f"slope along b at {letter} = {i0:g}"),
    )
    return np.column_stack([one, i - i0, b - b0]), terms


def _mode(values: Floats) -> float:
    unique, counts = np.unique(values, return_counts=True)
    return float(unique[np.argmax(counts)])


def fit_phase(
    batch: ArrayLike,
    length_tokens: ArrayLike,
    seconds: ArrayLike,
    *,
    decode: bool,
    form: Form = "full",
    weights: Weights = "relative",
    non_negative: bool = False,
    confidence: float = 0.95,
    label: str = "",
) -> PhaseFit:
    """Fit Xiong et al.'s eq. 3 (prefill) or one step of eq. 4 (decode) to measured times.

    Parameters
    ----------
    batch, length_tokens, seconds
        Shape (N,); requests, input tokens (prefill) or cached tokens (decode) per request, times.
    form
        See :data:`Form`. The ``cross`` form counts from the most frequent batch and length;
        with ``non_negative`` its slopes are what is held non-negative.
    label
        What was measured, for the title and for errors.

    Raises
    ------
    FitError
        If the rows do not determine the coefficients of the form.

    Examples
    --------
    >>> b = np.array([1, 1, 2, 2, 4, 4.0])
    >>> i = np.array([128, 512, 128, 512, 128, 512.0])
    >>> fit = fit_phase(b, i, 0.01 + 1e-4 * b * i, decode=False)
    >>> round(fit.linear["p1"], 8), round(fit.linear["p4"], 6)
    (0.0001, 0.01)
    """
    b = np.asarray(batch, dtype=np.float64)
    length = np.asarray(length_tokens, dtype=np.float64)
    reference = (_mode(b), _mode(length)) if form == "cross" else (1.0, 0.0)
    design, terms = _design(decode, form, b, length, reference)
    phase = "decode step" if decode else "prefill"
    linear = fit_linear(
        design,
        seconds,
        terms,
        title=f"{label}, {phase}" if label else phase.capitalize(),
        weights=weights,
        non_negative=non_negative,
        confidence=confidence,
        resolve=_OTHER_FORM if form == "full" else "vary batch size or length.",
    )
    return PhaseFit(decode, form, linear, b, length, reference)


def check_phase(batch: ArrayLike, length_tokens: ArrayLike, *, decode: bool) -> Identifiability:
    """Which of the four coefficients of a phase these settings determine."""
    design, terms = _design(decode, "full", batch, length_tokens, (1.0, 0.0))
    return identifiability(design, terms)
