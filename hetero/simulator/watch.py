"""Runs that end as soon as they show that a goal is missed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from hetero.simulator.loop import missed_for_certain
from hetero.simulator.metrics import Slo

CHECKS: Final = 16
"""Times that a run is looked at."""
_ROUNDED = 1.0 + 1e-9  # beyond its target a time has missed it, whatever is rounded later


class MissedError(Exception):
    """A run cannot meet its goal any more.

    Attributes
    ----------
    attained
        Share of the requests that may have met their targets: of all that count or, where a part
        of them decided, of those.
    """

    def __init__(self, attained: float) -> None:
        super().__init__(f"at most {attained:.4g} of the requests can meet their targets")
        self.attained = attained


@dataclass(frozen=True, slots=True)
class Watch:
    """Raises :class:`MissedError` when more requests have missed a target than may.

    What it counts has been missed for certain: a first token or a finish that was late, a rejected
    request, or one that is still held when its first token was due. So a run that goes on to its
    end is the same as without it.

    Attributes
    ----------
    first, last
        First request that counts, and the first after it that does not.
    needed
        Share of them that has to meet every target.
    early
        Shares of the run, and of the requests that counted by then that may have missed.
    """

    slo: Slo
    first: int
    last: int
    needed: float
    early: tuple[tuple[float, float], ...] = ()

    def look(self, requests: Any, engines: Any, come: int) -> None:
        """Count among the requests that have come, the last of them just now."""
        slo, stop = self.slo, min(come, self.last)
        targets = (slo.ttft_s, slo.tpot_s, slo.e2e_s)
        limits = [math.inf if one is None else one * _ROUNDED for one in targets]
        # Times here lack the way back, which may differ between two phases.
        ways_s = float(engines["way_s"].max())
        now_s = float(requests["arrival_s"][come - 1])
        missed = int(missed_for_certain(requests, self.first, stop, now_s, ways_s, *limits))
        count, so_far = self.last - self.first, stop - self.first
        if missed > (1.0 - self.needed) * count + 0.5:
            raise MissedError(1.0 - missed / count)
        if any(come >= at * len(requests) and missed > most * so_far for at, most in self.early):
            raise MissedError(1.0 - missed / so_far)
