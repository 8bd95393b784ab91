r"""An autoscaler over a day: target tracking with start-up, drain and losses, simulated.

The machines of the busiest hour stand in a row, those that are reserved first, then the cheapest,
and are wanted in this order. Every period the rule asks for

.. math::
    m_t = \max_{t - hold \le u \le t} \min \Big\{ m :
    \sum_{i \le m} c_i \ge \frac{\bar\lambda_u}{U \lambda_{peak}} \sum_i c_i \Big\}

of them, with prices c, :math:`\bar\lambda_u` the mean rate of the last window, U the target and
the maximum over the time for which it holds on before it scales down. With machines of one kind
this is Kubernetes' HorizontalPodAutoscaler on requests per second. It depends on the arrivals
alone: the life of every machine is known ahead, and the day is simulated once, request by request.

A machine serves a start-up after its order. The newest goes first: it is sent nothing more and ends
what it has within a grace period. It is paid for from its order to its last answer. A spot machine
that is lost is ordered again at once.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from hetero.apps.capacity.curve import DayPlan, LoadCurve
from hetero.apps.capacity.fluid import Counts
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.spot import Kind, Rental, events
from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import require, require_not_negative, require_positive
from hetero.question import Load
from hetero.simulator.metrics import attainment
from hetero.streams import stream
from hetero.workload import Trace

Steps: TypeAlias = list[tuple[float, int]]
"""From which time [s] how many machines are asked for."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How an autoscaler tracks its target.

    Source of the defaults: Kubernetes for the period and the time that it holds on
    (HorizontalPodAutoscaler), Elastic Load Balancing of AWS for the drain (deregistration delay).

    Attributes
    ----------
    target
        Share U of the rate that the busiest hour's machines carry, at which machines are kept.
    period_s, window_s
        Between two decisions, and over what arrivals are averaged.
    hold_s
        For how long fewer machines must do before it scales down.
    drain_s
        Longest time that a machine may take to end what it has.
    weights_gbs
        Bandwidth at which a machine that has started loads the weights [GB/s]; by default that is
        in the start-up time of the price list.
    spot
        Whether machines that are not reserved are rented at spot prices.
    """

    target: float = 0.8
    period_s: float = 15.0
    window_s: float = 60.0
    hold_s: float = 300.0
    drain_s: float = 300.0
    weights_gbs: float | None = None
    spot: bool = False

    def __post_init__(self) -> None:
        require(
            self.target >= 0.1,
            f"A target of {self.target:g} keeps more than ten times the machines that serve.",
            resolve="give 0.1 or more, such as 0.8.",
        )
        require_positive(period_s=self.period_s, window_s=self.window_s)
        require_not_negative(hold_s=self.hold_s, drain_s=self.drain_s)
        if self.weights_gbs is not None:
            require_positive(weights_gbs=self.weights_gbs)

    def start_s(self, market: Market) -> float:
        """From the order of a machine to its first request [s]."""
        start_s = market.prices.start_s
        if self.weights_gbs is not None:
            weights = market.llm.weight_bytes(market.settings.engine.precision)
            start_s += weights / (1e9 * self.weights_gbs)
        require(
            start_s < 3600,
            f"A machine that starts in {start_s:.0f} s cannot follow a load that changes hourly.",
            resolve="load the weights faster, or lower start_s of the price list.",
        )
        return start_s

    def asked(self, arrival_s: Floats, curve: LoadCurve, shares: Floats, least: int = 1) -> Steps:
        """How many machines of a row are asked for.

        Parameters
        ----------
        shares
            Part of the busiest hour's fleet that the first 1, 2, ... machines make up.
        least
            Machines that are always asked for.
        """
        marks = np.arange(0.0, curve.end_s, self.period_s)
        came = np.histogram(arrival_s, np.append(marks, marks[-1] + self.period_s))[0][:-1]
        window = max(1, round(self.window_s / self.period_s))
        hold = round(self.hold_s / self.period_s)
        before = np.full(window, curve.rates_rps[0] * self.period_s)
        total = np.cumsum(np.concatenate([[0.0], before, came]))
        rates = (total[window:] - total[:-window]) / (window * self.period_s)
        need = np.clip(_first(shares, rates / (self.target * curve.peak_rps)), least, len(shares))
        padded = np.concatenate([np.full(hold, need[0]), need])
        held = np.lib.stride_tricks.sliding_window_view(padded, hold + 1).max(axis=1)
        return [(float(marks[k]), int(held[k])) for k in np.flatnonzero(np.diff(held, prepend=0))]


def rentals(steps: Steps, start_s: float, drain_s: float, day_s: float) -> list[Rental]:
    """Machines that are ordered and given back as asked for; the first ones serve at once."""
    found: list[Rental] = []
    up: list[Rental] = []
    free: list[tuple[float, int]] = []  # when a place is free again
    places = 0
    for time_s, number in steps:
        while len(up) < number:
            ready_s = time_s + start_s if time_s > 0 else 0.0
            if free and free[0][0] <= ready_s:
                place = heapq.heappop(free)[1]
            else:
                place, places = places, places + 1
            up.append(Rental(place, time_s, ready_s, day_s))
        while len(up) > number:
            one = replace(up.pop(), end_s=time_s)
            found.append(one)
            heapq.heappush(free, (time_s + drain_s * one.serves, one.place))
    return sorted([*found, *up], key=lambda one: (one.place, one.ordered_s))


@dataclass(frozen=True, slots=True)
class Course:
    """What a day costs and delivers with one way to scale.

    Attributes
    ----------
    usd, gpu_hours
        Price of the day [$] and what is paid for.
    attained, worst
        Share of the requests that meet every target, over the day and in its worst hour.
    short
        Share of the time in which fewer machines of a kind serve than the hour's rate takes.
    starts, lost
        Machines that were ordered during the day and that were lost, a day.
    """

    name: str
    usd: float
    gpu_hours: float
    attained: float
    worst: float
    short: float
    starts: float
    lost: float


@dataclass(frozen=True, eq=False, repr=False)
class Autoscaled(Shown):
    """A day under an autoscaler, beside the hourly optimum and a constant fleet."""

    day: DayPlan
    policy: Policy
    start_s: float
    courses: tuple[Course, ...]

    def table(self) -> Table:
        """One row per way to scale."""
        columns = (
            Column("machines", of="name"),
            Column("price", "$", of="usd"),
            Column("paid for", "GPU h", of="gpu_hours"),
            Column("SLO met", "%", 3, of=lambda one: 100 * one.attained),
            Column("in the worst hour", "%", 3, of=lambda one: 100 * one.worst),
            Column("too few", "% of time", 3, of=lambda one: 100 * one.short),
            Column("starts"),
            Column("lost"),
        )
        policy, load = self.policy, self.day.market.load
        notes = (
            f"The same requests in every row, played one by one; seeds "
            f"{', '.join(map(str, load.seeds))}, goal {100 * load.goal:g} %.",
            f"Autoscaler: {100 * policy.target:g} % of what the busiest hour's machines carry, "
            f"decided every {policy.period_s:g} s on the arrivals of {policy.window_s:g} s; fewer "
            f"after {policy.hold_s:g} s, drained within {policy.drain_s:g} s.",
            f"A machine serves {self.start_s:.0f} s after its order and is paid for from its order "
            "to its last answer; the hourly optimum is ordered so long ahead.",
        )
        title = f"{self.day.market.llm.name} over {len(self.day.curve.rates_rps)} hours"
        return Table.of(title, columns, self.courses, *notes)


def autoscaled(day: DayPlan, policy: Policy | None = None) -> Autoscaled:
    """Simulate an autoscaler over a day, the hourly optimum and the constant fleet beside it."""
    policy = policy or Policy()
    market, curve = day.market, day.curve
    hours = len(curve.rates_rps)
    peak = day.machines(int(np.argmax(curve.rates_rps)))
    for k, _ in peak if policy.spot else ():
        require(
            market.offers[k].spot_usd_per_h is not None,
            f"{market.offers[k].name} has no spot price in {market.prices.name}.",
            resolve="add spot_usd_per_h and losses_per_h to it, or rent on demand.",
        )
    start_s = policy.start_s(market)
    best = _hourly("hourly optimum", [*map(day.machines, range(hours))], start_s, day.reserved)
    constant = _hourly("constant", [peak] * hours, start_s, peak)
    found = []
    for seed in market.load.seeds:
        trace = day_of(market.load, curve, seed)
        ways = (_tracking(day, policy, peak, trace), best, constant)
        found.append([_course(day, policy, way, trace, seed) for way in ways])
    return Autoscaled(day, policy, start_s, tuple(_mean(each) for each in zip(*found, strict=True)))


def day_of(load: Load, curve: LoadCurve, seed: int) -> Trace:
    """Requests of a load whose rate changes as the curve says, from hour to hour."""
    marks = np.linspace(0.0, curve.end_s, len(curve.rates_rps) + 1)
    total = np.concatenate([[0.0], np.cumsum(3600.0 * np.array(curve.rates_rps))])
    drawn = load.at(1.0).arrivals(math.ceil(total[-1] + 6.0 * math.sqrt(total[-1])), seed)
    drawn = drawn.take(drawn.arrival_s < total[-1])
    return replace(drawn, arrival_s=np.interp(drawn.arrival_s, total, marks))


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to scale: machines that it asks for, that each hour needs, and that are reserved."""

    name: str
    steps: Mapping[Kind, Steps]
    needed: Mapping[Kind, Sequence[int]]
    kept: Counts
    spot: bool = False


