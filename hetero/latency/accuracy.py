"""How far a latency model lies from what was measured, in the same four numbers everywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from hetero.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Accuracy:
    r"""Relative error of a model, ``e = predicted / measured - 1``, over the rows of a table.

    Attributes
    ----------
    mape_percent, bias_percent, p95_percent, max_percent
        Mean of ``|e|``, mean of ``e``, 95th percentile and largest ``|e|``, times 100.
    r2
        ``1 - sum (measured - predicted)^2 / sum (measured - mean)^2``, not weighted; NaN where
        all measured values are equal.
    rows
        Number of rows.

    Examples
    --------
    >>> accuracy = Accuracy.of([1.1, 1.9], [1.0, 2.0])
    >>> round(accuracy.mape_percent, 3), round(accuracy.bias_percent, 3), accuracy.rows
    (7.5, 2.5, 2)
    """

    mape_percent: float
    bias_percent: float
    p95_percent: float
    max_percent: float
    r2: float
    rows: int

    @property
    def percents(self) -> dict[str, float]:
        """The four percentages by name."""
        return {name: value for name, value in asdict(self).items() if name.endswith("percent")}

    @classmethod
    def of(cls, predicted: ArrayLike, measured: ArrayLike) -> Accuracy:
        """Accuracy of ``predicted`` against ``measured``, equal shapes and units, measured > 0."""
        y = np.asarray(measured, dtype=np.float64)
        p = np.asarray(predicted, dtype=np.float64)
        if y.shape != p.shape or y.size == 0 or not bool(np.all(y > 0)):
            raise ParameterError(
                f"Accuracy compares equal shapes of positive measured values; received {p.shape} "
                f"predictions and {y.shape} measurements.",
                resolve="drop rows whose measured time is not positive.",
            )
        error = 100.0 * (p / y - 1.0)
        size = np.abs(error)
        spread = float(np.sum((y - y.mean()) ** 2))
        return cls(
            mape_percent=float(size.mean()),
            bias_percent=float(error.mean()),
            p95_percent=float(np.quantile(size, 0.95)),
            max_percent=float(size.max()),
            r2=1.0 - float(np.sum((y - p) ** 2)) / spread if spread > 0 else float("nan"),
            rows=int(y.size),
        )
