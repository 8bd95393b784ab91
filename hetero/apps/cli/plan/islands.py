"""``hetero plan islands``: a fleet cut into islands that prefill or decode ranges of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.latency.models.moe_devices import MoeDevice
    from hetero.planners.rignall.assignment import Assignment

_HINT = "write, for example, H200=64, or name a cluster file (.yaml)."


def islands(
    inventory: Annotated[
        list[str],
        typer.Argument(
            help="GPUs, as H200=64 H20=128, or a cluster (file or shipped name); with --load "
            "the most on offer."
        ),
    ],
    model: options.MoeModel = "DeepSeek-V3",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    width: Annotated[int, typer.Option(min=1, help="Width of a range of lengths [tokens].")] = 400,
    reading: Annotated[
        str, typer.Option(help="What throughput counts: printed, thesis, whole or fitting.")
    ] = "fitting",
    minimum: Annotated[int, typer.Option(min=1, help="Smallest island [GPUs].")] = 2,
    largest: Annotated[int, typer.Option(min=1, help="Largest island [GPUs].")] = 128,
    pairs: Annotated[bool, typer.Option(help="Even sizes only: GPUs come in pairs.")] = False,
    powers: Annotated[bool, typer.Option(help="Sizes that are powers of two only.")] = False,
    method: Annotated[
        Any,
        typer.Option(
            metavar="<str>", help="'exact', or a search: bo, saasbo, ax, mutation, sobol, random."
        ),
    ] = "exact",
    batch: Annotated[int, typer.Option(min=1, help="Layouts per batch of a search.")] = 16,
    iterations: Annotated[int, typer.Option(min=1, help="Batches of a search.")] = 15,
    state: Annotated[
        Path | None, typer.Option(help="File that a search is saved to and resumed from.")
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Price of a GPU [$/h], as H200=4; repeat per type.")
    ] = None,
    budget: Annotated[
        float | None, options.above_zero("Most that all islands may cost [$/h].")
    ] = None,
    load: Annotated[
        float | None, options.above_zero("Buy the cheapest GPUs for this load [requests/s].")
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    figure: options.Figure = None,
    force: options.Force = False,
) -> None:
    """Cut GPUs into islands, give each a phase and ranges of input lengths to serve.

    By default the best layout of all, with the bound that no layout exceeds. A search takes the
    divider's layouts and shows its distance from the best of all. GPUs of your own, and prices of
    machines, come from a cluster file.
    """
    from hetero import catalog
    from hetero.apps.capacity.draws import middle, served_draws
    from hetero.errors import InfeasibleError, require
    from hetero.planners.rignall import cost
    from hetero.planners.rignall.assignment import check_inventory
    from hetero.planners.rignall.divider import Divider
    from hetero.planners.rignall.exact import exact, usable
    from hetero.planners.rignall.model import IslandModel
    from hetero.planners.rignall.parallelism import reading as reading_of
    from hetero.planners.rignall.search import Method, Objective, search
    from hetero.progress import progress
    from hetero.question import in_draws

    options.new_file(figure, force, *options.PICTURES)
    options.choice("--method", method, ("exact", *get_args(Method)))
    given = options.pairs("--price", price, float, _HINT)
    for gpu, usd in given.items():
        options.positive(f"--price {gpu}", usd)
    require(
        method == "exact" or not (load is not None or budget is not None or pairs or powers),
        "A search knows no load, budget, pairs or powers.",
        resolve="leave them out, or use --method exact.",
    )
    llm = catalog.find_llm(model)
    require(
        bool(llm.experts),
        f"{llm.name} has no experts, which islands divide over their GPUs.",
        resolve="choose a mixture of experts, such as DeepSeek-V3.",
    )
    lengths = options.opened(trace, source, seed, columns)
    counts, stated, devices = _inventory(inventory)
    islands_of = IslandModel.of_trace(
        lengths, width, model=llm, reading=reading_of(reading), devices=devices
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
        if count < minimum:
            raise InfeasibleError(
                f"{count} {gpu} GPUs are fewer than the smallest island, {minimum}.",
                resolve="add GPUs of the type, lower --minimum, or leave it out.",
            )
    most = min(largest, max(held.values()))
    sizes = [s for s in range(minimum, most + 1) if not (powers and s & (s - 1))]
    rates = islands_of.rates([(gpu, s) for gpu in held for s in sizes])
    found: Any
    allowed, offer = usable(rates, held, minimum=minimum, pairs=pairs)
    if load is not None:
        found = cost.cheapest(allowed, {g: prices[g] for g in offer}, load, most=offer)
        plan: Assignment = found.plan
    elif budget is not None:
        found = cost.front(allowed, offer, prices, [budget])
        plan = found.plans[0]
    else:
        plan = found = exact(rates, held, minimum=minimum, pairs=pairs)
    optimum = plan.bound
    if method != "exact":
        tabulated, all_ = max(rates.sizes), max(held.values())
        require(
            tabulated >= all_,
            f"The divider makes islands of up to {all_} GPUs, --largest is {tabulated}.",
            resolve=f"pass --largest {all_}.",
        )
        with progress(batch * iterations, method, unit="layouts") as advance:
            found = search(
                Divider(held, minimum=minimum),
                Objective(rates),
                method,
                batch=batch,
                iterations=iterations,
                seed=seed,
                state=state,
                progress=advance,
            )
        require(
            found.best is not None,
            f"None of the {len(found.values_rps)} layouts tried can serve the workload.",
            resolve="raise --iterations, or use --method exact.",
        )
        plan = found.best
    options.draw(figure, force, "hetero.plots.islands:draw", plan)
    drawn = served_draws(plan, seed=seed)
    lines = [str(plan), f"It serves {middle(drawn, 'requests/s')}, as if no GPU were measured."]
    if load is not None:
        carried = (drawn >= load * (1 - 1e-9)).tolist()
        lines.append(f"Carries {load:g} requests/s in {in_draws(carried)}.")
    if method != "exact":
        bound = f"No layout carries more than {optimum:.4g} requests/s"
        lines.append(f"{bound} with these step times.")
    if prices:
        lines.append(f"The islands cost {cost.cost_usd_per_h(plan, prices):,.4g} $/h.")
    elif stated:
        lines.append(f"Their cost is not known: no price is given for {missing[0]}.")
    before = [] if found is plan else [found]
    record = _record(plan, prices, optimum) | {"served_rps_in_draws": drawn.tolist()}
    options.show(as_json, lambda: record, *before, "\n".join(lines))


def _inventory(
    texts: list[str],
) -> tuple[dict[str, int], dict[str, float], tuple[MoeDevice, ...]]:
    """GPUs of each type, their prices [$/h] where a file states them, and the user's own types."""
    from hetero import cluster
    from hetero.planners.rignall.model import devices_of

    def is_cluster(text: str) -> bool:
        if text.endswith((".yaml", ".yml")):
            return True
        return "=" not in text and text in {one.name for one in cluster.clusters()}

    files = [text for text in texts if is_cluster(text)]
    of_types = [text for text in texts if text not in files]
    counts = options.pairs("GPUs", of_types, options.natural, _HINT)
    prices: dict[str, float] = {}
    devices: tuple[MoeDevice, ...] = ()
    for fleet in map(cluster.find, files):
        devices += devices_of(fleet)
        for gpu, count in fleet.gpu_counts.items():
            of_type = [machine.usd_per_h for machine in fleet.machines if machine.gpu.name == gpu]
            known = [usd for usd in of_type if usd is not None]
            if len(known) == len(of_type):
                prices[gpu] = sum(known) / count
            counts[gpu] = counts.get(gpu, 0) + count
    return counts, prices, devices


def _record(plan: Assignment, prices: dict[str, float], optimum: float) -> dict[str, object]:
    from hetero.planners.rignall import cost
    from hetero.planners.rignall.rates import PHASES

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
