"""The cheapest fleet for a load, and what is left of a plan without any one machine."""

from __future__ import annotations

import unicodedata
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from hetero.apps.ask import RESILIENCE, SIZE, Ask, asks, choice, natural, pairs
from hetero.apps.capacity import curve as days
from hetero.apps.capacity import prices as lists
from hetero.apps.capacity import resilience as losses
from hetero.apps.capacity import sizing
from hetero.apps.capacity.autoscale import Autoscaled, Policy, autoscaled
from hetero.apps.capacity.curve import LoadCurve
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.prices import PriceList
from hetero.apps.capacity.spot import SpotMix, cheapest_mix
from hetero.apps.cards.answer import best_plan
from hetero.apps.cards.contenders import winner
from hetero.apps.cards.request import requested
from hetero.costs.cost import CostSettings
from hetero.display import Shown, Table
from hetero.engines import EngineSpec
from hetero.errors import require
from hetero.plans import Plan, footing
from hetero.question import Load, Question
from hetero.search.portfolio import planner, planners
from hetero.simulator.sustained import came

Sized: TypeAlias = sizing.Sizing | SpotMix | days.DayPlan | Autoscaled
"""The fleet for a load, with spot machines, or for a day."""


@asks(SIZE, Ask)
def size(ask: Ask) -> Sized:
    """The cheapest fleet of whole replicas that carries a load within its targets.

    An integer program proposes fleets, simulation over several seeds decides, and a bound says
    what any fleet of these machines must cost, see :mod:`hetero.apps.capacity.sizing`.

    Raises
    ------
    InfeasibleError
        If the model fits no machine, some requests fit none under the targets, or all machines
        do not suffice.

    Examples
    --------
    >>> found = size(rate=4.0, slo="ttft=2s,tpot=150ms", gpu=["L4", "A40"], seeds=1)
    >>> found.bound_usd_per_h <= found.usd_per_h <= found.homogeneous[1].usd_per_h
    True
    """
    say = ask.progress or (lambda _: None)
    require(
        (ask.rate is not None) + (ask.curve is not None) + (ask.arrivals == "trace") == 1,
        "The load is given by one of --rate, --curve and --arrivals trace.",
        resolve="write --rate 20, or --curve day.csv.",
    )
    require(
        ask.spot is None or ask.curve is None,
        "--spot takes a constant load, and --curve gives a changing one.",
        resolve="give --rate instead of --curve.",
    )
    require(
        ask.autoscale is None or ask.curve is not None,
        "--autoscale follows a changing load, and --rate gives a constant one.",
        resolve="give --curve day.csv.",
    )
    require(
        ask.autoscale is not None or not (ask.weights_gbs or ask.on_spot),
        "--weights-gbs and --on-spot are of an autoscaler.",
        resolve="give --autoscale 0.8 as well.",
    )
    curve = None if ask.curve is None else LoadCurve.load(Path(ask.curve))
    trace = ask.opened()
    process, own = ask.arriving(trace)
    offered = curve.peak_rps if curve else own or 0.0
    load = Load(trace, offered, ask.targets, ask.goal, seeds=_seeds(ask), process=process)
    market = Market(_listed(ask), ask.llm, load, CostSettings(engine=_engine(ask)))
    if ask.spot is not None:
        return cheapest_mix(market, ask.spot, seed=ask.seed)
    if curve is None:
        return sizing.cheapest(market, near=ask.near, progress=say)
    plan = days.day(market, curve, progress=say)
    if ask.autoscale is None:
        return plan
    say("autoscaler")
    return autoscaled(plan, Policy(ask.autoscale, weights_gbs=ask.weights_gbs, spot=ask.on_spot))


