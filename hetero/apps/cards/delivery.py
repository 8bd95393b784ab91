"""What a plan delivers: goodput and latencies over seeds and over the error of step times.

Two things make a figure uncertain. Requests come at random, which other seeds show. And step times
err: every draw multiplies the prefill and decode times of each GPU type by factors from their
expected error (:mod:`hetero.simulator.uncertainty`) and plays arrivals of its own. Draws are the
same for every plan of the same question, so that differences between plans are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetero.apps.cards.card import Sampled
from hetero.catalog import Gpu
from hetero.deployment import Deployment
from hetero.errors import CatalogError, ParameterError
from hetero.latency.calibration.expected import StepError, error_of, expected_error
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps
from hetero.simulator import metrics
from hetero.simulator.sustained import steady_s
from hetero.simulator.uncertainty import draw_factors

LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
"""Latencies of a card, by the name of their target."""


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
"""By name, as those of :mod:`hetero.apps.portfolio.effort`."""


def step_error(gpu: Gpu) -> StepError:
    """Expected error of the roofline's step times on a GPU; one's own counts as never measured."""
    try:
        return expected_error(gpu.name)
    except CatalogError:
        return error_of("carried")


def redeployed(plan: Plan, deployment: Deployment) -> Plan:
    """The same plan and routing rule with replicas that have other step times, caches or links."""
    if plan.deployment is None:
        raise ParameterError(
            f"The plan of {plan.planner} is no deployment of replicas, which could be changed.",
            resolve="change its case, and plan again.",
        )
    return plan.on(deployment)


def drawable(plan: Plan) -> bool:
    """Whether the step times of a plan can be drawn: it has replicas on known GPUs."""
    return plan.deployment is not None and bool(_weights(plan))


def _weights(plan: Plan) -> dict[str, dict[str, float]]:
    """Share of the layers on each GPU type by replica; empty where a replica's are not known."""
    if plan.deployment is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for group in plan.groups:
        layers = sum(held for *_, held in group.stages)
        if layers:
            own = found.setdefault(group.name, {})
            for _, gpu, _, held in group.stages:
                own[gpu] = own.get(gpu, 0.0) + held / layers
    for replica in plan.deployment.replicas:
        if replica.gpu is not None:
            found.setdefault(replica.name, {replica.gpu.name: 1.0})
    names = [replica.name for replica in plan.deployment.replicas]
    return {name: found[name] for name in names} if set(names) <= found.keys() else {}


def rescaled(plan: Plan, factors: Mapping[str, tuple[float, float]]) -> Plan:
    """The plan with prefill and decode times of each replica multiplied."""
    assert plan.deployment is not None
    # Replicas often share a step model: one scaled copy serves them all.
    known: dict[tuple[int, float, float], StepModel] = {}
    replicas = []
    for replica in plan.deployment.replicas:
        key = (id(replica.step), *factors[replica.name])
        if key not in known:
            known[key] = scaled(replica.step, *factors[replica.name])
        replicas.append(replace(replica, step=known[key]))
    return redeployed(plan, replace(plan.deployment, replicas=tuple(replicas)))


def drawn(plan: Plan, question: Question, draws: int) -> Iterator[Plan]:
    """The plan with the step times of each draw.

    A pipeline over several GPU types errs by the mean of their errors, weighted by layers.
    """
    if draws < 1 or not drawable(plan):
        return
    weights = _weights(plan)
    kinds = question.cluster.gpu_types
    types = sorted({gpu for own in weights.values() for gpu in own})
    errors = {name: step_error(kinds[name]) for name in types}
    logs = {n: np.log(f) for n, f in draw_factors(errors, draws, seed=question.seed).items()}
    for d in range(draws):
        factors: dict[str, tuple[float, float]] = {}
        for name, own in weights.items():
            prefill, decode = np.exp(sum(share * logs[gpu][d] for gpu, share in own.items()))
            factors[name] = (float(prefill), float(decode))
        yield rescaled(plan, factors)


def goodput(
    plan: Plan, question: Question, effort: CardEffort, *, draws: int | None = None
) -> Sampled:
    """Goodput of a plan over the seeds, and over the draws where step times can be drawn."""
    load = question.load(precision=effort.precision)
    seeds: list[float] = []
    for k in range(effort.seeds):
        near = seeds[-1] if seeds and seeds[-1] else question.rate_rps
        seeds.append(sustained_rps(plan, load, question.seed + k, near_rps=near))
    middle = float(np.mean(seeds)) or question.rate_rps
    count = effort.draws if draws is None else draws
    return Sampled.of(
        seeds,
        [
            sustained_rps(one, load, question.seed + d, near_rps=middle)
            for d, one in enumerate(drawn(plan, question, count))
        ],
    )


def difference(a: Sampled, b: Sampled) -> Sampled:
    """Differences ``a - b`` seed by seed and draw by draw, where both have the same of them."""
    seeds = min(len(a.seeds), len(b.seeds))
    draws = min(len(a.draws), len(b.draws))
    return Sampled(
        a.value - b.value,
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

    def figures(one: Plan, seed: int) -> dict[str, float]:
        run, _ = judged(one, load, seed)
        begin_s, end_s = steady_s(run)
        seen = metrics(run, question.slo, warmup_s=begin_s, until_s=end_s)
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

    seeds = [figures(plan, question.seed + k) for k in range(effort.seeds)]
    draws = drawn(plan, question, effort.draws)
    rows = [figures(one, question.seed + d) for d, one in enumerate(draws)]
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
