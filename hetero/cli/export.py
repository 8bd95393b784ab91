"""``hetero export``: a plan as files for vLLM, Kubernetes, SkyPilot or a dispatcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.cli import options

if TYPE_CHECKING:
    from hetero.planning.card import PlanCard


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("export")(export)


def export(
    plan: Annotated[
        str,
        typer.Argument(help="Plan card (JSON), or a cluster to plan for: file or shipped name."),
    ],
    to: Annotated[str, typer.Option("--to", help="vllm, kubernetes, skypilot, routing or serve.")],
    output: Annotated[Path, options.output("Folder for the files; made if need be.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the catalog, or a Hugging Face config.json; by default the card's."
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(help="What engines load: a Hugging Face name or a path."),
    ] = "",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    slo: options.Targets = "ttft=500ms,tpot=50ms",
    rate: Annotated[
        float | None, typer.Option(help="Load to plan for [requests/s]; else all it can carry.")
    ] = None,
    budget: options.Budget = None,
    precision: Annotated[
        str, typer.Option(help="Data type of weights, or 'auto'; a card has its own.")
    ] = "fp16",
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the GPU memory that an engine may take.")
    ] = 0.9,
    router: Annotated[
        str | None,
        typer.Option(help="Router of the dispatcher instead of the plan's, such as hetero."),
    ] = None,
    hosts: Annotated[
        str,
        typer.Option(
            help="Where routing and serve look for engines: 'machines' or 'kubernetes' names."
        ),
    ] = "machines",
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """Write a plan as files that other tools read.

    vllm: a script per machine. kubernetes: manifests. skypilot: services and tasks. routing: a
    table (JSON) for a dispatcher. serve: the deployment file of `hetero serve`, which needs step
    times and so a cluster to plan for, not a card. What a tool cannot express ends in one sentence;
    what it does differently is noted in the file.
    """
    from hetero import catalog
    from hetero.export import TARGETS, Service, write
    from hetero.export.files import Hosts
    from hetero.routers.named import factories

    target = options.choice("--to", to, TARGETS)
    where: Hosts = options.choice("--hosts", hosts, Hosts)
    makers = factories()
    chosen = options.choice("--router", router, makers) if router is not None else None
    llm = catalog.find_llm(model) if model is not None else None
    if plan.endswith(".json"):
        from hetero.planning.card import PlanCard

        card = PlanCard.load(plan)
    else:
        card = _planned(plan, model, trace, source, slo, rate, budget, precision, seed)
    service = Service.of_card(card, llm, weights=weights, memory_fraction=memory_fraction)
    if chosen is not None:
        service = replace(service, router=makers[chosen](), routing=chosen)
    files = write(service, target, output, hosts=where, force=force)
    print(service)
    print("Wrote " + ", ".join(str(path) for path in files) + ".")


def _planned(
    cluster: str,
    model: str | None,
    trace: str,
    source: str,
    slo: str,
    rate: float | None,
    budget: float | None,
    precision: str,
    seed: int,
) -> PlanCard:
    import hetero
    from hetero import workload
    from hetero.errors import ParameterError

    if model is None:
        raise ParameterError(
            f"No model is named that {cluster} should serve.", resolve="say --model."
        )
    return hetero.plan(
        cluster,
        model=model,
        trace=trace,
        source=options.choice("--source", source, workload.TraceSource),
        slo=slo,
        rate=rate,
        budget=budget,
        precision=precision,
        seed=seed,
    )
