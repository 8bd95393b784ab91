"""``hetero simulate``: what a cluster of whole replicas delivers, router by router."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.cluster import Cluster
    from hetero.display import Table
    from hetero.engines import EngineSpec
    from hetero.latency.step import StepModel
    from hetero.plans import Plan
    from hetero.routers import Builtin
    from hetero.routers.pipelines import PipelineRouter
    from hetero.simulator import Metrics
    from hetero.workload import Trace

BATCHING = {"chunked": "chunked", "prefill-first": "prefill first"}
_DEFAULT = ("round-robin", "least-tokens", "power-of-two", "hetero")


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
    columns: options.Columns = "",
    degree: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degree of every machine: 'best' by the estimate of Xiong et "
            "al., one number for all, or one per machine, as in a=4,b=1."
        ),
    ] = "best",
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Spread whole experts over the GPUs of an engine.")
    ] = False,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Ranks of an engine, of --degree GPUs with own attention.")
    ] = 1,
    router: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Router, once or several times; by default {', '.join(_DEFAULT)}, or that of "
            "the plan card."
        ),
    ] = None,
    rate: options.Rate = None,
    arrivals: options.Arrivals = None,
    clients: options.Clients = None,
    think: options.Think = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Serve only the first requests of the trace.")
    ] = None,
    slo: options.Targets = "",
    classes: Annotated[
        str,
        typer.Option(
            help="Shares of the requests in order of priority, as in chat=0.7,batch=0.3: engines "
            "and the dispatcher serve the first class first, and each has a row of its own."
        ),
    ] = "",
    batching: Annotated[
        str | None,
        options.one_of(
            "hetero.apps.cli.simulate:BATCHING",
            "How engines form steps: 'chunked', as those that exist do, or 'prefill-first'.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that an engine decodes together, at most; by default its own limit for "
            "the GPU.",
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a step, at most; by default the engine's own limit for the GPU, or "
            "8,192 where prompts go first.",
        ),
    ] = None,
    schedule_ahead: options.ScheduleAhead = None,
    prefix_cache: options.PrefixCache = None,
    prefix_share: options.PrefixShare = None,
    memory: options.Memory = None,
    sampler: Annotated[
        Any,
        options.one_of(
            "hetero.catalog.engines:Sampler",
            "'flashinfer' where FlashInfer's sampler is installed; by default the release's own.",
        ),
    ] = "",
    kv_tokens: Annotated[
        str,
        typer.Option(
            help="KV cache of a replica [tokens], as its engine prints it, instead of what "
            "--memory leaves: one number for all, or one per machine, as in a=469072,b=93312."
        ),
    ] = "",
    precision: Annotated[
        str,
        typer.Option(
            help="Data type or format of the weights: fp16, fp8, int4, awq ...; by default what "
            "the checkpoint states."
        ),
    ] = "",
    kv_precision: options.KvPrecision = "fp16",
    engine: options.EngineRelease = "vllm",
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

    Every machine is divided into instances of its tensor-parallel degree; step times are those of
    files that were fitted to servers (--steps), else of the table that was measured under --engine
    for GPU, model and degree, else of the calibrated roofline: the answer says which. KV cache is
    paged, of the size that the engine's profiling run leaves for it. The simulation is exact for
    these step times. What the log of an engine says of it goes into --max-batch, --chunk,
    --kv-tokens and the other options of the engine.

    A plan card that `hetero plan ... --json` wrote is simulated as it stands: its replicas, engines
    and router, its targets and, with --rate, the arrivals that it was made for. Without --rate a
    trace's own arrivals are played, or with --clients a closed loop, as most benchmarks of servers
    are.
    """
    from hetero import catalog
    from hetero import cluster as clusters
    from hetero.engines import EngineSpec, replicated
    from hetero.errors import CatalogError, DataError, require
    from hetero.plans import Plan
    from hetero.progress import progress
    from hetero.question import within_context
    from hetero.routers.named import factories
    from hetero.simulator import Slo, metrics
    from hetero.streams import stream

    options.new_file(output, force, *options.TABLES)
    if figures is not None and not figures.is_dir():
        raise DataError("The folder does not exist.", path=figures, resolve="create it first.")
    known = factories()
    asked = dict.fromkeys(router or _DEFAULT)
    chosen: list[Builtin | PipelineRouter] = [
        known[options.choice("--router", name, known)]() for name in asked
    ]
    card = None
    if cluster.endswith(".json"):
        from hetero.apps.cards.card import PlanCard  # with all that answers

        card = PlanCard.load(cluster)
    if card is not None and rate is not None and arrivals is None:
        arrivals = card.question.arrivals
    requested = options.opened(trace, source, seed, columns)
    requested, came = options.arrivals(requested, requests, rate, seed, arrivals, clients, think)
    if prefix_share is not None:
        requested = requested.with_prefix(prefix_share)
    names: dict[int, str] = {}  # of the classes of requests
    if classes:
        hint = "give each class its share of the requests, as in chat=0.7,batch=0.3."
        shares = options.pairs("--classes", classes.split(","), float, hint)
        requested = requested.with_priorities([*shares.values()], stream(seed, "classes"))
        names = dict(enumerate(shares))
    elif requested.priorities is not None:
        names = {k: f"priority {k}" for k in sorted(set(requested.priorities.tolist()))}
    setting: dict[str, Any]
    notes: list[str] = []
    if card is not None:
        require(
            (degree, batching, engine, kv_tokens, precision, kv_precision)
            == ("best", None, ("vllm", ""), "", "", "fp16")
            and not (steps or max_batch or chunk or enable_expert_parallel)
            and (memory, schedule_ahead, prefix_cache, sampler) == (None, None, None, ""),
            "A plan card says itself how its machines are divided and what its engines do.",
            resolve="leave out --degree, --steps, and the options of engines and their memory.",
        )
        served = card.plan
        require(
            not router or served.deployment is not None,
            "This plan places layers over a network, with a router of its own.",
            resolve="leave out --router.",
        )
        if not router:
            chosen = [served.router]
        if slo == Slo():
            slo = Slo(**{f"{name}_s": value for name, value in card.question.targets_s.items()})
        setting = {"cluster": card.question.cluster, "model": card.question.model}
        with suppress(CatalogError):  # a model of one's own is not read again
            requested, too_long = within_context(requested, catalog.find_llm(card.question.model))
            notes += too_long
        setting["planner"] = card.planner
        about = f"plan of {card.planner}"
    else:
        machines, llm = clusters.find(cluster), catalog.find_llm(model)
        requested, too_long = within_context(requested, llm)
        precision = llm.loaded_as(precision)
        own = _own(steps or [], machines, degree)
        serving = catalog.serving_engine(engine[0])
        ranks = data_parallel_size
        require(
            ranks == 1 or (enable_expert_parallel and degree != "best"),
            f"{ranks} ranks spread no experts without --enable-expert-parallel and --degree.",
            resolve="add both, or leave out --data-parallel-size.",
        )
        cannot = [
            name for name, g in machines.gpu_types.items() if not serving.serves(g, precision)
        ]
        require(
            precision == "fp16" or not cannot,
            f"{', '.join(cannot)} of {machines.name}: no weights in {precision} under "
            f"{serving.title}.",
            resolve="choose another precision or engine.",
        )

        spec = EngineSpec(
            name=engine[0],
            release=engine[1],
            precision=precision,
            kv_precision=kv_precision,
            memory_fraction=memory,
            sampler=sampler,
            batching=batching and BATCHING[batching],  # type: ignore[arg-type]
            max_batch=max_batch,
            max_step_tokens=chunk,
            schedule_ahead=schedule_ahead,
            prefix_cache=prefix_cache,
            expert_ranks=ranks * enable_expert_parallel,
            own=tuple(own.items()),
        )

        degrees, notes = _degrees(machines, llm, degree, requested, seed, spec)
        notes += too_long
        deployment = replicated(machines, llm, degrees, spec, trace=requested)
        if prefix_cache and requested.prefix_ids is None:
            notes.append("Nothing is cached: the trace names no blocks that prompts share.")
        given = _by_machine("--kv-tokens", kv_tokens, machines) if kv_tokens else {}
        replicas = (
            replace(one, kv_tokens=given.get(one.name.partition(" t=")[0], one.kv_tokens))
            for one in deployment.replicas
        )
        deployment = replace(deployment, replicas=tuple(replicas))
        for name, count in degrees.items():
            gpu = machines.machine(name).linked_gpu
            here = spec.on(gpu, llm, count, requested)
            limits = spec.limits(gpu)
            ahead = ", the next step prepared ahead" if limits.schedule_ahead else ""
            if limits.prefix_cache and requested.prefix_ids is not None:
                ahead += ", prompts that share blocks found in the cache"
            sample = next(r for r in deployment.replicas if r.name.startswith(f"{name} t="))
            held = sample.kv_tokens
            share, rest_gib = here.room
            weights = here.budget.weight_bytes / here.budget.gpus
            left = (
                f"{share * gpu.mem_gib:.4g} GiB of each less {weights / 2**30:.4g} GiB of weights "
                f"and {rest_gib:.3g} GiB held"
            )
            longest = int((requested.input_tokens + requested.output_tokens).max())
            if (error := sample.kv_error_tokens) and held < longest + 3.0 * error:
                sure = 0.5 + 0.5 * math.erf((held - longest) / error / math.sqrt(2.0))
                left += f", give or take {error:,.0f}: the longest request fits in {sure:.0%}"
            left = "as given" if name in given else left
            if not llm.plain:
                most = here.budget.max_requests(longest, limits.max_step_tokens)
                left += f"; {most:,.4g} requests of {longest:,} tokens as engines count"
            said = [
                f"Step times of {gpu.name} x{count * ranks}: {here.label}.",
                f"Engines on {gpu.name}: {'@'.join(filter(None, engine))}, at most "
                f"{limits.max_batch:,} requests and {limits.max_step_tokens:,} tokens a step"
                f"{ahead}.",
                f"KV cache on {gpu.name} x{count * ranks}: {held:,} tokens, {left}.",
            ]
            notes += [one for one in said if one not in notes]
        if (form := llm.format(precision)).name not in ("fp16", "bf16"):
            whose = ", as the checkpoint states" if form is llm.stated else ""
            notes.append(f"Weights in {form.name}{whose}, loaded as {precision}.")
        served = Plan("given degrees", (), deployment, chosen[0], chosen[0].name, None)
        setting = {"cluster": machines.name, "model": llm.name}
        about = steps_of = deployment.replicas[0].engine.batching
    found, frames, runs = [], [], []
    sample_s = None
    if figures is not None:
        from hetero.plots import timelines

        span_s = float(requested.arrival_s[-1] - requested.arrival_s[0])
        sample_s = max(span_s / timelines.POINTS, 1.0)
    for one in chosen:
        with progress(len(requested), one.name) as advance:
            run = replace(served, router=one).simulate(
                requested, seed, sample_s=sample_s, progress=advance
            )
        if figures is not None:
            runs.append((one.name, run))
        found.append((one.name, metrics(run, slo)))
        found += [
            (f"{one.name}, {label}", metrics(run, slo, priority=k)) for k, label in names.items()
        ]
        if output is not None:
            frame = run.frame()
            frame.insert(0, "router", one.name)
            frames.append(frame)
    if output is not None:
        _write(output, frames, force)
    if figures is not None:
        timelines.draw(figures, runs, f"{requested.source}, {about}, seed {seed}")
    title = f"{setting['model']} on {setting['cluster']}: {_layout(served)}"
    about = f"{len(requested):,} requests of {requested.source}, {came}; {about}, seed {seed}"
    setting |= {"trace": requested.source, "requests": len(requested), "arrivals": came}
    if card is None:
        setting |= {"degrees": degrees, "batching": steps_of}
    rows = [{"router": name, **options.plain(one)} for name, one in found]
    written = f"\n{len(requested) * len(found):,} rows written to {output}." if output else ""
    options.show(
        as_json,
        lambda: setting | {"seed": seed, "notes": notes, "routers": rows},
        f"{_table(title, found, [about, *notes])}{written}",
    )


