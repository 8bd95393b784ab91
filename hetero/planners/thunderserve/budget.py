"""What a budget rents: the parts of an offer of machines that it pays for."""

from __future__ import annotations

from collections.abc import Callable

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.cluster.fleets import within
from hetero.costs.cost import CostModel, CostSettings
from hetero.costs.demand import Demand
from hetero.costs.transfer import KvTransfer
from hetero.errors import InfeasibleError
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.patterns import starts
from hetero.simulator.metrics import Slo


def best_part(
    offer: Cluster,
    usd_per_h: float,
    llm: Llm,
    demand: Demand,
    slo: Slo,
    *,
    settings: CostSettings | None = None,
    transfer: KvTransfer | None = None,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """The part of an offer within a budget whose best design of the integer program attains most.

    Raises
    ------
    InfeasibleError
        If no part that the budget pays for serves the model in both phases.
    """
    best, value, reason = None, -1.0, ""
    for part in within(offer, usd_per_h):
        model = CostModel(part, llm, settings or CostSettings())
        evaluator = Evaluator(model, demand, slo, transfer or KvTransfer())
        try:
            found = max((evaluator.value(one).score for one in starts(evaluator)), default=-1.0)
        except InfeasibleError as error:
            reason = error.what
            continue
        if progress:
            progress(f"{part.gpu_counts}: {found:.3f}")
        if found > value:
            best, value = part, found
    if best is None:
        raise InfeasibleError(
            f"No choice of machines of {offer.name} for {usd_per_h:g} $/h serves {llm.name} in "
            f"both phases. {reason}".strip(),
            resolve="raise the budget, or use a smaller model or precision.",
        )
    return best
