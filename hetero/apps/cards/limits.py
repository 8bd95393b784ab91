"""What binds a plan: where a little more would carry more requests, found by trying it.

Each resource is made 10 % better by itself (step times of prefill or decode shorter, KV caches,
links or batches larger) and the goodput is found again with the same requests and gaps. Where the
largest gain is, there the plan binds; the gain over 10 % is the elasticity of the goodput.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from hetero.apps.cards.card import Limit, Limits, Sampled
from hetero.apps.cards.delivery import LATENCIES, CardEffort, redeployed
from hetero.deployment import Deployment, KvLink, Replica
from hetero.latency.scaled import scaled
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps
from hetero.routers import Builtin
from hetero.simulator import Run, simulate
from hetero.simulator.pipeline_run import PipelineRun

BETTER = 1.1
"""How much better each thing is made."""

_LEAST_PERCENT = 1.0  # gains below this are within the precision of a goodput
_BRACKET = 0.002  # around the goodputs that are compared
_SAMPLES = 200

Better: TypeAlias = Callable[[Deployment], Deployment]


def _each(better: Callable[[Replica], Replica]) -> Better:
    return lambda deployment: replace(
        deployment, replicas=tuple(better(replica) for replica in deployment.replicas)
    )


def _links(deployment: Deployment) -> Deployment:
    def faster(link: KvLink) -> KvLink:
        return replace(link, bandwidth_gbs=BETTER * link.bandwidth_gbs)

    default = deployment.default_link
    return replace(
        deployment,
        links=tuple((a, b, faster(link)) for a, b, link in deployment.links),
        default_link=None if default is None else faster(default),
    )


PREFILL, DECODE, CACHE = "compute of prefill", "bandwidth of decode", "memory for KV cache"
BATCH, LINKS, BUDGET = "batch limit", "links between machines", "budget"

_BETTER: dict[str, Better] = {
    PREFILL: _each(lambda r: replace(r, step=scaled(r.step, 1.0 / BETTER, 1.0))),
    DECODE: _each(lambda r: replace(r, step=scaled(r.step, 1.0, 1.0 / BETTER))),
    CACHE: _each(lambda r: replace(r, kv_tokens=round(BETTER * r.kv_tokens))),
    BATCH: _each(
        lambda r: replace(r, engine=replace(r.engine, max_batch=round(BETTER * r.engine.max_batch)))
    ),
    LINKS: _links,
}


def limits(
    plan: Plan, question: Question, goodput: Sampled, effort: CardEffort, *, unaffordable: str = ""
) -> Limits:
    """What binds a plan at the largest rate that it carries.

    Parameters
    ----------
    goodput
        Of the plan, seed by seed.
    unaffordable
        Machine that the budget leaves idle; empty where the budget leaves none.
    """
    edge = goodput.value
    load = question.load(BETTER * edge, precision=effort.precision)
    run, _ = judged(plan, load, question.seed)
    missed = first_missed(run, question)
    if plan.deployment is not None:
        use = _use(plan, question, edge)
        rows = []

        def finely(plan: Plan, seed: int, near_rps: float) -> float:
            return sustained_rps(plan, load, seed, near_rps=near_rps, bracket=_BRACKET)

        seeds = [(question.seed + k, rate) for k, rate in enumerate(goodput.seeds) if rate > 0]
        now = [finely(plan, seed, rate) for seed, rate in seeds]
        for name, better in _BETTER.items():
            if name == LINKS and not (plan.deployment.links or plan.deployment.default_link):
                continue
            other = redeployed(plan, better(plan.deployment))
            gains = [
                finely(other, seed, rate) / rate - 1.0
                for (seed, _), rate in zip(seeds, now, strict=True)
            ]
            gain = max(0.0, float(np.mean(gains)))  # less is noise
            rows.append(Limit(name, 100.0 * gain, use.get(name, np.nan)))
        rows.sort(key=lambda row: -row.gain_percent)
    else:
        rows = _busiest(run)
    return _said(tuple(rows), missed, unaffordable)


def _said(rows: tuple[Limit, ...], missed: str, unaffordable: str) -> Limits:
    target = f"; {missed.upper()} is the target missed first" if missed else ""
    if unaffordable:
        text = f"The budget binds: it does not pay for {unaffordable}, which stays idle"
        return Limits(BUDGET, f"{text}{target}.", missed, rows)
    first = rows[0]
    if np.isnan(first.gain_percent):
        name = f"{first.name[0].upper()}{first.name[1:]}"
        text = f"{name} is the busiest, {first.use_percent:.0f} % of the time"
        return Limits(first.name, f"{text}{target}.", missed, rows)
    if first.gain_percent < _LEAST_PERCENT:
        text = "Nothing binds by itself: no single thing made 10 % better carries 1 % more"
        return Limits("", f"{text}{target}.", missed, rows)
    text = f"{first.name[0].upper()}{first.name[1:]} binds: 10 % more of it carries "
    return Limits(first.name, f"{text}{first.gain_percent:.1f} % more{target}.", missed, rows)


def first_missed(run: Run, question: Question) -> str:
    """Target that most of the requests miss; empty without a miss."""
    misses = {}
    for name, quantity in LATENCIES.items():
        target = getattr(question.slo, quantity)
        if target is not None:
            misses[name] = float(((getattr(run, quantity) > target) | (~run.finished)).mean())
    worst = max(misses, key=lambda name: misses[name], default="")
    return worst if worst and misses[worst] > 0 else ""


def _use(plan: Plan, question: Question, rate_rps: float) -> dict[str, float]:
    """Share of the time in steps and of the caches held, of the fullest replica [%]."""
    if plan.deployment is None or not isinstance(plan.router, Builtin):
        return {}
    trace = question.arrivals(rate_rps, seed=question.seed)
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    run = simulate(
        plan.deployment,
        trace,
        plan.router,
        seed=question.seed,
        sample_s=max(span_s / _SAMPLES, 1e-3),
    )
    use = run.utilisation()
    phases = np.array([replica.role for replica in plan.deployment.replicas])
    found = {}
    for name, phase in ((PREFILL, "prefill"), (DECODE, "decode")):
        of = (phases == phase) | (phases == "both")
        if of.any():
            found[name] = 100.0 * float(use[of].max())
    if run.samples is not None:
        found[CACHE] = 100.0 * float(
            run.samples.kv_use[run.samples.time_s <= span_s].mean(axis=0).max()
        )
    return found


def _busiest(run: Run) -> list[Limit]:
    """Nodes and links of a pipeline over a network by how busy they are."""
    use = run.utilisation()
    rows = [
        Limit(f"node {replica.name}", np.nan, 100.0 * float(use[k]))
        for k, replica in enumerate(run.deployment.replicas)
    ]
    if isinstance(run, PipelineRun):
        rows += [
            Limit(f"link {source} to {target}", np.nan, 100.0 * share)
            for (source, target), share in _link_use(run).items()
        ]
    return sorted(rows, key=lambda row: -row.use_percent)[:5]


def _link_use(run: PipelineRun) -> dict[tuple[str, str], float]:
    names = [*(replica.name for replica in run.deployment.replicas), "coordinator"]
    busy = np.asarray(run.edges["busy_s"]) / max(run.end_s, 1e-300)
    return {
        (names[a], names[b]): float(share)
        for (a, b), share in zip(run.pairs.tolist(), busy, strict=True)
    }
