"""Layers over a network of nodes: Helix with our planner, and the placements it compares with."""

from __future__ import annotations

from collections.abc import Callable

from hetero.errors import InfeasibleError
from hetero.placement import FlowNetwork, Placement
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, planner
from hetero.planners.helix import heuristics
from hetero.planners.helix.nodes import Nodes, degrees, nodes
from hetero.planners.helix.planner import search
from hetero.planners.helix.regions import PlacementEffort
from hetero.planners.score import margin, screened
from hetero.plans import Group, Layers, Plan
from hetero.question import Question
from hetero.routers.pipelines import FlowRouter

_ADMITTED = "Requests are admitted as KV cache is free, as for all plans of layers here."


@planner("layer placement", ground.unfit_layers)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Which node holds which layers, for the largest flow of tokens (Helix, our planner)."""
    how = PlacementEffort(
        steps=300,
        variety=effort.variety,
        exchanges=effort.exchanges,
        exact_nodes=effort.exact_nodes,
        proof=effort.proof,
        keep=effort.keep,
        shallow=(0.9, 0.7, 0.5),
    )

    def placed(where: Nodes) -> list[Plan]:
        found = search(where.problem, effort=how, seed=question.seed)
        tokens = where.means.input_tokens + where.means.output_tokens
        return [
            plan_of_layers(
                plan.name,
                question,
                where,
                one.flow.network,
                "along the maximum flow",
                (
                    f"Maximum flow {one.tokens_per_s:,.0f} tokens/s, {100 * one.gap:.2g} % "
                    "from its bound.",
                ),
                bound_rps=found.bound.tokens_per_s / tokens,
                evidence=found,
            )
            for one in found.best
        ]

    return _best(question, effort, placed)


@planner("separate pipelines", ground.unfit_layers)
def separate(question: Question, effort: Effort = NORMAL) -> Plan:
    """Chains of equal parts, of nodes of one kind each."""
    return _of(question, effort, separate.name, lambda one: heuristics.separate(one.problem))


@planner("Swarm", ground.unfit_layers)
def swarm(question: Question, effort: Effort = NORMAL) -> Plan:
    """Equal stages, every node joins the weakest."""
    return _of(
        question, effort, swarm.name, lambda one: heuristics.swarm(one.problem), notes=(_ADMITTED,)
    )


@planner("Petals", ground.unfit_layers)
def petals(question: Question, effort: Effort = NORMAL) -> Plan:
    """Every node holds as many layers as it can, where the layers have the least throughput."""
    return _of(
        question,
        effort,
        petals.name,
        lambda one: heuristics.petals(one.problem, seed=question.seed),
        partial_inference=True,
    )


def _of(
    question: Question,
    effort: Effort,
    name: str,
    placement: Callable[[Nodes], Placement],
    *,
    partial_inference: bool = False,
    notes: tuple[str, ...] = (),
) -> Plan:
    def placed(where: Nodes) -> list[Plan]:
        network = FlowNetwork(placement(where), partial_inference)
        if partial_inference:
            network.max_flow()  # says which layer or link is missing
        return [plan_of_layers(name, question, where, network, "along the maximum flow", notes)]

    return _best(question, effort, placed)


def _best(question: Question, effort: Effort, placed: Callable[[Nodes], list[Plan]]) -> Plan:
    """The placement that carries most, over the degrees that nodes may have.

    Raises
    ------
    InfeasibleError
        If there is no placement for any degree; the text is that of the largest.
    """
    found: list[Plan] = []
    reason: InfeasibleError | None = None
    for cap in degrees(question)[: effort.node_degrees]:
        try:
            found += placed(nodes(question, cap))
        except InfeasibleError as error:
            reason = reason or error
    if not found:
        assert reason is not None
        raise reason
    if len(found) == 1:
        return found[0]
    short = ground.short(question, effort.requests)
    best, value = found[0], -1.0
    for one in found:
        # Most cannot reach the best so far: one run shows it.
        if value > 0 and margin(one, short, value, question.seed) < 0:
            continue
        rate = screened(
            one, short, question.seed, start_rps=value if value > 0 else None, precision=0.05
        )
        if rate > value:
            best, value = one, rate
    return best


def plan_of_layers(
    planner: str,
    question: Question,
    where: Nodes,
    network: FlowNetwork,
    routing: str,
    notes: tuple[str, ...] = (),
    *,
    bound_rps: float | None = None,
    evidence: object = None,
) -> Plan:
    """A plan of layers placed over a network, simulated by the simulator of pipelines."""
    costs, placement = ground.costs(question), network.placement
    engine = question.engine.limits(*(machine.gpu for machine in costs.machines))
    prompt_tokens = engine.max_step_tokens / float(engine.max_batch)
    groups, price = [], 0.0
    known = True
    for k, held in enumerate(placement.ranges):
        if held is None:
            continue
        machine = costs.machines[where.machines[k]]
        stage = (machine.name, machine.gpu.name, where.gpus[k], held[1] - held[0])
        groups.append(Group(where.problem.nodes[k].name, "both", (stage,)))
        known = known and machine.usd_per_h is not None
        price += (machine.usd_per_h or 0.0) * where.gpus[k] / machine.count
    left = question.cluster.gpus - sum(group.stages[0][2] for group in groups)
    return Plan(
        planner=planner,
        groups=tuple(groups),
        serving=Layers(placement, network.partial_inference, prompt_tokens),
        router=FlowRouter(expected_output_tokens=where.means.output_tokens),
        routing=routing,
        usd_per_h=price if known else None,
        bound_rps=bound_rps,
        bound="maximum flow of any placement of these nodes" if bound_rps else "",
        notes=notes + ((f"Idle: {left} GPUs.",) if left else ()),
        options={
            f"layers of {group.name}": f"{held[0]} to {held[1] - 1}"
            for group, held in zip(
                groups, (one for one in placement.ranges if one is not None), strict=True
            )
        },
        evidence=evidence,
    )
