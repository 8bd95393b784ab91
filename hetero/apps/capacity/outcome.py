"""Trials: what a plan makes of a load over several seeds, by the rule of a sustained rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.intervals import interval
from hetero.plans import Plan
from hetero.question import Load, judged
from hetero.routers import Predictive
from hetero.simulator import Event, Run
from hetero.simulator.sustained import Judged

_MARGIN = 0.9  # of targets, which leaves room for what is not predicted


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan made of a load, one value per seed.

    Attributes
    ----------
    rate_rps
        The load's rate.
    seen
        What the run of each seed shows.
    tokens_per_s
        Input and output tokens served.
    """

    rate_rps: float
    seen: tuple[Judged, ...]
    tokens_per_s: tuple[float, ...]

    @property
    def sustained(self) -> bool:
        """Whether the load could go on, in every seed."""
        return all(one.sustained for one in self.seen)

    @property
    def mean(self) -> float:
        """Mean share of the requests that met every target."""
        return float(np.mean([one.attained for one in self.seen]))

    @property
    def attained_interval(self) -> tuple[float, float]:
        """95 % interval of that share."""
        low, high = interval([one.attained for one in self.seen])
        return max(low, 0.0), min(high, 1.0)

    @property
    def goodput_rps(self) -> float:
        """Requests per second that met every target."""
        return self.mean * self.rate_rps

    @property
    def shown(self) -> str:
        """What was simulated, in words."""
        count, seconds = (
            min(each) for each in zip(*((j.requests, j.seconds) for j in self.seen), strict=True)
        )
        return f"{len(self.seen)} seeds of {count:,} requests in {seconds:,.0f} s or more"


def outcome(
    plan: Plan, load: Load, *, events: Sequence[Event] = (), stop_early: bool = False
) -> Outcome:
    """Play a load on a plan.

    Parameters
    ----------
    stop_early
        Leave the remaining seeds out once one does not sustain it.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.deployment import Deployment, Replica
    >>> from hetero.latency.step import StepModel
    >>> from hetero.simulator import Slo
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> one = Deployment("one", (Replica("a", step, kv_tokens=50_000),))
    >>> chats = workload.load("azure2023_conv")
    >>> easy = Load(chats, 1.0, Slo(ttft_s=2.0), precision=0.05, seeds=(0,))
    >>> plan = Plan("by hand", (), one, Predictive(), "hetero", None)
    >>> outcome(plan, easy).sustained, outcome(plan, easy.at(50.0)).sustained
    (True, False)
    """
    found: list[Judged] = []
    tokens: list[float] = []
    for seed in load.seeds:
        run, seen = judged(plan, load, seed, events=events)
        found.append(seen)
        tokens.append(_tokens_per_s(run))
        if stop_early and not seen.sustained:
            break
    return Outcome(load.rate_rps, tuple(found), tuple(tokens))


def dispatcher(load: Load) -> Predictive:
    """The router of fleets that are sized: by predicted times, with their targets."""
    ttft_s, tpot_s = (one and _MARGIN * one for one in (load.slo.ttft_s, load.slo.tpot_s))
    return Predictive(target_s=ttft_s, tpot_s=tpot_s)


def _tokens_per_s(run: Run) -> float:
    done = run.finished
    tokens = run.requests["input_tokens"][done].sum() + run.requests["output_tokens"][done].sum()
    return float(tokens) / max(run.span_s, 1e-9)
