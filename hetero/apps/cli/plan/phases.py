"""``hetero plan phases``: prefill and decode on different groups of GPUs (ThunderServe)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.deployment import Deployment
    from hetero.planners.thunderserve.phases import PhasePlan
    from hetero.simulator.uncertainty import Choice, Rule
    from hetero.workload import Trace

_CHOICE_REQUESTS = 400  # that every plan serves with every draw of the step times


def phases(
    cluster: options.Cluster,
    model: options.Model = "LLaMA-1-30B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    rate: Annotated[float, options.above_zero("Request rate to plan for [requests/s].")] = 4.0,
    slo: options.Targets = "",
    slo_scale: options.SloScale = 8.0,
    search: Annotated[
        Any,
        options.one_of(
            "hetero.planners.thunderserve.phases:Search",
            "'patterns' (ours), 'tabu' (the paper's) or 'exact' (small fleets).",
        ),
    ] = "patterns",
    steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of the search; by default its own number.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits per value of KV transfers: 16, 8 or 4.")] = 4,
    overlap: Annotated[
        bool, typer.Option(help="Send KV caches layer by layer while prefill goes on.")
    ] = False,
    max_stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of a group.")] = 4,
    budget: options.Budget = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests of a simulation of the plan; 0 for none.")
    ] = 0,
    choose: Annotated[
        Any,
        options.one_of(
            "hetero.simulator.uncertainty:Rule",
            "Rule among the plans of three searches, seeds SEED to SEED+2: 'nominal' (one "
            "search), or over draws of the error of step times 'best mean', 'best worst case'.",
        ),
    ] = "nominal",
    seed: options.Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that evaluate designs.")] = 1,
    as_json: options.AsJson = False,
    output: Annotated[Path | None, options.output("Write the plan as JSON.")] = None,
    force: options.Force = False,
) -> None:
    """Divide a mixed fleet into groups, give each a phase, and route requests between them.

    The plan says which GPUs serve which phase with which parallelism, and which share of the
    requests each pair of groups takes. Attainment is an estimate for Poisson arrivals; --requests
    simulates the plan with as many of them.
    """
    from hetero import catalog
    from hetero import cluster as clusters
    from hetero.costs.cost import CostSettings
    from hetero.costs.demand import Demand, reference, scaled
    from hetero.costs.transfer import KvTransfer
    from hetero.files import writing
    from hetero.planners.thunderserve.budget import best_part
    from hetero.planners.thunderserve.phases import phases
    from hetero.planners.thunderserve.tabu import TabuSettings
    from hetero.progress import progress
    from hetero.simulator import Slo

    options.new_file(output, force)
    transfer = KvTransfer(bits=bits, overlap=overlap)  # type: ignore[arg-type]
    fleet, llm = clusters.find(cluster), catalog.find_llm(model)
    lengths = options.opened(trace, source, seed, columns)
    demand = Demand.of(lengths, rate)
    target = slo if slo != Slo() else scaled(reference(llm, demand), slo_scale)
    settings = CostSettings(max_stages=max_stages)
    if budget is not None:
        fleet = best_part(fleet, budget, llm, demand, target, settings=settings, transfer=transfer)
    tabu = TabuSettings() if steps is None else TabuSettings(steps=steps)
    count = {"patterns": 2 * tabu.steps, "tabu": tabu.steps, "exact": 1}[search]
    seeds = [seed] if choose == "nominal" else [seed, seed + 1, seed + 2]
    with progress(count * len(seeds), f"{search} search", unit="steps") as advance:
        plans = {
            f"seed {each}": phases(
                fleet,
                llm,
                demand,
                target,
                search=search,
                settings=settings,
                transfer=transfer,
                tabu=tabu,
                seed=each,
                jobs=jobs,
                progress=lambda _: advance(1),
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
    if output is not None:
        with writing(output, force=force) as part:
            part.write_text(options.to_json(record), encoding="utf-8")
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
    options.show(as_json, lambda: record, *filter(None, [chosen]), "\n".join(lines))


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
    from hetero.simulator import uncertainty
    from hetero.streams import stream

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
    from dataclasses import replace

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
    from hetero.simulator import metrics, simulate
    from hetero.streams import stream

    rng = stream(seed, "arrivals")
    served = lengths.sample(requests, rng).poisson(found.evaluator.demand.rate_rps, rng)
    run = simulate(found.deployment(), served, found.router(), seed=seed)
    seen = metrics(run, found.evaluator.slo)
    return {
        "requests": requests,
        "attainment": seen.attainment,
        "usd_per_mtok": seen.usd_per_mtok,
        "output_tps": seen.output_tps,
    }