def _layout(plan: Plan) -> str:
    """Replicas in words, alike ones counted."""
    if plan.deployment is None:
        return f"layers over {len(plan.groups)} nodes"
    places = {g.name: " + ".join(f"{n} x {gpu}" for gpu, n in g.gpus.items()) for g in plan.groups}
    alike: Counter[tuple[str, str]] = Counter()
    for one in plan.deployment.replicas:
        own = places.get(one.name) or f"{one.gpus} x {one.gpu.name if one.gpu else 'GPU'}"
        alike["" if one.role == "both" else f" for {one.role}", own] += 1
    return ", ".join(
        f"{n} replica{'s' * (n > 1)}{role} on {own}" for (role, own), n in alike.items()
    )


def _degrees(
    machines: Cluster,
    llm: Any,
    text: str,
    trace: Trace,
    seed: int,
    engine: EngineSpec,
) -> tuple[dict[str, int], list[str]]:
    """Degree of each machine, and what a reader should know of the choice."""
    from hetero.planners.xiong import plan as xiong

    if text == "best":
        found = xiong.search(machines, llm, trace, engine, seed=seed)
        degrees = xiong.degrees(machines, found)
        why = f"{llm.name} does not fit"
    else:
        degrees = _by_machine("--degree", text, machines)
        why = "--degree does not name it"
    idle = [machine.name for machine in machines.machines if machine.name not in degrees]
    return degrees, [f"Left out, since {why}: {', '.join(idle)}."] if idle else []


