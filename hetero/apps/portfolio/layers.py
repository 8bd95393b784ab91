"""Layers over a network of nodes: Helix with our planner, and the placements it compares with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hetero.apps.portfolio.base import Adapter
from hetero.apps.portfolio.effort import Effort
from hetero.apps.portfolio.layer_kinds import Nodes, degrees, nodes
from hetero.apps.portfolio.score import margin, screened
from hetero.errors import InfeasibleError
from hetero.placement import FlowNetwork, Placement
from hetero.planners import ground, helix
from hetero.planners.helix import heuristics
from hetero.plans import Group, Layers, Plan
from hetero.question import Question
from hetero.routers.pipelines import FlowRouter

Heuristic: TypeAlias = Literal["separate pipelines", "Swarm", "Petals"]


@dataclass(frozen=True)
class LayerPlacement(Adapter):
    """Which node holds which layers, for the largest flow of tokens (Helix, our planner)."""

    @property
    def name(self) -> str:
        """Its name."""
        return "layer placement"

    def unfit(self, question: Question) -> str | None:
        """Engines of one's own, and a network for activations."""
        return ground.unfit_layers(question)

    def _plan(self, question: Question) -> Plan:
        effort = helix.PlacementEffort(
            steps=300,
            variety=self.effort.variety,
            exchanges=self.effort.exchanges,
            exact_nodes=self.effort.exact_nodes,
            proof=self.effort.proof,
            keep=self.effort.keep,
            shallow=(0.9, 0.7, 0.5),
        )

        def placed(where: Nodes) -> list[Plan]:
            found = helix.search(where.problem, effort=effort, seed=question.seed)
            tokens = where.means.input_tokens + where.means.output_tokens
            return [
                plan_of_layers(
                    self.name,
                    question,
                    where,
                    one.flow.network,
                    "along the maximum flow",
                    (
                        f"Maximum flow {one.tokens_per_s:,.0f} tokens/s, {100 * one.gap:.2g} % "
                        "from its bound.",
                    ),
                    bound_rps=found.bound.tokens_per_s / tokens,
                )
                for one in found.best
            ]

        return _best(question, self.effort, placed)


@dataclass(frozen=True)
class Heuristics(Adapter):
    """Placements that Helix compares with.

    Parameters
    ----------
    kind
        ``"separate pipelines"``: chains of equal parts, of nodes of one kind each. ``"Swarm"``:
        equal stages, every node joins the weakest. ``"Petals"``: every node holds as many layers
        as it can, where the layers have the least throughput.
    """

    kind: Heuristic = "separate pipelines"

    @property
    def name(self) -> str:
        """Its name."""
        return self.kind

    def unfit(self, question: Question) -> str | None:
        """Engines of one's own, and a network for activations."""
        return ground.unfit_layers(question)

    def _plan(self, question: Question) -> Plan:
        def placed(where: Nodes) -> list[Plan]:
            network = FlowNetwork(self._placement(where, question.seed), self.kind == "Petals")
            if self.kind == "Petals":
                network.max_flow()  # says which layer or link is missing
            notes = ("Requests are admitted as KV cache is free, as for all plans of layers here.",)
            return [
                plan_of_layers(
                    self.name,
                    question,
                    where,
                    network,
                    "along the maximum flow",
                    notes if self.kind == "Swarm" else (),
                )
            ]

        return _best(question, self.effort, placed)

    def _placement(self, where: Nodes, seed: int) -> Placement:
        if self.kind == "separate pipelines":
            return heuristics.separate(where.problem)
        if self.kind == "Swarm":
            return heuristics.swarm(where.problem)
        return heuristics.petals(where.problem, seed=seed)


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
) -> Plan:
    """A plan of layers placed over a network, played by the simulator of pipelines."""
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
    used = sum(group.stages[0][2] for group in groups)
    left = question.cluster.gpus - used
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
    )
