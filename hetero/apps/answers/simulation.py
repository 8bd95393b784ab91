"""What a cluster of whole replicas, or a plan card, delivers under each router."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pandas as pd

from hetero import catalog
from hetero.apps.ask import BATCHING, ROUTERS, SIMULATE, Ask, asks, choice, natural, pairs, word
from hetero.apps.cards.card import PlanCard
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.cluster.found import lists_nodes
from hetero.comparison import KEYS, Comparison, compare, measured, resampled
from hetero.deployment import Replica
from hetero.display import Column, Shown, Table
from hetero.encoding import finite
from hetero.engines import EngineSpec, Instance, replicated
from hetero.errors import CatalogError, DataError, HeteroError, ParameterError, require
from hetero.files import writing
from hetero.intervals import interval
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.planners.xiong import plan as xiong
from hetero.plans import Plan, footing
from hetero.question import within_context
from hetero.routers import RoundRobin, router_of
from hetero.routers.base import PREDICTORS
from hetero.simulator import Metrics, Run, Slo, metrics
from hetero.streams import stream
from hetero.workload import Trace
from hetero.workload.statistics import rate_rps

_OF_ENGINES = (
    *("degree", "batching", "engine", "kv_tokens", "precision", "kv_precision", "steps", "memory"),
    *("max_batch", "chunk", "enable_expert_parallel", "schedule_ahead", "prefix_cache", "sampler"),
    "scheduler_recv_interval",
)


@dataclass(frozen=True, eq=False, repr=False)
class Simulated(Shown):
    """A trace as a cluster or a plan serves it, router by router.

    Attributes
    ----------
    title
        What serves.
    comparison
        A row per router and seed, with its ``run`` and, in ``found``, the metrics of all requests
        and of each class.
    setting
        What was asked, as JSON values.
    about, notes
        The requests and the seed in a line, and what a reader should know.
    """

    title: str
    comparison: Comparison
    setting: dict[str, Any]
    about: str
    notes: tuple[str, ...]

    @property
    def runs(self) -> tuple[tuple[str, Run], ...]:
        """The run of each router with the first seed."""
        rows = self.comparison.frame.drop_duplicates("router")
        return tuple(zip(rows["router"], rows["run"], strict=True))

    @property
    def found(self) -> list[tuple[str, Metrics]]:
        """Metrics with the first seed by router, and class of requests."""
        first = self.comparison.frame.drop_duplicates("router")["found"]
        return [pair for pairs_ in first for pair in pairs_]

    def frame(self) -> pd.DataFrame:
        """One row per request and router, with the first seed."""
        frames = {name: run.frame() for name, run in self.runs}
        return pd.concat(frames, names=["router"]).reset_index("router").reset_index(drop=True)

    def save(self, path: Path, *, force: bool = False) -> int:
        """Write the rows of :meth:`frame` (``.csv``, ``.parquet``), and say how many."""
        frame = self.frame()
        with writing(path, force=force) as part:
            if path.suffix == ".parquet":
                frame.to_parquet(part, index=False)
            else:
                frame.to_csv(part, index=False, lineterminator="\n")
        return len(frame)

    @property
    def _seeds(self) -> int:
        return int(self.comparison.frame["seed"].nunique())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = [{"router": name, **one.to_dict()} for name, one in self.found]
        told = self.setting | {"notes": [self.comparison.note, *self.notes], "routers": rows}
        if self._seeds > 1:
            kinds = self.comparison.frame.columns.drop([*KEYS, "found", "run"])
            told["over_seeds"] = [
                finite({"metric": kind, **row})
                for kind in kinds
                for row in self.comparison.summary(kind).to_dict("records")
            ]
        return told

    def table(self) -> Table:
        """One row per router, and per class of requests; of several seeds means, 95 % intervals."""
        seen: dict[str, list[Metrics]] = {}
        for label, one in (pair for row in self.comparison.frame["found"] for pair in row):
            seen.setdefault(label, []).append(one)

        def of(
            label: str, unit: str, value: Callable[[Metrics], float | None], digits: int = 4
        ) -> Column:
            def cell(item: tuple[str, list[Metrics]]) -> float | str | None:
                values = [value(one) for one in item[1]]
                if len(values) == 1 or None in values:
                    return values[0]
                low, high = interval(cast("list[float]", values))
                half = float(f"{(high - low) / 2:.2g}")
                return f"{(low + high) / 2:,.{digits}g}" + f" ± {half:,g}" * (half > 0)

            return Column(label, unit, digits, of=cell)

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
            of("time in steps", "%", lambda one: 100 * one.utilisation, 3),
        ]
        if any(one[0].attainment for one in seen.values()):
            columns.append(of("SLO met", "%", lambda one: 100 * one.attainment["joint"], 3))
            columns.append(of("within targets", "req/s", lambda one: one.within_targets_rps, 3))
        if any(one[0].usd_per_mtok is not None for one in seen.values()):
            columns.append(of("cost", "$/10^6 tokens", lambda one: one.usd_per_mtok, 3))
        found = self.comparison.note if self._seeds == 1 else self.comparison.sentence
        return Table.of(self.title, columns, seen.items(), self.about, found, *self.notes)


@asks(SIMULATE, Ask)
def simulation(ask: Ask) -> Simulated:
    """Serve a trace with whole replicas of a model, or with a plan card, and compare routers.

    Every machine is divided into instances of its tensor-parallel degree; see
    :class:`hetero.engines.EngineSpec` for their step times and KV cache. A plan card is simulated
    as it stands: with its replicas, engines and router, its targets and, at a rate, the arrivals
    that it was made for. The grid is that of :func:`hetero.compare`.

    Examples
    --------
    >>> found = simulation("xiong-8xv100", degree="2", requests=100, router=["round-robin"])
    >>> found.setting["degrees"], found.found[0][1].finished
    ({'v100': 2}, 100)
    """
    if ask.figures is not None and not Path(ask.figures).is_dir():
        raise DataError("The folder does not exist.", path=ask.figures, resolve="create it first.")
    asked = [ask.router] if isinstance(ask.router, str) else [*(ask.router or ())]
    routers = [_router(one) for one in dict.fromkeys(asked or ROUTERS)]
    card = _card(ask.cluster)
    if card is not None and ask.rate is not None and ask.arrivals is None:
        ask = replace(ask, arrivals=card.question.arrivals)
    opened, shares = ask.opened(), _classes(ask.classes)
    llm = _model(ask, card)
    said: dict[str, list[str]] = {}  # of how requests come, by what is left out

    @cache
    def requests(_: float, seed: int) -> Trace:
        trace = resampled(opened, seed) if ask.seeds > 1 else opened
        trace, came = ask.came(trace, seed)
        if ask.prefix_share is not None:
            trace = trace.with_prefix(ask.prefix_share)
        if shares:
            trace = trace.with_priorities([*shares.values()], stream(seed, "classes"))
        trace, too_long = within_context(trace, llm) if llm else (trace, ())
        said.setdefault(came, [*too_long])
        return trace

    first = requests(0.0, ask.seed)
    ((came, too_long),) = said.items()
    names = dict(enumerate(shares))
    if not shares and first.priorities is not None:
        names = {k: f"priority {k}" for k in sorted(set(first.priorities.tolist()))}
    served, title, setting, own, notes = (
        _divided(ask, first, too_long) if card is None else _planned(ask, card, too_long)
    )
    slo = ask.targets
    if card is not None and slo == Slo():
        slo = Slo(**{f"{name}_s": value for name, value in card.question.targets_s.items()})
    predictor = PREDICTORS[choice("--predictor", ask.predictor, PREDICTORS)]
    seeds = range(ask.seed, ask.seed + ask.seeds)
    playing: dict[str, Any] = {"progress": ask.progress}
    if ask.figures is not None:
        from hetero.plots import answers as pictures

        playing["sample_s"] = max(
            float(first.arrival_s[-1] - first.arrival_s[0]) / pictures.POINTS, 1.0
        )
    found = compare(
        served,
        None if card is not None and not asked else routers,
        requests,
        ask.rate or rate_rps(ask.came(opened, ask.seed)[0].arrival_s),
        seeds,
        predictor=predictor,
        measure=partial(_seen, slo, names, ask.seed),
        playing=playing,
    )
    about = own["batching"] if card is None else f"plan of {card.planner}"
    order = "drawn anew in blocks for each seed" if ask.seeds > 1 else "in their order"
    came = came.replace("in their order", order)
    told = came if ", requests " in came else f"{came}, requests {order}"
    setting |= {"trace": first.source, "requests": len(first), "arrivals": came} | own
    every = getattr(getattr(served, "deployment", served), "replicas", ())
    seed = f"seed {ask.seed}" if ask.seeds == 1 else f"means of {ask.seeds} seeds ± 95 %"
    made = Simulated(
        f"{setting['model']} on {setting['cluster']}: {title}",
        replace(found, note=footing(every, told, seeds, predictor)),
        setting | {"seed": ask.seed},
        f"{len(first):,} requests of {first.source}, {came}; {about}, {seed}",
        tuple(notes),
    )
    if ask.figures is not None:
        pictures.timelines(
            Path(ask.figures), made.runs, f"{first.source}, {about}, seed {ask.seed}"
        )
    return made


def _seen(slo: Slo, names: Mapping[int, str], first: int, run: Run) -> dict[str, Any]:
    """What is kept of a run: of the first seed all."""
    found = [(run.router, metrics(run, slo))]
    found += [
        (f"{run.router}, {label}", metrics(run, slo, priority=k)) for k, label in names.items()
    ]
    return {**measured(run, slo), "found": found, "run": run if run.seed == first else None}


def _router(given: Any) -> Any:
    """A router by its name, of a module by its path (``module:Class``), or as it is."""
    if not isinstance(given, str) or ":" not in given:
        return router_of(given)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return router_of(resolve_name(given))
    except HeteroError:
        raise
    except Exception as error:
        raise ParameterError(
            f"--router {given} cannot be made ({type(error).__name__}: {error}).",
            resolve="name what a module of this folder, or an installed one, calls a router, as in "
            "mine:Router; where it needs arguments, a function that gives them.",
        ) from None
    finally:
        del sys.path[0]


def _card(cluster: Any) -> PlanCard | None:
    if isinstance(cluster, PlanCard):
        return cluster
    written = isinstance(cluster, str | Path) and str(cluster).endswith(".json")
    return PlanCard.load(cluster) if written and not lists_nodes(cluster) else None


def _classes(text: str) -> dict[str, float]:
    """Share of the requests by class."""
    hint = "give each class its share of the requests, as in chat=0.7,batch=0.3."
    return pairs("--classes", text.split(",") if text else (), float, hint)


def _model(ask: Ask, card: PlanCard | None) -> Llm | None:
    """The model; None of a card that was made for one's own, which is not read again."""
    if card is None:
        return ask.llm
    with suppress(CatalogError, DataError):
        return catalog.find_llm(card.question.checkpoint or card.question.model)
    return None


