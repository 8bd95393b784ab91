"""What becomes of a service when GPUs, links or the workload change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.apps.answers import Answer
from hetero.apps.ask import RESCHEDULE, PhaseAsk, asks, choice, pairs
from hetero.costs.cost import IN_PAPERS
from hetero.costs.demand import Demand, reference, scaled
from hetero.errors import require
from hetero.planners.reschedule import change
from hetero.planners.reschedule.change import ClusterChange
from hetero.planners.reschedule.comparison import compare, joined
from hetero.planners.reschedule.service import PhaseService
from hetero.planners.thunderserve.phases import best_part, phases
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.simulator import Slo
from hetero.streams import stream

_POLICIES = ("none", "light", "full")
_SLOW = "write two machines, as a,b=0.1."


@asks(RESCHEDULE, PhaseAsk)
def reschedule(ask: PhaseAsk) -> Answer:
    """Plan a service, let something happen to it, and play the episode under each policy.

    The plan is that of :func:`hetero.apps.answers.phases.phases` with the same words.
    """
    chosen: list[Any] = [
        choice("--policies", part.strip(), _POLICIES) for part in ask.policies.split(",")
    ]
    lose, lose_gpu, slow, shift = [*(ask.lose or ())], ask.lose_gpu, ask.slow, ask.shift
    seed, at, slo, budget = ask.seed, ask.at, ask.targets, ask.budget
    given = sum(map(bool, (lose, lose_gpu, slow, shift)))
    require(
        given == 1,
        f"{given or 'None'} of --lose, --lose-gpu, --slow and --shift given.",
        resolve="give one of them (--lose may be repeated).",
    )
    hit = [*lose, *filter(None, [lose_gpu]), *(_slowed(slow)[:2] if slow else ())]
    fleet, llm = ask.fleet, ask.llm
    for name in hit:
        fleet.machine(name)  # an unknown machine is told before the search, not after it
    lengths = ask.opened()
    demand = Demand.of(lengths, ask.rate)
    target = slo if slo != Slo() else scaled(reference(llm, demand), ask.slo_scale)
    settings = replace(IN_PAPERS, max_stages=ask.max_stages)
    if budget is not None:
        fleet = best_part(fleet, budget, llm, demand, target, settings=settings)
        rented = [machine.name for machine in fleet.machines]
        for name in hit:
            require(
                name in rented,
                f"Machine {name} is not among those that {budget:g} $/h rent.",
                resolve=f"choose one of {', '.join(rented)}, or another budget.",
            )
    tabu = None if ask.steps is None else TabuSettings(steps=ask.steps)
    made = phases(fleet, llm, demand, target, settings=settings, tabu=tabu, seed=seed)
    service = PhaseService.of(made, "service")
    later = replace(ask, trace=shift).opened() if shift else None
    happened = _change(service, lose, lose_gpu, slow, shift)
    rng = stream(seed, "arrivals")
    served = lengths.sample(min(ask.requests or 0, len(lengths)), rng).poisson(ask.rate, rng)
    found = compare(
        service,
        happened,
        chosen,
        served if later is None else joined(served, later, at, rng),
        at,
        target,
        demand=None if later is None else Demand.of(later, ask.rate),
        tabu=tabu,
        disk_gbs=ask.disk_gbs,
        search_s=ask.search_s,
        ending="drain" if ask.drain else "abrupt",
        seed=seed,
    )
    answers = [one.answer for one in found.outcomes.values() if not isinstance(one, str)]
    return Answer(found, found.to_dict(), (made, f"At {at:g} s {happened.what}.", *answers, found))


def _slowed(text: str) -> tuple[str, str, float]:
    """Two machines and the share that is left of the bandwidth between them."""
    ((pair, share),) = pairs("--slow", [text], float, _SLOW).items()
    first, comma, second = (part.strip() for part in pair.partition(","))
    require(bool(comma), f"--slow cannot read '{text}'.", resolve=_SLOW)
    return first, second, share


def _change(
    service: PhaseService, lose: list[str], gpu: str, slow: str, shift: str
) -> ClusterChange:
    """What happens, from the options."""
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