def _by_machine(option: str, text: str, machines: Cluster) -> dict[str, int]:
    """Numbers of an option that takes one for all machines, or one for each that it names."""
    if text.isdecimal():
        return {machine.name: int(text) for machine in machines.machines}
    hint = "write a number such as 2, or one per machine such as a=4,b=1."
    given = options.pairs(option, text.split(","), options.natural, hint)
    return {machines.machine(name).name: value for name, value in given.items()}


def _own(texts: list[str], machines: Cluster, degree: str) -> dict[str, StepModel]:
    """Step models that files bring, by GPU type."""
    from hetero import catalog
    from hetero.errors import CatalogError, require
    from hetero.latency import storage

    require(
        not texts or degree != "best",
        "--steps brings times of the one tensor-parallel degree that was measured.",
        resolve="say which with --degree.",
    )
    found: dict[str, StepModel] = {}
    hint = "write a GPU and a file, as L40S=a.json."
    for given, file in options.pairs("--steps", texts, options.word, hint).items():
        name = given
        if name not in machines.gpu_types:
            with suppress(CatalogError):
                name = catalog.gpu(name).name
        require(
            name in machines.gpu_types,
            f"--steps: {machines.name} has no GPU '{given}'.",
            resolve=f"use {' or '.join(machines.gpu_types)}.",
        )
        own = storage.load(file)
        found[name] = replace(own, source=f"{file} ({own.provenance})")
    return found


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

    def of(label: str, unit: str, value: Callable[[Metrics], object], digits: int = 4) -> Column:
        return Column(label, unit, digits, of=lambda item: value(item[1]))

    columns = [
        Column("router", of=lambda item: item[0]),
        of("finished", "", lambda one: one.finished),
        of("rejected", "", lambda one: one.rejected),
        of("throughput", "tokens/s", lambda one: one.total_tps),
        of("throughput", "req/s", lambda one: one.requests_per_s, 3),
        of("TTFT P50", "ms", lambda one: 1e3 * one.percentiles["ttft_s"][50]),
        of("TTFT P95", "ms", lambda one: 1e3 * one.percentiles["ttft_s"][95]),
        of("TPOT P95", "ms", lambda one: 1e3 * one.percentiles["tpot_s"][95]),
        of("E2E P95", "s", lambda one: one.percentiles["e2e_s"][95]),
        of("utilisation", "%", lambda one: 100 * one.utilisation, 3),
    ]
    if any(one.attainment for _, one in found):
        columns.append(of("SLO met", "%", lambda one: 100 * one.attainment["joint"], 3))
        columns.append(of("goodput", "req/s", lambda one: one.goodput_rps, 3))
    if any(one.usd_per_mtok is not None for _, one in found):
        columns.append(of("cost", "$/10^6 tokens", lambda one: one.usd_per_mtok, 3))
    return Table.of(title, columns, found, *notes)
