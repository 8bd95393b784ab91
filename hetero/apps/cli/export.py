"""``hetero export``: a plan as files for vLLM, Kubernetes, SkyPilot or a dispatcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetero.apps.cli import options


def export(
    plan: Annotated[
        str,
        typer.Argument(help="Plan card (JSON), or a cluster to plan for: file or shipped name."),
    ],
    to: Annotated[
        str,
        options.one_of(
            "hetero.apps.export:TARGETS", "vllm, kubernetes, skypilot, routing or serve.", "--to"
        ),
    ],
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
    ] = "",
    memory: Annotated[
        float | None,
        typer.Option(help="Share of a GPU's memory that an engine may use; by default the card's."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(help="Router of the dispatcher instead of the plan's, such as hetero."),
    ] = None,
    hosts: Annotated[
        Any,
        options.one_of(
            "hetero.apps.export.files:Hosts",
            "Where routing and serve look for engines: 'machines' or 'kubernetes' names.",
        ),
    ] = "machines",
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="Plan card of another model on the same machines, once or several times: its "
            "engines have the first GPUs and ports, these the next."
        ),
    ] = None,
    engine: options.Engine = "vllm",
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """Write a plan as files that other tools read.

    vllm: a script per machine. kubernetes: manifests. skypilot: services and tasks. routing: a
    table (JSON) for a dispatcher. serve: the deployment file of `hetero serve`, of plans whose
    engines all serve both phases. A card has its own engine; --engine is that of a cluster that is
    planned for. What a tool cannot express ends in one sentence, what it does differently is noted
    in the file.
    """
    import hetero
    from hetero import catalog
    from hetero.apps.cards.card import PlanCard
    from hetero.apps.export import Service, write
    from hetero.apps.export.service import EngineOptions
    from hetero.errors import ExportError, ParameterError
    from hetero.routers.named import factories

    makers = factories()
    chosen = options.choice("--router", router, makers) if router is not None else None
    llm = catalog.find_llm(model) if model is not None else None
    if plan.endswith(".json"):
        card = PlanCard.load(plan)
    else:
        if model is None:
            raise ParameterError(
                f"No model is named that {plan} should serve.", resolve="say --model."
            )
        card = hetero.plan(
            plan,
            model=model,
            trace=trace,
            source=source,
            slo=slo,
            rate=rate,
            budget=budget,
            precision=precision,
            engine=engine,
            seed=seed,
        )
    how: EngineOptions = {"weights": weights}
    if memory is not None:
        how["memory_fraction"] = memory
    service = Service.of_card(card, llm, **how)
    service = service.beside(Service.of_card(PlanCard.load(one)) for one in beside or ())
    if chosen is not None:
        service = replace(service, router=makers[chosen](), routing=chosen)
    try:
        files = write(service, to, output, hosts=hosts, force=force)
    except ExportError as error:
        if card.question.engine != "any":
            raise
        again = "plan with --engine vllm, whose rules every plan then keeps"
        raise ExportError(error.what, resolve=f"{error.resolve.rstrip('.')}; or {again}.") from None
    print(service)
    print("Wrote " + ", ".join(str(path) for path in files) + ".")
