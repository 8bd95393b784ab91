r"""The rule of a sustained rate: whether a fleet could go on serving a load for ever.

A short burst shows nothing: the first requests of any run find an empty fleet, and the last ones
are served while nothing comes any more. So

- arrivals last at least :math:`20\,T`, with T the time that a median request takes where every
  replica decodes as many requests as it holds, by its step times. T does not come from the run that
  is judged: beyond saturation that grows with the run;
- requests that arrive in the first fifth (warm-up) and the last twentieth (drain) do not count;
- of the n that do, at least the goal meet every target. n is large enough that chance alone moves
  the rate of Poisson arrivals by no more than the stated precision p, one standard deviation:
  :math:`n \ge 1 / p^2`. The share that meets the targets moves by less;
- the backlog does not grow between the ends of that window beyond noise: by at most
  :math:`p n + 3 \sqrt{B_0 + B_1}` with the backlogs :math:`B_0, B_1` at its ends, as arrivals and
  completions that were independent would let it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment, Replica
from hetero.engine import state
from hetero.errors import ParameterError
from hetero.simulator.metrics import Slo
from hetero.simulator.run import Run
from hetero.simulator.saturation import attainment

LIVES: Final = 20.0
"""Times of a median request at the batch limit that arrivals last."""
WARM_UP, DRAIN = 0.2, 0.05
"""Shares of the arrivals at their beginning and end that do not count."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a run shows of a rate.

    Attributes
    ----------
    requests, seconds
        Requests that count, and the time in which they arrive [s].
    attained
        Share of them that met every target; 1 where there is none and all were served.
    growth
        Growth of the backlog over the window, as a share of the requests that count.
    steady
        Whether that is no more than noise.
    goal
        Share of the requests that has to meet the targets.
    """

    requests: int
    seconds: float
    attained: float
    growth: float
    steady: bool
    goal: float

    @property
    def sustained(self) -> bool:
        """Whether the rate could go on."""
        return self.steady and self.attained >= self.goal


@dataclass(frozen=True, slots=True)
class SustainedRule:
    """Targets, goal and precision of a sustained rate; nothing else differs between its users.

    Examples
    --------
    >>> SustainedRule(goal=0.9, precision=0.02).requests(1.0, 0.5)
    3334
    >>> SustainedRule(goal=0.9, precision=0.02).requests(100.0, 10.0)  # 20 lives of 10 s
    20000
    """

    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    precision: float = 0.02

    def __post_init__(self) -> None:
        if not (0 < self.goal <= 1 and 0 < self.precision < 1):
            raise ParameterError(
                f"A goal of {self.goal:g} cannot be judged to {self.precision:g}.",
                resolve="give a goal above 0 and up to 1, and a precision between 0 and 1.",
            )

    def requests(self, rate_rps: float, life_s: float) -> int:
        """Arrivals that a run at a rate has to hold.

        Parameters
        ----------
        life_s
            Time of a median request at the batch limit [s], see :func:`life_s`.
        """
        counted = 1.0 / self.precision**2
        return math.ceil(max(LIVES * life_s * rate_rps, counted / (1.0 - WARM_UP - DRAIN)))

    def judge(self, run: Run) -> Judged:
        """What a run of so many requests shows."""
        arrival_s = np.asarray(run.requests["arrival_s"])
        first, last = window(len(arrival_s))
        inside = np.zeros(len(arrival_s), np.bool_)
        inside[first:last] = True
        count = last - first
        finish_s = np.sort(np.asarray(run.requests["finish_s"])[_served(run)])
        arrived = np.sort(arrival_s[_served(run)])
        begin_s, end_s = float(arrival_s[first]), float(arrival_s[last - 1])
        before, after = (
            int(np.searchsorted(arrived, t, side="right"))
            - int(np.searchsorted(finish_s, t, side="right"))
            for t in (begin_s, end_s)
        )
        noise = 3.0 * math.sqrt(before + after)
        return Judged(
            requests=count,
            seconds=end_s - begin_s,
            attained=attainment(run, self.slo, inside),
            growth=(after - before) / count,
            steady=after - before <= self.precision * count + noise,
            goal=self.goal,
        )


def window(requests: int) -> tuple[int, int]:
    """First request that counts, and the first after it that does not."""
    first = int(WARM_UP * requests)
    return first, max(first + 1, requests - int(DRAIN * requests))


def life_s(deployment: Deployment, input_tokens: float, output_tokens: float) -> float:
    r"""Time that a request takes where every replica is as full as it can be [s].

    .. math:: T = t_p(I) + O\,t_d(b), \qquad b = \min(B, K / (I + O))

    with the prefill of I tokens alone, and O decode steps of b requests with :math:`I + O / 2`
    cached tokens each; B the batch limit, K the KV cache of the replica. The slowest replica of
    each phase counts.
    """
    phases = {"prefill": 0.0, "decode": 0.0}
    for replica in deployment.replicas:
        prefill_s, decode_s = _phases_s(replica, input_tokens, output_tokens)
        if replica.role != "decode":
            phases["prefill"] = max(phases["prefill"], prefill_s)
        if replica.role != "prefill":
            phases["decode"] = max(phases["decode"], decode_s)
    return sum(phases.values())


def _phases_s(replica: Replica, inputs: float, outputs: float) -> tuple[float, float]:
    held = min(float(replica.engine.max_batch), replica.kv_tokens / max(inputs + outputs, 1.0))
    batch = max(1, int(held))
    cached = batch * (inputs + outputs / 2.0)
    prefill = replica.step.seconds(inputs, 0, 0.0, inputs * inputs / 2.0)
    decode = replica.step.seconds(batch, batch, cached)
    return float(np.asarray(prefill)), outputs * float(np.asarray(decode))


def _served(run: Run) -> NDArray[np.bool_]:
    return np.asarray(run.requests["status"] != state.REJECTED)
