"""Sizes, phases and work of islands in one mixed-integer program, with prices of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetero.planners.rignall.assignment import Layouts
from hetero.planners.rignall.rates import PHASES, Phase, RateTable
from hetero.programs import Program, SolverLimits


def solve(
    rates: RateTable,
    inventory: Mapping[str, int],
    limits: SolverLimits,
    *,
    load_rps: float | None = None,
    usd_per_gpu_h: Mapping[str, float] | None = None,
    budget_usd_per_h: float | None = None,
) -> Layouts:
    r"""Largest load of an inventory, or with ``load_rps`` the cheapest GPUs that carry that load.

    .. math::
        \max R, \quad \sum_s s\, (n_{ts}^{prefill} + n_{ts}^{decode}) \le I_t,
        \quad \sum_j x_{kj} \le n_k, \quad \sum_k b_{kj} x_{kj} \ge p_j R,
        \quad \sum_t c_t \sum_s s\, n_{ts} \le B

    Parameters
    ----------
    inventory
        GPUs of each type; the most that may be bought where ``load_rps`` is given.
    usd_per_gpu_h
        Price of a GPU of each type [$/h], c.
    budget_usd_per_h
        What all islands may cost [$/h], B.
    """
    program = Program()
    load = program.variables(
        1,
        lower=0.0 if load_rps is None else load_rps,
        upper=np.inf if load_rps is None else load_rps,
        objective=1.0 if load_rps is None else 0.0,
    )
    stock = {gpu: program.rows(1, upper=count) for gpu, count in inventory.items()}
    price = dict(usd_per_gpu_h or {})
    money = None
    if budget_usd_per_h is not None:
        money = program.rows(1, upper=budget_usd_per_h)
    columns: dict[tuple[int, Phase], int] = {}
    for phase in PHASES:
        rate = rates.rps(phase)
        serve = program.rows(len(rates.share), lower=0.0)
        program.entries(serve, load, -1.0)
        for k, island in enumerate(rates.classes):
            most = inventory.get(island.gpu, 0) // island.size
            can = np.flatnonzero(rate[k] > 0)
            if not most or not len(can):
                continue
            cost = price.get(island.gpu, 0.0) * island.size
            count = program.variables(
                1, upper=most, integer=True, objective=0.0 if load_rps is None else -cost
            )
            program.entries(stock[island.gpu], count, island.size)
            if money is not None:
                program.entries(money, count, cost)
            work = program.variables(len(can))
            capacity = program.rows(1, upper=0.0)
            program.entries(capacity, work, 1.0)
            program.entries(capacity, count, -1.0)
            program.entries(serve[can], work, rate[k, can] / rates.share[can])
            columns[k, phase] = int(count[0])
    found = program.solve(limits, names="the layout of islands")
    islands: dict[Phase, dict[int, int]] = {"prefill": {}, "decode": {}}
    for (k, phase), column in columns.items():
        if round(found.values[column]):
            islands[phase][k] = round(found.values[column])
    return Layouts(
        **islands, load_rps=float(found.values[load[0]]), bound=found.bound, status=found.status
    )
