"""A fleet cut into islands, or layers placed on its nodes, and both with draws of the step times.

Plans of replicas are simulated with each draw (:func:`hetero.question.sustained_draws`); these two
are linear programs and flows, which are solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from hetero import cluster
from hetero.apps.answers import Answer
from hetero.apps.ask import ISLANDS, LAYERS, Ask, IslandAsk, asks, choice, natural, pairs, positive
from hetero.arrays import Floats
from hetero.errors import InfeasibleError, require
from hetero.latency.calibration.expected import error_of, expected_error
from hetero.latency.models.moe_devices import MoeDevice
from hetero.placement import Problem
from hetero.planners.helix import PlacementCandidate, place
from hetero.planners.rignall import cost
from hetero.planners.rignall.assignment import Assignment, check_inventory
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact, usable
from hetero.planners.rignall.inner import solve
from hetero.planners.rignall.model import IslandModel, devices_of
from hetero.planners.rignall.parallelism import reading as reading_of
from hetero.planners.rignall.rates import PHASES
from hetero.planners.rignall.search import Method, Objective, search
from hetero.question import DRAWS, in_draws
from hetero.simulator.uncertainty import draw_factors

_HINT = "write, for example, H200=64, or name a cluster file (.yaml)."


@asks(ISLANDS, IslandAsk)
def islands(ask: IslandAsk) -> Answer:
    """Cut GPUs into islands, give each a phase and ranges of input lengths to serve.

    By default the best layout of all, with the bound that no layout exceeds; see
    :mod:`hetero.planners.rignall`.
    """
    method, price, load, budget = ask.method, ask.price, ask.load, ask.budget
    choice("--method", method, ("exact", *get_args(Method)))
    given = pairs("--price", price, float, _HINT)
    for gpu, usd in given.items():
        positive(f"--price {gpu}", usd)
    require(
        method == "exact"
        or not (load is not None or budget is not None or ask.pairs or ask.powers),
        "A search knows no load, budget, pairs or powers.",
        resolve="leave them out, or use --method exact.",
    )
    llm = ask.llm
    require(
        bool(llm.experts),
        f"{llm.name} has no experts, which islands divide over their GPUs.",
        resolve="choose a mixture of experts, such as DeepSeek-V3.",
    )
    lengths = ask.opened()
    counts, stated, devices = _inventory(ask.cluster)
    islands_of = IslandModel.of_trace(
        lengths, ask.width, model=llm, reading=reading_of(ask.reading), devices=devices
    )
    held = {islands_of.device(gpu).name: count for gpu, count in counts.items()}
    prices = {islands_of.device(gpu).name: usd for gpu, usd in stated.items()} | {
        islands_of.device(gpu).name: usd for gpu, usd in given.items()
    }
    priced = bool(price) or load is not None or budget is not None
    missing = [gpu for gpu in held if gpu not in prices]
    require(
        not (missing and priced),
        f"No price is given for {', '.join(missing[:1])}.",
        resolve="add --price for each type, or usd_per_h in the cluster file.",
    )
    if missing:
        prices = {}
    for gpu, count in check_inventory(held).items():
        require(
            count >= ask.minimum,
            f"{count} {gpu} GPUs are fewer than the smallest island, {ask.minimum}.",
            resolve="add GPUs of the type, lower --ask.minimum, or leave it out.",
            error=InfeasibleError,
        )
    most = min(ask.largest, max(held.values()))
    sizes = [s for s in range(ask.minimum, most + 1) if not (ask.powers and s & (s - 1))]
    rates = islands_of.rates([(gpu, s) for gpu in held for s in sizes])
    found: Any
    allowed, offer = usable(rates, held, minimum=ask.minimum, pairs=ask.pairs)
    if load is not None:
        found = cost.cheapest(allowed, {g: prices[g] for g in offer}, load, most=offer)
        plan: Assignment = found.plan
    elif budget is not None:
        found = cost.front(allowed, offer, prices, [budget])
        plan = found.plans[0]
    else:
        plan = found = exact(rates, held, minimum=ask.minimum, pairs=ask.pairs)
    optimum = plan.bound
    if method != "exact":
        tabulated, all_ = max(rates.sizes), max(held.values())
        require(
            tabulated >= all_,
            f"The divider makes islands of up to {all_} GPUs, --largest is {tabulated}.",
            resolve=f"pass --largest {all_}.",
        )
        found = search(
            Divider(held, minimum=ask.minimum),
            Objective(rates),
            method,
            batch=ask.batch,
            iterations=ask.iterations,
            seed=ask.seed,
            state=ask.state,
            progress=ask.progress,
        )
        require(
            found.best is not None,
            f"None of the {len(found.values_rps)} layouts tried can serve the workload.",
            resolve="raise --iterations, or use --method exact.",
        )
        plan = found.best
    drawn = served_draws(plan, seed=ask.seed)
    lines = [str(plan), f"It serves {middle(drawn, 'requests/s')}, as if no GPU were measured."]
    if load is not None:
        sustained = (drawn >= load * (1 - 1e-9)).tolist()
        lines.append(f"Carries {load:g} requests/s in {in_draws(sustained)}.")
    if method != "exact":
        bound = f"No layout carries more than {optimum:.4g} requests/s"
        lines.append(f"{bound} with these step times.")
    if prices:
        lines.append(f"The islands cost {cost.cost_usd_per_h(plan, prices):,.4g} $/h.")
    elif stated:
        lines.append(f"Their cost is not known: no price is given for {missing[0]}.")
    before = [] if found is plan else [found]
    record = _record(plan, prices, optimum) | {"served_rps_in_draws": drawn.tolist()}
    return Answer(plan, record, (*before, "\n".join(lines)))


def _inventory(given: Any) -> tuple[dict[str, int], dict[str, float], tuple[MoeDevice, ...]]:
    """GPUs of each type, their prices [$/h] where a file states them, and the user's own types."""

    def is_cluster(text: object) -> bool:
        return (
            not isinstance(text, str)
            or text.endswith((".yaml", ".yml"))
            or ("=" not in text and text in {one.name for one in cluster.clusters()})
        )

    texts: list[Any] = [given] if isinstance(given, str | Path | cluster.Cluster) else [*given]
    files = [text for text in texts if is_cluster(text)]
    counts = pairs("GPUs", [text for text in texts if text not in files], natural, _HINT)
    prices: dict[str, float] = {}
    devices: tuple[MoeDevice, ...] = ()
    for fleet in (Ask(one).fleet for one in files):
        devices += devices_of(fleet)
        for gpu, count in fleet.gpu_counts.items():
            of_type = [machine.usd_per_h for machine in fleet.machines if machine.gpu.name == gpu]
            known = [usd for usd in of_type if usd is not None]
            if len(known) == len(of_type):
                prices[gpu] = sum(known) / count
            counts[gpu] = counts.get(gpu, 0) + count
    return counts, prices, devices


