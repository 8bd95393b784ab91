"""Speed of the simulator and the routers: requests per CPU second at a known load.

Every figure is CPU time of one process on one core, the best of a few repeats. Load is a share of
saturation, which is found by simulation for every router on eight replicas and grows with the
fleet; overload is twice saturation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd

from hetero import catalog, paths, workload
from hetero.cluster import cluster
from hetero.deployment import Deployment, Engine
from hetero.display import Column, Table
from hetero.engines import EngineSpec, replicated
from hetero.routers import (
    Builtin,
    CacheAware,
    Choice,
    FleetState,
    HeteroServe,
    LeastRequests,
    LeastTokens,
    PowerOfTwo,
    Predictive,
    Request,
    RoundRobin,
    Router,
    WeightedRandom,
    WeightedRoundRobin,
    Workload,
)
from hetero.simulator import simulate
from hetero.simulator.sustained import saturation
from hetero.streams import stream
from hetero.timings import Timing
from hetero.workload import Trace, datasets
from pipelines.bench.measured import Measured, Say, silent, stopwatch

LOADS = (0.7, 2.0)
"""Shares of saturation that are offered."""

TRACE = "azure2023_conv"
"""Trace whose lengths the requests have."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One program in one configuration, run on few and on many requests.

    Attributes
    ----------
    requests, cpu_s
        Requests and CPU time of the larger run.
    marginal_per_cpu_s
        Requests per CPU second between the two runs: what it takes without its start-up.
    """

    program: str
    repository: str
    commit: str
    configuration: str
    requests: int
    cpu_s: float
    marginal_per_cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests per CPU second of the larger run, start-up included."""
        return self.requests / self.cpu_s


def peers() -> tuple[Peer, ...]:
    """The peers of ``data/published/peers.csv``.

    Examples
    --------
    >>> [round(peer.requests_per_cpu_s) for peer in peers()]
    [639, 153, 307, 479, 1]
    """
    frame = pd.read_csv(paths.data("published", "peers.csv"), dtype={"commit": str})
    runs = frame.groupby(["program", "repository", "commit", "configuration"], sort=False)
    ends = runs[["requests", "cpu_s"]].agg(["min", "max"])
    return tuple(
        Peer(name, at, commit, how, many, more, (many - few) / (more - less))
        for (name, at, commit, how), few, many, less, more in ends.itertuples(name=None)
    )


def peer_table(own_per_cpu_s: float) -> Table:
    """Peers beside what this library reaches on the same trace, without start-up on both sides."""
    columns = (
        Column("program"),
        Column("configuration"),
        Column("requests"),
        Column("whole run", "requests/CPU s", 3, of="requests_per_cpu_s"),
        Column("without start-up", "requests/CPU s", 3, of="marginal_per_cpu_s"),
        Column(
            "hetero", "times as fast", 3, of=lambda peer: own_per_cpu_s / peer.marginal_per_cpu_s
        ),
    )
    return Table.of(
        "Peers on the conversation trace (measured apart, quoted)",
        columns,
        peers(),
        "Each on its own models and hardware tables, 2 cores of an AMD EPYC virtual machine; "
        "commits and run times in data/published/peers.csv.",
    )


