"""``hetero bench``: how fast this library is here, and beside what."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from pipelines.bench.measured import Measured

group = typer.Typer(no_args_is_help=True, help="Measure how fast hetero is on this machine.")


def _say(what: str) -> None:
    """Name what is measured next in one line of a terminal, in place of the last name."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(found: Measured, as_json: bool, record: bool = False) -> None:
    """Print what was measured, and keep its times where they are to be recorded."""
    from hetero import timings

    _say("")
    if record:
        timings.record(found.timings)
    print(options.to_json(found.record()) if as_json else f"{found}\n", end="")


@group.command()
def simulate(
    largest: Annotated[
        int, typer.Option(min=100, help="Requests of the largest runs.")
    ] = 1_000_000,
    many: Annotated[int, typer.Option(min=8, help="Replicas of the larger fleet.")] = 1_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the simulator: speed at 70 % load and overload, memory, decisions, start.

    CPU time of one core; the load is a share of the saturation found by simulation. Published
    simulators stand beside it as they were measured on the same trace.
    """
    from pipelines.bench.simulator import bench

    found = bench(largest=largest, many=many, repeats=repeats, progress=_say)
    _show(found, as_json, record)


@group.command()
def routers(
    requests: Annotated[
        int, typer.Option(min=100, help="Requests per run on eight devices or two instances.")
    ] = 2000,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds, 0 and up.")] = 5,
    source: options.Source = "twin",
    as_json: options.AsJson = False,
    output: Annotated[Path | None, options.output("One row per setting and metric (.csv).")] = None,
    force: options.Force = False,
) -> None:
    """Count wins, ties and losses of our own router in every setting of both routing papers.

    Against the best of all other routers, chosen anew for every setting and metric: throughput,
    share of first tokens within the target, P95 of the time to first token. Without a target and
    with it. The same numbers come out in every run.
    """
    from hetero.files import writing
    from hetero.progress import progress
    from pipelines.bench.contest import contest, settings

    options.new_file(output, force, ".csv", ".csv.gz")
    chosen = settings(requests=requests, source=source)
    with progress(len(chosen), "routers", unit="settings") as advance:
        found = contest(chosen, seeds=range(seeds), progress=advance)
    if output is not None:
        with writing(output, force=force) as part:
            found.rows.to_csv(part, index=False, lineterminator="\n")
    _show(found, as_json)


@group.command()
def cards(
    fleets: Annotated[int, typer.Option(min=1, help="Random fleets.")] = 40,
    seed: options.Seed = 0,
    changes: Annotated[
        bool, typer.Option(help="Check what cards say of one change as well.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Make plan cards of random fleets, and play each plan for ten minutes of traffic.

    A card's goodput has to hold at 0.95 of it and to fail at 1.10; its intervals have to contain
    the gains that long runs show. Some minutes of CPU time per fleet.
    """
    from pipelines.bench.cards import bench

    _show(bench(fleets=fleets, seed=seed, changes=changes, progress=_log), as_json)


@group.command()
def search(
    fleets: Annotated[int, typer.Option(min=1, help="Random fleets.")] = 60,
    gpus: Annotated[int, typer.Option(min=2, help="GPUs of a fleet at most.")] = 8,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Compare the search for a plan with a plain enumeration of the same designs.

    Both judge by the one rule of a sustained rate; CPU time of one process.
    """
    from pipelines.bench.search import bench

    _show(bench(fleets=fleets, most=gpus, seed=seed, progress=_log), as_json)


@group.command()
def phases(
    gpus: Annotated[
        str, typer.Option(help="Sizes of the fleet: 16, 24, 32 and 256 GPUs, by commas.")
    ] = "16,24,32,256",
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure plans from scratch, by the paper's tabu search and by ours, and light rescheduling.

    LLaMA-30B on the paper's cloud, parts of it, and eight times it; CPU time of one process.
    """
    from hetero.errors import require
    from pipelines.bench.phases import PUBLISHED_S, bench

    sizes = options.whole_numbers("--gpus", gpus)
    good = set(sizes) <= set(PUBLISHED_S)
    require(good, f"--gpus cannot do '{gpus}'.", resolve="use 16, 24, 32 and 256.")
    _show(bench(sizes, progress=_say), as_json, record)


@group.command()
def placement(
    random: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Also plan a random cluster of so many nodes in several regions."),
    ] = None,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the planner of layer placements on Helix's clusters: flow, bound, elapsed time."""
    from pipelines.bench.placement import bench

    _show(bench(tuple(random or ()), progress=_say), as_json, record)


@group.command()
def islands(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the median counts.")] = 5,
    iterations: Annotated[int, typer.Option(min=2, help="Batches of each search.")] = 4,
    ax: Annotated[bool, typer.Option(help="Time Ax as well; takes minutes.")] = False,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the island planners: inner program, exact layout, searches by batch size."""
    from pipelines.bench.islands import bench

    found = bench(repeats=repeats, iterations=iterations, ax=ax, progress=_say)
    _show(found, as_json, record)


@group.command()
def pipelines(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the pipeline simulator: 660 s of Helix's clusters, kept full by its scheduler.

    CPU time of one core, placement and requests at hand, kernels compiled.
    """
    from pipelines.bench.pipelines import bench

    _show(bench(repeats=repeats), as_json, record)


@group.command()
def scale(
    requests: Annotated[int, typer.Option(min=10_000, help="Requests of the day.")] = 10_000_000,
    replicas: Annotated[int, typer.Option(min=2, help="Replicas, of one GPU each.")] = 1_000,
    shards: Annotated[
        int, typer.Option(min=1, help="Shards; a divisor of half the replicas.")
    ] = 10,
    as_json: options.AsJson = False,
) -> None:
    """Measure a sharded replay: CPU time, memory, their slopes, and what 44 million would take."""
    from pipelines.bench.scale import bench

    _show(bench(count=requests, replicas=replicas, shards=shards, progress=_say), as_json)


@group.command()
def serve(
    rate: Annotated[float, typer.Option(help="Requests per second each way.")] = 100.0,
    seconds: Annotated[float, typer.Option(help="Length of the paired run [s].")] = 10.0,
    tokens: Annotated[int, typer.Option(min=2, help="Streamed tokens per request.")] = 32,
    streams: Annotated[int, typer.Option(min=1, help="Streams held at once.")] = 1000,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the memory test.")] = 10_000,
    soak: Annotated[
        int | None,
        typer.Option(min=100, help="Only send so many requests and watch the dispatcher's memory."),
    ] = None,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Processor, first bytes beside routers of `make tools`."),
    ] = False,
    learning: Annotated[
        bool, typer.Option("--learning", help="After how many answers an engine is known.")
    ] = False,
    backends: Annotated[
        int | None, typer.Option(min=4, help="Only decide, for so many simulated engines.")
    ] = None,
    router: Annotated[str, typer.Option(help="Router of --backends.")] = "hetero",
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure time and processor that the dispatcher adds, paired against the engine itself.

    Takes about a minute on two idle cores: CPU per request and per streamed chunk, added median and
    P99 of the time to the first token, between tokens and to the end, streams held at once, and
    memory. --soak 100000 instead sends so many requests and prints the memory on the way; --beside
    asks for processor and first bytes of the routers of vLLM and SGLang as well, in turns;
    --learning has simulated engines serve that the dispatcher is told nothing of; --backends 200
    sends 2.5 requests per second and engine to simulated ones, by one dispatcher and by several.
    """
    from pipelines.bench import serve as benches

    found: Measured
    if backends is not None:
        from pipelines.bench.decisions import bench as decision_bench

        rate_rps = 2.5 * backends
        found = decision_bench(backends=backends, router=router, rate_rps=rate_rps, progress=_log)
    elif learning:
        from pipelines.bench.learning import bench as learning_bench

        found = learning_bench()
    elif beside:
        from pipelines.bench.beside import bench as beside_bench

        found = beside_bench(progress=_log)
    elif soak is not None:
        found = benches.soak(soak, progress=_log)
    else:
        found = benches.bench(
            rate_rps=rate, seconds=seconds, tokens=tokens, streams=streams, requests=requests
        )
    _show(found, as_json, record)


@group.command()
def sweep(
    points: Annotated[int, typer.Option(min=2, help="Points of the sweep over theta.")] = 200,
    alone: Annotated[
        int, typer.Option(min=2, help="Points that one process runs for comparison.")
    ] = 40,
    workers: Annotated[int, typer.Option(min=0, help="Processes at once; 0 takes all cores.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Measure the overhead per point and the speed-up by workers, on the sweep over theta."""
    from pipelines.bench.sweep import bench

    _show(bench(points=points, alone=alone, workers=workers), as_json)


@group.command()
def live(
    repeats: Annotated[int, typer.Option(min=2, help="Runs per router.")] = 5,
    requests: Annotated[int, typer.Option(min=12, help="Requests per run.")] = 80,
    load: Annotated[
        float, typer.Option(help="Arrival rate over what both engines are planned to carry.")
    ] = 1.5,
    alone: Annotated[int, typer.Option(min=2, help="Runs of each engine alone.")] = 3,
    max_minutes: Annotated[
        float, typer.Option(help="No repeat begins that would end later [minutes].")
    ] = 7.5,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="Write data/measured/live.csv and live_profile.csv."),
    ] = False,
) -> None:
    """Profile, plan, serve and replay on two real engines on this machine's processor.

    Starts two Llamas with random weights behind `transformers serve`, each on a core of its own,
    fits their step times, and sends more requests than they carry through `hetero serve` with each
    router; the simulator gets the same requests. Takes up to eight minutes and two idle cores.
    """
    from pipelines.bench.live import bench
    from pipelines.studies import live_data

    found = bench(
        repeats=repeats,
        requests=requests,
        load=load,
        alone=alone,
        max_minutes=max_minutes,
        seed=seed,
        progress=_log,
    )
    if record:
        live_data.record(found.runs, found.rounds)
    _show(found, as_json)


@group.command()
def arena(
    effort: Annotated[
        Literal["quick", "normal", "thorough"], typer.Option(help="How much planners may try.")
    ] = "quick",
    repeats: Annotated[int, typer.Option(min=1, help="Plans of which the best counts.")] = 3,
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure the planners of the arena: wall clock of one plan on fleets of 8 to 256 GPUs."""
    from hetero.errors import require
    from pipelines.bench.arena import bench

    require(
        not record or effort == "quick",
        f"Times of the effort '{effort}' are not recorded, as the arena's notebook reads those "
        "of 'quick'.",
        resolve="leave out --record, or --effort.",
    )
    _show(bench(effort=effort, repeats=repeats, progress=_say), as_json, record)