def _planned(ask: Ask, card: PlanCard, notes: list[str]) -> tuple[Any, ...]:
    """What a card serves with: plan, layout, and what was asked of it."""
    plain, served = Ask(), card.plan
    require(
        all(getattr(ask, name) == getattr(plain, name) for name in _OF_ENGINES),
        "A plan card says itself how its machines are divided and what its engines do.",
        resolve="leave out --degree, --steps, and the options of engines and their memory.",
    )
    require(
        ask.model in (plain.model, card.question.model),
        f"The plan card is of {card.question.model}, not of {ask.model}.",
        resolve="leave out --model, or plan for that one.",
    )
    require(
        not ask.router or served.deployment is not None,
        "This plan places layers over a network, with a router of its own.",
        resolve="leave out --router.",
    )
    setting = {"cluster": card.question.cluster, "model": card.question.model}
    return served, _layout(served), setting | {"planner": card.planner}, {}, notes


def _divided(ask: Ask, trace: Trace, too_long: list[str]) -> tuple[Any, ...]:
    """The replicas of a cluster that is divided as asked, and what a reader should know."""
    machines, llm, degree, ranks = ask.fleet, ask.llm, ask.degree, ask.data_parallel_size
    name, release = ask.engine_release
    own, serving = _own(ask.steps or (), machines, degree), catalog.serving_engine(name)
    require(
        ranks == 1 or (ask.enable_expert_parallel and degree != "best"),
        f"{ranks} ranks spread no experts without --enable-expert-parallel and --degree.",
        resolve="add both, or leave out --data-parallel-size.",
    )
    precision = llm.loaded_as(ask.precision)
    cannot = [gpu for gpu, g in machines.gpu_types.items() if not serving.serves(g, precision)]
    require(
        precision == "fp16" or not cannot,
        f"{', '.join(cannot)} of {machines.name}: no weights in {precision} under {serving.title}.",
        resolve="choose another precision or engine.",
    )
    batching: Any = ask.batching and BATCHING[choice("--batching", ask.batching, BATCHING)]
    spec = EngineSpec(
        name=name,
        release=release,
        precision=precision,
        kv_precision=ask.kv_precision,
        sampler=ask.sampler,  # type: ignore[arg-type]
        memory_fraction=ask.memory,
        batching=batching,
        max_batch=ask.max_batch,
        max_step_tokens=ask.chunk,
        schedule_ahead=ask.schedule_ahead,
        prefix_cache=ask.prefix_cache,
        poll_steps=ask.scheduler_recv_interval,
        expert_ranks=ranks * ask.enable_expert_parallel,
        own=tuple(own.items()),
    )
    if degree == "best":
        found = xiong.search(machines, llm, trace, spec, seed=ask.seed)
        degrees, why = xiong.degrees(machines, found), f"{llm.name} does not fit"
    else:
        degrees, why = _by_machine("--degree", degree, machines), "--degree does not name it"
    idle = [machine.name for machine in machines.machines if machine.name not in degrees]
    notes = [f"Left out, since {why}: {', '.join(idle)}."] if idle else []
    notes += too_long
    deployment = replicated(machines, llm, degrees, spec, trace=trace)
    if ask.prefix_cache and trace.prefix_ids is None:
        notes.append("Nothing is cached: the trace names no blocks that prompts share.")
    given = _by_machine("--kv-tokens", ask.kv_tokens, machines) if ask.kv_tokens else {}
    deployment = replace(
        deployment,
        replicas=tuple(
            replace(one, kv_tokens=given.get(one.name.partition(" t=")[0], one.kv_tokens))
            for one in deployment.replicas
        ),
    )
    for at, count in degrees.items():
        gpu = machines.machine(at).linked_gpu
        here, limits = spec.on(gpu, llm, count, trace), spec.limits(gpu)
        ahead = ", the next step prepared ahead" if limits.schedule_ahead else ""
        if limits.prefix_cache and trace.prefix_ids is not None:
            ahead += ", prompts that share blocks found in the cache"
        one = next(r for r in deployment.replicas if r.name.startswith(f"{at} t="))
        left = "as given" if at in given else _left(here, one, trace)
        said = [
            f"Step times of {gpu.name} x{count * ranks}: {here.label}.",
            f"Engines on {gpu.name}: {ask.engine}, at most {limits.max_batch:,} requests and "
            f"{limits.max_step_tokens:,} tokens a step{ahead}.",
            f"KV cache on {gpu.name} x{count * ranks}: {one.kv_tokens:,} tokens, {left}.",
        ]
        notes += [one for one in said if one not in notes]
    if (form := llm.format(precision)).name not in ("fp16", "bf16"):
        whose = ", as the checkpoint states" if form is llm.stated else ""
        notes.append(f"Weights in {form.name}{whose}, loaded as {precision}.")
    setting = {"cluster": machines.name, "model": llm.name}
    batching = deployment.replicas[0].engine.batching
    layout = _layout(Plan("given degrees", (), deployment, RoundRobin(), "", None))
    return deployment, layout, setting, {"degrees": degrees, "batching": batching}, notes


