"""``hetero simulate``, ``size``, ``resilience``, ``reschedule``, ``export`` and ``serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetero.apps import ask
from hetero.apps.cli import options
from hetero.errors import require
from hetero.progress import progress

_EXAMPLE = """
    name: quote of March
    start_s: 240
    machines:
      - {gpu: L4, usd_per_h: 0.8, limit: 40}
      - {gpu: H100-SXM, count: 8, usd_per_h: 24, reserved_usd_per_h: 17}
      - {gpu: L40S, count: 4, usd_per_h: 4.4, spot_usd_per_h: 1.6, losses_per_h: 0.08}
"""
MORE = {"size": {"epilog": f"A price list:\n```\n{_EXAMPLE}\n```"}}
"""What commands are added with."""


@options.asking(ask.SIMULATE)
def simulate(
    asked: dict[str, Any],
    as_json: options.AsJson = False,
    output: Annotated[
        Path | None,
        options.output("One row per request and router (.csv, .parquet)."),
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
    trace's own arrivals are simulated, or with --clients a closed loop, as most benchmarks of
    servers are.
    """
    from hetero.apps.answers.simulation import simulation

    options.new_file(output, force, *options.TABLES)
    with progress(None, "simulate") as advance:
        found = simulation(progress=advance, **asked)
    rows = 0 if output is None else found.save(output, force=force)
    written = f"\n{rows:,} rows written to {output}." if output else ""
    options.show(as_json, found.to_dict, f"{found}{written}")


@options.asking(ask.EXPORT)
def export(asked: dict[str, Any]) -> None:
    """Write a plan as files that other tools read.

    vllm: a script per machine. kubernetes: manifests. skypilot: services and tasks. routing: a
    table (JSON) for a dispatcher. serve: the deployment file of `hetero serve`, of plans whose
    engines all serve both phases. A card has its own engine; --engine is that of a cluster that is
    planned for. What a tool cannot express ends in one sentence, what it does differently is noted
    in the file.
    """
    from hetero.apps.answers import exports

    service, files = exports.export(**asked)
    print(service)
    print("Wrote " + ", ".join(str(path) for path in files) + ".")


@options.asking(ask.SIZE)
def size(
    asked: dict[str, Any],
    as_json: options.AsJson = False,
    figure: Annotated[
        Path | None, typer.Option(help="With --curve: draw the day into this file (.png, .svg).")
    ] = None,
    force: options.Force = False,
) -> None:
    """Find the cheapest fleet of whole replicas that carries a load within its targets.

    An integer program proposes fleets, simulation over several seeds decides, and a bound says
    what any fleet of these machines must cost with these step times; draws of their error say how
    often the fleet carries the load. With --curve machines are kept the whole day or rented by the
    hour; with --autoscale an autoscaler is simulated beside that; with --spot cheaper machines that
    vanish are mixed in.
    """
    from hetero.apps.answers import fleets
    from hetero.apps.capacity.autoscale import Autoscaled
    from hetero.apps.capacity.sizing import Sizing

    options.new_file(figure, force, *options.PICTURES)
    require(
        figure is None or asked["curve"] is not None,
        "--figure draws a day.",
        resolve="give --curve as well.",
    )
    found = options.told("size", fleets.size, **asked)
    day = found.day if isinstance(found, Autoscaled) else found
    about = f"{day.market.load.trace.source}, {asked['seeds']} seeds from {asked['seed']}"
    options.draw(figure, force, "hetero.plots.answers:day", day, about=about)
    more = [*([day] if day is not found else []), found]
    alone = [found.alternatives()] if isinstance(found, Sizing) else []
    options.show(as_json, lambda: fleets.record(found), *more, *alone)


@options.asking(ask.RESILIENCE)
def resilience(asked: dict[str, Any], as_json: options.AsJson = False) -> None:
    """Say what is left of a plan if any one machine is lost, and what spare would make up for it.

    Every machine is taken away in turn, before a run and in the middle of one, by simulation.
    """
    from hetero.apps.answers import fleets

    found = options.told("resilience", fleets.resilience, **asked)
    options.show(as_json, found.to_dict, *found.shown)


@options.asking(ask.RESCHEDULE)
def reschedule(asked: dict[str, Any], as_json: options.AsJson = False) -> None:
    """Plan a service, let something happen to it, and play the episode under each policy.

    The plan is that of 'hetero plan phases' with the same options.

    'none' goes on with what is left; 'light' changes phases and shares of the groups that are left
    and loads nothing; 'full' plans anew and restarts. Requests in flight are followed throughout.
    """
    from hetero.apps.answers import phases as answers

    found = answers.reschedule(**asked)
    options.show(as_json, lambda: found.record, found)


def serve(
    deployment: Annotated[Path, typer.Argument(help="Deployment file (YAML).")],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535)] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Make all that is served, but do not listen, and show the file."
        ),
    ] = False,
) -> None:
    """Dispatch requests to OpenAI-compatible engines: vLLM, SGLang, TensorRT-LLM, transformers.

    Serves /v1/completions, /v1/chat/completions, /v1/embeddings, /tokenize, /v1/models,
    /live, /ready, /health and /metrics. SIGHUP reads the file again without dropping a
    request: add or drain engines, change the router. The file names the model, the
    router and the engines, each with address, KV cache and the step model that
    `hetero profile --fit` wrote; without one, its step times are learnt while it serves:

        model: tiny
        router: hetero
        backends:
          - {name: fast, url: "http://127.0.0.1:8001", step: fast.json, kv_tokens: 60000}
          - {name: slow, url: "http://127.0.0.1:8002", step: slow.json, kv_tokens: 20000}
    """
    from hetero.engine.compiled import interpret

    interpret()  # tens of engines are compared in microseconds; a compiler costs seconds and memory
    from hetero.apps.serving.server import packages
    from hetero.apps.serving.server import serve as run
    from hetero.apps.serving.settings import load

    if check:
        settings = load(deployment)
        with packages():
            from hetero.apps.serving.dispatcher import Dispatcher, Prepared
        made = Dispatcher(Prepared.of(settings))  # all that is served, but for an address
        print(settings.deployment().table())
        print(f"Router: {made.router.name}.")
        return
    run(deployment, host=host, port=port)
