"""Every time that notebooks cite: what is timed, how it is made, and what is called.

Each function is a command, ``hetero bench NAME``, and a table; ``keys`` keeps the rows whose key
begins with it. What is made is not timed, and made anew for each run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from hetero import workload
from hetero.catalog import llm
from hetero.cluster import Cluster, Machine, cluster
from hetero.costs.cost import IN_PAPERS, CostModel
from hetero.costs.demand import Demand, reference, scaled
from hetero.display import Column, Table
from hetero.errors import InfeasibleError, require
from hetero.placement import FlowNetwork, Problem
from hetero.planners import helix
from hetero.planners.base import EFFORTS
from hetero.planners.helix.planner import timing_key
from hetero.planners.rignall.direct import Direct
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.inner import Deviations
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import READINGS
from hetero.planners.rignall.search import Method, Objective, Space, search
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.patterns import polish
from hetero.planners.thunderserve.phases import PhasePlan, keep, replan
from hetero.planners.thunderserve.tabu import TabuSearch, TabuSettings
from hetero.routers.pipelines import FlowRouter
from hetero.search.portfolio import planners, portfolio
from hetero.timings import Timing
from pipelines.bench.measured import Measured, Say, silent, stopwatch
from pipelines.studies.contest import Match, Rules, case_of
from pipelines.studies.helix import run_offline
from pipelines.studies.helix_artifact import placement as published
from pipelines.studies.helix_artifact import problem
from pipelines.studies.island_outer_loop import PRICE, held, tabulated
from pipelines.studies.league import PORTFOLIO

_STATISTICS: dict[str, Callable[[list[float]], Any]] = {
    "single": np.median,
    "best": min,
    "median": np.median,
    "worst": max,
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One row of the table.

    Attributes
    ----------
    make
        What is called upon, by the number of the run.
    call
        What is timed; a mapping that it returns holds the times in its place, by key.
    """

    key: str
    make: Callable[[int], Any]
    call: Callable[[Any], object]
    statistic: Literal["single", "best", "median", "worst"] = "single"
    repeats: int = 1


@dataclass(frozen=True, slots=True, repr=False)
class Times(Measured):
    """Times by key."""

    times: tuple[Timing, ...]

    @property
    def timings(self) -> tuple[Timing, ...]:
        """All of them."""
        return self.times

    def table(self) -> Table:
        """One row per time."""
        columns = (
            *(Column("what", of="key"), Column("time", "s", 4, of="seconds")),
            *(Column("clock"), Column("statistic"), Column("runs", of="repeats")),
        )
        return Table.of("Times on this machine", columns, self.times)

    def record(self) -> dict[str, float]:
        """Seconds by key."""
        return {one.key: one.seconds for one in self.times}


def timed(
    rows: Iterator[Timed], command: str, keys: str, clock: Literal["cpu", "wall"], say: Say
) -> Times:
    """Time the rows whose key begins with ``keys``."""
    found: list[Timing] = []
    tick = time.process_time if clock == "cpu" else time.perf_counter
    for row in (row for row in rows if row.key.startswith(keys)):
        say(row.key)
        spent: list[float] = []
        parts: dict[str, float] = {}
        try:
            for k in range(row.repeats):
                made = row.make(k)
                with stopwatch(spent, tick):
                    got = row.call(made)
                parts = got if isinstance(got, dict) else {}
        except InfeasibleError:  # a planner of the arena that has no plan for this fleet
            continue
        seconds = parts or {row.key: float(_STATISTICS[row.statistic](spent))}
        for key, value in seconds.items():
            one = Timing.here(
                *(key, value), command=f"hetero bench {command} --record",
                statistic=row.statistic, repeats=row.repeats, clock=clock,
            )  # fmt: skip
            found.append(one)
    require(bool(found), f"No time begins with '{keys}'.", resolve="leave `keys` out to see all.")
    return Times(tuple(found))


# The arena ------------------------------------------------------------------------------------

