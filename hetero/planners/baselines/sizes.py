"""Fixed shares of the requests by the length of their input, followed by smooth rotation."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.errors import ParameterError
from hetero.routers import Request
from hetero.routers.base import FleetState


class SizeShares:
    """Smooth rotation with weights that depend on the length of the input.

    Parameters
    ----------
    rows
        Upper end of each range of inputs, in order, and the weight of each replica in it.
    """

    name = "shares by size"

    def __init__(self, rows: Sequence[tuple[float, tuple[float, ...]]]) -> None:
        self.rows = tuple(rows)
        self._credit = [[0.0] * len(weights) for _, weights in rows]

    def choose(self, request: Request, fleet: FleetState) -> int:
        """The replica with the most credit among those that can take the request.

        Raises
        ------
        ParameterError
            If the fleet has another number of replicas than there are weights.
        """
        row = next(
            (k for k, (top, _) in enumerate(self.rows) if request.input_tokens < top),
            len(self.rows) - 1,
        )
        weights, credit = self.rows[row][1], self._credit[row]
        if len(weights) != len(fleet.eligible):
            raise ParameterError(
                f"Shares by size were made for {len(weights)} replicas; the fleet has "
                f"{len(fleet.eligible)}.",
                resolve="plan anew for this fleet, or take another router.",
            )
        able = [i for i, weight in enumerate(weights) if weight > 0 and fleet.eligible[i]]
        if not able:
            able = [i for i in range(len(weights)) if fleet.eligible[i]]
            return min(able, key=lambda i: int(fleet.outstanding_tokens[i]), default=-1)
        for i in able:
            credit[i] += weights[i]
        best = max(able, key=lambda i: credit[i])
        credit[best] -= sum(weights[i] for i in able)
        return best
