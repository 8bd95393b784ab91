"""Prefill and decode on different groups of GPUs (ThunderServe)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.apps.answers import Answer
from hetero.apps.ask import PHASES, PhaseAsk, asks
from hetero.costs.cost import IN_PAPERS
from hetero.costs.demand import Demand, reference, scaled
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment
from hetero.planners.thunderserve.phases import PhasePlan, best_part
from hetero.planners.thunderserve.phases import phases as plan
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.simulator import Slo, metrics, simulate, uncertainty
from hetero.simulator.uncertainty import Choice, Rule
from hetero.streams import stream
from hetero.workload import Trace

_CHOICE_REQUESTS = 400  # that every plan serves with every draw of the step times


@asks(PHASES, PhaseAsk)
def phases(ask: PhaseAsk) -> Answer:
    """Divide a mixed fleet into groups, give each a phase, and route requests between them.

    Attainment is an estimate for Poisson arrivals; ``requests`` simulates the plan with as many of
    them. See :mod:`hetero.planners.thunderserve`.
    """
    transfer = KvTransfer(bits=ask.bits, overlap=ask.overlap)
    seed, choose, requests, steps = ask.seed, ask.choose, ask.requests or 0, ask.steps
    fleet, llm = ask.fleet, ask.llm
    lengths = ask.opened()
    demand = Demand.of(lengths, ask.rate)
    target = ask.targets if ask.targets != Slo() else scaled(reference(llm, demand), ask.slo_scale)
    settings = replace(IN_PAPERS, max_stages=ask.max_stages)
    if ask.budget is not None:
        fleet = best_part(
            fleet, ask.budget, llm, demand, target, settings=settings, transfer=transfer
        )
    tabu = TabuSettings() if steps is None else TabuSettings(steps=steps)
    seeds = [seed] if choose == "nominal" else [seed, seed + 1, seed + 2]
    plans = {
        f"seed {each}": plan(
            fleet,
            llm,
            demand,
            target,
            search=ask.search,
            settings=settings,
            transfer=transfer,
            tabu=tabu,
            seed=each,
            jobs=ask.jobs,
            progress=(lambda _: ask.progress(1)) if ask.progress else None,
        )
        for each in seeds
    }
    chosen = None if choose == "nominal" else _robust(plans, lengths, choose, seed)
    found = plans[chosen.name if chosen else f"seed {seed}"]
    record = _record(found)
    if chosen is not None:
        record["chosen"] = {"rule": choose, "plan": chosen.name, "nominal": chosen.nominal}
    if requests:
        record["simulated"] = _simulated(found, lengths, requests, seed)
    goals = {"TTFT": target.ttft_s, "TPOT": target.tpot_s, "E2E": target.e2e_s}
    said = ", ".join(f"{name} {1e3 * goal:,.0f} ms" for name, goal in goals.items() if goal)
    lines = [str(found), f"Targets: {said}."]
    if requests:
        met = record["simulated"]
        shares = ", ".join(f"{key} {100 * part:.1f} %" for key, part in met["attainment"].items())
        usd = met["usd_per_mtok"] or float("nan")
        lines.append(
            f"Simulated with {requests:,} requests: {shares} met; {usd:,.3f} $ per 10^6 tokens."
        )
    return Answer(found, record, (*([chosen] if chosen else ()), "\n".join(lines)))


def _record(found: PhasePlan) -> dict[str, Any]:
    """The plan as JSON values."""
    slo, share = found.evaluator.slo, found.orchestration.share
    first, second = found.names
    machines = found.evaluator.model.machines
    replicas = [
        {
            "name": name,
            "phase": phase,
            "stages": [
                {
                    "machine": machines[stage.machine].name,
                    "gpus": stage.gpus,
                    "layers": stage.layers,
                }
                for stage in pipeline.stages
            ],
            "kv_tokens": pipeline.kv_tokens,
        }
        for names, built, phase in (
            (first, found.prefill, "prefill"),
            (second, found.decode, "decode"),
        )
        for name, pipeline in zip(names, built, strict=True)
    ]
    return {
        "cluster": found.evaluator.model.cluster.name,
        "model": found.evaluator.model.llm.name,
        "gpus": found.evaluator.model.cluster.gpu_counts,
        "usd_per_h": found.usd_per_h,
        "rate_rps": found.evaluator.demand.rate_rps,
        "targets": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s},
        "attainment": found.value.attainment,
        "headroom": found.value.headroom,
        "search": found.search,
        "designs_evaluated": found.tried,
        "replicas": replicas,
        "shares": [
            {"prefill": a, "decode": b, "share": float(share[i, j])}
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            if share[i, j] > 0
        ],
    }


def _robust(plans: dict[str, PhasePlan], lengths: Trace, rule: Rule, seed: int) -> Choice:
    """The plan that a rule chooses by the requests served within all targets."""
    first = next(iter(plans.values())).evaluator
    rng = stream(seed, "arrivals")
    served = lengths.sample(_CHOICE_REQUESTS, rng).poisson(first.demand.rate_rps, rng)
    cases = {
        name: uncertainty.JudgedPlan(
            _of_one_type(one), uncertainty.served(one.router(), served, first.slo, seed=seed)
        )
        for name, one in plans.items()
    }
    return uncertainty.robust(cases, "within targets [requests/s]", rule, seed=seed)


def _of_one_type(found: PhasePlan) -> Deployment:
    """The deployment, a pipeline over several GPU types named after that of its slowest stage."""
    slowest = {}
    for names, built in zip(found.names, (found.prefill, found.decode), strict=True):
        for name, pipeline in zip(names, built, strict=True):
            stage = pipeline.stages[int(pipeline.stage_seconds([1024.0])[:, 0].argmax())]
            slowest[name] = pipeline.model.machines[stage.machine].gpu
    whole = found.deployment()
    typed = tuple(replace(one, gpu=one.gpu or slowest[one.name]) for one in whole.replicas)
    return replace(whole, replicas=typed)


def _simulated(found: PhasePlan, lengths: Trace, requests: int, seed: int) -> dict[str, Any]:
    """Attainment and cost of the plan in a simulation with Poisson arrivals."""
    rng = stream(seed, "arrivals")
    served = lengths.sample(requests, rng).poisson(found.evaluator.demand.rate_rps, rng)
    seen = metrics(
        simulate(found.deployment(), served, found.router(), seed=seed), found.evaluator.slo
    )
    return {
        "requests": requests,
        "attainment": seen.attainment,
        "usd_per_mtok": seen.usd_per_mtok,
        "output_tps": seen.output_tps,
    }
