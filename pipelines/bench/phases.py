"""How long planning of phase-split services takes: from scratch, rescheduled, and on 256 GPUs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

from hetero import workload
from hetero.catalog import llm
from hetero.cluster import Cluster, Machine, cluster
from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand, reference, scaled
from hetero.costs.groups import Design
from hetero.display import Column, Table
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.patterns import polish
from hetero.planners.thunderserve.phases import PhasePlan, keep, replan
from hetero.planners.thunderserve.tabu import TabuSearch, TabuSettings
from hetero.timings import Timing
from pipelines.bench.measured import Measured, Say, silent, stopwatch

MODEL = "LLaMA-1-30B"
TRACES = {"coding": "azure2023_code", "conversation": "azure2023_conv"}
PUBLISHED_S = {16: 21.0, 24: 36.0, 32: 54.0, 256: None}
"""Seconds that ThunderServe's search takes by number of GPUs (section 5.4)."""

RPS_PER_GPU = 0.19
SCALE = 6.0
LIGHT_PUBLISHED_S = 13.0


@dataclass(frozen=True, slots=True)
class TimedSearch:
    """One search: CPU and wall time, what it attained, and how many designs it evaluated."""

    what: str
    workload: str
    gpus: int
    cpu_s: float
    wall_s: float
    attainment: float
    score: float
    designs: int

    @property
    def published_s(self) -> float | None:
        """What the paper prints for it [s]."""
        return LIGHT_PUBLISHED_S if self.what == "light" else PUBLISHED_S.get(self.gpus)


_COLUMNS = (
    Column("search", of="what"),
    Column("workload"),
    Column("GPUs", of="gpus"),
    Column("CPU", "s", 3, of="cpu_s"),
    Column("elapsed", "s", 3, of="wall_s"),
    Column("published", "s", 3, of="published_s"),
    Column("attainment", "%", of=lambda one: 100.0 * one.attainment),
    Column("designs"),
)


@dataclass(frozen=True, slots=True)
class PhasesBench(Measured):
    """All searches of the benchmark."""

    searches: tuple[TimedSearch, ...]

    def table(self) -> Table:
        """One row per search, the published time beside it."""
        return Table.of(f"Plans for {MODEL}", _COLUMNS, self.searches)

    def record(self) -> list[dict[str, object]]:
        """One row per search, for JSON."""
        return [asdict(one) for one in self.searches]

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Longest CPU time over the workloads, by search and number of GPUs."""
        spent: dict[tuple[str, int], list[float]] = {}
        for one in self.searches:
            spent.setdefault((one.what, one.gpus), []).append(one.cpu_s)
        return tuple(
            Timing.here(
                f"phases.{what}.{gpus}",
                max(cpu_s),
                command="hetero bench phases --record",
                statistic="worst",
                repeats=len(cpu_s),
            )
            for (what, gpus), cpu_s in spent.items()
        )


def fleet(gpus: int) -> Cluster:
    """16, 24 or 32 GPUs of the paper's cloud, or 256: eight times as many machines.

    Examples
    --------
    >>> [fleet(n).gpus for n in (16, 24, 32, 256)]
    [16, 24, 32, 256]
    """
    whole = cluster("thunderserve-cloud-32")
    if gpus > whole.gpus:
        copies = gpus // whole.gpus
        machines = tuple(
            replace(machine, name=f"{machine.name}-{k}", usd_per_h=machine.usd_per_h)
            for machine in whole.machines
            for k in range(copies)
        )
        return replace(whole, name=f"{whole.name} x{copies}", machines=machines)
    # The paper does not say which; one machine of every kind first, then the second ones.
    kept: list[Machine] = []
    left = gpus
    for machine in sorted(whole.machines, key=lambda m: (m.name.endswith("-2"), m.name)):
        if machine.count <= left:
            kept.append(machine)
            left -= machine.count
        elif left:
            kept.append(replace(machine, count=left, usd_per_h=None))
            left = 0
    return replace(whole, name=f"{whole.name}, {gpus} GPUs", machines=tuple(kept))


def evaluator(gpus: int, work: str, rate_rps: float | None = None) -> Evaluator:
    """The evaluation of plans on :func:`fleet` for a workload of the paper."""
    model = CostModel(fleet(gpus), llm(MODEL))
    demand = Demand.of(workload.load(TRACES[work]), rate_rps or RPS_PER_GPU * gpus)
    return Evaluator(model, demand, scaled(reference(model.llm, demand), SCALE))


def bench(sizes: tuple[int, ...] = (16, 24, 32, 256), *, progress: Say = silent) -> PhasesBench:
    """Search from scratch with the paper's tabu search and with ours, then flip phases."""
    # Solvers and kernels load once per process; that is no part of a search.
    polish(evaluator(16, "conversation"), TabuSettings(steps=0))
    found: list[TimedSearch] = []
    for gpus in sizes:
        for work in TRACES:
            progress(f"{gpus} GPUs, {work}")
            search, best = _timed("patterns", gpus, work)
            found.append(search)
            if gpus <= 32:
                found.append(_timed("tabu", gpus, work)[0])
            if gpus == 32:
                found.append(_light(gpus, work, best))
    return PhasesBench(tuple(found))


def _timed(what: str, gpus: int, work: str) -> tuple[TimedSearch, Design]:
    one = evaluator(gpus, work)
    spent: list[float] = []
    with stopwatch(spent, time.perf_counter), stopwatch(spent):
        if what == "patterns":
            # A plan of 256 GPUs takes a second to evaluate a few designs, and starts well.
            search = polish(one, TabuSettings(steps=100 if gpus <= 32 else 10))
        else:
            search = TabuSearch.start(one)
            search.run()
    value = one.value(search.best)
    cpu_s, wall_s = spent
    done = TimedSearch(
        what, work, gpus, cpu_s, wall_s, value.attainment, value.score, one.evaluated
    )
    return done, search.best


def _light(gpus: int, work: str, best: Design) -> TimedSearch:
    """Flip phases for the other workload, the pipelines staying as they are."""
    other = next(name for name in TRACES if name != work)
    before = PhasePlan.of(evaluator(gpus, work), best)
    after = replace(evaluator(gpus, other), fixed=keep(before))
    spent: list[float] = []
    with stopwatch(spent, time.perf_counter), stopwatch(spent):
        found = replan(after, best)
    value = found.value
    cpu_s, wall_s = spent
    return TimedSearch(
        "light", other, gpus, cpu_s, wall_s, value.attainment, value.score, found.tried
    )
