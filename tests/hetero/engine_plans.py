"""Plans for vLLM on fleets drawn at random, for the tests of engines and exporters."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from hetero import catalog, workload
from hetero.apps.cards.request import request
from hetero.apps.export import Service
from hetero.cluster import Cluster, Machine, Network
from hetero.engines import PAPERS, EngineSpec
from hetero.planners.base import Effort
from hetero.question import Question
from hetero.search.portfolio import Tried, ask, planner, portfolio
from hetero.simulator import Slo

LITTLE = Effort(
    requests=100, rates=1, tabu_steps=3, tabu_neighbours=4, generations=3, population=6, layouts=16,
    node_degrees=1, exchanges=20, variety=2, exact_nodes=20, keep=2, parts=1, improved=2,
    designs=20,
)  # fmt: skip
CHATS = workload.load("azure2023_conv").sample(120, np.random.default_rng(3))
OF_GROUPS = (
    *("tensor-parallel search", "Mélange", "vLLM homogeneous", "DistServe", "HexGen"),
    *("phase splitting", "phase splitting, tabu"),
)
GPUS = (
    *("H100-SXM", "A100-SXM-80GB", "L40S", "A10G", "MI300X", "MI355X", "Gaudi3", "RTX-3090"),
    *("V100-16GB", "Arc-Pro-B60", "L4"),
)
MODELS = ("Llama-3.1-8B", "LLaMA-1-13B", "Mixtral-8x7B", "Llama-3.1-70B", "LLaMA-1-30B")
SEEDS, MORE = (1, 2, 3, 4, 10), (0, 5, 6, 7)  # all have plans; those of more take longer


def as_in_papers(*case: Any, engine: EngineSpec = PAPERS, **more: Any) -> Question:
    """A question for the engine that the papers' systems stand for."""
    return Question(*case, engine=engine, **more)


def fleet(seed: int) -> Cluster:
    """One to four types of GPU in one to three regions, 2 to 12 GPUs."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(GPUS, int(rng.integers(1, 5)), replace=False)
    machines, left = [], 12
    for gpu in kinds:
        count = int(rng.choice([1, 2, 4, 8]))
        for _ in range(int(rng.integers(1, 4))):
            if count <= left:
                region = f"r{rng.integers(3)}"
                found = catalog.gpu(str(gpu))
                machines.append(Machine(f"m{len(machines)}", found, count, region=region))
                left -= count
    near, far = catalog.link("Ethernet-100G"), catalog.link("Ethernet-10G")
    where = Network(within_region=near, between_regions=far)
    return Cluster(f"fleet {seed}", tuple(machines), where)


@lru_cache(maxsize=16)
def planned(seed: int) -> tuple[Question, tuple[Tried, ...]]:
    """What the planners of groups and the portfolio make of a fleet."""
    asked = {"model": MODELS[seed % len(MODELS)], "trace": CHATS, "slo": Slo(4.0, 0.3)}
    question = request(fleet(seed), rate=1.0, **asked).question
    tried = [ask(planner(name, LITTLE), question) for name in OF_GROUPS]
    good = [one for one in tried if one.plan is not None]
    three = [planner(one.planner, LITTLE) for one in good[:3]]
    return question, (*good, portfolio(question, effort=LITTLE, planners=three).best)


def services(seed: int) -> list[Service]:
    """Every plan of a fleet, ready for export."""
    question, tried = planned(seed)
    return [
        Service.of_plan(one.plan, question.llm, question.cluster.name, engine="vllm")
        for one in tried
        if one.plan is not None
    ]