def _record(plan: Assignment, prices: dict[str, float], optimum: float) -> dict[str, object]:
    groups = [
        {
            "phase": phase,
            "islands": group.count,
            "gpu": group.island.gpu,
            "gpus_per_island": group.island.size,
            "requests_per_s": [round(float(v), 6) for v in flow],
        }
        for phase in PHASES
        for group, flow in zip(plan.of(phase), plan.flow_rps(phase), strict=True)
    ]
    return {
        "served_rps": plan.served_rps,
        "bound_rps": optimum,
        "status": plan.status,
        "usd_per_h": cost.cost_usd_per_h(plan, prices) if prices else None,
        "range_start_tokens": plan.rates.ranges.start_tokens.tolist(),
        "range_end_tokens": plan.rates.ranges.end_tokens.tolist(),
        "groups": groups,
    }


@asks(LAYERS, Ask)
def layers(ask: Ask) -> Answer:
    """Place the layers of a model on the nodes of a cluster for the largest flow of tokens.

    See :mod:`hetero.planners.helix`.
    """
    found = place(ask.fleet, ask.llm, seed=ask.seed)
    best = found.best[0]
    drawn = flow_draws(best, seed=ask.seed)
    record = {
        "tokens_per_s": best.tokens_per_s,
        "bound_tokens_per_s": best.bound,
        "gap": best.gap,
        "tokens_per_s_in_draws": drawn.tolist(),
        "bottleneck": best.flow.bottleneck,
        "layers": {node.name: list(held) for _, node, held in best.placement.nodes()},
        "seconds": found.seconds,
    }
    planned = (
        f"Flow of plan 1: {middle(drawn, 'tokens/s')}; the bound is for these step times.\n"
        f"Planned in {found.seconds:.1f} s."
    )
    return Answer(best, record, (found, f"{best.flow}\n{planned}"))


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