@dataclass(frozen=True, eq=False, repr=False)
class Remaining(Shown):
    """A plan, what is left of it without any one machine, and a spare that makes up for a loss."""

    plan: Plan
    question: Question
    found: losses.Resilience
    spare: losses.Spare | None
    notes: tuple[str, ...]

    @property
    def shown(self) -> tuple[object, ...]:
        """All there is to read."""
        return (self.plan, self.found, *filter(None, (self.spare, "\n".join(self.notes))))

    def table(self) -> Table:
        """The N-1 table."""
        return self.found.table()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        question, found, extra = self.question, self.found, self.spare
        record: dict[str, Any] = {
            "cluster": question.cluster.name,
            "model": question.llm.name,
            "planner": self.plan.planner,
            "rate_rps": question.rate_rps,
            "goal": question.goal,
            "seeds": list(found.load.seeds),
            "arrivals": question.process,
            "notes": list(self.notes),
            "holds": found.holds,
            "draws": len(found.draws),
            "holds_in_draws": _share(found.draws),
            "whole": _loss(found.whole),
            "losses": [_loss(one) for one in found.losses],
        }
        if extra is not None:
            record["spare"] = {
                "machines": extra.machines,
                "usd_per_h": extra.usd_per_h,
                "losses": [
                    {"machine": name or None, "attainment": one.mean} for name, one in extra.losses
                ],
            }
        return record


@asks(RESILIENCE, Ask)
def resilience(ask: Ask) -> Remaining:
    """Say what is left of a plan if any one machine is lost, and what spare would make up for it.

    Every machine is taken away in turn, before a run and in the middle of one, by simulation, see
    :mod:`hetero.apps.capacity.resilience`.

    Examples
    --------
    >>> left = resilience("xiong-v100-a800", rate=1.0, slo="ttft=2s", seeds=1).found
    >>> left.holds, left.whole.sustained_rps > left.worst.sustained_rps
    (False, True)
    """
    say = ask.progress or (lambda _: None)
    asked = requested(ask)
    require(
        asked.rate_given,
        "The load is given by --rate or --arrivals trace.",
        resolve="write --rate 20.",
    )
    question, notes, known = (
        asked.question,
        asked.notes,
        {_slug(one.name): one for one in planners()},
    )
    chosen = choice("--planner", _slug(ask.planner), ["best", *known])
    if chosen == "best":
        made = best_plan(asked, say)
        plan, maker = made.best.plan, planner(winner(asked, made.best, made.found))
    else:
        say("plan")
        plan, maker = known[chosen].plan(question), known[chosen]
    again = maker if ask.replan or plan.deployment is None else None
    seeds = _seeds(ask)
    found = losses.resilience(plan, question, planner=again, seeds=seeds, progress=say)
    extra = losses.spare(plan, question, _listed(ask), seeds=seeds) if ask.spare else None
    replicas = plan.deployment.replicas if plan.deployment is not None else ()
    said = footing(replicas, came(question.trace, question.process), seeds)
    return Remaining(plan, question, found, extra, (*notes, said))


def _engine(ask: Ask) -> EngineSpec:
    name, release = ask.engine_release
    return EngineSpec(name=name, release=release, precision=ask.llm.loaded_as(ask.precision))


def _seeds(ask: Ask) -> tuple[int, ...]:
    return tuple(range(ask.seed, ask.seed + ask.seeds))


def _listed(ask: Ask) -> PriceList:
    """What can be rented."""
    given: Any = ask.prices
    if isinstance(given, PriceList):
        return given
    require(
        not (given and ask.within),
        "--within takes the prices of the cluster, and --prices gives others.",
        resolve="leave one of them out.",
    )
    gpus = [*(ask.gpu or ())]
    if given or ask.within:
        own = [
            lists.load(path) for path in ([given] if isinstance(given, str | Path) else given or ())
        ]
        found = PriceList.joined(
            own or [PriceList.of_cluster(replace(ask, cluster=ask.within or "").fleet)]
        )
        found = found.only(gpus) if gpus else found
    else:
        found = lists.from_catalog(gpus or None)
    limits = pairs("--max", ask.most, natural, "write a GPU and a number, as L40S=8.")
    return found.limited(limits) if limits else found


