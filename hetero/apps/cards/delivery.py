"""What a plan delivers: goodput and latencies over seeds and over the error of step times.

Two things make a figure uncertain. Requests come at random, which other seeds show. And step times
err: every draw multiplies the prefill and decode times of each GPU type by factors from their
expected error (:func:`hetero.question.drawn`) and plays arrivals of its own. Draws are the
same for every plan of the same question, so that differences between plans are paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetero.apps.cards.card import PERCENTILES, AtRate, Sampled
from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.plans import Plan
from hetero.question import Load, Question, drawn, judged, sustained_rps
from hetero.simulator import metrics
from hetero.simulator.sustained import steady_s

LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Latencies of a card, by the name of their target."""
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Of its goodput, at which a card says what its plan does."""


@dataclass(frozen=True, slots=True)
class CardEffort:
    """How much is played for a card.

    Attributes
    ----------
    requests
        Requests that planners compare plans with; runs that figures come from take as many as
        :mod:`hetero.simulator.sustained` asks for.
    seeds
        Seeds of the arrivals.
    draws
        Draws of the step times; those of a change are half as many.
    precision
        Width of the bracket around a goodput, over its lower end.
    """

    requests: int = 3000
    seeds: int = 5
    draws: int = 40
    precision: float = 0.01


EFFORTS = {
    "quick": CardEffort(requests=2000, seeds=4, draws=24, precision=0.02),
    "normal": CardEffort(),
    "thorough": CardEffort(requests=8000, seeds=10, draws=200, precision=0.005),
}
"""By name, as those of :mod:`hetero.planners.base`."""


def redeployed(plan: Plan, deployment: Deployment) -> Plan:
    """The same plan and routing rule with replicas that have other step times, caches or links."""
    if plan.deployment is None:
        raise ParameterError(
            f"The plan of {plan.planner} is no deployment of replicas, which could be changed.",
            resolve="change its case, and plan again.",
        )
    return plan.on(deployment)


def goodput(
    plan: Plan,
    question: Question,
    effort: CardEffort,
    *,
    draws: int | None = None,
    like: Sampled | None = None,
) -> Sampled:
    """Goodput of a plan over the seeds, and over the draws where step times can be drawn.

    Parameters
    ----------
    like
        Goodput that this one is likely in proportion to, seed by seed and draw by draw: rates are
        looked for from there.
    """
    load = question.load(precision=effort.precision)
    seeds: list[float] = []
    for k in range(effort.seeds):
        near = seeds[-1] if seeds and seeds[-1] else question.rate_rps
        if seeds and like is not None and like.seeds[k - 1] > 0:
            near *= like.seeds[k] / like.seeds[k - 1]
        seeds.append(sustained_rps(plan, load, question.seed + k, near_rps=near or None))
    middle = float(np.mean(seeds)) or question.rate_rps
    found: list[float] = []
    for d, one in enumerate(drawn(plan, question, effort.draws if draws is None else draws)):
        share = like.draws[d] / like.value if like is not None and like.value > 0 else 1.0
        found.append(sustained_rps(one, load, question.seed + d, near_rps=middle * share or None))
    return Sampled.of(seeds, found)


def difference(a: Sampled, b: Sampled) -> Sampled:
    """Differences ``a - b`` seed by seed and draw by draw, where both have the same of them."""
    seeds = min(len(a.seeds), len(b.seeds))
    draws = min(len(a.draws), len(b.draws))
    return Sampled(
        round(a.value - b.value, 12),
        tuple(x - y for x, y in zip(a.seeds[:seeds], b.seeds[:seeds], strict=True)),
        tuple(x - y for x, y in zip(a.draws[:draws], b.draws[:draws], strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a plan delivers at a rate; figures of :class:`~hetero.apps.cards.card.PlanCard`."""

    served: Mapping[str, Sampled]
    latencies_s: Mapping[str, Mapping[int, Sampled]]
    usd_per_mtok: Sampled | None


def delivered(plan: Plan, question: Question, rate_rps: float, effort: CardEffort) -> Delivered:
    """Throughput, attainment, latencies and cost per token at a rate."""
    load = question.load(rate_rps, precision=effort.precision)
    seeds = [_figures(plan, load, question.seed + k) for k in range(effort.seeds)]
    draws = drawn(plan, question, effort.draws)
    rows = [_figures(one, load, question.seed + d) for d, one in enumerate(draws)]
    every = {
        key: Sampled.of([row[key] for row in seeds], [row.get(key, np.nan) for row in rows])
        for key in seeds[0]
    }
    latencies = {
        key: {int(name.split()[1]): e for name, e in every.items() if name.startswith(f"{key} ")}
        for key in LATENCIES
    }
    apart = ("requests_per_s", "output_tps", "total_tps")
    served = {k: e for k, e in every.items() if k in apart or k.startswith("met ")}
    return Delivered(served, latencies, every.get("usd_per_mtok"))


def _figures(plan: Plan, load: Load, seed: int) -> dict[str, float]:
    run, _ = judged(plan, load, seed)
    begin_s, end_s = steady_s(run)
    seen = metrics(run, load.slo, warmup_s=begin_s, until_s=end_s)
    found = {
        "requests_per_s": seen.requests_per_s,
        "output_tps": seen.output_tps,
        "total_tps": seen.total_tps,
    }
    found |= {f"met {key}": share for key, share in seen.attainment.items()}
    for key, quantity in LATENCIES.items():
        found |= {f"{key} {p}": v for p, v in seen.percentiles[quantity].items()}
    if plan.usd_per_h is not None and seen.total_tps > 0:
        found["usd_per_mtok"] = plan.usd_per_h / 3600.0 / seen.total_tps * 1e6
    return found


def at_rates(
    plan: Plan, question: Question, goodput_rps: float, effort: CardEffort
) -> tuple[AtRate, ...]:
    """What a plan does with less than its goodput and with more, with arrivals of one seed."""
    found = []
    for share in SHARES if goodput_rps > 0 else ():
        load = question.load(share * goodput_rps, precision=effort.precision)
        seen = _figures(plan, load, question.seed)
        tail = {
            name: tuple(seen.get(f"{name} {p}", math.nan) for p in PERCENTILES)
            for name in LATENCIES
        }
        met, cost = seen.get("met joint", math.nan), seen.get("usd_per_mtok")
        found.append(AtRate(load.rate_rps, met, tail, cost))
    return tuple(found)
