r"""The cheapest machines over a day whose load changes by the hour.

Some machines are kept the whole day at their reserved price :math:`c^r`, others are rented by the
hour at :math:`c`. With r machines reserved and o on demand per kind k, division p and hour h, s of
them started for that hour, and z the share of bucket s of requests that instances of degree d on
machines k serve:

.. math::
    \min \sum_{k,p} \Big[ H c^r_k r_{kp} + \sum_h c_k \big(o_{hkp} + \tau s_{hkp}\big) \Big]
    \quad\text{s.t.}\quad
    f_h \lambda_h \sum_s \frac{share_s}{T_{skd}} z_{hskd} \le \sum_p n_{pd} (r_{kp} + o_{hkp}),
    \quad s_{hkp} \ge o_{hkp} - o_{h-1,kp}

where :math:`\tau` [h] is the time that a machine is paid for before it serves, the hour before
the first is the last of the day, and the rest is the program of
:mod:`hetero.planners.baselines.melange`. Two things make it small and leave its optimum as it is:
machines in whose place others do the same for no more money are left out, and those of every hour
cost by the hour no less than the cheapest that serve this hour alone. Every hour is then simulated
with its machines: where they miss the goal its factor :math:`f_h` is raised until the cheapest that
serve it alone carry it and the program solved again, and at the end machines are given back hour by
hour while simulation allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from hetero.apps.capacity.fluid import Counts, together
from hetero.apps.capacity.market import Draws, Market
from hetero.apps.capacity.outcome import Outcome
from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, SolverError, require
from hetero.planners.baselines.melange import MelangeProgram
from hetero.programs import Program, SolverLimits
from hetero.question import in_draws
from hetero.rows import read_rows

_PARTS = (3, 2)
_TIGHT = 3  # hours that are simulated with draws of the step times
_RAISE = 1.08
_MOST = 5.0  # of factors: beyond, it is not a queue that misses the targets
_LIMITS = SolverLimits(gap=2e-3, nodes=1000)


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Requests per second, hour by hour.

    Examples
    --------
    >>> LoadCurve((2.0, 8.0, 4.0)).peak_rps
    8.0
    """

    rates_rps: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            len(self.rates_rps) > 0 and all(0 < rate < np.inf for rate in self.rates_rps),
            f"A load curve of {len(self.rates_rps)} hours needs rates above 0.",
            resolve="give one rate above 0 per hour.",
        )

    @property
    def peak_rps(self) -> float:
        """Largest rate [requests/s]."""
        return max(self.rates_rps)

    @property
    def end_s(self) -> float:
        """Its length [s]."""
        return 3600.0 * len(self.rates_rps)

    @classmethod
    def load(cls, path: Path | str) -> LoadCurve:
        """Curve from a CSV file with the columns ``hour`` (0, 1, ...) and ``rate_rps``."""
        rows = read_rows(Path(path), ("hour", "rate_rps"))
        hours, rates = rows.numbers("hour"), rows.numbers("rate_rps", above=0.0)
        resolve = "give hours 0, 1, 2, ... in order."
        rows.refuse(hours != np.arange(len(rows)), "hour", "the next hour", resolve)
        if not len(rows):
            raise rows.error("no hour is given.", None, None, "give one row per hour.")
        return cls(tuple(rates.tolist()))


