"""What a plan delivers: goodput and latencies over seeds and over the error of step times.

Three things make a figure uncertain. Requests come at random, which other seeds show. Some parts of
a workload are harder, which requests drawn anew in blocks show: what holds with both is what can be
promised (:func:`promised`). And step times err: every draw multiplies the prefill and decode times
of each GPU type by factors from their expected error (:func:`hetero.question.drawn`) and plays
arrivals of its own. Draws are the same for every plan of the same question, so that differences
between plans are paired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from hetero.apps.cards.card import PERCENTILES, AtRate, Sampled
from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.planners.bound import capped
from hetero.plans import Plan
from hetero.question import Load, Question, drawn, judged, sustained_rps
from hetero.simulator import Run, metrics
from hetero.simulator.metrics import attainment, largest_rate
from hetero.simulator.metrics import met as run_met
from hetero.simulator.sustained import LOWER, MOST_OWN, Arrivals, redrawn, steady_s
from hetero.streams import stream
from hetero.workload import Trace

LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Latencies of a card, by the name of their target."""
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
"""Of what can be promised, at which a card says what its plan does."""

_RUNS = 2  # per seed, that say what can be promised
_BLOCKS = 10  # that a workload is drawn anew in
_HOPELESS = 0.1  # below the goal: further runs do not help
_QUARTER_S = 900.0
_LEAST_PROMISE = 0.05  # of a goodput


@dataclass(frozen=True, slots=True)
class CardEffort:
    """How much is simulated for a card.

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
    near_rps: float = 0.0,
    process: Arrivals | None = None,
) -> Sampled:
    """Goodput of a plan over the seeds, and over the draws where step times can be drawn.

    Parameters
    ----------
    near_rps, process
        Rate to look around first, and how requests come, by default those of the question.
    like
        Goodput that this one is likely in proportion to, seed by seed and draw by draw: rates are
        looked for from there.
    """
    load, first_rps = capped(plan, question, effort.precision), near_rps or question.rate_rps
    load = replace(load, process=process or load.process)
    seeds: list[float] = []
    for k in range(effort.seeds):
        near = seeds[-1] if seeds and seeds[-1] else first_rps
        if seeds and like is not None and like.seeds[k - 1] > 0:
            near *= like.seeds[k] / like.seeds[k - 1]
        seeds.append(sustained_rps(plan, load, question.seed + k, near_rps=near or None))
    middle = float(np.mean(seeds)) or first_rps
    found: list[float] = []
    load = question.load(precision=effort.precision)  # other step times have other bounds
    for d, one in enumerate(drawn(plan, question, effort.draws if draws is None else draws)):
        share = like.draws[d] / like.value if like is not None and like.value > 0 else 1.0
        found.append(sustained_rps(one, load, question.seed + d, near_rps=middle * share or None))
    return Sampled.of(seeds, found)


def promised(plan: Plan, question: Question, effort: CardEffort, goodput_rps: float) -> float:
    r"""Rate that holds with 95 % confidence over arrivals and the workload's own variability.

    .. math:: \bar p - t_{0.95, K - 1}\, s \sqrt{2 + 1 / K} \ge g

    with the mean and deviation of the shares p within the targets in K runs, so that other requests
    are above the goal g. Each draws those at hand anew (:func:`rerun`); what comes next differs
    from them by as much again. No less may meet the targets in the first run, at smaller shares of
    the rate, and in the later part of one's own log. A plan may be lost within the width of the
    bracket, where replicas fill at once: as much is kept below the rate found.

    Parameters
    ----------
    goodput_rps
        Mean over seeds, which it stays below.
    """
    runs = _RUNS * effort.seeds
    width = float(stdtrit(runs - 1, 0.95)) * math.sqrt(2.0 + 1.0 / runs)

    def holds(rate_rps: float, runs: int = runs) -> bool:
        load = question.load(rate_rps, precision=effort.precision, whole=True)
        shares: list[float] = []
        for k in range(runs):
            shares.append(load.rule.judge(rerun(plan, load, question.seed + k)).attained)
            if shares[0] < load.goal or shares[-1] < load.goal - _HOPELESS:
                return False
        if runs == 1:
            return True
        safe = float(np.mean(shares)) - width * float(np.std(shares, ddof=1))
        return min(safe, _met_later(plan, question, rate_rps)) >= load.goal

    most, found = goodput_rps, 0.0
    while most > 0 and found == 0:
        least_rps = _LEAST_PROMISE * goodput_rps
        found = largest_rate(
            holds, most, factor=1.1, precision=effort.precision, most_rps=most, least_rps=least_rps
        )
        lower = (share * found for share in LOWER if found > 0)
        if failed := next((rate for rate in lower if not holds(rate, 1)), 0.0):
            most, found = failed, 0.0
        elif found == 0:
            break
    return found / (1.0 + effort.precision)


def rerun(plan: Plan, load: Load, seed: int) -> Run:
    """A run of as many requests as the workload has or the rule asks for, drawn anew in blocks.

    Blocks are a tenth of the workload, so that they are longer than its bursts.
    """
    of, poisson = load.trace, load.process != "scaled"
    count = max(load.requests(plan), min(len(of), MOST_OWN))
    if load.process == "shuffled":
        return plan.simulate(load.arrivals(count, seed), seed)
    drawn = redrawn(of if poisson else of.rescale(rate_rps=load.rate_rps), count, seed, _block(of))
    return plan.simulate(
        drawn.poisson(load.rate_rps, stream(seed, "arrivals")) if poisson else drawn, seed
    )


def _block(of: Trace) -> int:
    return -(-len(of) // _BLOCKS)


def _met_later(plan: Plan, question: Question, rate_rps: float) -> float:
    """Share within the targets in the later part of one's own log."""
    if question.whole is None:
        return 1.0
    log, first = question.whole.rescale(rate_rps=rate_rps), len(question.load().trace)
    later = log.take(np.arange(first, len(log)))
    return attainment(plan.simulate(later, question.seed), question.slo)


def worst_quarter(plan: Plan, load: Load, seed: int) -> float | None:
    """Smallest share within the targets in a quarter of an hour of a log at a rate; None for less.

    Quarters with fewer than a tenth of the mean number of requests do not count.
    """
    if load.process != "scaled":
        return None
    run = plan.simulate(load.trace.rescale(rate_rps=load.rate_rps), seed)
    arrival_s = np.asarray(run.requests["arrival_s"])
    quarter = ((arrival_s - arrival_s[0]) // _QUARTER_S).astype(np.int64)
    counts, good = np.bincount(quarter), np.bincount(quarter, run_met(run, load.slo))
    busy = counts >= 0.1 * counts.mean()
    return float((good[busy] / counts[busy]).min()) if len(counts) > 1 else None


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


def _figures(plan: Plan, load: Load, seed: int, run: Run | None = None) -> dict[str, float]:
    run = run or judged(plan, load, seed)[0]
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
    """What a plan does with less than its goodput and with more, in one run of :func:`rerun`."""
    found = []
    for share in SHARES if goodput_rps > 0 else ():
        load = question.load(share * goodput_rps, precision=effort.precision, whole=True)
        seen = _figures(plan, load, question.seed, rerun(plan, load, question.seed))
        tail = {
            name: tuple(seen.get(f"{name} {p}", math.nan) for p in PERCENTILES)
            for name in LATENCIES
        }
        met, cost = seen.get("met joint", math.nan), seen.get("usd_per_mtok")
        found.append(AtRate(load.rate_rps, met, tail, cost))
    return tuple(found)