def _first(shares: Floats, share: Floats) -> Ints:
    """How many machines of a row make up a share."""
    return np.searchsorted(shares, share - 1e-9) + 1


def _tracking(day: DayPlan, policy: Policy, peak: Counts, trace: Trace) -> _Way:
    market, curve = day.market, day.curve
    kept = Counter(day.reserved)
    row: list[Kind] = []
    for part in (kept, Counter(peak) - kept, *[Counter(peak)] * math.ceil(1 / policy.target - 1)):
        row += sorted(part.elements(), key=lambda at: market.offers[at[0]].usd_per_h)
    shares = np.cumsum([market.offers[k].usd_per_h for k, _ in row]) / market.usd_per_h(peak)
    most = max(kept.total(), int(_first(shares, np.array(1 / policy.target))))
    if not market.allowed(Counter(row[:most])):
        most = sum(peak.values())
    asked = policy.asked(trace.arrival_s, curve, shares[:most], max(kept.total(), 1))
    steps = {at: [(t, row[:m].count(at)) for t, m in asked] for at in peak}
    takes = _first(shares, np.array(curve.rates_rps) / curve.peak_rps).tolist()
    needed = {at: [row[:m].count(at) for m in takes] for at in peak}
    return _Way("autoscaler", steps, needed, day.reserved, policy.spot)