@dataclass(frozen=True, eq=False, repr=False)
class DayPlan(Shown):
    """Machines over a day, and what they deliver hour by hour.

    Attributes
    ----------
    reserved
        Machines kept the whole day, by kind and division.
    on_demand
        Machines rented for each hour.
    outcomes
        Simulation of every hour.
    usd
        Price of the day, starts included [$].
    bound_usd
        Proven: no machines of the list serve these rates for less, targets and starts aside.
    program_usd, program_gap
        Bound of the integer program with factors of 1, and the gap at which it stopped.
    static_usd
        Price of a day with the machines of the busiest hour kept throughout.
    tight, draws
        The hours that meet their targets most narrowly, and whether all of them carry their load
        with each draw of the step times.
    """

    market: Market
    curve: LoadCurve
    reserved: Counts
    on_demand: tuple[Counts, ...]
    outcomes: tuple[Outcome, ...]
    usd: float
    bound_usd: float
    program_usd: float
    program_gap: float
    static_usd: float
    tight: tuple[int, ...]
    draws: Draws

    def machines(self, hour: int) -> Counts:
        """All machines of an hour."""
        return together(self.reserved, self.on_demand[hour])

    @property
    def starts(self) -> tuple[int, ...]:
        """Machines started for each hour."""
        return tuple(int(sum(one.values())) for one in _starts(self.on_demand))

    def gpus(self, hour: int, *, reserved: bool) -> dict[str, int]:
        """GPUs of an hour by type, of those reserved or on demand."""
        found: Counter[str] = Counter()
        for (k, _), n in (self.reserved if reserved else self.on_demand[hour]).items():
            offer = self.market.offers[k]
            found[offer.gpu.name] += n * offer.count
        return found

    def table(self) -> Table:
        """One row per hour."""
        kept = _reserved_usd(self.market, self.reserved)
        columns = (
            Column("hour", of=lambda hour: hour),
            Column("load", "requests/s", of=lambda hour: self.curve.rates_rps[hour]),
            Column("reserved", of=lambda _: self._names(self.reserved)),
            Column("on demand", of=lambda hour: self._names(self.on_demand[hour])),
            Column("started", of=lambda hour: self.starts[hour]),
            Column("price", "$/h", of=lambda h: kept + self.market.usd_per_h(self.on_demand[h])),
            Column("SLO met", "%", 3, of=lambda hour: 100 * self.outcomes[hour].mean),
        )
        saved = 100 * (1 - self.usd / self.static_usd)
        hours = ", ".join(map(str, self.tight))
        notes = (
            f"Its tightest hours ({hours}) all carry their load in {in_draws(self.draws)}, with "
            f"{self.market.load.arriving}.",
            f"Starts of {self.market.prices.start_s:g} s each are paid for in the total.",
            "Proven for these step times: no machines of this list serve these rates for less "
            f"than {self.bound_usd:.2f} $, targets and starts aside.",
            f"Estimate of a steady state under the targets: {self.program_usd:.2f} $ "
            f"(gap of the program {100 * self.program_gap:.1f} %).",
            f"The machines of the busiest hour kept throughout: {self.static_usd:.2f} $; this "
            f"plan costs {saved:.1f} % less.",
            *self.market.notes,
        )
        title = f"{self.market.llm.name} over {len(self.outcomes)} hours: {self.usd:.2f} $"
        return Table.of(title, columns, range(len(self.outcomes)), *notes)

    def _names(self, counts: Counts) -> str:
        return ", ".join(f"{n} x {name}" for name, n in self.market.names(counts).items()) or "-"


def day(
    market: Market, curve: LoadCurve, *, progress: Callable[[str], None] | None = None
) -> DayPlan:
    """The cheapest machines over a day.

    Parameters
    ----------
    market
        Its load gives the requests, targets, goal and seeds; its rate must be the curve's peak.
    """
    load, say = market.load, progress or (lambda _: None)
    require(
        load.rate_rps >= curve.peak_rps * (1 - 1e-9),
        f"The market was made for {load.rate_rps:g} requests/s, the curve has a peak of "
        f"{curve.peak_rps:g}.",
        resolve="make it for the peak.",
    )
    program = market.program(parts=_PARTS, lean=True)
    factors = np.ones(len(curve.rates_rps))
    bounds: list[list[float]] = []
    for n in count(1):
        say(f"round {n}")
        reserved, on_demand, *bound = _solve(market, program, curve, factors)
        bounds.append(bound)
        missed = [
            hour
            for hour, rate in enumerate(curve.rates_rps)
            if not market.sustains(together(reserved, on_demand[hour]), load.at(rate))
        ]
        if not missed:
            break
        for hour in missed:
            factors[hour] = _raised(market, program, curve.rates_rps[hour], factors[hour])
    say("machines to give back")
    reserved, on_demand = _give_back(market, curve, reserved, on_demand)
    fluid = market.bound(reserved=True)
    floor = sum(fluid.least_usd_per_h(rate) for rate in curve.rates_rps)
    fleets = [together(reserved, one) for one in on_demand]
    loads = [load.at(rate) for rate in curve.rates_rps]
    say("draws of step times")
    outcomes = tuple(map(market.play, fleets, loads))
    tight = sorted(
        sorted(range(len(outcomes)), key=lambda h: (outcomes[h].mean, -curve.rates_rps[h]))[:_TIGHT]
    )
    each = [market.draws(fleets[hour], loads[hour]) for hour in tight]
    return DayPlan(
        market=market,
        curve=curve,
        reserved=reserved,
        on_demand=tuple(on_demand),
        outcomes=outcomes,
        usd=_usd(market, reserved, on_demand),
        bound_usd=floor,
        program_usd=bounds[0][0],
        program_gap=bounds[0][1],
        static_usd=len(on_demand) * _reserved_usd(market, fleets[int(np.argmax(curve.rates_rps))]),
        tight=tuple(tight),
        draws=tuple(map(all, zip(*each, strict=True))),
    )


