r"""Machines that vanish: their losses, and the cheapest mix of spot machines and others.

A machine that is lost after an exponential time of rate :math:`\ell` [1/h] and replaced
:math:`\tau` [h] later is there for :math:`a = 1 / (1 + \ell \tau)` of the time, independently of
the others: of n alike, k serve for a share :math:`\binom nk a^k (1 - a)^{n - k}` of the time. A
spot machine is paid for while it serves. Prices, loss rates and the time to a replacement are those
of the price list. Machines that a provider takes away all at once are worse than this.

Simulation says which share of the requests meets its targets in every state. That leaves out what a
loss does to the requests on the machine: :func:`play_hours` plays whole hours with losses and
replacements request by request, and both are shown side by side.

The cheapest mix is looked for among fleets of the machines that are cheapest on demand and at spot
prices, in order of their expected price: the first that meets the goal in the asked share of the
time is the cheapest of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from scipy.stats import binom

from hetero.apps.capacity.fluid import Counts, together
from hetero.apps.capacity.market import Draws, Market
from hetero.apps.capacity.prices import Offer
from hetero.apps.capacity.sizing import cheapest
from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.question import in_draws
from hetero.simulator import Event
from hetero.simulator.metrics import attainment
from hetero.simulator.replicas import What
from hetero.streams import stream

Kind: TypeAlias = tuple[int, tuple[int, ...]]
"""A kind of machine of a market and how it is divided."""

Mix: TypeAlias = dict[tuple[Kind, bool], int]
"""Machines by kind, and whether they may vanish."""

Key = TypeVar("Key")
Found = TypeVar("Found")

_WORST = 0.05
_LEFT_OUT = 1e-3  # of the time: states that are rarer together count as nobody served
_MIXES = 20_000


def availability(losses_per_h: float, replace_s: float) -> float:
    """Share of the time that a machine serves.

    Examples
    --------
    >>> availability(0.1, 3600.0)
    0.9090909090909091
    """
    return 1.0 / (1.0 + losses_per_h * replace_s / 3600.0)


def states(numbers: Sequence[int], serving: Sequence[float]) -> tuple[Floats, Ints]:
    """Share of the time of every state and the machines that serve in it, the most frequent first.

    Shapes (S,) and (S, kinds).

    Examples
    --------
    >>> share, up = states([2], [0.9])
    >>> share.round(2).tolist(), up.ravel().tolist()
    ([0.81, 0.18, 0.01], [2, 1, 0])
    """
    each = [n + 1 for n in numbers]
    up = np.indices(each).reshape(len(each), math.prod(each)).T
    share = np.prod(binom.pmf(up, np.array(numbers), np.array(serving)), axis=1)
    order = np.argsort(-share, kind="stable")
    return share[order], up[order]


def cheapest_set(
    usd_per_h: Mapping[Key, float],
    allowed: Callable[[dict[Key, int]], bool],
    holds: Callable[[dict[Key, int]], Found | None],
    tries: int,
) -> Found | None:
    """What ``holds`` finds for the first set of machines that holds, in order of price.

    What adds to a set that is not allowed is left out; None if none of so many sets holds.

    Examples
    --------
    >>> def holds(counts: dict[str, int]) -> dict[str, int] | None:
    ...     return counts if 2 * counts.get("a", 0) + 3 * counts.get("b", 0) >= 5 else None
    >>> cheapest_set({"a": 1.0, "b": 1.4}, lambda counts: counts.get("b", 0) < 2, holds, 100)
    {'a': 1, 'b': 1}
    """
    keys, prices = [*usd_per_h], [*usd_per_h.values()]
    queue = [(0.0, (0,) * len(keys))]
    for _ in range(tries):
        if not queue:
            break
        less = heapq.heappop(queue)[1]  # negative: at one price the first kinds come first
        if (found := holds(_counts(keys, less))) is not None:
            return found
        for k in range(max((k for k, n in enumerate(less) if n), default=0), len(keys)):
            more = (*less[:k], less[k] - 1, *less[k + 1 :])
            if allowed(_counts(keys, more)):
                heapq.heappush(
                    queue, (sum(-n * usd for n, usd in zip(more, prices, strict=True)), more)
                )
    return None


def _counts(keys: Sequence[Key], less: Sequence[int]) -> dict[Key, int]:
    return {key: -n for key, n in zip(keys, less, strict=True) if n}


@dataclass(frozen=True, slots=True)
class Rental:
    """One machine in one place of the fleet.

    Attributes
    ----------
    place
        Its number among the machines of its kind.
    ordered_s, ready_s, end_s
        When it is ordered, would serve, and begins to drain or is lost [s].
    lost
        Whether it is lost.
    """

    place: int
    ordered_s: float
    ready_s: float
    end_s: float
    lost: bool = False

    @property
    def serves(self) -> bool:
        """Whether it is ready before it is given back."""
        return self.ready_s < self.end_s

    def losses(
        self, losses_per_h: float, start_s: float, draws: np.random.Generator
    ) -> Iterator[Rental]:
        """The same where the machine is lost at a rate and ordered again at once."""
        one = self
        while losses_per_h > 0 and one.serves:
            lost_s = one.ready_s + draws.exponential(3600.0 / losses_per_h)
            if lost_s >= one.end_s:
                break
            yield replace(one, end_s=lost_s, lost=True)
            one = replace(one, ordered_s=lost_s, ready_s=lost_s + start_s)
        yield one


def events(
    own: Sequence[Rental], names: Sequence[str], end_s: float, drain_s: float = 0.0
) -> Iterator[Event]:
    """What happens to the replicas of one place until the end of a day, in order of time."""
    what: list[tuple[float, What]] = [(0.0, "fail")]
    for one in own:
        if one.serves:
            what.append((one.ready_s, "recover"))
            if one.lost:
                what.append((one.end_s, "fail"))
            elif one.end_s < end_s:
                what += [(one.end_s, "drain"), (one.end_s + drain_s, "fail")]
    return (Event(time_s, name, kind) for time_s, kind in what for name in names)


# The cheapest mix -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpotRisk:
    """What a mix of machines delivers over its states.

    Attributes
    ----------
    usd_per_h
        Expected price [$/h].
    attained
        Expected share of the requests that meet their targets.
    time_met
        Share of the time in which the goal is met.
    worst
        Attainment that the worst 5 % of the time stays at or below.
    """

    usd_per_h: float
    attained: float
    time_met: float
    worst: float


@dataclass(frozen=True, eq=False, repr=False)
class SpotMix(Shown):
    """The cheapest mix of spot machines and machines on demand.

    Attributes
    ----------
    on_demand, spot
        Machines by kind (number in the market) and division.
    probability
        Share of the time that had to meet the goal.
    simulated
        Attainment of hours simulated request by request, losses included.
    on_demand_usd_per_h
        Price of the cheapest fleet found without spot machines [$/h].
    draws
        Whether the mix, none of it lost, carries the load with each draw of the step times.
    """

    market: Market
    on_demand: Counts
    spot: Counts
    probability: float
    risk: SpotRisk
    simulated: tuple[float, ...]
    on_demand_usd_per_h: float
    draws: Draws

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
        notes = (
            f"{100 * risk.time_met:.2f} % of the time the goal of {100 * load.goal:g} % is met "
            f"(asked: {100 * self.probability:g} %).",
            f"While no machine is lost, it carries {load.rate_rps:g} requests/s in "
            f"{in_draws(self.draws)}; with {load.arriving}. Times are for these step times.",
            f"Played request by request, losses included, {len(self.simulated)} hours meet "
            f"{100 * float(np.mean(self.simulated)):.1f} % on average, the worst "
            f"{100 * min(self.simulated):.1f} %.",
            f"Expected goodput {risk.attained * load.rate_rps:.2f} of {load.rate_rps:g} "
            f"requests/s; in the worst 5 % of the time {100 * risk.worst:.1f} % of the requests "
            "meet their targets, or fewer.",
            f"On demand alone: {self.on_demand_usd_per_h:.3f} $/h; this mix costs {saved:.1f} % "
            "less.",
            f"A lost machine is replaced after {self.market.prices.start_s:g} s, in which it is "
            f"not paid for; losses are independent. Prices and loss rates: {sources}.",
            *self.market.notes,
        )
        title = f"{self.market.llm.name} at {load.rate_rps:g} requests/s: {risk.usd_per_h:.3f} $/h"
        return Table(title, columns, tuple(rows), notes)


def spot_risk(
    market: Market, on_demand: Counts, spot: Counts, probability: float = 0.0
) -> SpotRisk | None:
    """What a mix delivers over its states; None if it meets the goal too seldom."""
    for k, _ in spot:
        require(
            market.offers[k].spot_usd_per_h is not None,
            f"{market.offers[k].name} has no spot price in {market.prices.name}.",
            resolve="add spot_usd_per_h and losses_per_h to it.",
        )
    share, up = states([*spot.values()], [_serving(market, at) for at in spot])
    left = np.cumsum(share[::-1])[::-1]
    attained, goal, failed = np.zeros(len(share)), market.load.goal - 1e-12, 0.0
    for n in np.flatnonzero(left >= min(_LEFT_OUT, (1.0 - probability) / 10)):
        serving = dict(zip(spot, up[n].tolist(), strict=True))
        attained[n] = _attained(market, together(on_demand, serving))
        failed += share[n] * (attained[n] < goal)
        if failed > 1.0 - probability:
            return None
    time_met = float(share[attained >= goal].sum())
    order = np.argsort(attained, kind="stable")
    worst = order[np.searchsorted(np.cumsum(share[order]), _WORST)]
    usd_per_h = market.usd_per_h(on_demand) + sum(n * _price(market, at) for at, n in spot.items())
    found = SpotRisk(usd_per_h, float(share @ attained), time_met, float(attained[worst]))
    return found if time_met >= probability else None


def _attained(market: Market, counts: Counts) -> float:
    if not counts:
        return 0.0
    # Where the goal is missed only the first seeds are simulated, which is as good for a mean.
    found = market.play(counts)
    # Where the backlog grows, an hour leaves nobody within the targets in the end.
    return found.mean if found.seen[-1].steady else 0.0


def play_hours(
    market: Market, on_demand: Counts, spot: Counts, *, hours: int = 8, seed: int = 0
) -> tuple[float, ...]:
    """Attainment of hours simulated request by request, with losses and replacements."""
    total, load = together(on_demand, spot), market.load
    plan, replicas, start_s = market.plan(total), market.replicas(total), market.prices.start_s
    count = max(round(3600 * load.rate_rps), 100)
    found = []
    for hour in range(hours):
        draws, what = stream(seed + hour, "losses of an hour"), list[Event]()
        for at, n in spot.items():
            rate = float(market.offers[at[0]].losses_per_h or 0.0)
            for place, names in enumerate(replicas[at][:n]):
                down = draws.random() < 1.0 - _serving(market, at)
                one = Rental(place, 0.0, start_s * draws.random() if down else 0.0, 3600.0)
                what += events([*one.losses(rate, start_s, draws)], names, 3600.0)
        run = plan.simulate(load.arrivals(count, seed + hour), seed + hour, events=what)
        found.append(attainment(run, load.slo))
    return tuple(found)


def cheapest_mix(
    market: Market, probability: float = 0.95, *, simulated_hours: int = 8, seed: int = 0
) -> SpotMix:
    """The cheapest mix that meets the goal in a share of the time.

    Parameters
    ----------
    probability
        Share of the time in which the goal must be met.
    simulated_hours, seed
        Hours of the answer that are simulated request by request, and the seed of the first.
    """
    require(
        0 < probability < 1,
        f"A probability of {probability:g} cannot be kept with machines that vanish.",
        resolve="give a share of the time above 0 and below 1.",
    )
    require(
        not all(offer.spot_usd_per_h is None for offer in market.offers),
        f"No machine of {market.prices.name} that fits {market.llm.name} has a spot price.",
        resolve="add spot_usd_per_h and losses_per_h to the price list.",
    )
    firm = cheapest(market, near=1.0, draws=0)
    base = _spot_fleet(market)
    usd_per_h = {(at, False): market.offers[at[0]].usd_per_h for at in firm.best.counts | base}
    usd_per_h |= {(at, True): _price(market, at) for at in base}

    def split(mix: Mix) -> tuple[Counts, Counts]:
        on_demand, spot = (
            {at: n for (at, vanishes), n in mix.items() if vanishes is part}
            for part in (False, True)
        )
        return on_demand, spot

    def holds(mix: Mix) -> tuple[Counts, Counts, SpotRisk] | None:
        on_demand, spot = split(mix)
        total = together(on_demand, spot)
        if market.fluid.most_rps(total) < market.load.rate_rps or not market.sustains(total):
            return None
        risk = spot_risk(market, on_demand, spot, probability)
        return None if risk is None else (on_demand, spot, risk)

    found = cheapest_set(
        usd_per_h, lambda mix: market.allowed(together(*split(mix))), holds, _MIXES
    )
    if found is None:
        raise InfeasibleError(
            f"None of the {_MIXES:,} cheapest mixes of {len(usd_per_h)} kinds of machines and "
            f"prices meets the goal in {100 * probability:g} % of the time.",
            resolve="offer fewer kinds of machines, or lower the rate or the probability.",
        )
    on_demand, spot, risk = found
    return SpotMix(
        market,
        on_demand,
        spot,
        probability,
        risk,
        play_hours(market, on_demand, spot, hours=simulated_hours, seed=seed),
        firm.usd_per_h,
        market.draws(together(on_demand, spot)),
    )


def _serving(market: Market, at: Kind) -> float:
    """Share of the time that a spot machine serves."""
    return availability(float(market.offers[at[0]].losses_per_h or 0.0), market.prices.start_s)


def _price(market: Market, at: Kind) -> float:
    """Expected price of a spot machine [$/h]."""
    return float(market.offers[at[0]].spot_usd_per_h or 0.0) * _serving(market, at)


def _spot_fleet(market: Market) -> Counts:
    """The fleet that would be cheapest at spot prices if no machine were ever lost."""

    def at_spot(offers: Sequence[Offer]) -> dict[Offer, int]:
        found: dict[Offer, int] = {}
        for k, one in enumerate(offers):
            if one.spot_usd_per_h is not None:
                found.setdefault(replace(one, usd_per_h=float(one.spot_usd_per_h)), k)
        return found

    offers = tuple(at_spot(market.prices.offers))
    other = replace(market, prices=replace(market.prices, offers=offers))
    place = at_spot(market.offers)
    found = cheapest(other, near=1.0, draws=0).best.counts
    each = {(place.get(other.offers[k], -1), division): n for (k, division), n in found.items()}
    return {at: n for at, n in each.items() if at in market.fluid.columns}