def _slug(name: str) -> str:
    """A planner's name as it is typed: no accents, no spaces."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return plain.lower().replace(",", "").replace(" ", "-")


def _loss(one: losses.Loss) -> dict[str, Any]:
    return {
        "machines": list(one.machines),
        "gpus": one.gpus,
        "attainment": one.after and one.after.mean,
        "sustained_rps": one.sustained_rps,
        "carries_in_draws": _share(one.draws),
        "attainment_minute_after": one.shock,
        "interrupted_requests": one.interrupted,
        "attainment_planned_again": one.planned_again and one.planned_again.mean,
    }


# As JSON values --------------------------------------------------------------------------------


def record(found: Sized) -> dict[str, Any]:
    """What was found, as JSON values."""
    if isinstance(found, Autoscaled):
        return _day(found.day) | {
            "autoscaler": asdict(found.policy) | {"start_s": found.start_s},
            "over_the_day": [asdict(one) for one in found.courses],
        }
    if isinstance(found, SpotMix):
        return _spot(found)
    return _day(found) if isinstance(found, days.DayPlan) else _record(found)


def _about(market: Market) -> dict[str, Any]:
    load = market.load
    return {
        "model": market.llm.name,
        "precision": market.settings.engine.precision,
        "trace": load.trace.source,
        "goal": load.goal,
        "slo": {name: value for name, value in asdict(load.slo).items() if value is not None},
        "arrivals": load.process,
        "seeds": list(load.seeds),
        "notes": list(market.notes),
        "precision_of_rate": load.precision,
        "prices": market.prices.name,
    }


def _machines(market: Market, counts: Any) -> list[dict[str, Any]]:
    return [
        {
            "gpu": market.offers[k].gpu.name,
            "gpus_each": market.offers[k].count,
            "number": n,
            "tensor_parallel": list(division),
            "usd_per_h_each": market.offers[k].usd_per_h,
        }
        for (k, division), n in sorted(counts.items())
    ]


def _record(found: sizing.Sizing) -> dict[str, Any]:
    low, high = found.best.outcome.attained_interval
    single = found.homogeneous
    return _about(found.market) | {
        "rate_rps": found.market.load.rate_rps,
        "usd_per_h": found.usd_per_h,
        "bound_usd_per_h": found.bound_usd_per_h,
        "gap": found.gap,
        "steady_state_usd_per_h": found.program_usd_per_h,
        "attainment": found.best.outcome.mean,
        "attainment_interval": [low, high],
        "draws": len(found.best.draws),
        "carries_in_draws": _share(found.best.draws),
        "assumed_gpus": list(found.market.assumed(found.best.counts)),
        "machines": _machines(found.market, found.best.counts),
        "cheapest_of_one_gpu_type": single
        and {
            "gpu": single[0],
            "usd_per_h": single[1].usd_per_h,
            "machines": _machines(found.market, single[1].counts),
        },
        "of_one_gpu_type": [
            {"gpu": name, "proven_least_usd_per_h": found.least_usd_per_h.get(name)}
            | (
                {"why": one}
                if isinstance(one, str)
                else {
                    "usd_per_h": one.usd_per_h,
                    "attainment": one.outcome.mean,
                    "carries_in_draws": _share(one.draws),
                    "machines": _machines(found.market, one.counts),
                }
            )
            for name, one in found.alone.items()
        ],
    }


def _share(draws: tuple[bool, ...]) -> float | None:
    """Share of the draws of step times in which something holds; None without any."""
    return sum(draws) / len(draws) if draws else None


def _spot(mix: SpotMix) -> dict[str, Any]:
    return _about(mix.market) | {
        "rate_rps": mix.market.load.rate_rps,
        "usd_per_h": mix.risk.usd_per_h,
        "on_demand_alone_usd_per_h": mix.on_demand_usd_per_h,
        "probability": mix.probability,
        "time_that_meets_the_goal": mix.risk.time_met,
        "goodput_rps": mix.risk.attained * mix.market.load.rate_rps,
        "attainment_worst_5_percent": mix.risk.worst,
        "attainment_of_played_hours": list(mix.simulated),
        "carries_in_draws": _share(mix.draws),
        "on_demand": _machines(mix.market, mix.on_demand),
        "spot": _machines(mix.market, mix.spot),
    }


def _day(plan: days.DayPlan) -> dict[str, Any]:
    return _about(plan.market) | {
        "usd": plan.usd,
        "bound_usd": plan.bound_usd,
        "steady_state_usd": plan.program_usd,
        "program_gap": plan.program_gap,
        "static_usd": plan.static_usd,
        "tightest_hours": list(plan.tight),
        "carries_in_draws": _share(plan.draws),
        "reserved": _machines(plan.market, plan.reserved),
        "hours": [
            {
                "hour": hour,
                "rate_rps": rate,
                "on_demand": _machines(plan.market, plan.on_demand[hour]),
                "started": plan.starts[hour],
                "attainment": plan.outcomes[hour].mean,
            }
            for hour, rate in enumerate(plan.curve.rates_rps)
        ],
    }
