"""``hetero reschedule``: what becomes of a service when GPUs, links or the workload change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options
from hetero.errors import require

if TYPE_CHECKING:
    from hetero.planners.reschedule.change import ClusterChange
    from hetero.planners.reschedule.service import PhaseService

_POLICIES = ("none", "light", "full")
_SLOW = "write two machines, as a,b=0.1."


def reschedule(
    cluster: options.Cluster,
    model: options.Model = "LLaMA-1-30B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    columns: options.Columns = "",
    rate: Annotated[float, options.above_zero("Request rate [requests/s].")] = 4.0,
    slo: options.Targets = "",
    slo_scale: options.SloScale = 8.0,
    budget: options.Budget = None,
    lose: Annotated[
        list[str] | None, typer.Option(help="Machine that fails; may be given several times.")
    ] = None,
    lose_gpu: Annotated[
        str, typer.Option(help="Machine of which one GPU fails, with a group that uses it.")
    ] = "",
    slow: Annotated[
        str, typer.Option(help="Link that slows, as in a40,3090ti-1=0.1 (share of bandwidth).")
    ] = "",
    shift: Annotated[
        str, typer.Option(help="Trace or workload that takes over instead of a loss.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help="Policies to compare: none, light, full, separated by commas.")
    ] = "none,light,full",
    at: Annotated[float, typer.Option(min=0, help="Time of the change [s].")] = 60.0,
    search_s: Annotated[
        float | None,
        typer.Option(
            min=0, help="Time until the new plan is there [s]; by default as measured here."
        ),
    ] = None,
    disk_gbs: Annotated[float, options.above_zero("Disk bandwidth of a machine [GB/s].")] = 1.2,
    drain: Annotated[
        bool, typer.Option(help="Groups finish their requests before they change their phase.")
    ] = False,
    requests: Annotated[int, typer.Option(min=10, help="Requests of the episode.")] = 1000,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of the search; by default its own number.")
    ] = None,
    max_stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of a group.")] = 4,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Plan a service, let something happen to it, and play the episode under each policy.

    The plan is that of 'hetero plan phases' with the same options.

    'none' goes on with what is left; 'light' changes phases and shares of the groups that are left
    and loads nothing; 'full' plans anew and restarts. Requests in flight are followed throughout.
    """
    from hetero import catalog
    from hetero import cluster as clusters
    from hetero.costs.cost import CostSettings
    from hetero.costs.demand import Demand, reference, scaled
    from hetero.planners.reschedule.comparison import compare, joined
    from hetero.planners.reschedule.service import PhaseService
    from hetero.planners.thunderserve.budget import best_part
    from hetero.planners.thunderserve.phases import phases
    from hetero.planners.thunderserve.tabu import TabuSettings
    from hetero.simulator import Slo
    from hetero.streams import stream

    chosen: list[Any] = [part.strip() for part in policies.split(",")]
    for one in chosen:
        require(
            one in _POLICIES,
            f"--policies: there is no policy '{one}'.",
            resolve=f"use {', '.join(_POLICIES)}, separated by commas.",
        )
    given = sum(map(bool, (lose, lose_gpu, slow, shift)))
    require(
        given == 1,
        f"{given or 'None'} of --lose, --lose-gpu, --slow and --shift given.",
        resolve="give one of them (--lose may be repeated).",
    )
    hit = [*(lose or []), *filter(None, [lose_gpu]), *(_slowed(slow)[:2] if slow else ())]
    fleet, llm = clusters.find(cluster), catalog.find_llm(model)
    for name in hit:
        fleet.machine(name)  # an unknown machine is told before the search, not after it
    lengths = options.opened(trace, source, seed, columns)
    demand = Demand.of(lengths, rate)
    target = slo if slo != Slo() else scaled(reference(llm, demand), slo_scale)
    settings = CostSettings(max_stages=max_stages)
    if budget is not None:
        fleet = best_part(fleet, budget, llm, demand, target, settings=settings)
        rented = [machine.name for machine in fleet.machines]
        for name in hit:
            require(
                name in rented,
                f"Machine {name} is not among those that {budget:g} $/h rent.",
                resolve=f"choose one of {', '.join(rented)}, or another budget.",
            )
    tabu = None if steps is None else TabuSettings(steps=steps)
    made = phases(fleet, llm, demand, target, settings=settings, tabu=tabu, seed=seed)
    service = PhaseService.of(made, "service")
    later = options.opened(shift, source, seed, columns) if shift else None
    change = _change(service, lose or [], lose_gpu, slow, shift)
    rng = stream(seed, "arrivals")
    served = lengths.sample(min(requests, len(lengths)), rng).poisson(rate, rng)
    found = compare(
        service,
        change,
        chosen,
        served if later is None else joined(served, later, at, rng),
        at,
        target,
        demand=None if later is None else Demand.of(later, rate),
        tabu=tabu,
        disk_gbs=disk_gbs,
        search_s=search_s,
        ending="drain" if drain else "abrupt",
        seed=seed,
    )
    answers = [one.answer for one in found.outcomes.values() if not isinstance(one, str)]
    said = f"At {at:g} s {change.what}."
    options.show(as_json, found.to_dict, made, said, *answers, found)


def _slowed(text: str) -> tuple[str, str, float]:
    """Two machines and the share that is left of the bandwidth between them."""
    ((pair, share),) = options.pairs("--slow", [text], float, _SLOW).items()
    first, comma, second = (part.strip() for part in pair.partition(","))
    require(bool(comma), f"--slow cannot read '{text}'.", resolve=_SLOW)
    return first, second, share


def _change(
    service: PhaseService, lose: list[str], gpu: str, slow: str, shift: str
) -> ClusterChange:
    """What happens, from the options."""
    from hetero.planners.reschedule import change

    if shift:
        return change.ClusterChange(f"the workload shifts to {shift}", service.cluster)
    if gpu:
        service.cluster.machine(gpu)
        users = [one.name for one in service.groups if gpu in one.machines]
        if not users:
            return change.ClusterChange(
                f"an idle GPU of {gpu} fails", change.fewer(service.cluster, {gpu: 1})
            )
        return change.lose_gpu(service, users[0], gpu)
    if slow:
        return change.slow_link(service, *_slowed(slow))
    lost = frozenset(
        one.name for one in service.groups if any(name in one.machines for name in lose)
    )
    counts = {name: service.cluster.machine(name).count for name in lose}
    verb = "fails" if len(lose) == 1 else "fail"
    return change.ClusterChange(
        f"{', '.join(lose)} {verb}", change.fewer(service.cluster, counts), lost
    )
