"""What a plan delivers in a case: the same requests, arrivals and seeds for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, total_ordering

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.intervals import interval
from hetero.planners.bound import bound, capped, goodput_bound
from hetero.plans import Plan
from hetero.question import MOST_REQUESTS, Question, judged, sustained_rps
from hetero.simulator import Slo
from hetero.simulator.metrics import Metrics, largest_rate, metrics
from hetero.simulator.sustained import steady_s

PRECISION = 0.02
"""Width of the last bracket of a goodput, over its lower end."""
GROWTH = 0.05
"""Growth of the backlog that still counts as keeping up in a short run, which is noisy."""
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its 95 % interval, which is the mean itself for one seed.

    Examples
    --------
    >>> Estimate.of([1.0, 3.0]).mean
    2.0
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], most: float = math.inf) -> Estimate:
        """Mean and interval of one value per seed, none of which can be below 0 or above ``most``.

        >>> Estimate.of([0.9, 1.0], most=1.0).high
        1.0
        """
        low, high = interval(values)
        return cls(float(np.mean(values)), max(low, 0.0), min(high, most))

    def __str__(self) -> str:
        half = max(self.high - self.mean, self.mean - self.low)  # one end may be cut
        return f"{self.mean:.4g}" + (f" ± {half:.2g}" if half > 0 else "")


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A run at a rate, its part that counts, and the shares that met the targets and finished."""

    told: Metrics
    attained: float
    finished: float


@dataclass(frozen=True, eq=False, repr=False)
class Score(Shown):
    """What a plan delivers.

    What happens at the offered load is simulated when it is first asked for: plans are ranked by
    their goodput, and most are never looked at closer.

    Attributes
    ----------
    rate_rps
        Offered load that everything but the goodput is simulated at [requests/s].
    seeds_rps
        Largest offered load that the plan sustains, of each seed.
    """

    plan: Plan
    question: Question
    rate_rps: float
    seeds: tuple[int, ...]
    seeds_rps: tuple[float, ...]

    @property
    def goodput_rps(self) -> Estimate:
        """Mean over seeds of the largest load sustained (:mod:`hetero.simulator.sustained`)."""
        return Estimate.of(self.seeds_rps)

    @cached_property
    def _simulated(self) -> list[_Simulated]:
        load = self.question.load(self.rate_rps, precision=PRECISION)
        found = []
        for seed in self.seeds:
            run, seen = judged(self.plan, load, seed)
            begin_s, end_s = steady_s(run)
            told = metrics(run, self.question.slo, warmup_s=begin_s, until_s=end_s)
            found.append(_Simulated(told, seen.attained, float(run.finished.mean())))
        return found

    def _of(self, figure: Callable[[Metrics], float]) -> Estimate:
        return Estimate.of([figure(one.told) for one in self._simulated])

    @property
    def throughput_rps(self) -> Estimate:
        """Requests finished per second in the part of each run that counts."""
        return self._of(lambda one: one.requests_per_s)

    @property
    def throughput_tps(self) -> Estimate:
        """Input and output tokens of finished requests per second in that part."""
        return self._of(lambda one: one.total_tps)

    @property
    def attainment(self) -> Estimate:
        """Share of the requests that met every target."""
        return Estimate.of([one.attained for one in self._simulated], most=1.0)

    @property
    def met(self) -> dict[str, Estimate]:
        """Share of the requests that met each target."""
        names = [name for name in self._simulated[0].told.attainment if name != "joint"]
        runs = [one.told.attainment for one in self._simulated]
        return {name: Estimate.of([one[name] for one in runs], most=1.0) for name in names}

    @property
    def finished(self) -> Estimate:
        """Share of the requests that were served at all."""
        return Estimate.of([one.finished for one in self._simulated], most=1.0)

    @property
    def ttft_s(self) -> dict[int, Estimate]:
        """Time to first token by percentile."""
        return self._percentiles("ttft_s")

    @property
    def tpot_s(self) -> dict[int, Estimate]:
        """Time per output token by percentile."""
        return self._percentiles("tpot_s")

    @property
    def e2e_s(self) -> dict[int, Estimate]:
        """Time to the last token by percentile."""
        return self._percentiles("e2e_s")

    def _percentiles(self, key: str) -> dict[int, Estimate]:
        runs = [one.told.percentiles[key] for one in self._simulated]
        return {p: Estimate.of([one[p] for one in runs]) for p in PERCENTILES}

    @property
    def usd_per_h(self) -> float | None:
        """Price of the GPUs in use."""
        return self.plan.usd_per_h

    @property
    def usd_per_mtok(self) -> Estimate | None:
        """Price per 10^6 tokens, in and out, at ``rate_rps``."""
        return self._cost([one.told.total_tps for one in self._simulated])

    @property
    def usd_per_mtok_at_goodput(self) -> Estimate | None:
        """Price per 10^6 tokens, in and out, when the goodput is used in full."""
        trace = self.question.trace
        tokens = float((trace.input_tokens + trace.output_tokens).mean())
        return self._cost([one * tokens for one in self.seeds_rps])

    def _cost(self, tokens_per_s: Sequence[float]) -> Estimate | None:
        price = self.usd_per_h
        if price is None or min(tokens_per_s) <= 0:
            return None
        return Estimate.of([price / 3600.0 / rate * 1e6 for rate in tokens_per_s])

    @cached_property
    def bound_rps(self) -> float | None:
        """What no plan exceeds that serves such a share of the requests; None if none is known."""
        return goodput_bound(self.question, self.finished.mean)

    @property
    def gap(self) -> float | None:
        """Distance of the goodput to the bound, over the bound; None without a bound."""
        return None if self.bound_rps is None else 1.0 - self.goodput_rps.mean / self.bound_rps

    def table(self) -> Table:
        """Quantities with their units."""
        rows: list[tuple[object, ...]] = [
            ("goodput", str(self.goodput_rps), "requests/s"),
            ("throughput", str(self.throughput_rps), "requests/s"),
            ("throughput", str(self.throughput_tps), "tokens/s"),
            ("requests that met every target", _percent(self.attainment), "%"),
            *((f"  {name.upper()}", _percent(share), "%") for name, share in self.met.items()),
        ]
        for label, found in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s)):
            rows += [(f"{label} P{p}", str(_times(one, 1e3)), "ms") for p, one in found.items()]
        if self.usd_per_h is not None:
            rows.append(("price", f"{self.usd_per_h:.4g}", "$/h"))
        if self.usd_per_mtok is not None:
            rows.append(("cost", str(self.usd_per_mtok), "$ per 10^6 tokens"))
        if self.usd_per_mtok_at_goodput is not None:
            rows.append(("cost at goodput", str(self.usd_per_mtok_at_goodput), "$ per 10^6 tokens"))
        if self.bound_rps is not None:
            rows.append(("bound on goodput", f"{self.bound_rps:.4g}", "requests/s"))
        columns = (Column("quantity"), Column("value"), Column("unit"))
        note = f"Played at {self.rate_rps:.4g} requests/s with {len(self.seeds)} seeds."
        return Table(self.plan.planner, columns, tuple(rows), (note,))


