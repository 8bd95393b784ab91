r"""Machines that are cheaper and vanish: expected goodput and cost, bad hours, the cheapest mix.

A spot machine is lost after an exponential time of rate :math:`\ell` [1/h], independently of the
others, and another one serves :math:`\tau` [h] later; it is paid for while it serves. It is there
for :math:`1 / (1 + \ell \tau)` of the time. Prices, loss rates and the time to a replacement are
those of the price list. Machines that a provider takes away all at once are worse than this.

A long timeline of losses gives the machines of every moment, and simulation the share of the
requests that meet their targets with those machines; an hour gets the mean over its moments. That
leaves out what a loss does to the requests on the machine: :func:`play_hours` plays whole hours
with losses and replacements request by request, and both are shown side by side.

The cheapest mix is looked for among fleets of the machines that are cheapest on demand and at spot
prices, in order of their expected price. The first that meets the goal in the asked share of the
hours is the cheapest of them; a mix with no more of any machine than one that failed is not tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hetero.apps.capacity.fluid import Counts, together
from hetero.apps.capacity.losses import availability, timeline
from hetero.apps.capacity.market import Draws, Market
from hetero.apps.capacity.sizing import cheapest
from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.question import in_draws
from hetero.simulator import Event
from hetero.simulator.saturation import attainment
from hetero.streams import stream

_HOURS = 4000
_WORST = 0.05
_EXTRA = 3  # spot machines beyond those that suffice while none is lost, at least
_MIXES = 20_000


@dataclass(frozen=True, slots=True)
class SpotRisk:
    """What a mix of machines delivers, hour by hour.

    Attributes
    ----------
    attained
        Share of the requests that meet their targets, per hour of the timeline.
    usd_per_h
        Expected price [$/h].
    goodput_rps
        Expected goodput [requests/s].
    carried
        Share of the hours that meet the goal.
    worst
        Attainment that 5 % of the hours stay below.
    """

    attained: Floats
    usd_per_h: float
    goodput_rps: float
    carried: float
    worst: float


@dataclass(frozen=True, eq=False, repr=False)
class SpotMix(Shown):
    """The cheapest mix of spot machines and machines on demand.

    Attributes
    ----------
    on_demand, spot
        Machines by kind (number in the market) and division.
    probability
        Share of the hours that had to meet the goal.
    played
        Attainment of hours played request by request, losses included.
    on_demand_usd_per_h
        Price of the cheapest fleet found without spot machines [$/h].
    tried
        Mixes whose timeline was looked at.
    draws
        Whether the mix, none of it lost, carries the load with each draw of the step times.
    """

    market: Market
    on_demand: Counts
    spot: Counts
    probability: float
    risk: SpotRisk
    played: tuple[float, ...]
    on_demand_usd_per_h: float
    tried: int
    draws: Draws = ()

    def table(self) -> Table:
        """One row per kind of machine and price."""
        rows = []
        for counts, label in ((self.on_demand, "on demand"), (self.spot, "spot")):
            for (k, division), n in sorted(counts.items()):
                offer, parts = self.market.offers[k], " + ".join(f"TP {d}" for d in division)
                spot = (offer.spot_usd_per_h, offer.losses_per_h)
                each = spot if label == "spot" else (offer.usd_per_h, None)
                rows.append((offer.name, label, n, parts, *each))
        columns = (
            Column("machine"),
            Column("rented"),
            Column("number"),
            Column("instances of each"),
            Column("price each", "$/h"),
            Column("losses", "per h"),
        )
        risk, load = self.risk, self.market.load
        saved = 100 * (1 - risk.usd_per_h / self.on_demand_usd_per_h)
        used = {self.market.offers[k] for k, _ in together(self.on_demand, self.spot)}
        sources = "; ".join(sorted({self.market.prices.price_source(one) for one in used}))
        notes = [
            f"{100 * risk.carried:.2f} % of {len(risk.attained):,} hours meet the goal of "
            f"{100 * load.goal:g} % (asked: {100 * self.probability:g} %).",
            f"Expected goodput {risk.goodput_rps:.2f} of {load.rate_rps:g} requests/s; in the 5 % "
            f"worst hours {100 * risk.worst:.1f} % of the requests meet their targets, or fewer.",
            f"On demand alone: {self.on_demand_usd_per_h:.3f} $/h; this mix costs {saved:.1f} % "
            f"less. {self.tried:,} mixes tried in order of price.",
            f"A lost machine is replaced after {self.market.prices.start_s:g} s, in which it is "
            f"not paid for; losses are independent. Prices and loss rates: {sources}.",
            *self.market.notes,
        ]
        if self.draws:
            notes.insert(
                1,
                f"While no machine is lost, it carries {load.rate_rps:g} requests/s in "
                f"{in_draws(self.draws)}; with {load.arriving}. Hours are for these step times.",
            )
        if self.played:
            notes.insert(
                2,
                f"Played request by request, losses included, {len(self.played)} hours meet "
                f"{100 * float(np.mean(self.played)):.1f} % on average, the worst "
                f"{100 * min(self.played):.1f} %.",
            )
        title = f"{self.market.llm.name} at {load.rate_rps:g} requests/s: {risk.usd_per_h:.3f} $/h"
        return Table(title, columns, tuple(rows), tuple(notes))


def spot_risk(
    market: Market, on_demand: Counts, spot: Counts, *, hours: int = _HOURS, seed: int = 0
) -> SpotRisk:
    """What a mix delivers over a timeline of losses."""
    columns = list(spot)
    for k, _ in columns:
        if market.offers[k].spot_usd_per_h is None:
            raise ParameterError(
                f"{market.offers[k].name} has no spot price in {market.prices.name}.",
                resolve="add spot_usd_per_h and losses_per_h to it.",
            )
    numbers = np.array([spot[at] for at in columns], np.int64)
    losses = np.array([float(market.offers[k].losses_per_h or 0.0) for k, _ in columns])
    times, up = timeline(numbers, losses, market.prices.start_s / 3600.0, hours, seed)
    states, which = np.unique(up, axis=0, return_inverse=True)
    shares = np.array(
        [
            _attained(market, on_demand, dict(zip(columns, map(int, row), strict=True)))
            for row in states
        ]
    )
    prices = np.array([float(market.offers[k].spot_usd_per_h or 0.0) for k, _ in columns])
    lengths = np.diff(times)
    hour = np.minimum(times[:-1].astype(np.int64), hours - 1)
    weights = lengths * shares[which.ravel()]
    attained = np.bincount(hour, weights=weights, minlength=hours).astype(np.float64)
    spent = market.usd_per_h(on_demand) + float(lengths @ (up @ prices)) / hours
    return SpotRisk(
        attained,
        spent,
        float(attained.mean()) * market.load.rate_rps,
        float((attained >= market.load.goal - 1e-12).mean()),
        float(np.quantile(attained, _WORST)),
    )


def _attained(market: Market, on_demand: Counts, spot: Counts) -> float:
    counts = together(on_demand, spot)
    if not counts:
        return 0.0
    # Where the goal is missed only the first seeds are played, which is as good for a mean.
    found = market.play(counts)
    # Where the backlog grows, an hour leaves nobody within the targets in the end.
    return found.mean if found.seen[-1].steady else 0.0


def play_hours(
    market: Market, on_demand: Counts, spot: Counts, *, hours: int = 8, seed: int = 0
) -> tuple[float, ...]:
    """Attainment of hours played request by request, with losses and replacements as they come."""
    total = together(on_demand, spot)
    plan = market.plan(total)
    machines: dict[tuple[int, tuple[int, ...]], list[tuple[str, ...]]] = {}
    for at, groups in market.machines(total):
        machines.setdefault(at, []).append(groups)
    down_h = market.prices.start_s / 3600.0
    load = market.load
    count = max(round(3600 * load.rate_rps), 100)
    found = []
    for hour in range(hours):
        events = []
        draws = stream(seed + hour, "losses of an hour")
        for at, n in spot.items():
            rate = float(market.offers[at[0]].losses_per_h or 0.0)
            for names in machines[at][:n]:
                begin = 0.0
                if draws.random() < rate * down_h / (1.0 + rate * down_h):
                    begin = down_h * draws.random()
                    events += [Event(0.0, name) for name in names]
                    events += [Event(3600 * begin, name, "recover") for name in names]
                lost = begin + draws.exponential(1.0 / rate)
                while lost < 1.0:
                    events += [Event(3600 * lost, name) for name in names]
                    lost += down_h
                    events += [Event(3600 * lost, name, "recover") for name in names]
                    lost += draws.exponential(1.0 / rate)
        run = plan.simulate(load.arrivals(count, seed + hour), seed + hour, events=events)
        found.append(attainment(run, load.slo))
    return tuple(found)


def cheapest_mix(
    market: Market,
    probability: float = 0.95,
    *,
    hours: int = _HOURS,
    played_hours: int = 8,
    seed: int = 0,
) -> SpotMix:
    """The cheapest mix that meets the goal in a share of the hours.

    Parameters
    ----------
    probability
        Share of the hours in which the goal must be met.
    hours
        Hours of the timeline of losses.
    played_hours
        Hours of the answer that are played request by request.

    Raises
    ------
    InfeasibleError
        If no mix meets the goal often enough.
    """
    if not 0 < probability < 1:
        raise ParameterError(
            f"A probability of {probability:g} cannot be kept with machines that vanish.",
            resolve="give a share of the hours above 0 and below 1.",
        )
    if all(offer.spot_usd_per_h is None for offer in market.offers):
        raise ParameterError(
            f"No machine of {market.prices.name} that fits {market.llm.name} has a spot price.",
            resolve="add spot_usd_per_h and losses_per_h to the price list.",
        )
    firm = cheapest(market, near=1.0, draws=0)
    base = _spot_fleet(market)
    choices: list[tuple[tuple[int, tuple[int, ...]], bool, int]] = [
        (at, False, n) for at, n in firm.best.counts.items()
    ]
    for at in base:
        choices += [(at, False, base[at])] if at not in firm.best.counts else []
        choices.append((at, True, base[at] + max(_EXTRA, base[at] // 2)))
    prices = [_price(market, at, spot) for at, spot, _ in choices]
    ranges = [range(most + 1) for *_, most in choices]
    if np.prod([float(len(one)) for one in ranges]) > _MIXES:
        raise InfeasibleError(
            f"More than {_MIXES:,} mixes of {len(choices)} kinds of machines and prices.",
            resolve="offer fewer kinds of machines, or lower the rate.",
        )
    mixes = sorted(
        (sum(n * price for n, price in zip(mix, prices, strict=True)), mix)
        for mix in product(*ranges)
        if any(mix)
    )
    failed: list[Ints] = []
    tried = 0
    for _, mix in mixes:
        numbers = np.array(mix)
        if any(np.all(numbers <= other) for other in failed):
            continue
        on_demand = {at: n for (at, spot, _), n in zip(choices, mix, strict=True) if n and not spot}
        spot = {at: n for (at, vanishes, _), n in zip(choices, mix, strict=True) if n and vanishes}
        total = together(on_demand, spot)
        if not market.allowed(total):
            continue
        if market.fluid.most_rps(total) < market.load.rate_rps or not market.sustains(total):
            failed.append(numbers)
            continue
        tried += 1
        risk = spot_risk(market, on_demand, spot, hours=hours, seed=seed)
        if risk.carried < probability:
            failed.append(numbers)
            continue
        played = play_hours(market, on_demand, spot, hours=played_hours, seed=seed)
        return SpotMix(
            market,
            on_demand,
            spot,
            probability,
            risk,
            played,
            firm.usd_per_h,
            tried,
            market.draws(total),
        )
    raise InfeasibleError(
        f"No mix of {', '.join(market.offers[at[0]].name for at in base)} meets the goal in "
        f"{100 * probability:g} % of the hours.",
        resolve="lower the probability or the goal, or offer machines that are lost less often.",
    )


def _price(market: Market, at: tuple[int, tuple[int, ...]], spot: bool) -> float:
    """Expected price of a machine [$/h]."""
    offer = market.offers[at[0]]
    if not spot:
        return offer.usd_per_h
    return float(offer.spot_usd_per_h or 0.0) * availability(
        float(offer.losses_per_h or 0.0), market.prices.start_s
    )


def _spot_fleet(market: Market) -> Counts:
    """The fleet that would be cheapest at spot prices if no machine were ever lost."""
    offers = tuple(
        replace(offer, usd_per_h=float(offer.spot_usd_per_h))
        for offer in market.prices.offers
        if offer.spot_usd_per_h is not None
    )
    other = replace(market, prices=replace(market.prices, offers=offers))
    found: Counts = {}
    for (k, division), n in cheapest(other, near=1.0, draws=0).best.counts.items():
        offer = other.offers[k]
        for place, one in enumerate(market.offers):
            same = (one.gpu, one.count, one.spot_usd_per_h, one.link)
            if same == (offer.gpu, offer.count, offer.spot_usd_per_h, offer.link) and (
                division in market.kinds[place].divisions
            ):
                found[place, division] = n
                break
    return found
