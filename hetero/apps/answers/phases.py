"""Prefill and decode on different groups of GPUs (ThunderServe), and how such a service changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hetero.apps.answers import Answer
from hetero.apps.ask import PHASES, RESCHEDULE, PhaseAsk, asks, choice, pairs
from hetero.costs.cost import IN_PAPERS
from hetero.costs.demand import Demand, reference, scaled
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.planners.reschedule import change
from hetero.planners.reschedule.change import ClusterChange
from hetero.planners.reschedule.episode import Ending, Episode
from hetero.planners.reschedule.policy import Policy, Rescheduling
from hetero.planners.reschedule.policy import reschedule as rescheduled
from hetero.planners.reschedule.reload import Disk
from hetero.planners.reschedule.service import PhaseService
from hetero.planners.thunderserve.phases import PhasePlan, best_part
from hetero.planners.thunderserve.phases import phases as plan
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.simulator import Slo, metrics, simulate, uncertainty
from hetero.simulator.metrics import attainment
from hetero.simulator.uncertainty import Choice, Rule
from hetero.streams import stream
from hetero.workload import Trace

_CHOICE_REQUESTS = 400  # that every plan serves with every draw of the step times
_POLICIES = ("none", "light", "full")
_SLOW = "write two machines, as a,b=0.1."


@asks(PHASES, PhaseAsk)
def phases(ask: PhaseAsk) -> Answer:
    """Divide a mixed fleet into groups, give each a phase, and route requests between them.

    Attainment is an estimate for Poisson arrivals; ``requests`` simulates the plan with as many of
    them. See :mod:`hetero.planners.thunderserve`.
    """
    seed, choose, requests = ask.seed, ask.choose, ask.requests or 0
    say = (lambda _: ask.progress(1)) if ask.progress else None
    lengths, target, planned = _planner(ask)
    seeds = [seed] if choose == "nominal" else [seed, seed + 1, seed + 2]
    plans = {f"seed {each}": planned(seed=each, progress=say) for each in seeds}
    chosen = None if choose == "nominal" else _robust(plans, lengths, choose, seed)
    found = plans[chosen.name if chosen else f"seed {seed}"]
    record = _record(found)
    if chosen is not None:
        record["chosen"] = {"rule": choose, "plan": chosen.name, "nominal": chosen.nominal}
    if requests:
        record["simulated"] = _simulated(found, lengths, requests, seed)
    goals = {"TTFT": target.ttft_s, "TPOT": target.tpot_s, "E2E": target.e2e_s}
    said = ", ".join(f"{name} {1e3 * goal:,.0f} ms" for name, goal in goals.items() if goal)
    lines = [str(found), f"Targets: {said}."]
    if requests:
        met = record["simulated"]
        shares = ", ".join(f"{key} {100 * part:.1f} %" for key, part in met["attainment"].items())
        usd = met["usd_per_mtok"] or float("nan")
        lines.append(
            f"Simulated with {requests:,} requests: {shares} met; {usd:,.3f} $ per 10^6 tokens."
        )
    return Answer(found, record, (*([chosen] if chosen else ()), "\n".join(lines)))


def _planner(ask: PhaseAsk) -> tuple[Trace, Slo, partial[PhasePlan]]:
    """Requests, their targets, and what plans for them with a seed."""
    transfer = KvTransfer(bits=ask.bits, overlap=ask.overlap)
    fleet, llm, lengths, target = ask.fleet, ask.llm, ask.opened(), ask.targets
    demand = Demand.of(lengths, ask.rate)
    target = target if target != Slo() else scaled(reference(llm, demand), ask.slo_scale)
    settings = replace(IN_PAPERS, max_stages=ask.max_stages)
    if ask.budget is not None:
        fleet = best_part(
            fleet, ask.budget, llm, demand, target, settings=settings, transfer=transfer
        )
    planned = partial(
        plan,
        fleet,
        llm,
        demand,
        target,
        search=ask.search,
        settings=settings,
        transfer=transfer,
        tabu=_tabu(ask),
        jobs=ask.jobs,
    )
    return lengths, target, planned


def _tabu(ask: PhaseAsk) -> TabuSettings | None:
    return None if ask.steps is None else TabuSettings(steps=ask.steps)


def _record(found: PhasePlan) -> dict[str, Any]:
    """The plan as JSON values."""
    slo, share = found.evaluator.slo, found.orchestration.share
    first, second = found.names
    machines = found.evaluator.model.machines
    replicas = [
        {
            "name": name,
            "phase": phase,
            "stages": [
                {
                    "machine": machines[stage.machine].name,
                    "gpus": stage.gpus,
                    "layers": stage.layers,
                }
                for stage in pipeline.stages
            ],
            "kv_tokens": pipeline.kv_tokens,
        }
        for names, built, phase in (
            (first, found.prefill, "prefill"),
            (second, found.decode, "decode"),
        )
        for name, pipeline in zip(names, built, strict=True)
    ]
    return {
        "cluster": found.evaluator.model.cluster.name,
        "model": found.evaluator.model.llm.name,
        "gpus": found.evaluator.model.cluster.gpu_counts,
        "usd_per_h": found.usd_per_h,
        "rate_rps": found.evaluator.demand.rate_rps,
        "targets": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s},
        "attainment": found.value.attainment,
        "headroom": found.value.headroom,
        "search": found.search,
        "designs_evaluated": found.tried,
        "replicas": replicas,
        "shares": [
            {"prefill": a, "decode": b, "share": float(share[i, j])}
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            if share[i, j] > 0
        ],
    }


def _robust(plans: dict[str, PhasePlan], lengths: Trace, rule: Rule, seed: int) -> Choice:
    """The plan that a rule chooses by the requests served within all targets."""
    first = next(iter(plans.values())).evaluator
    rng = stream(seed, "arrivals")
    served = lengths.sample(_CHOICE_REQUESTS, rng).poisson(first.demand.rate_rps, rng)
    cases = {
        name: uncertainty.JudgedPlan(
            _of_one_type(one), uncertainty.served(one.router(), served, first.slo, seed=seed)
        )
        for name, one in plans.items()
    }
    return uncertainty.robust(cases, "within targets [requests/s]", rule, seed=seed)


def _of_one_type(found: PhasePlan) -> Deployment:
    """The deployment, a pipeline over several GPU types named after that of its slowest stage."""
    slowest = {}
    for names, built in zip(found.names, (found.prefill, found.decode), strict=True):
        for name, pipeline in zip(names, built, strict=True):
            stage = pipeline.stages[int(pipeline.stage_seconds([1024.0])[:, 0].argmax())]
            slowest[name] = pipeline.model.machines[stage.machine].gpu
    whole = found.deployment()
    typed = tuple(replace(one, gpu=one.gpu or slowest[one.name]) for one in whole.replicas)
    return replace(whole, replicas=typed)


def _simulated(found: PhasePlan, lengths: Trace, requests: int, seed: int) -> dict[str, Any]:
    """Attainment and cost of the plan in a simulation with Poisson arrivals."""
    rng = stream(seed, "arrivals")
    served = lengths.sample(requests, rng).poisson(found.evaluator.demand.rate_rps, rng)
    seen = metrics(
        simulate(found.deployment(), served, found.router(), seed=seed), found.evaluator.slo
    )
    return {
        "requests": requests,
        "attainment": seen.attainment,
        "usd_per_mtok": seen.usd_per_mtok,
        "output_tps": seen.output_tps,
    }


# When something changes ---------------------------------------------------------------------


@asks(RESCHEDULE, PhaseAsk)
def reschedule(ask: PhaseAsk) -> Answer:
    """Plan a service, let something happen to it, and play the episode under each policy.

    The plan is that of :func:`hetero.apps.answers.phases.phases` with the same words.
    """
    chosen: list[Any] = [
        choice("--policies", part.strip(), _POLICIES) for part in ask.policies.split(",")
    ]
    lose, lose_gpu, slow, shift = [*(ask.lose or ())], ask.lose_gpu, ask.slow, ask.shift
    seed, at = ask.seed, ask.at
    given = sum(map(bool, (lose, lose_gpu, slow, shift)))
    require(
        given == 1,
        f"{given or 'None'} of --lose, --lose-gpu, --slow and --shift given.",
        resolve="give one of them (--lose may be repeated).",
    )
    hit = [*lose, *filter(None, [lose_gpu]), *(_slowed(slow)[:2] if slow else ())]
    offer = ask.fleet
    for name in hit:
        offer.machine(name)  # an unknown machine is told before the search, not after it
    lengths, target, planned = _planner(replace(ask, cluster=offer))
    rented = [machine.name for machine in planned.args[0].machines]
    for name in hit:
        if name not in rented:
            raise ParameterError(
                f"Machine {name} is not among those that {ask.budget:g} $/h rent.",
                resolve=f"choose one of {', '.join(rented)}, or another budget.",
            )
    made = planned(seed=seed)
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
        tabu=_tabu(ask),
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
        return ClusterChange(f"the workload shifts to {shift}", service.cluster)
    if gpu:
        service.cluster.machine(gpu)
        users = [one.name for one in service.groups if gpu in one.machines]
        if not users:
            return ClusterChange(
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
    return ClusterChange(f"{', '.join(lose)} {verb}", change.fewer(service.cluster, counts), lost)


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """A policy's answer to a change, and the episode that it led to.

    Attributes
    ----------
    search_s
        Time until the answer was there [s].
    """

    answer: Rescheduling
    episode: Episode
    search_s: float

    def usd_per_mtok(self, at_s: float) -> float | None:
        """Cost of the tokens of requests that came after the change [$/10^6 tokens]."""
        run, price = self.episode.run, self.answer.after.cluster.usd_per_h
        tokens = run.requests["input_tokens"] + run.requests["output_tokens"]
        later = (run.requests["arrival_s"] >= at_s) & run.finished
        span = float(run.requests["finish_s"][later].max() - at_s) if later.any() else 0.0
        if price is None or span <= 0:
            return None
        return price * span / 3600.0 / float(tokens[later].sum()) * 1e6


@dataclass(frozen=True, slots=True, repr=False)
class PolicyComparison(Shown):
    """Policies side by side.

    Attributes
    ----------
    outcomes
        What became of the service by policy, or why the policy has no answer.
    """

    service: PhaseService
    change: ClusterChange
    at_s: float
    slo: Slo
    outcomes: dict[Policy, PolicyOutcome | str]

    def _row(self, name: str, one: PolicyOutcome | str) -> dict[str, Any]:
        if isinstance(one, str):
            return {"policy": name, "error": one}
        answer, episode = one.answer, one.episode
        return {
            "policy": name,
            "prefill_groups": answer.after.ratio[0],
            "decode_groups": answer.after.ratio[1],
            "turned": list(answer.turned),
            "search_s": one.search_s,
            "reload_s": answer.reload_s,
            "estimate": answer.after.attainment,
            "attainment_of_episode": attainment(episode.run, self.slo),
            "in_flight_at_change": episode.in_flight(self.at_s),
            "routed_again": episode.routed_again,
            "lost": episode.lost - episode.too_long,
            "too_long": episode.too_long,
            "nothing_up_s": sum(end - begin for begin, end in episode.waits),
            "usd_per_mtok": one.usd_per_mtok(self.at_s),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return {
            "cluster": self.service.cluster.name,
            "usd_per_h": self.service.cluster.usd_per_h,
            "what": self.change.what,
            "at_s": self.at_s,
            "policies": [self._row(name, one) for name, one in self.outcomes.items()],
        }

    def table(self) -> Table:
        """One row per policy."""

        def share(key: str) -> Callable[[dict[str, Any]], float | None]:
            return lambda row: 100 * row[key] if key in row else None

        def of(key: str) -> Callable[[dict[str, Any]], object]:
            return lambda row: row.get(key)

        def ratio(row: dict[str, Any]) -> str | None:
            return None if "error" in row else f"{row['prefill_groups']}:{row['decode_groups']}"

        rows = self.to_dict()["policies"]
        long = "{policy}: {too_long} requests are longer than any cache of the plan"
        notes = [
            ("{policy}: {error}" if "error" in row else long).format(**row)
            for row in rows
            if "error" in row or row["too_long"]
        ]
        columns = (
            Column("policy", of=of("policy")),
            Column("prefill:decode", of=ratio),
            Column("estimate", "%", of=share("estimate")),
            Column("met in the episode", "%", of=share("attainment_of_episode")),
            Column("search", "s", 3, of=of("search_s")),
            Column("reload", "s", 3, of=of("reload_s")),
            Column("in flight", of=of("in_flight_at_change")),
            Column("routed again", of=of("routed_again")),
            Column("lost", of=of("lost")),
            Column("cost after", "$/10^6 tokens", of=of("usd_per_mtok")),
        )
        return Table.of(f"After {self.change.what}", columns, rows, *notes)


def compare(
    service: PhaseService,
    change: ClusterChange,
    policies: Sequence[Policy],
    served: Trace,
    at_s: float,
    slo: Slo,
    *,
    demand: Demand | None = None,
    tabu: TabuSettings | None = None,
    disk_gbs: float = 1.2,
    search_s: float | None = None,
    ending: Ending = "abrupt",
    seed: int = 0,
) -> PolicyComparison:
    """Play the episode of a change under each policy.

    Parameters
    ----------
    served
        Requests of the whole episode.
    at_s
        When the change happens [s].
    demand
        What the service is asked for from then on; by default what it was planned for.
    disk_gbs
        Disk bandwidth of a machine [GB/s].
    search_s
        Time until a new plan is there [s]; by default as measured here.
    """
    outcomes: dict[Policy, PolicyOutcome | str] = {}
    for one in policies:
        start = time.perf_counter()
        try:
            answer = rescheduled(
                service, change, one, demand=demand, tabu=tabu, disk=Disk(disk_gbs), seed=seed
            )
        except InfeasibleError as error:
            outcomes[one] = str(error)
            continue
        took = time.perf_counter() - start if search_s is None else search_s
        took = 0.0 if one == "none" else took
        episode = answer.episode(served, at_s, search_s=took, ending=ending, seed=seed)
        outcomes[one] = PolicyOutcome(answer, episode, took)
    return PolicyComparison(service, change, at_s, slo, outcomes)


def joined(first: Trace, later: Trace, at_s: float, rng: np.random.Generator) -> Trace:
    """Requests of one trace before a time [s], and drawn from another from then on."""
    before = first.arrival_s < at_s
    rest = later.all_at_once().take(rng.integers(0, len(later), int((~before).sum())))
    return Trace(
        first.arrival_s,
        np.concatenate([first.input_tokens[before], rest.input_tokens]),
        np.concatenate([first.output_tokens[before], rest.output_tokens]),
        name=f"{first.name}, then {later.name}",
    )