def _left(here: Instance, one: Replica, trace: Trace) -> str:
    """What the caches of a replica are left of the memory, and how sure that is."""
    share, rest_gib = here.room
    weights_gib = here.budget.weight_bytes / here.budget.gpus / 2**30
    left = (
        f"{share * here.gpu.mem_gib:.4g} GiB of each less {weights_gib:.4g} GiB of weights and "
        f"{rest_gib:.3g} GiB held"
    )
    longest, error = int((trace.input_tokens + trace.output_tokens).max()), one.kv_error_tokens
    if error and one.kv_tokens < longest + 3.0 * error:
        sure = 0.5 + 0.5 * math.erf((one.kv_tokens - longest) / error / math.sqrt(2.0))
        left += f", give or take {error:,.0f}: the longest request fits in {sure:.0%}"
    if not here.llm.plain:
        most = here.budget.max_requests(longest, here.spec.limits(here.gpu).max_step_tokens)
        left += f"; {most:,.4g} requests of {longest:,} tokens as engines count"
    return left


def _by_machine(option: str, given: Any, machines: Cluster) -> dict[str, int]:
    """Numbers of an option that takes one for all machines, or one for each that it names."""
    if str(given).isdecimal():
        return {machine.name: int(given) for machine in machines.machines}
    hint = "write a number such as 2, or one per machine such as a=4,b=1."
    found = pairs(option, given.split(",") if isinstance(given, str) else given, natural, hint)
    return {machines.machine(name).name: value for name, value in found.items()}


def _own(texts: Any, machines: Cluster, degree: object) -> dict[str, StepModel]:
    """Step models of one's own, or of files, by GPU type."""
    require(
        not texts or degree != "best",
        "--steps brings times of the one tensor-parallel degree that was measured.",
        resolve="say which with --degree.",
    )
    found: dict[str, StepModel] = {}
    file: Any
    hint = "write a GPU and a file, as L40S=a.json."
    for given, file in pairs("--steps", texts, word, hint).items():
        name = given
        if name not in machines.gpu_types:
            with suppress(CatalogError):
                name = catalog.gpu(name).name
        require(
            name in machines.gpu_types,
            f"--steps: {machines.name} has no GPU '{given}'.",
            resolve=f"use {' or '.join(machines.gpu_types)}.",
        )
        found[name] = own = file if isinstance(file, StepModel) else storage.load(file)
        if own is not file:
            found[name] = replace(own, source=f"{file} ({own.provenance})")
    return found


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
