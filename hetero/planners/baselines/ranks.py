"""Expert parallelism as engines have it: ranks of an engine share out the experts of a mixture."""

from __future__ import annotations

from dataclasses import replace

from hetero.deployment import Deployment, Replica
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, planner
from hetero.planners.score import Rank, score
from hetero.plans import Group, Plan
from hetero.question import Question
from hetero.routers import Predictive

NAME = "expert parallelism"


def _unfit(question: Question) -> str | None:
    """Dense models have no experts to spread, and the papers' systems no ranks."""
    if not question.llm.experts or question.engine.name == "any":
        return "Ranks spread the experts of a mixture, under an engine that exists."
    return ground.unfit(question)


@planner(NAME, _unfit)
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """One replica per machine, its experts spread by as many ranks as are best for its kind."""
    nodes: list[Replica] = []
    groups: list[Group] = []
    for numbers in ground.alike(question.cluster):
        part, count = ground.only(question, numbers), question.cluster.machines[numbers[0]].count
        found = (_spread(part, d, NAME) for d in range(2, count + 1) if count % d == 0)
        scored = [(Rank(score(one, part, seeds=(part.seed,))), one) for one in found if one]
        if scored:
            _, best = max(scored, key=lambda one: one[0])
            nodes += best.deployment.replicas if best.deployment else ()
            groups += best.groups
    if not nodes:
        raise InfeasibleError(
            f"{question.llm.name} fits no machine of {question.cluster.name} in ranks.",
            resolve="offer larger machines, or plan with tensor parallelism.",
        )
    made = Deployment(f"{NAME} on {question.cluster.name}", tuple(nodes))
    return Plan(NAME, tuple(groups), made, Predictive(), "hetero", made.usd_per_h)


def _spread(question: Question, ranks: int, name: str) -> Plan | None:
    """Every machine as one replica of so many ranks; None where the model does not fit."""
    costs, machines = ground.costs(question), question.cluster.machines
    tensor = machines[0].count // ranks
    if not costs.divides(tensor) or machines[0].count > question.llm.experts:
        return None
    try:
        found = ground.in_ranks(question, {one.name: tensor for one in machines}, ranks)
    except InfeasibleError:
        return None
    nodes = [replace(one, step=replace(one.step, level="")) for one in found.replicas]
    words = f"TP {tensor} x DP {ranks}, EP {tensor * ranks}"
    stages = [((m.name, m.gpu.name, m.count, question.llm.layers),) for m in machines]
    groups = [
        Group(one.name, "both", at, words=words, tensor=tensor)
        for one, at in zip(nodes, stages, strict=True)
    ]
    return Plan(name, tuple(groups), Deployment(name, tuple(nodes)), Predictive(), "hetero", None)