@dataclass(frozen=True, slots=True)
class Speed:
    """One router on one fleet at one load.

    Attributes
    ----------
    load
        Share of saturation that was offered; NaN where arrivals are those of the trace.
    """

    router: str
    replicas: int
    engine: str
    requests: int
    load: float
    rate_rps: float
    cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests simulated per CPU second."""
        return self.requests / self.cpu_s


_COLUMNS = (
    Column("router"),
    Column("engine"),
    Column("replicas"),
    Column("requests"),
    Column("load", of=lambda one: "as recorded" if one.load != one.load else f"{one.load:.0%}"),
    Column("arrivals", "requests/s", of="rate_rps"),
    Column("CPU time", "s", 3, of="cpu_s"),
    Column("speed", "requests/CPU s", of=lambda one: round(one.requests_per_cpu_s)),
)


@dataclass(frozen=True, slots=True, repr=False)
class SimulatorBench(Measured):
    """What ``hetero bench simulate`` measures.

    Attributes
    ----------
    speeds
        Built-in routers.
    plain
        A router written in Python.
    recorded, source
        The conversation trace at its own rate, as the peers ran it: the real one where it is at
        hand, or its twin.
    decision_us
        Median time of one decision by router, called from Python, at eight replicas.
    bytes_per_request
        Peak of the memory that the largest run and its trace take, over its requests.
    exponent
        Of the cost over the number of requests: 1 is linear.
    first_call
        CPU seconds of a fresh process: imports, first simulation, all of it.
    repeats
        Runs behind each figure.
    """

    speeds: tuple[Speed, ...]
    plain: Speed
    recorded: Speed
    source: str
    decision_us: dict[str, float]
    bytes_per_request: float
    exponent: float
    first_call: dict[str, float]
    repeats: int = 1

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def table(self) -> Table:
        """Requests per CPU second."""
        return Table.of(
            f"Simulator: requests like {TRACE} on mixed fleets",
            _COLUMNS,
            (*self.speeds, self.plain, self.recorded),
            f"As recorded: {self.source}.",
        )

    def other_table(self) -> Table:
        """Memory, growth, decisions and the first call."""
        slowest = max(self.decision_us, key=self.decision_us.__getitem__)
        rows = (
            ("memory per request, trace included", self.bytes_per_request, "bytes"),
            ("growth of the cost with requests", self.exponent, "exponent; 1 is linear"),
            (f"slowest decision, 8 replicas ({slowest})", self.decision_us[slowest], "µs"),
            ("fresh process: imports", self.first_call["import_s"], "CPU s"),
            ("fresh process: first simulation", self.first_call["first_call_s"], "CPU s"),
            ("fresh process: all", self.first_call["process_s"], "CPU s"),
        )
        return Table("Other costs", (Column("what"), Column("value", "", 3), Column("unit")), rows)

    def tables(self) -> tuple[Table, ...]:
        """All tables, the peers last."""
        return self.table(), self.other_table(), peer_table(self.recorded.requests_per_cpu_s)

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Times of decisions."""
        return tuple(
            Timing.here(
                f"routers.decision.{router}",
                micros * 1e-6,
                command="hetero bench simulate --record",
                statistic="median",
                repeats=self.repeats,
                clock="wall",
            )
            for router, micros in self.decision_us.items()
        )

    def record(self) -> dict[str, object]:
        """Everything as JSON values."""

        def plain(one: Speed) -> dict[str, object]:
            load = None if one.load != one.load else one.load
            return asdict(one) | {"load": load, "requests_per_cpu_s": one.requests_per_cpu_s}

        own = self.recorded.requests_per_cpu_s
        return asdict(self) | {
            "speeds": [plain(one) for one in self.speeds],
            "plain": plain(self.plain),
            "recorded": plain(self.recorded) | {"source": self.source},
            "peers": [
                asdict(peer)
                | {
                    "requests_per_cpu_s": peer.requests_per_cpu_s,
                    "times_as_fast": own / peer.marginal_per_cpu_s,
                }
                for peer in peers()
            ],
        }


_SAMPLE = 20_000  # requests that show where eight replicas saturate
_SCANNED = 0.1  # share of the requests for routers that look at every one of many replicas

_FIRST_CALL = """
import json, time
from pipelines.bench.simulator import fleet, requests
from hetero.routers import LeastTokens
from hetero.simulator import simulate
ready = time.process_time()
served, trace = fleet(8), requests(1000, 10.0)
start = time.process_time()
simulate(served, trace, LeastTokens())
end = time.process_time()
print(json.dumps({"import_s": ready, "first_call_s": end - start, "process_s": end}))
"""


class FreestCache:
    """The router in plain Python that is measured: the most free KV cache in its records."""

    name = "plain Python"

    def choose(self, request: Request, fleet: FleetState) -> int:
        """Index of the replica."""
        free = fleet.kv_tokens - fleet.outstanding_tokens
        return int(np.where(fleet.eligible, free, -np.inf).argmax())


def fleet(replicas: int, engine: Engine | None = None) -> Deployment:
    """Llama 3 8B on H100, A100 and L40S as HeteroServe mixes them, so many of them."""
    machines = cluster("heteroserve-8")
    degrees = {machine.name: 1 for machine in machines.machines}
    spec = EngineSpec(rules=engine or Engine(), memory_fraction=0.9, overhead_gib=2.0)
    eight = replicated(machines, catalog.llm("Llama-3-8B"), degrees, spec).replicas
    chosen = tuple(
        replace(eight[k % len(eight)], name=f"{eight[k % len(eight)].name}/{k}")
        for k in range(replicas)
    )
    return Deployment(f"{replicas} replicas", chosen)


def requests(count: int, rate_rps: float, seed: int = 0) -> Trace:
    """Lengths drawn anew from the conversation trace, Poisson arrivals."""
    trace = workload.load(TRACE)
    lengths = trace.take(np.sort(stream(seed, "lengths").integers(len(trace), size=count)))
    shuffled = stream(seed, "order").permutation(count)
    return lengths.all_at_once().take(shuffled).poisson(rate_rps, stream(seed, "arrivals"))


def _speed(
    deployment: Deployment,
    trace: Trace,
    router: Builtin | Router,
    load: float,
    rate_rps: float,
    repeats: int,
) -> Speed:
    simulate(deployment, trace.head(min(len(trace), 100)), router)  # compiled, or read
    spent: list[float] = []
    for _ in range(repeats):
        with stopwatch(spent):
            simulate(deployment, trace, router)
    engine = deployment.replicas[0].engine
    how = f"{engine.batching}, {engine.admission}"
    return Speed(router.name, len(deployment.replicas), how, len(trace), load, rate_rps, min(spent))