def _raised(market: Market, one: MelangeProgram, rate_rps: float, factor: float) -> float:
    """The next factor at which the cheapest machines that serve a rate alone also carry it."""
    while True:
        factor *= _RAISE
        require(
            factor < _MOST,
            f"{rate_rps:g} requests/s miss the targets in simulation with {_MOST:g} times the "
            "machines of their steady state.",
            resolve="relax the targets or the goal, or offer other machines.",
            error=InfeasibleError,
        )
        used = one.cheapest(factor * rate_rps).used
        if market.sustains(market.counts(one, used), market.load.at(rate_rps)):
            return factor


def _solve(
    market: Market, one: MelangeProgram, curve: LoadCurve, factors: Floats
) -> tuple[Counts, list[Counts], float, float]:
    """The program of a day with a factor per hour."""
    program, hours = Program(minimize=True), len(curve.rates_rps)
    names = [*market.counts(one, [(k, one.kinds[k].divisions[p], 1) for k, p in one.columns])]
    offers = [market.offers[k] for k, _ in names]
    hourly = np.array([offer.usd_per_h for offer in offers])
    kept = np.array([offer.reserved_usd_per_h or offer.usd_per_h for offer in offers])
    reserved = program.variables(len(names), objective=hours * kept, integer=True)
    rented = [program.variables(len(names), objective=hourly, integer=True) for _ in range(hours)]
    rates = (factors * np.array(curve.rates_rps)).tolist()
    least = {rate: one.cheapest(rate).bound for rate in {*rates}}
    for hour, rate in enumerate(rates):
        one.serve(program, [reserved, rented[hour]], rate)
        alone = program.rows(1, lower=least[rate] * (1 - 1e-9))
        program.entries(alone, [*reserved, *rented[hour]], [*hourly, *hourly])
        started = program.variables(len(names), objective=hourly * market.prices.start_s / 3600.0)
        more = program.rows(len(names), lower=0.0)
        program.entries(more, started, 1.0)
        if hours > 1:  # a single hour is also the one before it
            program.entries(more, rented[hour], -1.0)
            program.entries(more, rented[hour - 1], 1.0)
    try:
        found = program.solve(_LIMITS, solver=one.solver, names="the program of the day")
    except (InfeasibleError, SolverError) as error:
        raise InfeasibleError(
            f"The machines of {market.prices.name} do not suffice for {curve.peak_rps:g} "
            "requests/s at the peak.",
            resolve="offer more machines, relax the targets, or lower the rates.",
        ) from error

    def counts(chosen: Ints) -> Counts:
        numbers = [round(value) for value in found.values[chosen]]
        return {at: n for at, n in zip(names, numbers, strict=True) if n > 0}

    return counts(reserved), [counts(one) for one in rented], found.dual_bound, found.dual_gap


def _give_back(
    market: Market, curve: LoadCurve, reserved: Counts, on_demand: list[Counts]
) -> tuple[Counts, list[Counts]]:
    """Leave out machines, dearest first, as long as every hour is served and the day cheaper."""
    parts = [reserved, *on_demand]
    improved = True
    while improved:
        improved = False
        for n, part in enumerate(parts):
            hours = [n - 1] if n else range(len(on_demand))
            for at in sorted(part, key=lambda at: -market.offers[at[0]].usd_per_h):
                tried = [*parts[:n], together(parts[n], {at: -1}), *parts[n + 1 :]]
                saved = _usd(market, parts[0], parts[1:]) - _usd(market, tried[0], tried[1:])
                if (n == 0 or saved > 1e-9) and all(
                    market.sustains(
                        together(tried[0], tried[1 + hour]), market.load.at(curve.rates_rps[hour])
                    )
                    for hour in hours
                ):
                    parts, improved = tried, True
    return parts[0], parts[1:]


def _usd(market: Market, reserved: Counts, on_demand: Sequence[Counts]) -> float:
    """Price of a day, starts included [$]."""
    rented, started = (sum(map(market.usd_per_h, each)) for each in (on_demand, _starts(on_demand)))
    return (
        len(on_demand) * _reserved_usd(market, reserved)
        + rented
        + market.prices.start_s / 3600.0 * started
    )


def _starts(on_demand: Sequence[Counts]) -> list[Counts]:
    """Machines that an hour has and the one before it, round the clock, has not."""
    return [Counter(now) - Counter(on_demand[hour - 1]) for hour, now in enumerate(on_demand)]


def _reserved_usd(market: Market, counts: Counts) -> float:
    return sum(
        (market.offers[k].reserved_usd_per_h or market.offers[k].usd_per_h) * n
        for (k, _), n in counts.items()
    )
