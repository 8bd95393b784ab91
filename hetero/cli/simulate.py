"""``hetero simulate``: what a cluster of whole replicas delivers, router by router."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hetero.cluster import Cluster
    from hetero.display import Table
    from hetero.routers import Builtin
    from hetero.simulator import Metrics
    from hetero.workload import Trace

_ENGINES = {"chunked": "chunked", "prefill-first": "prefill first"}
_DEFAULT = ("round-robin", "least-tokens", "power-of-two", "hetero")
_SAMPLE = 200  # requests of the trace that the search for the best degree estimates with


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("simulate")(simulate)


def simulate(
    cluster: Annotated[
        str, typer.Argument(help="Cluster file (YAML) or the name of a shipped cluster.")
    ],
    model: Annotated[
        str, typer.Option(help="Model of the catalog, or a Hugging Face config.json.")
    ] = "Llama-3-8B",
    trace: Annotated[
        str, typer.Option(help="Trace file, or a shipped workload such as azure2023_conv.")
    ] = "azure2023_conv",
    source: Annotated[
        str, typer.Option(help="For a shipped workload: its statistical twin, or the real trace.")
    ] = "twin",
    degree: Annotated[
        str,
        typer.Option(
            help="Tensor-parallel degree of every machine: 'best' by the estimate of Xiong et "
            "al., one number for all, or one per machine, as in a=4,b=1."
        ),
    ] = "best",
    router: Annotated[
        list[str] | None,
        typer.Option(help=f"Router, once or several times; by default {', '.join(_DEFAULT)}."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean request rate [requests/s]; 'inf' sends all at once."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Serve only the first requests of the trace.")
    ] = None,
    slo: Annotated[
        str, typer.Option(help="Targets, as in ttft=500ms,tpot=50ms (also e2e; us, ms, s, min).")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="How engines form steps: 'chunked' or 'prefill-first'.")
    ] = "chunked",
    max_batch: Annotated[
        int, typer.Option(min=1, help="Requests that an engine decodes together, at most.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Seed of twin, arrivals and routers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="One row per request and router (.csv, .parquet)."),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Folder for figures (.png, .svg): queue, KV use and time in steps of every "
            "replica over time, times to first token."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Serve a trace with whole replicas of a model and compare routers.

    Every machine is divided into instances of its tensor-parallel degree; step times are those
    of the calibrated roofline, KV cache is paged. The simulation is exact for these step times.
    """
    from hetero import catalog, workload
    from hetero import cluster as clusters
    from hetero.cli.options import arrivals, choice, plain, targets, to_json
    from hetero.deployment import Engine
    from hetero.errors import DataError
    from hetero.planners.replicated import replicated
    from hetero.progress import progress
    from hetero.simulator import metrics
    from hetero.simulator import simulate as run_simulation

    batching = _ENGINES[choice("--engine", engine, _ENGINES)]
    chosen = _routers(router or list(_DEFAULT))
    wanted = targets(slo)
    if output is not None:
        _check_output(output, force)
    if figures is not None and not figures.is_dir():
        raise DataError("The folder does not exist.", path=figures, resolve="create it first.")
    machines, llm = clusters.find(cluster), catalog.find_llm(model)
    requested = workload.open_trace(
        trace, source=choice("--source", source, workload.TraceSource), seed=seed
    )
    requested = arrivals(requested, requests, rate, seed)
    degrees, notes = _degrees(machines, llm, degree, requested, seed)
    budget = 2048 if batching == "chunked" else 8192
    deployment = replicated(
        machines,
        llm,
        degrees,
        engine=Engine(
            batching=batching,  # type: ignore[arg-type]
            admission="paged",
            max_batch=max_batch,
            max_step_tokens=budget,
        ),
    )
    found, frames, runs = [], [], []
    sample_s = None
    if figures is not None:
        from hetero.cli import timelines

        span_s = float(requested.arrival_s[-1] - requested.arrival_s[0])
        sample_s = max(span_s / timelines.POINTS, 1.0)
    for one in chosen:
        with progress(len(requested), one.name) as advance:
            run = run_simulation(
                deployment, requested, one, seed=seed, sample_s=sample_s, progress=advance
            )
        if figures is not None:
            runs.append((one.name, run))
        found.append((one.name, metrics(run, wanted)))
        if output is not None:
            frame = run.frame()
            frame.insert(0, "router", one.name)
            frames.append(frame)
    if output is not None:
        _write(output, frames)
    if figures is not None:
        timelines.draw(figures, runs, f"{requested.source}, {batching}, seed {seed}")
    if as_json:
        setting = {
            "cluster": machines.name,
            "model": llm.name,
            "trace": requested.source,
            "requests": len(requested),
            "degrees": degrees,
            "engine": batching,
            "seed": seed,
            "notes": notes,
        }
        rows = [{"router": name, **plain(one)} for name, one in found]
        print(to_json(setting | {"routers": rows}), end="")
        return
    alike = Counter((one.gpus, one.gpu.name if one.gpu else "") for one in deployment.replicas)
    layout = ", ".join(
        f"{n} replica{'s' * (n > 1)} on {t} x {gpu}" for (t, gpu), n in alike.items()
    )
    title = f"{llm.name} on {machines.name}: {layout}"
    about = f"{len(requested):,} requests of {requested.source}; {batching}, seed {seed}"
    print(_table(title, found, [about, *notes]))
    if output is not None:
        print(f"{len(requested) * len(found):,} rows written to {output}.")


def _routers(names: list[str]) -> list[Builtin]:
    from hetero.cli.options import choice
    from hetero.routers.named import factories

    known = factories()
    return [known[choice("--router", name, known)]() for name in dict.fromkeys(names)]


def _degrees(
    machines: Cluster, llm: Any, text: str, trace: Trace, seed: int
) -> tuple[dict[str, int], list[str]]:
    """Degree of each machine, and what a reader should know of the choice."""
    from hetero.errors import ParameterError
    from hetero.planners import tensor_parallel
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


def _check_output(path: Path, force: bool) -> None:
    from hetero.errors import DataError, ParameterError

    if path.suffix != ".parquet" and not path.name.endswith((".csv", ".csv.gz")):
        raise ParameterError(
            f"The ending of {path.name} is of no known kind.",
            resolve="end its name with .csv, .csv.gz or .parquet.",
        )
    if not path.parent.is_dir():
        raise DataError("The folder of the file does not exist.", path=path, resolve="create it.")
    if path.exists() and not force:
        raise DataError("The file exists.", path=path, resolve="add --force to replace it.")


def _write(path: Path, frames: list[Any]) -> None:
    import pandas as pd

    from hetero.errors import DataError

    frame = pd.concat(frames, ignore_index=True)
    try:
        if path.suffix == ".parquet":
            frame.to_parquet(path, index=False)
        else:
            frame.to_csv(path, index=False, lineterminator="\n")
    except OSError as error:
        raise DataError(
            f"The file cannot be written ({error}).",
            path=path,
            resolve="choose a folder that may be written to.",
        ) from error


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