def _decision_us(deployment: Deployment, router: Builtin, rate_rps: float, count: int) -> float:
    """Median time of a decision, called from Python while the fleet is loaded."""
    live = router.live(deployment, stream(0, "router"))
    spent: list[int] = []

    class Timed:
        name, oracle = router.name, True

        def choose(self, request: Request, fleet: FleetState) -> Choice:
            start = time.perf_counter_ns()
            chosen = live.choose(request, fleet)
            spent.append(time.perf_counter_ns() - start)
            return chosen

    simulate(deployment, requests(count, rate_rps), Timed())
    return float(np.median(spent)) / 1e3


def _bytes_per_request(deployment: Deployment, trace: Trace, router: Builtin) -> float:
    tracemalloc.start()
    try:
        simulate(deployment, trace, router)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    own = trace.arrival_s.nbytes + trace.input_tokens.nbytes + trace.output_tokens.nbytes
    return (taken + own) / len(trace)


def _first_call() -> dict[str, float]:
    run = [sys.executable, "-c", _FIRST_CALL]
    subprocess.run(run, check=True, capture_output=True)  # compiles what no cache has yet
    found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    return {name: float(value) for name, value in found.items()}


def bench(
    *, largest: int = 1_000_000, many: int = 1_000, repeats: int = 3, progress: Say = silent
) -> SimulatorBench:
    """Measure the simulator.

    Parameters
    ----------
    largest
        Requests of the largest runs; the smaller ones have a hundredth of them.
    many
        Replicas of the larger fleet.
    repeats
        Runs of which the best counts.
    """
    eight, smallest = fleet(8), max(largest // 100, 100)
    builtin: list[Builtin] = [
        RoundRobin(),
        WeightedRandom(),
        WeightedRoundRobin(),
        LeastRequests(),
        LeastTokens(),
        CacheAware(),
        PowerOfTwo(),
        Workload(),
        HeteroServe(),
        Predictive(),
    ]
    saturated: dict[str, float] = {}
    speeds: list[Speed] = []

    sample = requests(min(max(largest, 2_000), _SAMPLE), 1.0)

    def saturation_rps(deployment: Deployment, router: Builtin) -> float:
        return saturation(deployment, sample, router, precision=0.02)

    def measure(
        deployment: Deployment,
        router: Builtin | Router,
        rate: float,
        counts: Sequence[int],
        loads: Sequence[float] = LOADS,
    ) -> list[Speed]:
        return [
            _speed(deployment, requests(count, load * rate), router, load, load * rate, repeats)
            for load in loads
            for count in counts
        ]

    for router in builtin:
        progress(f"{router.name}, 8 replicas")
        saturated[router.name] = saturation_rps(eight, router)
        speeds += measure(eight, router, saturated[router.name], (smallest, largest))
    chunked = fleet(8, Engine(batching="chunked", admission="paged", max_step_tokens=2048))
    for router in (LeastRequests(), Predictive()):
        progress(f"{router.name}, 8 replicas, chunked")
        speeds += measure(chunked, router, saturation_rps(chunked, router), (largest,))
    large = fleet(many)
    for router in (RoundRobin(), PowerOfTwo(), LeastRequests(), Predictive()):
        progress(f"{router.name}, {many} replicas")
        scans = isinstance(router, LeastRequests)
        rate = saturated[router.name] * many / len(eight.replicas)
        count = max(int(largest * (_SCANNED if scans else 1.0)), 100)
        speeds += measure(large, router, rate, (count,))
    progress("a router in plain Python")
    rate = saturated["least tokens"]
    (plain,) = measure(eight, FreestCache(), rate, [max(largest // 10, 100)], LOADS[:1])
    recorded_trace = workload.load(TRACE, "real" if datasets.available(TRACE) else "twin")
    rate = len(recorded_trace) / float(recorded_trace.arrival_s[-1] - recorded_trace.arrival_s[0])
    recorded = _speed(eight, recorded_trace, LeastTokens(), float("nan"), rate, repeats)
    progress("decisions, memory and growth")
    decisions = {
        router.name: _decision_us(
            eight, router, LOADS[0] * saturated[router.name], min(largest, 20_000)
        )
        for router in builtin
    }
    sizes = [max(largest // share, 10) for share in (100, 10, 1)]
    rate = saturated["round robin"]
    growing = measure(eight, RoundRobin(), rate, sizes, LOADS[:1])
    x, y = np.log([(one.requests, one.cpu_s) for one in growing]).T
    memory = _bytes_per_request(eight, requests(largest, LOADS[0] * rate), PowerOfTwo())
    progress("first call in a fresh process")
    return SimulatorBench(
        speeds=tuple(speeds),
        plain=plain,
        recorded=recorded,
        source=recorded_trace.source,
        decision_us=decisions,
        bytes_per_request=memory,
        exponent=float(np.polyfit(x, y, 1)[0]),
        first_call=_first_call(),
        repeats=repeats,
    )