def _times(one: Estimate, factor: float) -> Estimate:
    return Estimate(factor * one.mean, factor * one.low, factor * one.high)


def _percent(one: Estimate) -> str:
    return str(_times(one, 100.0))


@total_ordering
class Rank:
    """Key to sort plans by: goodput; where it is the same, attainment and then throughput.

    A plan that has no score is below all that have one.
    """

    def __init__(self, score: Score | None) -> None:
        self._score = score

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rank) and not self < other and not other < self

    def __lt__(self, other: Rank) -> bool:
        if self._score is None or other._score is None:
            return self._score is None and other._score is not None
        if self._score is other._score:
            return False
        ours, theirs = self._score.goodput_rps.mean, other._score.goodput_rps.mean
        return ours < theirs if ours != theirs else _at_rate(self._score) < _at_rate(other._score)


def _at_rate(one: Score) -> tuple[float, float]:
    return one.attainment.mean, one.throughput_rps.mean


def screened(
    plan: Plan,
    question: Question,
    seed: int,
    *,
    start_rps: float | None = None,
    precision: float = PRECISION,
) -> float:
    """About the largest rate that a plan sustains, by short runs [requests/s].

    For searches, which compare thousands of plans: the requests that a question compares plans by
    (:meth:`~hetero.question.Question.arrivals`) meet the goal, as :func:`margin` says. Some
    minutes of requests may meet their targets at rates that could not go on for ever; so nothing is
    tried above the bound on throughput or, where none is known, above the rate at which all
    requests that are simulated at most come within the time of the first token.
    """
    limit = bound(question)
    most = limit.rps(question.goal) if limit else _shown(question)
    start = min(start_rps or question.rate_rps, most)
    return largest_rate(
        lambda rate: margin(plan, question, rate, seed) >= 0.0,
        start,
        precision=precision,
        least_rps=1e-3 * start,
        most_rps=most,
    )


def _shown(question: Question) -> float:
    """Largest rate about which the requests of a case say anything, see :func:`screened`."""
    slo = question.slo
    target_s = (
        slo.ttft_s or slo.e2e_s or (slo.tpot_s or 1.0) * float(question.trace.output_tokens.mean())
    )
    return float(max(len(question.trace), MOST_REQUESTS) / target_s)


def margin(plan: Plan, question: Question, rate_rps: float, seed: int) -> float:
    """By how much a plan passes a short run at a rate, as a share of the requests.

    With targets, the share that meets all of them less what it has to be; growth is no sign there,
    since a run so short begins with an empty fleet. Without, what the growth of the backlog stays
    below :data:`GROWTH`. Below 0 if it does not pass.
    """
    seen = question.load().rule.judge(plan.simulate(question.arrivals(rate_rps, seed=seed), seed))
    enough = seen.attained - seen.needed
    return enough if question.slo != Slo() else min(enough, GROWTH - seen.growth)


def goodput(
    plan: Plan, question: Question, seeds: Sequence[int] = (0,), *, near_rps: float = 0.0
) -> tuple[float, ...]:
    """Largest rate that a plan sustains with the arrivals of each seed [requests/s].

    Parameters
    ----------
    near_rps
        Rate to look around first; by default that of short runs.
    """
    load = capped(plan, question, PRECISION)
    near = near_rps or screened(plan, question, _checked(seeds)[0])
    found: list[float] = []
    for seed in seeds:
        found.append(sustained_rps(plan, load, seed, near_rps=near or None))
        near = found[-1] or near
    return tuple(found)


def score(
    plan: Plan,
    question: Question,
    *,
    seeds: Sequence[int] = (0,),
    rate_rps: float | None = None,
    known: Sequence[float] | None = None,
) -> Score:
    """Find the most that a plan sustains; what it does at a rate is simulated when asked for.

    Parameters
    ----------
    seeds
        One run each; what comes of a seed is the same for every plan.
    rate_rps
        Offered load; that of the case by default.
    known
        Largest rate of each seed, where it has been found before.
    """
    used = _checked(seeds)
    seeds_rps = tuple(known) if known is not None else goodput(plan, question, used)
    return Score(plan, question, rate_rps or question.rate_rps, used, seeds_rps)


def _checked(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds:
        raise ParameterError("No seed is given to play with.", resolve="give one or more seeds.")
    return tuple(seeds)
