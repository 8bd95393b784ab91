"""Linear least squares with stated uncertainty, which refuses what the data cannot determine."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import FitError
from hetero.latency.accuracy import Accuracy

Weights = Literal["relative", "none"]
"""``relative`` minimises the squared relative error (weights ``1/y^2``), ``none`` the squared one.

Relative weights are taken from the measured values, so values that came out low weigh a little
more: a bias of about twice the squared relative noise (0.2 % at 3 % noise).
"""

# Singular values of the scaled design below this share of the largest count as zero.
RANK_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class Term:
    """One coefficient: its name, the column it multiplies, its unit, and what it means."""

    name: str
    column: str
    unit: str
    meaning: str = ""

    @property
    def display_unit(self) -> str:
        """The unit in tables, where values are shown in microseconds."""
        return f"µ{self.unit}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Identifiability(Shown):
    r"""Which coefficients of a linear model a set of rows determines.

    The columns of the design are scaled to unit length; ``condition`` is the ratio of the largest
    to the smallest singular value. Where the rank falls short of the number of coefficients, the
    null space names the relations that hold in every row: the coefficients that take part in one
    may be changed together without changing any prediction, so no data set of this layout can
    tell them apart.

    Examples
    --------
    >>> terms = (Term("p1", "b I", "s"), Term("p2", "b", "s"), Term("p3", "I", "s"))
    >>> b, i = np.array([1.0, 1.0, 1.0, 1.0]), np.array([128.0, 256.0, 512.0, 1024.0])
    >>> check = identifiability(np.column_stack([b * i, b, i]), terms)
    >>> check.rank, check.relations, check.determined
    (2, ('b I = I',), ('p2',))
    """

    terms: tuple[Term, ...]
    rank: int
    condition: float
    relations: tuple[str, ...]
    determined: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every coefficient is determined."""
        return self.rank == len(self.terms)

    def table(self) -> Table:
        """One row per coefficient, the relations below."""
        rows = tuple((t.name, t.column, t.name in self.determined) for t in self.terms)
        notes = (
            f"rank {self.rank} of {len(self.terms)}, condition {self.condition:.3g}",
            *(f"in every row: {relation}" for relation in self.relations),
        )
        columns = (Column("coefficient"), Column("multiplies"), Column("determined"))
        return Table("Identifiability", columns, rows, notes)


def identifiability(design: ArrayLike, terms: tuple[Term, ...]) -> Identifiability:
    """Rank, condition and null space of a design, shape (rows, coefficients)."""
    x = np.asarray(design, dtype=np.float64)
    length = np.sqrt((x**2).sum(axis=0))
    length[length == 0] = 1.0
    _, singular, right = np.linalg.svd(x / length, full_matrices=True)
    singular = np.pad(singular, (0, x.shape[1] - len(singular)))
    rank = int((singular > RANK_TOLERANCE * singular[0]).sum())
    null = _reduce(right[rank:] / length)
    free = np.any(np.abs(null) > 0, axis=0)
    return Identifiability(
        terms=terms,
        rank=rank,
        condition=float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf"),
        relations=tuple(_relation(row, terms) for row in null),
        determined=tuple(t.name for t, loose in zip(terms, free, strict=True) if not loose),
    )


def _reduce(null: Floats) -> Floats:
    """Reduced row echelon form, so that the relations read as simply as they can."""
    rows = null.copy()
    done = 0
    for column in range(rows.shape[1]):
        if done == len(rows):
            break
        pivot = done + int(np.argmax(np.abs(rows[done:, column])))
        if abs(rows[pivot, column]) < 1e-9 * np.abs(rows[done:]).max():
            continue
        rows[[done, pivot]] = rows[[pivot, done]]
        rows[done] /= rows[done, column]
        others = np.arange(len(rows)) != done
        rows[others] -= np.outer(rows[others, column], rows[done])
        done += 1
    if rows.size:
        rows[np.abs(rows) < 1e-6] = 0.0
    return rows


