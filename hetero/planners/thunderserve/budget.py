"""What a budget rents: the parts of an offer of machines that it pays for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from hetero.catalog import Llm
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import CostModel, CostSettings
from hetero.costs.demand import Demand
from hetero.costs.transfer import KvTransfer
from hetero.errors import InfeasibleError, require
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.patterns import starts
from hetero.simulator.metrics import Slo

_MOST = 200


def within(offer: Cluster, usd_per_h: float) -> list[Cluster]:
    """Parts of an offer that cost no more than a budget and to which no machine can be added.

    Machines with the same GPUs, region and price are alike; of these the first are taken.

    Raises
    ------
    InfeasibleError
        If the budget pays for no machine.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> found = within(cluster("thunderserve-cloud-32"), 5.0)
    >>> len(found), max(round(one.usd_per_h, 3) for one in found)
    (6, 4.944)
    """
    alike: dict[tuple[object, ...], list[Machine]] = {}
    for machine in offer.machines:
        require(
            machine.usd_per_h is not None,
            f"Machine {machine.name} of {offer.name} has no price.",
            resolve="give its usd_per_h in the cluster file.",
        )
        key = (machine.gpu.name, machine.count, machine.region, machine.usd_per_h, machine.link)
        alike.setdefault(key, []).append(machine)
    prices = [float(some[0].usd_per_h or 0.0) for some in alike.values()]
    choices = []
    for counts in product(*(range(len(some) + 1) for some in alike.values())):
        cost = sum(n * price for n, price in zip(counts, prices, strict=True))
        spare = [
            price
            for n, price, some in zip(counts, prices, alike.values(), strict=True)
            if n < len(some)
        ]
        if any(counts) and cost <= usd_per_h and all(cost + price > usd_per_h for price in spare):
            choices.append(counts)
            require(
                len(choices) <= _MOST,
                f"A budget of {usd_per_h:g} $/h leaves more than {_MOST} choices among the "
                f"machines of {offer.name}.",
                resolve="offer fewer different machines.",
            )
    if not choices:
        raise InfeasibleError(
            f"{usd_per_h:g} $/h rent no machine of {offer.name}, whose cheapest costs "
            f"{min(prices):g} $/h.",
            resolve="raise the budget, or offer cheaper machines.",
        )
    return [
        offer.part(m for n, some in zip(c, alike.values(), strict=True) for m in some[:n])
        for c in choices
    ]


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
