"""What a plan delivers in a case: the same requests, arrivals and seeds for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.apps.portfolio.bound import bound
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.intervals import interval
from hetero.plans import Plan
from hetero.question import MOST_REQUESTS, Question, judged, sustained_rps
from hetero.simulator import Slo
from hetero.simulator.metrics import Metrics, metrics
from hetero.simulator.saturation import largest_rate
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
    def of(cls, values: Sequence[float]) -> Estimate:
        """Mean and interval of one value per seed."""
        low, high = interval(values)
        return cls(float(np.mean(values)), low, high)

    def __str__(self) -> str:
        half = (self.high - self.low) / 2.0
        return f"{self.mean:.4g}" + (f" ± {half:.2g}" if half > 0 else "")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score(Shown):
    """What a plan delivers.

    Attributes
    ----------
    rate_rps
        Offered load that everything but the goodput was played at [requests/s].
    throughput_rps, throughput_tps
        Requests, and input and output tokens, finished per second in the part of each run that
        counts (:mod:`hetero.simulator.sustained`).
    seeds_rps
        Largest offered load that the plan sustains, of each seed.
    goodput_rps
        Its mean over seeds (:mod:`hetero.simulator.sustained`).
    attainment
        Share of the requests that met every target at ``rate_rps``; by target in ``met``.
    finished
        Share of the requests that were served at all.
    ttft_s, tpot_s, e2e_s
        By percentile.
    usd_per_h
        Price of the GPUs in use.
    usd_per_mtok, usd_per_mtok_at_goodput
        Price per 10^6 tokens, in and out, at ``rate_rps`` and when the goodput is used in full.
    bound_rps
        What no plan on these GPUs exceeds in goodput, were no target in the way: the goal of the
        requests, the largest left out, at the bound on throughput. None where none is known.
    gap
        Distance of the goodput to the bound, over the bound.
    """

    planner: str
    rate_rps: float
    seeds: tuple[int, ...]
    slo: Slo
    throughput_rps: Estimate
    throughput_tps: Estimate
    seeds_rps: tuple[float, ...]
    goodput_rps: Estimate
    attainment: Estimate
    met: dict[str, Estimate]
    finished: Estimate
    ttft_s: dict[int, Estimate]
    tpot_s: dict[int, Estimate]
    e2e_s: dict[int, Estimate]
    usd_per_h: float | None
    usd_per_mtok: Estimate | None
    usd_per_mtok_at_goodput: Estimate | None
    bound_rps: float | None

    @property
    def gap(self) -> float | None:
        """Distance of the goodput to the bound, over the bound; None without a bound."""
        if self.bound_rps is None:
            return None
        return 1.0 - self.goodput_rps.mean / self.bound_rps

    @property
    def key(self) -> tuple[float, float, float]:
        """What plans are ranked by: goodput, then attainment and throughput."""
        return (self.goodput_rps.mean, self.attainment.mean, self.throughput_rps.mean)

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
            cost = str(self.usd_per_mtok_at_goodput)
            rows.append(("cost at goodput", cost, "$ per 10^6 tokens"))
        if self.bound_rps is not None:
            rows.append(("bound on goodput", f"{self.bound_rps:.4g}", "requests/s"))
        columns = (Column("quantity"), Column("value"), Column("unit"))
        note = f"Played at {self.rate_rps:.4g} requests/s with {len(self.seeds)} seeds."
        return Table(self.planner, columns, tuple(rows), (note,))


def _times(one: Estimate, factor: float) -> Estimate:
    return Estimate(factor * one.mean, factor * one.low, factor * one.high)


def _percent(one: Estimate) -> str:
    return str(_times(one, 100.0))


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
    requests that are played at most come within the time of the first token.
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

    What the share that meets every target exceeds the goal by; without targets, what the growth of
    the backlog stays below :data:`GROWTH`. With targets growth is no sign, since a run so short
    begins with an empty fleet. Below 0 if it does not pass.
    """
    run = plan.simulate(question.arrivals(rate_rps, seed=seed), seed)
    seen = question.load().rule.judge(run)
    enough = seen.attained - question.goal
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
    load = question.load(precision=PRECISION)
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
    """Simulate a plan at a rate for as long as the rule asks, and find the most that it sustains.

    Parameters
    ----------
    seeds
        One run each; what comes of a seed is the same for every plan.
    rate_rps
        Offered load; that of the case by default.
    known
        Largest rate of each seed, where it has been found before.

    Raises
    ------
    ParameterError
        If no seed is given.
    """
    used = _checked(seeds)
    rate = rate_rps or question.rate_rps
    found: list[Metrics] = []
    shares, finished = [], []
    for seed in used:
        run, seen = judged(plan, question.load(rate, precision=PRECISION), seed)
        begin_s, end_s = steady_s(run)
        found.append(metrics(run, question.slo, warmup_s=begin_s, until_s=end_s))
        shares.append(seen.attained)
        finished.append(float(run.finished.mean()))
    seeds_rps = tuple(known) if known is not None else goodput(plan, question, used)
    tokens = float((question.trace.input_tokens + question.trace.output_tokens).mean())
    limit = bound(question)
    price = plan.usd_per_h
    return Score(
        planner=plan.planner,
        rate_rps=rate,
        seeds=used,
        slo=question.slo,
        throughput_rps=Estimate.of([one.requests_per_s for one in found]),
        throughput_tps=Estimate.of([one.total_tps for one in found]),
        seeds_rps=seeds_rps,
        goodput_rps=Estimate.of(seeds_rps),
        attainment=Estimate.of(shares),
        met={
            name: Estimate.of([one.attainment[name] for one in found])
            for name in found[0].attainment
            if name != "joint"
        },
        finished=Estimate.of(finished),
        ttft_s=_percentiles(found, "ttft_s"),
        tpot_s=_percentiles(found, "tpot_s"),
        e2e_s=_percentiles(found, "e2e_s"),
        usd_per_h=price,
        usd_per_mtok=_cost(price, [one.total_tps for one in found]),
        usd_per_mtok_at_goodput=_cost(price, [one * tokens for one in seeds_rps]),
        bound_rps=limit.rps(question.goal) if limit else None,
    )


def _checked(seeds: Sequence[int]) -> tuple[int, ...]:
    if not seeds:
        raise ParameterError("No seed is given to play with.", resolve="give one or more seeds.")
    return tuple(seeds)


def _percentiles(found: Sequence[Metrics], key: str) -> dict[int, Estimate]:
    return {p: Estimate.of([one.percentiles[key][p] for one in found]) for p in PERCENTILES}


def _cost(usd_per_h: float | None, tokens_per_s: Sequence[float]) -> Estimate | None:
    if usd_per_h is None or min(tokens_per_s) <= 0:
        return None
    return Estimate.of([usd_per_h / 3600.0 / rate * 1e6 for rate in tokens_per_s])
