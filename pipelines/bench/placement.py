"""How long our planner takes on Helix's clusters, and on larger ones, with the bound it proves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.catalog import Link, gpu, llm
from hetero.cluster import Cluster, Machine
from hetero.cluster import Network as Links
from hetero.display import Column, Table
from hetero.placement import Problem
from hetero.planners.helix import FlowPlan, search
from hetero.planners.helix.planner import timing_key
from hetero.streams import stream
from hetero.timings import Timing
from pipelines.bench.measured import Measured, Say, silent
from pipelines.studies.helix_artifact import problem

CASES = (
    ("single-24", "70B"),
    ("hetero-42", "70B"),
    ("geo-24", "70B"),
    ("small-10", "30B"),
    ("single-24", "30B"),
    ("geo-24", "30B"),
)
"""Helix's clusters and models."""

GUROBI = {
    ("single-24", "70B"): (1289.56, 476.0),
    ("hetero-42", "70B"): (4892.24, 0.0),
    ("geo-24", "70B"): (1212.18, 2655.0),
    ("small-10", "30B"): (286.587, 277.0),
}
"""Best objective in the artifact's logs [tokens/s] and when it was found [s]; 20 threads."""

_KINDS = (
    ("A100-SXM-40GB", 1),
    ("V100-16GB", 1),
    ("L4", 1),
    ("L4", 2),
    ("T4", 1),
    ("T4", 2),
    ("T4", 4),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One cluster that was planned."""

    cluster: str
    model: str
    nodes: int
    plan: FlowPlan

    @property
    def gurobi(self) -> tuple[float | None, float | None]:
        """Best objective of the artifact's solver [tokens/s], and when it was found [s]."""
        return GUROBI.get((self.cluster, self.model), (None, None))


_COLUMNS = (
    Column("cluster"),
    Column("model"),
    Column("nodes"),
    Column("flow", "tokens/s", 6, of="plan.tokens_per_s"),
    Column("bound", "tokens/s", 6, of="plan.bound.tokens_per_s"),
    Column("gap", "%", 3, of=lambda one: 100 * one.plan.gap),
    Column("time", "s", 3, of="plan.seconds"),
    Column("Gurobi's best", "tokens/s", 6, of=lambda one: one.gurobi[0]),
    Column("found after", "s", 3, of=lambda one: one.gurobi[1]),
)


@dataclass(frozen=True, slots=True, repr=False)
class PlacementBench(Measured):
    """All clusters that were planned."""

    planned: tuple[Planned, ...]

    def table(self) -> Table:
        """One row per cluster, the artifact's solver beside it."""
        return Table.of(
            "Placement over layers: our planner on one core",
            _COLUMNS,
            self.planned,
            "Gurobi 11 on 20 threads, from the logs of the Helix artifact; its bounds stay far "
            "off.",
        )

    def record(self) -> dict[str, object]:
        """The same as plain values."""
        return {
            f"{one.cluster} {one.model}": {
                "nodes": one.nodes,
                "tokens_per_s": float(np.round(one.plan.tokens_per_s, 3)),
                "bound_tokens_per_s": float(np.round(one.plan.bound.tokens_per_s, 3)),
                "seconds": one.plan.seconds,
                "steps": {step.name: step.seconds for step in one.plan.steps},
            }
            for one in self.planned
        }

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Elapsed time after every step of the planner."""
        return tuple(
            Timing.here(
                timing_key(one.cluster, one.model, step.name),
                step.seconds,
                command="hetero bench placement --record",
                clock="wall",
            )
            for one in self.planned
            for step in one.plan.steps
        )


def bench(sizes: tuple[int, ...] = (), *, progress: Say = silent) -> PlacementBench:
    """Plan Helix's clusters, and random ones of the given numbers of nodes in several regions."""
    found = []
    warm_up()
    for name, model in CASES:
        progress(f"{model} on {name}")
        case = problem(name, model)
        found.append(Planned(name, model, len(case.nodes), search(case)))
    for size in sizes:
        progress(f"{size} random nodes")
        fleet = random_cluster(size, regions=max(2, min(5, size // 40)))
        planned = search(Problem.of(fleet, llm("Llama-2-70B")))
        found.append(Planned(fleet.name, "70B", size, planned))
    return PlacementBench(tuple(found))


def warm_up() -> None:
    """Compile the kernels, so that no time holds it."""
    search(problem("small-10", "30B"))
    search(random_problem(8, seed=1))


def random_problem(nodes: int, seed: int = 0) -> Problem:
    """Llama-2-70B on a random cluster of one region whose nodes are A100 or larger."""
    draws = stream(seed, "kinds")
    kinds = [("A100-SXM-40GB", 1), ("L4", 2), ("T4", 4)]
    drawn = (kinds[int(draws.integers(len(kinds)))] for _ in range(nodes))
    machines = [Machine(f"node-{k + 1}", gpu(name), n) for k, (name, n) in enumerate(drawn)]
    fleet = Cluster(f"random-{nodes}", tuple(machines), _network())
    return Problem.of(fleet, llm("Llama-2-70B"))


def random_cluster(nodes: int, *, regions: int, seed: int = 0) -> Cluster:
    """A cluster of Helix's seven kinds of nodes, drawn evenly, 100 Mbit/s between its regions."""
    draws = stream(seed, "cluster")
    machines = tuple(
        Machine(f"node-{k + 1}", gpu(name), count, f"region-{int(draws.integers(regions)) + 1}")
        for k in range(nodes)
        for name, count in (_KINDS[int(draws.integers(len(_KINDS)))],)
    )
    return Cluster(f"random-{nodes}", machines, _network())


def _network() -> Links:
    def link(gbs: float, latency_s: float) -> Link:
        return Link(name="link", bandwidth_gbs=gbs, latency_s=latency_s, kind="network")

    return Links(
        within_region=link(1.25, 0.001),
        between_regions=link(0.0125, 0.05),
        coordinator=link(0.0125, 0.05),
    )
