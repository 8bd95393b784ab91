"""ThunderServe: prefill and decode on different groups of mixed GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hetero.catalog.engines import EngineStage
from hetero.costs.cost import PipelineStage
from hetero.costs.transfer import KvTransfer
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.base import (
    NORMAL,
    Effort,
    best_over_rates,
    idle,
    plan_of,
    planner,
    too_few_groups,
)
from hetero.planners.score import screened
from hetero.planners.thunderserve.phases import Search, phases
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.plans import Plan
from hetero.question import Question


def _unfit(question: Question) -> str | None:
    """No network, no KV cache on its way."""
    reason = ground.unfit(question) or ground.unfit_split(question)
    if reason is None and not _platforms(question):
        engine = question.engine.serving.title
        gpus = ", ".join(question.cluster.gpu_types)
        return f"{engine} has no connector that moves KV caches between {gpus}."
    return reason


@planner("phase splitting", _unfit)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Groups and phases by our integer program, then tabu search."""
    return _plan(question, effort, "patterns")


@planner("phase splitting, tabu", _unfit)
def tabu(question: Question, effort: Effort = NORMAL) -> Plan:
    """Groups and phases by the search of the paper."""
    return _plan(question, effort, "tabu")


def _plan(question: Question, effort: Effort, search: Search) -> Plan:
    # KV caches travel between devices of one platform only: the best of them is taken.
    best: tuple[float, Plan] | None = None
    reason: InfeasibleError | None = None
    parts = _platforms(question)
    for numbers in parts:
        whole = len(numbers) == len(question.cluster.machines)
        part = question if whole else ground.only(question, numbers)
        try:
            plan = best_over_rates(part, effort, partial(_at_rate, effort=effort, search=search))
        except InfeasibleError as error:
            reason = reason or too_few_groups(part, error)
            continue
        plan = plan if whole else _within(question, numbers, plan)
        value = -1.0
        if len(parts) > 1:
            short = ground.short(question, effort.requests)
            value = screened(plan, short, question.seed, precision=0.05)
        if best is None or value > best[0]:
            best = value, plan
    if best is None:
        assert reason is not None
        raise reason from None
    return best[1]


def _at_rate(question: Question, effort: Effort, search: Search) -> Plan:
    found = phases(
        question.cluster,
        question.llm,
        ground.demand(question),
        ground.targets(question),
        search=search,
        settings=ground.costs(question).settings,
        transfer=KvTransfer(bits=question.transfer_bits),
        tabu=TabuSettings(
            steps=effort.tabu_steps,
            neighbours=effort.tabu_neighbours,
            stall=max(1, effort.tabu_steps // 3),
        ),
        seed=question.seed,
    )
    name = plan.name if search == "patterns" else tabu.name
    share = found.orchestration.share
    total = float(share.sum()) or 1.0
    shares = dict(zip(found.names[0], share.sum(axis=1) / total, strict=True))
    shares |= dict(zip(found.names[1], share.sum(axis=0) / total, strict=True))
    title = f"{name} on {question.cluster.name}"
    return plan_of(
        name,
        found.deployment(name=title),
        [*found.prefill, *found.decode],
        found.router(),
        "fixed shares of pairs of replicas, in rotation",
        shares={name: float(value) for name, value in shares.items()},
        notes=(
            f"{100 * found.value.attainment:.1f} % meet their targets at "
            f"{question.rate_rps:.4g} requests/s by the planner's own account.",
            f"KV caches travel in {question.transfer_bits} bits.",
        ),
        evidence=found,
    )


def _platforms(question: Question) -> tuple[tuple[int, ...], ...]:
    """Numbers of the machines between which KV caches can be sent, platform by platform."""
    machines, engine = question.cluster.machines, question.engine.serving
    found: dict[object, list[int]] = {}
    for number, machine in enumerate(machines):
        seen = EngineStage(number, machine.gpu.name, machine.gpu.vendor, 1)
        if engine.splits(seen, seen):
            where = engine.platform(machine.gpu.name, machine.gpu.vendor)
            found.setdefault(where, []).append(number)
    return tuple(map(tuple, found.values()))


def _within(question: Question, numbers: tuple[int, ...], plan: Plan) -> Plan:
    """A plan of some of the machines as one of the whole cluster, whose other GPUs are idle."""
    costs = ground.costs(question)
    pipelines = tuple(
        costs.pipeline([PipelineStage(numbers[s.machine], s.gpus, s.layers) for s in one.stages])
        for one in plan.pipelines
    )
    notes = [note for note in plan.notes if not note.startswith("Idle: ")]
    return replace(plan, pipelines=pipelines, notes=(*notes, *idle(pipelines)))