MATCHES = (
    Match("heteroserve-8", "Qwen2.5-14B", "azure2023_conv"),
    Match("helix-single-24", "Qwen2.5-32B", "azure2023_conv"),
    Match("thunderserve-cloud-32", "Qwen2.5-32B", "azure2023_conv"),
    Match("current-mixed-32", "Llama-3.1-70B", "azure2023_conv"),
    Match("rignall-budget-a", "DeepSeek-V3-R1-671B", "azure2023_conv"),
)
"""A fleet of every size, with the model that the arena serves on it."""


def arena(*, keys: str = "", progress: Say = silent) -> Times:
    """Wall clock of one plan by every planner of the arena, on fleets of 8 to 256 GPUs."""
    return timed(_arena(), "arena", keys, "wall", progress)


def _arena() -> Iterator[Timed]:
    effort, rules = EFFORTS["quick"], Rules()
    asked = planners(effort)
    for match in MATCHES:
        case = case_of(match, rules)
        for one in asked:
            if not one.unfit(case):

                def made(k: int, match: Match = match, one: Any = one) -> Any:
                    if k == 0:
                        one.plan(case_of(match, rules))  # compiles, and fills what stays at hand
                    return case_of(match, rules)  # nothing is remembered of the last

                yield Timed(f"arena.plan.{one.name}/{match.cluster}", made, one.plan, "best", 3)
        every = partial(portfolio, planners=asked, effort=effort, seeds=rules.seeds[:1])
        key = f"arena.plan.{PORTFOLIO}/{match.cluster}"
        yield Timed(key, lambda _, case=case: replace(case), every)  # type: ignore[misc]


# Islands --------------------------------------------------------------------------------------

SEARCHED = {"B300": 128, "H200": 256}
"""Inventory of Rignall's section 5.3."""


def islands(*, keys: str = "", progress: Say = silent) -> Times:
    """CPU time of searches for islands with four batches, three of them proposed by Ax."""
    return timed(_islands(), "islands", keys, "cpu", progress)


def _islands() -> Iterator[Timed]:
    searches: list[tuple[Any, ...]] = [
        *((f"divider.batch{b}", Divider, "bo", b) for b in (4, 8, 16)),
        ("divider.skew1", partial(Divider, skew=1.0), "bo", 8),
        *((f"direct.{m}.batch{b}", Direct, m, b) for m, b in product(("bo", "saasbo"), (4, 16))),
    ]
    for name, *how in searches:
        yield Timed(f"islands.{name}", partial(_searched, *how), lambda run: run())


def _searched(
    space: Callable[[Any], Space], method: Method, batch: int, _: int
) -> Callable[[], object]:
    """A search with the program that the thesis prints, after a short one that imports."""
    model = IslandModel.of_trace(workload.load("azure2023_code"), 500, reading=READINGS["thesis"])
    objective = tabulated(model, tuple(SEARCHED), 256, Deviations(0.1, PRICE))
    inventory = held(objective.rates, tuple(SEARCHED.values()))
    search(Divider(inventory), Objective(objective.rates), "bo", batch=4, iterations=2)
    return partial(search, space(inventory), objective, method, batch=batch, iterations=4)


# Phases -----------------------------------------------------------------------------------------

_TRACES = {"coding": "azure2023_code", "conversation": "azure2023_conv"}


def phases(*, keys: str = "", progress: Say = silent) -> Times:
    """CPU time of plans for LLaMA-30B on ThunderServe's cloud: its tabu search, ours, light.

    The cloud, parts of it, and eight times it; the longer time of both workloads.
    """
    return timed(_phases(), "phases", keys, "cpu", progress)


def _phases() -> Iterator[Timed]:
    for gpus in (16, 24, 32, 256):
        made = partial(_evaluator, gpus)
        ours = partial(polish, settings=TabuSettings(steps=100 if gpus <= 32 else 10))
        yield Timed(f"phases.patterns.{gpus}", made, ours, "worst", 2)
        if gpus <= 32:
            tabu = partial(_tabu, gpus)
            yield Timed(f"phases.tabu.{gpus}", tabu, lambda found: found.run(), "worst", 2)
        if gpus == 32:
            yield Timed("phases.light.32", _other, lambda made: replan(*made), "worst", 2)


