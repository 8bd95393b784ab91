"""``hetero reschedule``: what becomes of a service when GPUs, links or the workload change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.planners.reschedule.change import ClusterChange
    from hetero.planners.reschedule.episode import Episode
    from hetero.planners.reschedule.policy import Rescheduling
    from hetero.planners.reschedule.service import PhaseService

_POLICIES = ("none", "light", "full")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("reschedule")(reschedule)


def reschedule(
    cluster: options.Cluster,
    model: options.DenseModel = "LLaMA-1-30B",
    trace: options.Trace = "azure2023_conv",
    source: options.Source = "twin",
    rate: Annotated[float, typer.Option(help="Request rate [requests/s].")] = 4.0,
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
    disk_gbs: Annotated[float, typer.Option(help="Disk bandwidth of a machine [GB/s].")] = 1.2,
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
    import time

    from hetero import catalog, workload
    from hetero import cluster as clusters
    from hetero.costs.cost import CostSettings
    from hetero.costs.demand import Demand, reference, scaled
    from hetero.errors import InfeasibleError, ParameterError
    from hetero.planners.reschedule import policy as policy_
    from hetero.planners.reschedule.reload import Disk
    from hetero.planners.reschedule.service import PhaseService
    from hetero.planners.thunderserve.budget import best_part
    from hetero.planners.thunderserve.plan import plan
    from hetero.planners.thunderserve.tabu import TabuSettings
    from hetero.streams import stream

    chosen = [part.strip() for part in policies.split(",")]
    for one in chosen:
        if one not in _POLICIES:
            raise ParameterError(
                f"--policies: there is no policy '{one}'.",
                resolve=f"use {', '.join(_POLICIES)}, separated by commas.",
            )
    options.positive("--rate", rate)
    options.positive("--slo-scale", slo_scale)
    if budget is not None:
        options.positive("--budget", budget)
    options.positive("--disk-gbs", disk_gbs)
    _check(lose or [], lose_gpu, slow, shift)
    kind = options.choice("--source", source, workload.TraceSource)
    fleet, llm = clusters.find(cluster), catalog.find_llm(model)
    hit = [*(lose or []), *filter(None, [lose_gpu]), *(_slowed(slow)[:2] if slow else ())]
    for name in hit:
        fleet.machine(name)  # an unknown machine is told before the search, not after it
    lengths = workload.open_trace(trace, source=kind, seed=seed)
    demand = Demand.of(lengths, rate)
    target = options.targets(slo) if slo else scaled(reference(llm, demand), slo_scale)
    settings = CostSettings(max_stages=max_stages)
    if budget is not None:
        fleet = best_part(fleet, budget, llm, demand, target, settings=settings)
        rented = [machine.name for machine in fleet.machines]
        for name in hit:
            if name not in rented:
                raise ParameterError(
                    f"Machine {name} is not among those that {budget:g} $/h rent.",
                    resolve=f"choose one of {', '.join(rented)}, or another budget.",
                )
    tabu = None if steps is None else TabuSettings(steps=steps)
    made = plan(fleet, llm, demand, target, settings=settings, tabu=tabu, seed=seed)
    service = PhaseService.of(made, "service")
    later = workload.open_trace(shift, source=kind, seed=seed) if shift else None
    change = _change(service, lose or [], lose_gpu, slow, shift)
    new = Demand.of(later, rate) if later is not None else None
    rng = stream(seed, "arrivals")
    served = lengths.sample(min(requests, len(lengths)), rng).poisson(rate, rng)
    if later is not None:
        served = _joined(served, later, at, rng)
    found: dict[str, tuple[Rescheduling, Episode, float] | str] = {}
    for one in chosen:
        start = time.perf_counter()
        try:
            answer = policy_.reschedule(
                service,
                change,
                one,  # type: ignore[arg-type]
                demand=new,
                tabu=tabu,
                disk=Disk(bandwidth_gbs=disk_gbs),
                seed=seed,
            )
        except InfeasibleError as error:
            found[one] = str(error)
            continue
        took = time.perf_counter() - start if search_s is None else search_s
        took = 0.0 if one == "none" else took
        episode = answer.episode(
            served, at, search_s=took, ending="drain" if drain else "abrupt", seed=seed
        )
        found[one] = (answer, episode, took)
    record = _record(service, change, found, at, target)
    if as_json:
        print(options.to_json(record), end="")
        return
    print(made)
    print(f"\nAt {at:g} s {change.what}.\n")
    for outcome in found.values():
        if not isinstance(outcome, str):
            print(outcome[0], end="\n\n")
    print(_table(record))


def _check(lose: list[str], gpu: str, slow: str, shift: str) -> None:
    from hetero.errors import ParameterError

    given = [bool(lose), bool(gpu), bool(slow), bool(shift)]
    if sum(given) != 1:
        raise ParameterError(
            f"{sum(given) or 'None'} of --lose, --lose-gpu, --slow and --shift given.",
            resolve="give one of them (--lose may be repeated).",
        )
    if slow:
        _slowed(slow)


def _slowed(text: str) -> tuple[str, str, float]:
    """Two machines and the share that is left of the bandwidth between them."""
    from hetero.errors import ParameterError

    pair, _, share = text.partition("=")
    names = [name.strip() for name in pair.split(",")]
    try:
        return names[0], names[1], float(share)
    except (ValueError, IndexError):
        raise ParameterError(
            f"--slow cannot read '{text}'.", resolve="write two machines, as a,b=0.1."
        ) from None


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


def _joined(first: Any, later: Any, at_s: float, rng: Any) -> Any:
    """Requests of one trace before a time, and of another from then on."""
    import numpy as np

    from hetero.workload import Trace

    before = first.arrival_s < at_s
    chosen = rng.integers(0, len(later), int((~before).sum()))
    rest = later.all_at_once().take(chosen)
    return Trace(
        first.arrival_s,
        np.concatenate([first.input_tokens[before], rest.input_tokens]),
        np.concatenate([first.output_tokens[before], rest.output_tokens]),
        name=f"{first.name}, then {later.name}",
    )


def _record(
    service: PhaseService,
    change: ClusterChange,
    found: dict[str, tuple[Rescheduling, Episode, float] | str],
    at_s: float,
    target: Any,
) -> dict[str, Any]:
    """Everything as JSON values."""
    from hetero.simulator.saturation import attainment

    rows: list[dict[str, Any]] = []
    for name, one in found.items():
        if isinstance(one, str):
            rows.append({"policy": name, "error": one})
            continue
        answer, episode, took = one
        run = episode.run
        price = answer.after.cluster.usd_per_h
        tokens = run.requests["input_tokens"] + run.requests["output_tokens"]
        later = (run.requests["arrival_s"] >= at_s) & run.finished
        span = float(run.requests["finish_s"][later].max() - at_s) if later.any() else 0.0
        cost = None
        if price is not None and span > 0:
            cost = price * span / 3600.0 / float(tokens[later].sum()) * 1e6
        rows.append(
            {
                "policy": name,
                "prefill_groups": answer.after.ratio[0],
                "decode_groups": answer.after.ratio[1],
                "turned": list(answer.turned),
                "search_s": took,
                "reload_s": answer.reload_s,
                "estimate": answer.after.attainment,
                "attainment_of_episode": attainment(run, target),
                "in_flight_at_change": episode.in_flight(at_s),
                "routed_again": episode.routed_again,
                "lost": episode.lost - episode.too_long,
                "too_long": episode.too_long,
                "nothing_up_s": sum(end - begin for begin, end in episode.waits),
                "usd_per_mtok": cost,
            }
        )
    return {
        "cluster": service.cluster.name,
        "usd_per_h": service.cluster.usd_per_h,
        "what": change.what,
        "at_s": at_s,
        "policies": rows,
    }


def _table(record: dict[str, Any]) -> Any:
    from hetero.display import Column, Table

    rows, notes = [], []
    for row in record["policies"]:
        if "error" in row:
            rows.append((row["policy"], *[None] * 9))
            notes.append(f"{row['policy']}: {row['error']}")
            continue
        rows.append(
            (
                row["policy"],
                f"{row['prefill_groups']}:{row['decode_groups']}",
                100 * row["estimate"],
                100 * row["attainment_of_episode"],
                row["search_s"],
                row["reload_s"],
                row["in_flight_at_change"],
                row["routed_again"],
                row["lost"],
                row["usd_per_mtok"],
            )
        )
        if row["too_long"]:
            notes.append(
                f"{row['policy']}: {row['too_long']} requests are longer than any cache of the plan"
            )
    columns = (
        Column("policy"),
        Column("prefill:decode"),
        Column("estimate", "%"),
        Column("met in the episode", "%"),
        Column("search", "s", 3),
        Column("reload", "s", 3),
        Column("in flight"),
        Column("routed again"),
        Column("lost"),
        Column("cost after", "$/10^6 tokens"),
    )
    return Table(f"After {record['what']}", columns, tuple(rows), tuple(notes))