def _relation(row: Floats, terms: tuple[Term, ...]) -> str:
    parts = []
    (first, *rest) = np.flatnonzero(row)
    for k in rest:
        value, column = -row[k], terms[k].column
        size = f"{abs(value):.6g}"
        text = size if column == "1" else column if size == "1" else f"{size} {column}"
        parts.append(f"{'-' if value < 0 else '+'} {text}")
    right = " ".join(parts).removeprefix("+ ") or "0"
    return f"{terms[first].column} = {right}"


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted times [s] with the interval that one new measurement falls into.

    Attributes
    ----------
    seconds, low_s, high_s
        Equal shapes; expected value and the ends of the prediction interval.
    """

    seconds: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Coefficients(Shown):
    """Coefficients with intervals, and the error of the fit.

    Attributes
    ----------
    coefficients, low, high
        Shape (K,); estimates and the ends of their confidence intervals.
    accuracy
        Of the fit on its own rows.
    """

    title: str
    terms: tuple[Term, ...]
    coefficients: Floats
    low: Floats
    high: Floats
    confidence: float
    accuracy: Accuracy
    weights: Weights

    @property
    @abstractmethod
    def note(self) -> str:
        """What else there is to say of the fit."""

    def table(self) -> Table:
        """One row per coefficient in microseconds, the errors of the fit below."""
        percent = f"{100 * self.confidence:g} %"
        columns = (
            Column("coefficient", of=lambda row: row[0].name),
            Column("multiplies", of=lambda row: row[0].column),
            Column("value", digits=6, of=lambda row: 1e6 * float(row[1])),
            Column("unit", of=lambda row: row[0].display_unit),
            Column(f"{percent} low", digits=6, of=lambda row: 1e6 * float(row[2])),
            Column(f"{percent} high", digits=6, of=lambda row: 1e6 * float(row[3])),
            Column("meaning", of=lambda row: row[0].meaning),
        )
        a = self.accuracy
        errors = (
            f"mean error {a.mape_percent:.2f} %, largest {a.max_percent:.2f} %, "
            f"R2 {a.r2:.4f}, {a.rows} rows"
        )
        rows = zip(self.terms, self.coefficients, self.low, self.high, strict=True)
        return Table.of(self.title, columns, rows, errors, self.note)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class LinearFit(Coefficients):
    """Fit of ``y = X p``, and which coefficients its rows determine."""

    check: Identifiability
    non_negative: bool
    _results: Any
    _active: NDArray[np.bool_]
    _scale: Floats

    def __getitem__(self, name: str) -> float:
        """Coefficient of that name, such as ``fit["p1"]``."""
        for term, value in zip(self.terms, self.coefficients, strict=True):
            if term.name == name:
                return float(value)
        raise KeyError(name)

    def predict(self, design: ArrayLike) -> Prediction:
        """Prediction for rows of the design, shape (rows, K), with its interval.

        With relative weights the scatter of a new measurement is taken proportional to its
        predicted value, as the fit assumes.
        """
        x = np.atleast_2d(np.asarray(design, dtype=np.float64))
        seconds = x @ self.coefficients
        new = x[:, self._active] / self._scale[self._active]
        frame = self._results.get_prediction(
            new,
            weights=np.maximum(np.abs(seconds), 1e-30) ** -2.0
            if self.weights == "relative"
            else np.ones(len(seconds)),
        ).summary_frame(alpha=1.0 - self.confidence)
        return Prediction(
            seconds, frame["obs_ci_lower"].to_numpy(), frame["obs_ci_upper"].to_numpy()
        )

    def expected(self, design: ArrayLike) -> Prediction:
        """Expected times for rows of the design with the interval of that expectation.

        Unlike :meth:`predict` it holds no scatter of a single measurement, so more rows narrow it
        without end, as one over the square root of their number.
        """
        x = np.atleast_2d(np.asarray(design, dtype=np.float64))
        new = x[:, self._active] / self._scale[self._active]
        frame = self._results.get_prediction(new).summary_frame(alpha=1.0 - self.confidence)
        return Prediction(
            x @ self.coefficients,
            frame["mean_ci_lower"].to_numpy(),
            frame["mean_ci_upper"].to_numpy(),
        )

    @property
    def note(self) -> str:
        """How rows were weighted."""
        return f"weights: {self.weights}" + (", coefficients >= 0" if self.non_negative else "")


def fit_linear(
    design: ArrayLike,
    y: ArrayLike,
    terms: tuple[Term, ...],
    *,
    title: str,
    weights: Weights = "relative",
    non_negative: bool = False,
    confidence: float = 0.95,
    resolve: str = "measure settings that vary the columns independently.",
) -> LinearFit:
    r"""Weighted least squares ``min sum w (y - X p)^2`` with confidence intervals.

    Intervals are Student's t on the residual variance. With ``non_negative`` the solution is
    scipy's NNLS; the intervals of its positive coefficients come from a refit without the others
    and are cut at 0, and a coefficient at 0 gets the interval up to the upper end that it has
    when it alone is added to that refit (0 where that end is negative).

    Parameters
    ----------
    design
        Shape (N, K).
    y
        Shape (N,), positive times [s].
    resolve
        What the error tells the reader to do when the rows do not determine the coefficients.

    Raises
    ------
    FitError
        If there are not more rows than coefficients, a time is not positive and finite, or the
        rows do not determine every coefficient.
    """
    # Half a second and more to import, and only fits need them.
    from scipy.optimize import nnls
    from scipy.stats import t as student
    from statsmodels.regression.linear_model import WLS

    x = np.asarray(design, dtype=np.float64)
    y = np.asarray(y, dtype=np.float64)
    if len(y) <= x.shape[1]:
        raise FitError(
            f"{title}: {len(y)} rows cannot determine {x.shape[1]} coefficients and their error.",
            resolve=f"measure at least {x.shape[1] + 1} settings.",
        )
    if not bool(np.all(np.isfinite(y) & (y > 0))):
        raise FitError(
            f"{title}: {int((~(y > 0)).sum())} of {len(y)} times are not positive numbers.",
            resolve="drop these rows.",
        )
    check = identifiability(x, terms)
    if not check.complete:
        loose = [t.name for t in terms if t.name not in check.determined]
        raise FitError(
            f"{title}: the {len(y)} rows do not determine {', '.join(loose)}, because in every "
            f"row {' and '.join(check.relations)}.",
            resolve=resolve,
        )

    scale = np.abs(x).max(axis=0)
    scaled = x / scale
    w = y**-2.0 if weights == "relative" else np.ones_like(y)
    active = np.ones(x.shape[1], dtype=bool)
    if non_negative:
        root = np.sqrt(w / w.max())
        active = nnls(scaled * root[:, None], y * root)[0] > 0
        if not active.any():
            raise FitError(f"{title}: no coefficient is positive.", resolve="check the times.")
    results = WLS(y, scaled[:, active], weights=w).fit()
    interval = results.conf_int(alpha=1.0 - confidence)

    coefficients, low, high = (np.zeros(x.shape[1]) for _ in range(3))
    coefficients[active] = results.params
    low[active], high[active] = interval.T
    if non_negative:
        low = np.maximum(low, 0.0)
        for k in np.flatnonzero(~active):
            with_k = active.copy()
            with_k[k] = True
            refit = WLS(y, scaled[:, with_k], weights=w).fit()
            position = int(np.flatnonzero(with_k).searchsorted(k))
            quantile = student.ppf(0.5 + confidence / 2.0, refit.df_resid)
            high[k] = max(0.0, refit.params[position] + quantile * refit.bse[position])
    coefficients, low, high = coefficients / scale, low / scale, high / scale
    return LinearFit(
        title=title,
        terms=terms,
        coefficients=coefficients,
        low=low,
        high=high,
        confidence=confidence,
        accuracy=Accuracy.of(x @ coefficients, y),
        check=check,
        weights=weights,
        non_negative=non_negative,
        _results=results,
        _active=active,
        _scale=scale,
    )