def _evaluator(gpus: int, k: int) -> Evaluator:
    """Plans on so many GPUs for one of the paper's workloads, after one that loads the solvers."""
    model = CostModel(_cloud(gpus), llm("LLaMA-1-30B"), IN_PAPERS)
    demand = Demand.of(workload.load([*_TRACES.values()][k]), 0.19 * gpus)
    made = Evaluator(model, demand, scaled(reference(model.llm, demand), 6.0))
    if k == 0:
        polish(_evaluator(16, 1), TabuSettings(steps=0))
    return made


def _tabu(gpus: int, k: int) -> TabuSearch:
    return TabuSearch.start(_evaluator(gpus, k))


def _other(k: int) -> tuple[Evaluator, Any]:
    """The best plan for a workload, and the evaluation for the other, pipelines as they are."""
    one = _evaluator(32, k)
    best = polish(one, TabuSettings(steps=100)).best
    if k == 0:
        replan(*_other(1))  # compiles what only this calls
    return replace(_evaluator(32, 1 - k), fixed=keep(PhasePlan.of(one, best))), best


def _cloud(gpus: int) -> Cluster:
    """16, 24 or 32 GPUs of the paper's cloud, or 256: eight times as many machines."""
    whole = cluster("thunderserve-cloud-32")
    copies = range(max(gpus // whole.gpus, 1))
    if len(copies) > 1:
        every = (replace(m, name=f"{m.name}-{k}") for m in whole.machines for k in copies)
        return replace(whole, name=f"{whole.name} x{len(copies)}", machines=tuple(every))
    # The paper does not say which; one machine of every kind first, then the second ones.
    kept: list[Machine] = []
    for machine in sorted(whole.machines, key=lambda m: (m.name.endswith("-2"), m.name)):
        count = min(machine.count, gpus - sum(one.count for one in kept))
        if count == machine.count:
            kept.append(machine)
        elif count:
            kept.append(replace(machine, count=count, usd_per_h=None))
    return replace(whole, name=f"{whole.name}, {gpus} GPUs", machines=tuple(kept))


# Layers -----------------------------------------------------------------------------------------


def pipelines(*, keys: str = "", progress: Say = silent) -> Times:
    """CPU time of 660 simulated seconds of Helix's clusters, kept full by its scheduler."""
    return timed(_pipelines(), "pipelines", keys, "cpu", progress)


def _pipelines() -> Iterator[Timed]:
    for setting in ("single-24 70B", "geo-24 70B", "hetero-42 70B"):

        def made(k: int, setting: str = setting) -> tuple[FlowNetwork, FlowRouter]:
            network = FlowNetwork(published(f"{setting} helix"))
            router = FlowRouter.offline(network.max_flow().link_tokens_per_s)
            if k == 0:
                run_offline(network, router, "twin", window_s=(1.0, 5.0))  # compiles
            return network, router

        def run(case: tuple[FlowNetwork, FlowRouter]) -> object:
            return run_offline(*case, source="twin")

        yield Timed(f"pipelines.{setting}", made, run, "best", 3)


def placement(*, keys: str = "", progress: Say = silent) -> Times:
    """Elapsed time of our planner of layer placements on Helix's clusters, after each step."""
    return timed(_placement(), "placement", keys, "wall", progress)


def _placement() -> Iterator[Timed]:
    for name, model in (
        ("single-24", "70B"),
        ("hetero-42", "70B"),
        ("geo-24", "70B"),
        ("small-10", "30B"),
        ("single-24", "30B"),
        ("geo-24", "30B"),
    ):

        def steps(case: Problem, name: str = name, model: str = model) -> dict[str, float]:
            found = helix.search(case).steps
            return {timing_key(name, model, one.name): one.seconds for one in found}

        def made(_: int, name: str = name, model: str = model) -> Problem:
            helix.search(problem("small-10", "30B"))  # compiles
            return problem(name, model)

        yield Timed(f"placement.{name}.{model}", made, steps)