def _hourly(name: str, fleets: Sequence[Counts], start_s: float, kept: Counts) -> _Way:
    """The machines of every hour, ordered so that they serve when it begins."""
    numbers = {at: [fleet.get(at, 0) for fleet in fleets] for fleet in fleets for at in fleet}
    steps = {
        at: [(0.0, own[0])]
        + [
            (3600.0 * hour - start_s * (now > before), now)
            for hour, (before, now) in enumerate(pairwise(own), 1)
            if now != before
        ]
        for at, own in numbers.items()
    }
    return _Way(name, steps, numbers, kept)


def _course(day: DayPlan, policy: Policy, way: _Way, trace: Trace, seed: int) -> Course:
    """The day with machines that are asked for so, simulated."""
    market, end_s, drain_s = day.market, day.curve.end_s, policy.drain_s
    start_s, draws = policy.start_s(market), stream(seed, "losses of a day")
    fleet: dict[Kind, list[Rental]] = {}
    for at, asked in way.steps.items():
        rate, kept = float(market.offers[at[0]].losses_per_h or 0.0), way.kept.get(at, 0)
        fleet[at] = [
            one
            for each in rentals(asked, start_s, drain_s, end_s)
            for one in each.losses(rate * (way.spot and each.place >= kept), start_s, draws)
        ]
    places = {at: 1 + max(one.place for one in own) for at, own in fleet.items() if own}
    replicas = market.replicas(places)
    what = [
        event
        for at, each in replicas.items()
        for place, names in enumerate(each)
        for event in events([one for one in fleet[at] if one.place == place], names, end_s, drain_s)
    ]
    run = market.plan(places).simulate(trace, seed, events=what)
    rows = run.requests[run.finished]
    ended = {
        replica.name: np.sort(rows["finish_s"][rows["node"] == k])
        for k, replica in enumerate(run.deployment.replicas)
    }
    usd = gpu_hours = 0.0
    for at, own in fleet.items():
        offer, kept = market.offers[at[0]], way.kept.get(at, 0)
        rented = (offer.spot_usd_per_h if way.spot else None) or offer.usd_per_h
        for one in own:
            last = max(_last(ended[name], one, drain_s) for name in replicas[at][one.place])
            hours = (min(last, end_s) - one.ordered_s) / 3600.0
            usd += hours * ((offer.reserved_usd_per_h if one.place < kept else None) or rented)
            gpu_hours += hours * offer.count
    hour = trace.arrival_s // 3600.0
    every = [one for own in fleet.values() for one in own]
    return Course(
        way.name,
        usd,
        gpu_hours,
        attainment(run, market.load.slo),
        min(attainment(run, market.load.slo, hour == h) for h in np.unique(hour)),
        short_share(fleet, way.needed),
        sum(one.ordered_s > 0 for one in every),
        sum(one.lost for one in every),
    )


def _last(finish_s: Floats, one: Rental, drain_s: float) -> float:
    """When a replica of a machine is done: at its last answer within the drain, or when lost."""
    if one.lost or not one.serves:
        return one.end_s
    k = int(np.searchsorted(finish_s, one.end_s + drain_s, "right"))
    return max(one.end_s, float(finish_s[k - 1])) if k else one.end_s


def short_share(
    fleet: Mapping[Kind, Sequence[Rental]], needed: Mapping[Kind, Sequence[int]]
) -> float:
    """Share of the time in which fewer machines of a kind serve than the hour needs."""
    end_s = 3600.0 * max(map(len, needed.values()))
    cuts = [t for own in fleet.values() for one in own for t in (one.ready_s, one.end_s)]
    marks = np.unique(np.clip([*np.arange(0.0, end_s + 1, 3600.0), *cuts], 0.0, end_s))
    begins = marks[:-1]
    short = np.zeros(len(begins), np.bool_)
    for at, numbers in needed.items():
        serve = sum((one.ready_s <= begins) & (begins < one.end_s) for one in fleet[at])
        short |= serve < np.array(numbers)[(begins // 3600.0).astype(np.int64)]
    return float(np.diff(marks)[short].sum() / end_s)


def _mean(seeds: Sequence[Course]) -> Course:
    """Means over the seeds; the worst hour is that of any."""
    first, *numbers = zip(*(astuple(one) for one in seeds), strict=True)
    found = Course(first[0], *(float(np.mean(each)) for each in numbers))
    return replace(found, worst=min(one.worst for one in seeds))
