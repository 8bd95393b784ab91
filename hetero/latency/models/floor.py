r"""Prefill time with a floor: flat while a step is too small to fill the GPU, then linear.

.. math::
    T_{prefill} = \max(floor,\; a\, b I + c \;[\, + p_2 b \,])

Small prefills are bound by reading the weights or by launching kernels, whatever their size; the
affine eq. 3 of Xiong et al. has no such floor and pays for it at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.errors import FitError
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.fitting import (
    Coefficients,
    Prediction,
    Term,
    Weights,
    identifiability,
)

_FLOOR = Term("floor", "1", "s", "while the step is small")
_LINE = (
    Term("a", "b I", "s/token", "per prompt token of the batch"),
    Term("c", "1", "s", "intercept of the line"),
    Term("p2", "b", "s/request", "per request of the batch"),
)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class FloorFit(Coefficients):
    """Fit of the floor form; coefficients in the order floor, a, c and, where fitted, p2."""

    batch: Floats
    length_tokens: Floats
    _covariance: Floats
    _variance: float

    @property
    def floor_s(self) -> float:
        """Time of a prefill that is too small to matter [s]."""
        return float(self.coefficients[0])

    @property
    def bend_tokens(self) -> float:
        """Tokens of a batch of one at which the line leaves the floor."""
        a, c = self.coefficients[1:3]
        per_request = self.coefficients[3] if len(self.coefficients) > 3 else 0.0
        return float(max(0.0, (self.coefficients[0] - c - per_request) / a))

    def predict(self, batch: ArrayLike, length_tokens: ArrayLike) -> Prediction:
        """Time [s] and prediction interval (first order in the coefficients); inputs broadcast."""
        from scipy.stats import t as student

        b, i = np.broadcast_arrays(np.asarray(batch, float), np.asarray(length_tokens, float))
        jacobian = _jacobian(self.coefficients, b.ravel(), i.ravel())
        seconds = jacobian @ self.coefficients
        scatter = self._variance * (seconds**2 if self.weights == "relative" else 1.0)
        spread = np.sqrt(scatter + ((jacobian @ self._covariance) * jacobian).sum(axis=1))
        freedom = self.accuracy.rows - len(self.coefficients)
        half = float(student.ppf(0.5 + self.confidence / 2.0, freedom)) * spread
        return Prediction(seconds, seconds - half, seconds + half)

    @property
    def note(self) -> str:
        """How rows were weighted, and where the floor ends."""
        return (
            f"weights: {self.weights}; floor up to {self.bend_tokens:,.0f} tokens; intervals hold "
            "while each row stays on its side of the bend"
        )


def _jacobian(p: Floats, b: Floats, i: Floats) -> Floats:
    """Rows of the design: the floor's column where the floor is the larger, else the line's."""
    line = np.column_stack([b * i, np.ones_like(b), b][: len(p) - 1])
    on_line = line @ p[1:] > p[0]
    return np.column_stack([~on_line, line * on_line[:, None]])


def fit_floor(
    batch: ArrayLike,
    length_tokens: ArrayLike,
    seconds: ArrayLike,
    *,
    per_request: bool = False,
    weights: Weights = "relative",
    confidence: float = 0.95,
    label: str = "",
) -> FloorFit:
    """Fit ``max(floor, a b I + c)``, with ``per_request`` also ``+ p2 b`` on the line.

    Every split of the rows by total tokens is a start (each side by weighted least squares); the
    best one is refined by scipy's ``least_squares``. Intervals are those of the linear model on
    the final split.

    Raises
    ------
    FitError
        If fewer than two rows are left on either side, or the line's slope is not determined.

    Examples
    --------
    >>> i = np.array([64, 128, 256, 512, 1024, 2048, 4096.0])
    >>> fit = fit_floor(np.ones(7), i, np.maximum(0.05, 1e-4 * i))
    >>> round(fit.floor_s, 6), round(fit.bend_tokens)
    (0.05, 500)
    """
    from scipy.optimize import least_squares
    from scipy.stats import t as student

    b = np.asarray(batch, dtype=np.float64)
    i = np.asarray(length_tokens, dtype=np.float64)
    y = np.asarray(seconds, dtype=np.float64)
    title = f"{label}, prefill with a floor" if label else "Prefill with a floor"
    line = np.column_stack([b * i, np.ones_like(b), b][: 3 if per_request else 2])
    count = line.shape[1] + 1
    w = 1.0 / y if weights == "relative" else np.ones_like(y)

    def residuals(p: Floats) -> Floats:
        return np.asarray((_jacobian(p, b, i) @ p - y) * w)

    best: Floats | None = None
    for bend in np.unique(b * i)[:-1]:
        small = b * i <= bend
        if (~small).sum() < line.shape[1]:
            continue
        slopes = np.linalg.lstsq(line[~small] * w[~small, None], (y * w)[~small], rcond=None)[0]
        start = np.array([(y[small] * w[small] ** 2).sum() / (w[small] ** 2).sum(), *slopes])
        if best is None or (residuals(start) ** 2).sum() < (residuals(best) ** 2).sum():
            best = start
    if best is None or len(y) <= count:
        raise FitError(
            f"{title}: {len(y)} rows over {len(np.unique(b * i))} batch sizes in tokens cannot "
            f"determine {count} coefficients and their error.",
            resolve="measure more settings, on both sides of the bend.",
        )
    scale = np.maximum(np.abs(best), 1e-12)

    def scaled(p: Floats) -> Floats:
        return residuals(p * scale)

    def scaled_jacobian(p: Floats) -> Floats:
        return np.asarray(_jacobian(p * scale, b, i) * w[:, None] * scale)

    solved = least_squares(scaled, best / scale, jac=scaled_jacobian, xtol=1e-12, ftol=1e-12)
    p = np.asarray(solved.x) * scale
    design = _jacobian(p, b, i)
    terms = (_FLOOR, *_LINE[: count - 1])
    flat = int(design[:, 0].sum())
    check = identifiability(design, terms)
    if min(flat, len(y) - flat) < 2 or not check.complete or p[1] <= 0 or p[0] < 0:
        raise FitError(
            f"{title}: {flat} of {len(y)} rows lie on the floor, which does not determine both "
            "the floor and a rising line.",
            resolve="fit without a floor, or measure both small and large prefills.",
        )
    weighted = design * w[:, None]
    freedom = len(y) - count
    variance = float((residuals(p) ** 2).sum()) / freedom
    covariance = variance * np.linalg.inv(weighted.T @ weighted)
    half = float(student.ppf(0.5 + confidence / 2.0, freedom)) * np.sqrt(np.diag(covariance))
    return FloorFit(
        title=title,
        terms=terms,
        coefficients=p,
        low=p - half,
        high=p + half,
        confidence=confidence,
        accuracy=Accuracy.of(design @ p, y),
        weights=weights,
        batch=b,
        length_tokens=i,
        _covariance=covariance,
        _variance=variance,
    )
