r"""What share of the requests each engine is planned to serve, mended while it serves.

An engine s of whole replicas carries

.. math:: \mu_s = \max_b \frac{b}{(O - 1)\, d_s(b) + b\, p_s}

requests of I input and O output tokens per second (:mod:`hetero.planners.baselines.capacity`), and
the largest load that any shares of them carry is the sum over the engines that are up, at shares in
proportion to it: as many as possible are at their limit together. The plan is made anew when
engines are lost or come back, and when requests become much longer or shorter. Engines are neither
moved nor restarted for it, and no weights are loaded (the light rescheduling of
ThunderServe, section 3.4, for engines that serve both phases).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero.deployment import Deployment
from hetero.planners.baselines.capacity import Bucket, capacity_rps


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Shares of the engines of a deployment.

    Attributes
    ----------
    capacities_rps
        What each carries [requests/s], up or not.
    input_tokens, output_tokens
        Mean lengths that this holds for.
    """

    names: tuple[str, ...]
    up: tuple[bool, ...]
    capacities_rps: tuple[float, ...]
    input_tokens: float
    output_tokens: float
    why: str = ""

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        input_tokens: float,
        output_tokens: float,
        *,
        up: Sequence[bool] | None = None,
        why: str = "",
    ) -> FleetPlan:
        """Plan for requests of these mean lengths.

        Examples
        --------
        >>> from hetero.deployment import Replica
        >>> from hetero.latency.step import StepModel
        >>> def one(name, pace):
        ...     step = StepModel.affine(
        ...         floor_s=pace, per_token_s=pace / 100, per_cached_token_s=pace / 1e6
        ...     )
        ...     return Replica(name, step, kv_tokens=50_000)
        >>> pair = Deployment("pair", (one("fast", 0.01), one("slow", 0.03)))
        >>> [round(x, 3) for x in FleetPlan.of(pair, 500, 100).shares]
        [0.75, 0.25]
        >>> FleetPlan.of(pair, 500, 100, up=(False, True)).shares
        (0.0, 1.0)
        """
        bucket = Bucket(input_tokens, output_tokens, 1.0, (0.0, float("inf")))
        capacities = tuple(capacity_rps(one, bucket) for one in deployment.replicas)
        return cls(
            tuple(one.name for one in deployment.replicas),
            tuple(up) if up is not None else (True,) * len(capacities),
            capacities,
            input_tokens,
            output_tokens,
            why,
        )

    @property
    def capacity_rps(self) -> float:
        """Load that the engines that are up carry together [requests/s]."""
        return sum(c for c, up in zip(self.capacities_rps, self.up, strict=True) if up)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the requests of each engine; all 0 where none that is up carries any."""
        total = self.capacity_rps
        return tuple(
            c / total if up and total > 0 else 0.0
            for c, up in zip(self.capacities_rps, self.up, strict=True)
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares for a router that needs some: as if all were up where none is."""
        if self.capacity_rps > 0:
            return self.shares
        return self.capacities_rps if sum(self.capacities_rps) > 0 else (1.0,) * len(self.names)

    def record(self) -> dict[str, Any]:
        """The plan as plain values."""
        rows = zip(self.names, self.up, self.capacities_rps, self.shares, strict=True)
        names = ("name", "up", "capacity_rps", "share")
        return {
            "why": self.why,
            "capacity_rps": round(self.capacity_rps, 4),
            "mean_input_tokens": round(self.input_tokens, 1),
            "mean_output_tokens": round(self.output_tokens, 1),
            "engines": [dict(zip(names, row, strict=True)) for row in rows],
        }

    def line(self) -> str:
        """The plan in one line, as logs have it."""
        pairs = zip(self.names, self.shares, strict=True)
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in pairs)
        return f"{self.why}: {self.capacity_rps:.3g} requests/s planned, {shares}"
