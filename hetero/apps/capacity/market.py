"""A market: what the machines of a price list do for a model and a load, and fleets of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hetero.apps.capacity.fluid import Counts, Fluid
from hetero.apps.capacity.outcome import Outcome, dispatcher, outcome
from hetero.apps.capacity.prices import Offer, PriceList
from hetero.arrays import Floats
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.costs.cost import CostSettings
from hetero.deployment import Deployment, Replica
from hetero.errors import InfeasibleError, require
from hetero.planners.baselines.capacity import buckets, capacity_rps
from hetero.planners.baselines.melange import MelangeProgram
from hetero.planners.ground import Kind, kinds
from hetero.plans import Group, Plan, footing
from hetero.question import DRAWS, Load, step_error, sustained_draws, within_context
from hetero.simulator.sustained import came

Draws = tuple[bool, ...]
"""Whether something holds, by draw of the step times; empty where none were drawn."""

_SPARE = 3.0  # a fleet of one kind never needs more than this times what the program gives it
_MOST = 4000  # machines of a kind
_GLANCE = 0.08  # precision of a first look: a sixteenth of the requests
_FAR = 0.1  # below the goal: overload shows soon


@dataclass(eq=False)
class Market:
    """Kinds of machines on offer with their instances of a model, and what fleets of them do.

    A division of a machine into several instances is left out where smaller machines of the same
    GPU hold the same instances for the same price or less, and so is a GPU that does not compute
    in the precision of the weights, or that the engine does not run on.
    """

    prices: PriceList
    llm: Llm
    load: Load
    settings: CostSettings = field(default_factory=CostSettings)

    def __post_init__(self) -> None:
        trace, self.notes = within_context(self.load.trace, self.llm)
        self.load = replace(self.load, trace=trace)
        self._drawn: dict[tuple[object, ...], tuple[bool, ...]] = {}
        precision, engine = self.settings.engine.precision, self.settings.engine.serving
        offers = tuple(o for o in self.prices.offers if engine.serves(o.gpu, precision))
        if not offers:
            by = f" under {engine.title}" if engine.limited else ""
            raise InfeasibleError(
                f"No GPU of {self.prices.name} computes in {precision}{by}.",
                resolve="offer other GPUs, or choose another precision or engine.",
            )
        base = Cluster(self.prices.name, tuple(o.machine(f"{n}") for n, o in enumerate(offers)))
        self.known: dict[tuple[object, ...], Outcome] = {}
        self.glanced: dict[tuple[object, ...], bool] = {}
        found = []
        self.offers: tuple[Offer, ...] = ()
        for kind in kinds(base, self.llm, self.settings):
            for n in kind.machines:
                divisions = tuple(d for d in kind.divisions if not self._redundant(offers[n], d))
                if divisions:
                    found.append(replace(kind, machines=(), divisions=divisions))
                    self.offers += (offers[n],)
        self._kinds = tuple(found)
        every = (one for kind in found for one in kind.instances.values())
        self.notes = (*self.notes, footing(every, came(trace, self.load.process), self.load.seeds))

    def _redundant(self, offer: Offer, division: tuple[int, ...]) -> bool:
        special = (None, None, None)  # no limit, no other prices
        each: dict[int, float] = {}
        for o in self.prices.offers:
            alike = o.gpu == offer.gpu and o.link == offer.link
            if alike and (o.limit, o.reserved_usd_per_h, o.spot_usd_per_h) == special:
                each[o.count] = min(o.usd_per_h, each.get(o.count, np.inf))
        price = sum(each.get(degree, np.inf) for degree in division)
        return division != (offer.count,) and price <= offer.usd_per_h * (1 + 1e-9)

    # What there is --------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds with as many machines as a fleet could need."""
        found, start = [], 0
        for kind, offer in zip(self._kinds, self.offers, strict=True):
            most = self._enough(kind) if offer.limit is None else offer.limit
            for name, gpus in self.prices.most_gpus:
                if name == offer.gpu.name:
                    most = min(most, gpus // offer.count)
            found.append(replace(kind, machines=tuple(range(start, start + most))))
            start += most
        return tuple(found)

    def _enough(self, kind: Kind) -> int:
        need = 0.0
        for bucket in buckets(self.load.trace):
            best = max(
                sum(capacity_rps(kind.instances[d], bucket, self.load.slo) for d in division)
                for division in kind.divisions
            )
            need += self.load.rate_rps * bucket.share / best if best > 0 else 0.0
        return min(int(np.ceil(_SPARE * need)) + 2, _MOST)

    @cached_property
    def cluster(self) -> Cluster:
        """Every machine that a fleet could need."""
        numbers = {k: len(kind.machines) for k, kind in enumerate(self.kinds)}
        machines = [self.offers[k].machine(name) for k, name in self._named(numbers)]
        return Cluster(self.prices.name, tuple(machines), source=self.prices.source)

    def program(
        self,
        only: str | None = None,
        parts: tuple[int, int] = (6, 4),
        *,
        lean: bool = False,
    ) -> MelangeProgram:
        """The integer program of all kinds, of those of one GPU type, or of those worthwhile."""
        kept = self.worthwhile(parts) if lean else None
        chosen = [
            replace(kind, divisions=own)
            for k, kind in enumerate(self.kinds)
            if only in (None, kind.machine.gpu.name)
            and kind.machines
            and (own := tuple(d for d in kind.divisions if kept is None or (k, d) in kept))
        ]
        require(
            bool(chosen),
            f"{self.prices.name} offers no machine of {only or 'any kind'} for {self.llm.name}.",
            resolve="offer other machines.",
            error=InfeasibleError,
        )
        return MelangeProgram(
            self.cluster,
            self.llm,
            self.load.trace,
            self.load.slo,
            load=1.0,
            settings=self.settings,
            kinds=chosen,
            most_gpus=dict(self.prices.most_gpus),
            parts=parts,
            solver="gscip",
        )

    def worthwhile(
        self, parts: tuple[int, int] = (6, 4), most: float = np.inf
    ) -> list[tuple[int, tuple[int, ...]]]:
        r"""Kinds and divisions, cheapest first, that no others outdo for no more money.

        Of i, with :math:`n_i` instances of one degree, as many do what one machine j does as

        .. math:: \lceil \sum_{d \in j} \max_s T_{sjd} / (n_i T_{si}) \rceil

        with T as in :mod:`hetero.planners.baselines.melange`: whatever an instance of j serves,
        its term of machines i serves as well. With ``most`` no more than so many stand in for one;
        machines of limited number stand in for none.
        """
        ranges = buckets(self.load.trace, inputs=parts[0], outputs=parts[1])
        rates = {
            (k, d): np.array([capacity_rps(one, part, self.load.slo) for part in ranges])
            for k, kind in enumerate(self._kinds)
            for d, one in kind.instances.items()
        }
        found: list[tuple[int, tuple[int, ...]]] = []
        others: list[tuple[Floats, Floats]] = []  # what stands in for others: rates, prices
        for k, division in sorted(
            ((k, one) for k, kind in enumerate(self._kinds) for one in kind.divisions),
            key=lambda at: self.offers[at[0]].usd_per_h,
        ):
            offer, each = self.offers[k], np.array([rates[k, d] for d in division])
            usd = np.array([offer.usd_per_h, offer.reserved_usd_per_h or offer.usd_per_h])
            with np.errstate(divide="ignore", invalid="ignore"):
                need = [np.where(each > 0, each / one, 0.0).max(axis=1).sum() for one, _ in others]
            outdone = any(
                n <= most and np.all(n * price <= usd * (1 + 1e-9))
                for n, (_, price) in zip(np.ceil(np.array(need) - 1e-9), others, strict=True)
            )
            if not outdone:
                found.append((k, division))
            limited = offer.limit is not None or offer.gpu.name in dict(self.prices.most_gpus)
            if not (outdone or limited or len({*division}) > 1):
                others.append((len(division) * each[0], usd))
        return found

    @cached_property
    def fluid(self) -> Fluid:
        """Bound on what any fleet must cost."""
        return self.bound()

    def bound(self, only: str | None = None, *, reserved: bool = False) -> Fluid:
        """The same for a fleet of one GPU type, or at the lower of the prices a day and an hour."""
        chosen = [k for k, o in enumerate(self.offers) if only in (None, o.gpu.name)]
        prices = [
            min(o.usd_per_h, (o.reserved_usd_per_h if reserved else None) or o.usd_per_h)
            for o in self.offers
        ]
        return Fluid(
            tuple(self._kinds[k] for k in chosen),
            self.load.trace,
            tuple(prices[k] for k in chosen),
            tuple(self.offers[k].limit for k in chosen),
            dict(self.prices.most_gpus),
        )

    # Fleets ---------------------------------------------------------------------------------

    def counts(
        self, program: MelangeProgram, used: Sequence[tuple[int, tuple[int, ...], int]]
    ) -> Counts:
        """A plan of a program in the numbers of this market's kinds."""
        place = {kind.machines: k for k, kind in enumerate(self.kinds) if kind.machines}
        return {(place[program.kinds[k].machines], division): count for k, division, count in used}

    def usd_per_h(self, counts: Counts) -> float:
        """Price of a fleet by the hour [$/h]."""
        return sum(self.offers[k].usd_per_h * n for (k, _), n in counts.items())

    def allowed(self, counts: Counts) -> bool:
        """Whether there are so many machines."""
        found: Counter[int | str] = Counter()
        for (k, _), n in counts.items():
            found[k] += n
            found[self.offers[k].gpu.name] += n * self.offers[k].count
        limits: dict[int | str, int] = {**dict(self.prices.most_gpus)}
        limits |= {k: one.limit for k, one in enumerate(self.offers) if one.limit is not None}
        return all(found[key] <= most for key, most in limits.items())

    def groups(self, counts: Counts) -> tuple[Group, ...]:
        """The instances of a fleet and their machines."""
        return tuple(
            Group(replica.name, "both", ((machine, offer.gpu.name, degree, self.llm.layers),))
            for machine, offer, degree, replica in self._placed(counts)
        )

    def plan(self, counts: Counts, name: str = "fleet") -> Plan:
        """A fleet as replicas behind one dispatcher."""
        return Plan(
            planner=name,
            groups=self.groups(counts),
            serving=Deployment(name, tuple(replica for *_, replica in self._placed(counts))),
            router=dispatcher(self.load),
            routing="least predicted time to first token, priced by what a request takes",
            usd_per_h=self.usd_per_h(counts),
        )

    def replicas(self, counts: Counts) -> dict[tuple[int, tuple[int, ...]], list[tuple[str, ...]]]:
        """Names of the replicas of every machine of a fleet, by its kind and division."""
        named = iter(self._placed(counts))
        return {
            (k, division): [tuple(next(named)[-1].name for _ in division) for _ in range(count)]
            for (k, division), count in sorted(counts.items())
        }

    def names(self, counts: Counts) -> dict[str, int]:
        """Machines of a fleet by name of their kind, all divisions together."""
        found: Counter[str] = Counter()
        for (k, _), n in counts.items():
            found[self.offers[k].name] += n
        return found

    def _placed(self, counts: Counts) -> list[tuple[str, Offer, int, Replica]]:
        numbers: Counter[int] = Counter()
        for (k, _), count in counts.items():
            numbers[k] += count
        named: dict[int, list[str]] = {}
        for k, name in self._named(numbers):
            named.setdefault(k, []).append(name)
        placed = []
        for (k, division), count in sorted(counts.items()):
            offer = self.offers[k]
            for _ in range(count):
                machine = named[k].pop(0)
                for n, degree in enumerate(division):
                    one = self._kinds[k].instances[degree]
                    label = machine if len(division) == 1 else f"{machine}/{n}"
                    made = replace(one, name=label, network_s=offer.network_s)
                    placed.append((machine, offer, degree, made))
        return placed

    def _named(self, numbers: Mapping[int, int]) -> Iterator[tuple[int, str]]:
        """So many machines of every kind, each with a name of its own."""
        used: Counter[str] = Counter()
        for k, count in sorted(numbers.items()):
            offer = self.offers[k]
            for n in range(count):
                used[offer.name] += 1
                owned = n < len(offer.owned)  # not all where one drains while another starts
                yield k, offer.owned[n] if owned else f"{offer.name}-{used[offer.name]}"

    def play(self, counts: Counts, load: Load | None = None) -> Outcome:
        """What a fleet makes of the load, or of another; every fleet is simulated once."""
        load = load or self.load
        key = _key(counts, load)
        if key not in self.known:
            self.known[key] = outcome(self.plan(counts), load, stop_early=True)
        return self.known[key]

    def draws(self, counts: Counts, load: Load | None = None, draws: int = DRAWS) -> Draws:
        """Whether a fleet sustains the load, or another, with each draw of the step times."""
        load = load or self.load
        key = (*_key(counts, load), draws)
        if key not in self._drawn:
            self._drawn[key] = sustained_draws(
                self.plan(counts),
                {offer.gpu.name: offer.gpu for offer in self.offers},
                load,
                draws=draws,
                engine=self.settings.engine.name,
                experts=bool(self.llm.experts),
            )
        return self._drawn[key]

    def assumed(self, counts: Counts) -> tuple[str, ...]:
        """GPU types of a fleet whose chips were never measured."""
        gpus = dict.fromkeys(self.offers[k].gpu for k, _ in counts)
        return tuple(g.name for g in gpus if step_error(g).level in ("same chip", "carried"))

    def sustains(self, counts: Counts, load: Load | None = None) -> bool:
        """Whether a fleet sustains the load in every seed."""
        load = load or self.load
        hopeful = bool(counts) and not self._hopeless(counts, load)
        return hopeful and self.play(counts, load).sustained

    def _hopeless(self, counts: Counts, load: Load) -> bool:
        """Whether a short run of the first seed misses the goal by far."""
        key = _key(counts, load)
        if key in self.known or load.process == "scaled":  # own bursts are simulated whole
            return False
        if key not in self.glanced:
            short = replace(load, precision=max(_GLANCE, load.precision), seeds=load.seeds[:1])
            self.glanced[key] = outcome(self.plan(counts), short).mean < load.goal - _FAR
        return self.glanced[key]


def _key(counts: Counts, load: Load) -> tuple[object, ...]:
    return tuple(sorted((at, n) for at, n in counts.items() if n)), load.rate_rps
