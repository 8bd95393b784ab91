"""What plans of islands and of layers over a network deliver with draws of the step times.

Plans of replicas are simulated with each draw (:func:`hetero.question.sustained_draws`); these two
are linear programs and flows, which are solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetero.arrays import Floats
from hetero.latency.calibration.expected import error_of, expected_error
from hetero.placement import Problem
from hetero.planners.helix import PlacementCandidate
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.inner import solve
from hetero.question import DRAWS
from hetero.simulator.uncertainty import draw_factors


def served_draws(plan: Assignment, *, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Largest load of the mix that the islands carry with each draw of step times [requests/s].

    Islands keep their phase, and the shares of their time follow the rates of the draw. No step of
    a mixture of experts was held out, so that every GPU type errs as one that was never measured.
    Shape (draws,).

    Examples
    --------
    >>> from hetero.planners.rignall.inner import solve
    >>> from hetero.planners.rignall.rates import IslandClass, RateTable
    >>> from hetero.workload.lengths import ranges
    >>> rates = RateTable((IslandClass("H200", 8), IslandClass("H20", 8)),
    ...                   ranges([100, 100, 100, 900], 500),
    ...                   [[9.0, 1.5], [2.0, 0.25]], [[4.0, 3.0], [5.0, 3.5]])
    >>> plan = solve(rates, {IslandClass("H200", 8): 2, IslandClass("H20", 8): 2})
    >>> found = served_draws(plan, draws=9)
    >>> bool(found.min() < plan.served_rps < found.max())
    True
    """
    rates, error = plan.rates, error_of("carried")
    factors = draw_factors({one.gpu: error for one in rates.classes}, draws, seed=seed)
    decoding = dict.fromkeys(plan.layout, 0)
    for group in plan.of("decode"):
        decoding[group.island] += group.count
    found = np.zeros(draws)
    for d in range(draws):
        slower = np.array([factors[one.gpu][d] for one in rates.classes])
        made = replace(
            rates,
            prefill_rps=rates.prefill_rps / slower[:, :1],
            decode_rps=rates.decode_rps / slower[:, 1:2],
        )
        found[d] = solve(made, plan.layout, phases=decoding).served_rps
    return found


def flow_draws(best: PlacementCandidate, *, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Maximum flow of a placement with each draw of the step times [tokens/s], shape (draws,).

    Times per layer of a GPU type err as its step times do
    (:mod:`hetero.latency.calibration.expected`); nodes keep their layers.

    Examples
    --------
    >>> from hetero.planners.helix import search
    >>> from pipelines.studies.helix_artifact import problem
    >>> best = search(problem("single-24", "70B")).best[0]
    >>> found = flow_draws(best, draws=9)
    >>> bool(found.min() < best.tokens_per_s < found.max())
    True
    """
    problem = best.placement.problem
    factors = draw_factors(
        {node.kind.gpu: expected_error(node.kind.gpu) for node in problem.nodes}, draws, seed=seed
    )
    places = [(node.name, node.region) for node in problem.nodes]
    found = np.zeros(draws)
    for d in range(draws):
        kinds = []
        for kind in (node.kind for node in problem.nodes):
            prefill, decode, _ = factors[kind.gpu][d]
            slower = replace(
                kind.latency,
                prompt_ms=prefill * kind.latency.prompt_ms,
                decode_ms=decode * kind.latency.decode_ms,
            )
            kinds.append(replace(kind, latency=slower))
        made = Problem.of_kinds(
            problem.name, problem.llm, places, kinds, problem.links, point=problem.point
        )
        network = replace(best.flow.network, placement=replace(best.placement, problem=made))
        found[d] = network.max_flow().tokens_per_s
    return found


def middle(found: Sequence[float] | Floats, unit: str, share: float = 0.9) -> str:
    """The central part of a figure's draws of step times, in words.

    Examples
    --------
    >>> middle([1.0, 2.0, 3.0], "requests/s")
    '1.1 to 2.9 requests/s in 90 % of 3 draws of step times'
    """
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2])
    return (
        f"{low:,.4g} to {high:,.4g} {unit} in {100 * share:.0f} % of {len(found)} draws of step "
        "times"
    )
