"""``hetero simulate``: what a cluster of whole replicas delivers, router by router."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.catalog import Gpu, Llm
    from hetero.cluster import Cluster
    from hetero.display import Table
    from hetero.latency.step import StepModel
    from hetero.planners.replicated import StepSource
    from hetero.plans import Plan
    from hetero.routers import Builtin
    from hetero.routers.pipelines import PipelineRouter
    from hetero.simulator import Metrics
    from hetero.workload import Trace

_ENGINES = {"chunked": "chunked", "prefill-first": "prefill first"}
_DEFAULT = ("round-robin", "least-tokens", "power-of-two", "hetero")
_MAX_BATCH = 256
_SAMPLE = 200  # requests of the trace that the search for the best degree estimates with


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("simulate")(simulate)


def simulate(
    cluster: Annotated[
        str,
        typer.Argument(
            help="Cluster file (YAML), the name of a shipped cluster, or a plan card (.json)."
        ),
    ],
    model: options.Model = "Llama-3-8B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    degree: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degree of every machine: 'best' by the estimate of Xiong et "
            "al., one number for all, or one per machine, as in a=4,b=1."
        ),
    ] = "best",
    router: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Router, once or several times; by default {', '.join(_DEFAULT)}, or that of "
            "the plan card."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean request rate [requests/s]; 'inf' sends all at once."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Serve only the first requests of the trace.")
    ] = None,
    slo: options.Targets = "",
    engine: Annotated[
        str, typer.Option(help="How engines form steps: 'chunked' or 'prefill-first'.")
    ] = "chunked",
    max_batch: Annotated[
        int, typer.Option(min=1, help="Requests that an engine decodes together, at most.")
    ] = _MAX_BATCH,
    steps: Annotated[
        list[str] | None,
        typer.Option(
            help="Step times of a GPU type from a file that 'hetero profile --fit' or 'hetero fit' "
            "wrote, as L40S=server.json; repeat per type."
        ),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    output: Annotated[
        Path | None,
        options.output("One row per request and router (.csv, .parquet)."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Folder for figures (.png, .svg): queue, KV use and time in steps of every "
            "replica over time, times to first token."
        ),
    ] = None,
    force: options.Force = False,
) -> None:
    """Serve a trace with whole replicas of a model and compare routers.

    Every machine is divided into instances of its tensor-parallel degree; step times are those
    of the calibrated roofline, or of files that were fitted to servers (--steps), KV cache is
    paged. The simulation is exact for these step times.

    A plan card that `hetero plan ... --json` wrote is simulated as it stands: its replicas, engines
    and router, its targets and, without --rate, a trace's own arrivals.
    """
    from hetero import catalog, workload
    from hetero import cluster as clusters
    from hetero.apps.cards.card import PlanCard
    from hetero.deployment import Engine
    from hetero.errors import DataError, ParameterError
    from hetero.files import check_new
    from hetero.planners.replicated import replicated
    from hetero.plans import Plan
    from hetero.progress import progress
    from hetero.simulator import Slo, metrics

    if output is not None:
        options.ending(output, options.TABLES)
        check_new(output, force=force)
    if figures is not None and not figures.is_dir():
        raise DataError("The folder does not exist.", path=figures, resolve="create it first.")
    batching = _ENGINES[options.choice("--engine", engine, _ENGINES)]
    chosen: list[Builtin | PipelineRouter] = [*_routers(router or list(_DEFAULT))]
    wanted = options.targets(slo)
    requested = workload.open_trace(
        trace, source=options.choice("--source", source, workload.TraceSource), seed=seed
    )
    requested = options.arrivals(requested, requests, rate, seed)
    of_plan = cluster.endswith(".json")
    setting: dict[str, Any]
    notes: list[str] = []
    if of_plan:
        if degree != "best" or steps or batching != "chunked" or max_batch != _MAX_BATCH:
            raise ParameterError(
                "A plan card says itself how its machines are divided and what its engines do.",
                resolve="leave out --degree, --steps, --engine and --max-batch.",
            )
        card = PlanCard.load(cluster)
        served = card.plan
        if not router:
            chosen = [served.router]
        elif served.deployment is None:
            raise ParameterError(
                "This plan places layers over a network, with a router of its own.",
                resolve="leave out --router.",
            )
        if wanted == Slo():
            wanted = Slo(**{f"{name}_s": value for name, value in card.question.targets_s.items()})
        setting = {"cluster": card.question.cluster, "model": card.question.model}
        setting["planner"] = card.planner
        about = f"plan of {card.planner}"
    else:
        machines, llm = clusters.find(cluster), catalog.find_llm(model)
        measured, fitted = _steps(steps or [], machines, degree)
        degrees, notes = _degrees(machines, llm, degree, requested, seed)
        notes += fitted
        made = Engine(
            batching=batching,  # type: ignore[arg-type]
            admission="paged",
            max_batch=max_batch,
            max_step_tokens=2048 if batching == "chunked" else 8192,
        )
        deployment = replicated(machines, llm, degrees, steps=measured, engine=made)
        served = Plan("given degrees", (), deployment, chosen[0], chosen[0].name, None)
        setting = {"cluster": machines.name, "model": llm.name}
        about = batching
    found, frames, runs = [], [], []
    sample_s = None
    if figures is not None:
        from hetero.apps.cli import timelines

        span_s = float(requested.arrival_s[-1] - requested.arrival_s[0])
        sample_s = max(span_s / timelines.POINTS, 1.0)
    for one in chosen:
        with progress(len(requested), one.name) as advance:
            run = replace(served, router=one).simulate(
                requested, seed, sample_s=sample_s, progress=advance
            )
        if figures is not None:
            runs.append((one.name, run))
        found.append((one.name, metrics(run, wanted)))
        if output is not None:
            frame = run.frame()
            frame.insert(0, "router", one.name)
            frames.append(frame)
    if output is not None:
        _write(output, frames, force)
    if figures is not None:
        timelines.draw(figures, runs, f"{requested.source}, {about}, seed {seed}")
    if as_json:
        setting |= {"trace": requested.source, "requests": len(requested)}
        if not of_plan:
            setting |= {"degrees": degrees, "engine": batching}
        setting |= {"seed": seed, "notes": notes}
        rows = [{"router": name, **options.plain(one)} for name, one in found]
        print(options.to_json(setting | {"routers": rows}), end="")
        return
    title = f"{setting['model']} on {setting['cluster']}: {_layout(served)}"
    about = f"{len(requested):,} requests of {requested.source}; {about}, seed {seed}"
    print(_table(title, found, [about, *notes]))
    if output is not None:
        print(f"{len(requested) * len(found):,} rows written to {output}.")


def _layout(plan: Plan) -> str:
    """Replicas in words, alike ones counted."""
    if plan.deployment is None:
        return f"layers over {len(plan.groups)} nodes"
    alike = Counter(
        (
            one.gpus,
            one.gpu.name if one.gpu else "",
            "" if one.role == "both" else f" for {one.role}",
        )
        for one in plan.deployment.replicas
    )
    return ", ".join(
        f"{n} replica{'s' * (n > 1)}{role} on {t} x {gpu}" for (t, gpu, role), n in alike.items()
    )


def _routers(names: list[str]) -> list[Builtin]:
    from hetero.routers.named import factories

    known = factories()
    return [known[options.choice("--router", name, known)]() for name in dict.fromkeys(names)]


def _degrees(
    machines: Cluster, llm: Any, text: str, trace: Trace, seed: int
) -> tuple[dict[str, int], list[str]]:
    """Degree of each machine, and what a reader should know of the choice."""
    from hetero.errors import ParameterError
    from hetero.planners.xiong import tensor_parallel
    from hetero.streams import stream

    names = [machine.name for machine in machines.machines]
    if text == "best":
        sample = trace.sample(min(_SAMPLE, len(trace)), stream(seed, "degrees"))
        best = tensor_parallel.search(machines, llm, sample, require_longest=False).best
        degrees = {one.machine.name: one.tensor_parallel for one in best}
        idle = [name for name in names if name not in degrees]
        left = [f"Left out, since {llm.name} does not fit: {', '.join(idle)}."] if idle else []
        return degrees, left
    if text.isdecimal():
        return {name: int(text) for name in names}, []
    degrees = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not value.isdecimal():
            raise ParameterError(
                f"--degree cannot read '{part.strip()}'.",
                resolve="write 'best', a number such as 2, or one per machine such as a=4,b=1.",
            )
        degrees[machines.machine(name).name] = int(value)
    idle = [name for name in names if name not in degrees]
    return degrees, [f"Left out, since --degree does not name it: {', '.join(idle)}."] * bool(idle)


def _steps(texts: list[str], machines: Cluster, degree: str) -> tuple[StepSource | None, list[str]]:
    """Step times that files bring for some GPU types, the roofline for the others, and a note."""
    from hetero import catalog
    from hetero.errors import CatalogError, ParameterError
    from hetero.latency import storage
    from hetero.planners.replicated import roofline_steps

    if not texts:
        return None, []
    if degree == "best":
        raise ParameterError(
            "--steps brings times of the one tensor-parallel degree that was measured.",
            resolve="say which with --degree.",
        )
    found: dict[str, StepModel] = {}
    notes = []
    for text in texts:
        name, _, file = text.partition("=")
        if not file:
            raise ParameterError(
                f"--steps cannot read '{text}'.", resolve="write a GPU and a file, as L40S=a.json."
            )
        if name not in machines.gpu_types:
            try:
                name = catalog.gpu(name).name
            except CatalogError:
                name = ""
        if name not in machines.gpu_types:
            raise ParameterError(
                f"--steps: {machines.name} has no GPU '{text.partition('=')[0]}'.",
                resolve=f"use {' or '.join(machines.gpu_types)}.",
            )
        found[name] = storage.load(file)
        notes.append(f"Step times of {name}: {file} ({found[name].provenance}).")
    other = roofline_steps()

    def steps(gpu: Gpu, llm: Llm, tensor_parallel: int) -> StepModel:
        return found[gpu.name] if gpu.name in found else other(gpu, llm, tensor_parallel)

    return steps, notes


def _write(path: Path, frames: list[Any], force: bool) -> None:
    import pandas as pd

    from hetero.files import writing

    frame = pd.concat(frames, ignore_index=True)
    with writing(path, force=force) as part:
        if path.suffix == ".parquet":
            frame.to_parquet(part, index=False)
        else:
            frame.to_csv(part, index=False, lineterminator="\n")


def _table(title: str, found: list[tuple[str, Metrics]], notes: list[str]) -> Table:
    from hetero.display import Column, Table

    with_slo = any(one.attainment for _, one in found)
    priced = any(one.usd_per_mtok is not None for _, one in found)
    columns = [
        Column("router"),
        Column("finished"),
        Column("rejected"),
        Column("throughput", "tokens/s"),
        Column("throughput", "req/s", 3),
        Column("TTFT P50", "ms"),
        Column("TTFT P95", "ms"),
        Column("TPOT P95", "ms"),
        Column("E2E P95", "s"),
        Column("utilisation", "%", 3),
    ]
    columns += [Column("SLO met", "%", 3), Column("goodput", "req/s", 3)] if with_slo else []
    columns += [Column("cost", "$/10^6 tokens", 3)] if priced else []
    rows = []
    for name, one in found:
        at = one.percentiles
        row: list[object] = [name, one.finished, one.rejected, one.total_tps, one.requests_per_s]
        row += [1e3 * at["ttft_s"][50], 1e3 * at["ttft_s"][95], 1e3 * at["tpot_s"][95]]
        row += [at["e2e_s"][95], 100 * one.utilisation]
        row += [100 * one.attainment["joint"], one.goodput_rps] if with_slo else []
        row += [one.usd_per_mtok] if priced else []
        rows.append(tuple(row))
    return Table(title, tuple(columns), tuple(rows), tuple(notes))
