"""Deadlines as multiples of a reference latency: what is met at a scale, and the smallest scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.errors import ParameterError
from hetero.simulator import Run, Slo

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Latencies of a run over those of the reference, sorted, by kind of target.

    Attributes
    ----------
    sorted_scales
        ``ttft``, ``tpot``, ``e2e``: of every request that arrived, infinite where it was not
        served, 0 for the TPOT of a reply of one token.
    """

    sorted_scales: dict[str, Floats]

    @classmethod
    def of(cls, run: Run, reference: Slo) -> Scales:
        """Scales of all requests of a run.

        Raises
        ------
        ParameterError
            If the reference lacks one of the three latencies.
        """
        found = {}
        for kind in ("ttft", "tpot", "e2e"):
            unit = getattr(reference, f"{kind}_s")
            if unit is None:
                raise ParameterError(
                    f"The reference has no {kind.upper()}.", resolve="give all three latencies."
                )
            values = np.asarray(getattr(run, f"{kind}_s")) / unit
            if kind == "tpot":
                values = np.where(run.finished & np.isnan(values), 0.0, values)
            found[kind] = np.sort(np.where(run.finished, values, np.inf))
        return cls(found)

    def attained(self, kind: str, scales: Sequence[float] | Floats) -> Floats:
        """Share of the requests within each multiple of the reference."""
        values = self.sorted_scales[kind]
        return np.searchsorted(values, np.asarray(scales), side="right") / len(values)

    def smallest(self, kind: str, goal: float) -> float:
        """Smallest multiple of the reference that a share of the requests stays within.

        Examples
        --------
        >>> Scales({"e2e": np.array([1.0, 2.0, 3.0, 8.0])}).smallest("e2e", 0.75)
        3.0
        """
        values = self.sorted_scales[kind]
        if not 0 < goal <= 1:
            raise ParameterError(f"The goal is {goal}.", resolve="give a share up to 1.")
        return float(values[int(np.ceil(goal * len(values) - 1e-9)) - 1])
