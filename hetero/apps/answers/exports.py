"""A plan as files for other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetero.apps.ask import EXPORT, PLAN, Ask, asks, choice
from hetero.apps.cards.answer import plan
from hetero.apps.cards.card import PlanCard
from hetero.apps.export import Service, write
from hetero.apps.export.service import EngineOptions
from hetero.cluster.found import lists_nodes
from hetero.errors import ExportError, ParameterError, require
from hetero.routers import factories
from hetero.simulator import Slo


@asks(EXPORT, Ask)
def export(ask: Ask) -> tuple[Service, list[Path]]:
    """Write a plan as files that other tools read, see :mod:`hetero.apps.export`.

    Raises
    ------
    ExportError
        If the tool cannot express the plan.
    """
    makers, given = factories(), ask.cluster
    chosen = choice("--router", ask.router, makers) if ask.router is not None else None
    llm = ask.llm if ask.model is not None else None
    # The memory share is of the engines' command lines; plans are made with their own.
    same = {one.name for one in PLAN} & {one.name for one in EXPORT} - {"memory"}
    if isinstance(given, PlanCard) or (
        str(given).endswith(".json") and not lists_nodes(str(given))
    ):
        usual = {one.name: one.default for one in EXPORT if one.name in same - {"cluster", "model"}}
        plain = replace(ask, **usual | {"slo": Slo.read(usual["slo"])})
        told = replace(ask, slo=ask.targets)
        more = [f"--{name}" for name in usual if getattr(told, name) != getattr(plain, name)]
        require(
            not more,
            f"{', '.join(more)}: a plan card is exported as it was planned.",
            resolve="leave that out, or plan anew with `hetero plan`.",
        )
        card = given if isinstance(given, PlanCard) else PlanCard.load(str(given))
    elif llm is None:
        raise ParameterError(
            f"No model is named that {given} should serve.", resolve="say --model."
        )
    else:
        card = plan(**{name: getattr(ask, name) for name in same})
    how: EngineOptions = {"weights": ask.weights}
    if ask.memory is not None:
        how["memory_fraction"] = ask.memory
    service = Service.of_card(card, llm, **how)
    service = service.beside(Service.of_card(PlanCard.load(one)) for one in ask.beside or ())
    if chosen is not None:
        service = replace(service, router=makers[chosen](), routing=chosen)
    try:
        files = write(service, ask.to, ask.output, hosts=ask.hosts, force=ask.force)
    except ExportError as error:
        if card.question.engine != "any":
            raise
        again = "plan with --engine vllm, whose rules every plan then keeps"
        raise ExportError(error.what, resolve=f"{error.resolve.rstrip('.')}; or {again}.") from None
    return service, files
