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
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.deployment import Deployment, Engine
from hetero.planners.replicated import replicated
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
from hetero.workload import Trace, datasets
from pipelines.bench.speeds import TRACE, SimulatorBench, Speed

LOADS = (0.7, 2.0)
"""Shares of saturation that are offered."""

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
    """The router in plain Python that is measured: the most free KV cache in its books."""

    name = "plain Python"

    def choose(self, request: Request, fleet: FleetState) -> int:
        """Index of the replica."""
        free = fleet.kv_tokens - fleet.outstanding_tokens
        return int(np.where(fleet.eligible, free, -np.inf).argmax())


def fleet(replicas: int, engine: Engine | None = None) -> Deployment:
    """Llama 3 8B on H100, A100 and L40S as HeteroServe mixes them, so many of them."""
    machines = cluster("heteroserve-8")
    degrees = {machine.name: 1 for machine in machines.machines}
    eight = replicated(machines, catalog.llm("Llama-3-8B"), degrees, engine=engine).replicas
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
    at_once = lengths.all_at_once().take(shuffled)
    return at_once.poisson(rate_rps, stream(seed, "arrivals"))


def cpu_s(call: Callable[[], object], repeats: int) -> float:
    """Best CPU time of a call [s]."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def _speed(
    deployment: Deployment,
    trace: Trace,
    router: Builtin | Router,
    *,
    load: float,
    rate_rps: float,
    repeats: int,
) -> Speed:
    simulate(deployment, trace.head(min(len(trace), 100)), router)  # compiled, or read
    taken = cpu_s(lambda: simulate(deployment, trace, router), repeats)
    engine = deployment.replicas[0].engine
    how = f"{engine.batching}, {engine.admission}"
    return Speed(router.name, len(deployment.replicas), how, len(trace), load, rate_rps, taken)


def _decision_us(deployment: Deployment, router: Builtin, rate_rps: float, count: int) -> float:
    """Median time of a decision, called from Python while the fleet is loaded."""
    live = router.live(deployment, stream(0, "router"))
    spent: list[int] = []

    class Timed:
        name = router.name

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
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        simulate(deployment, trace, router)
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    own = trace.arrival_s.nbytes + trace.input_tokens.nbytes + trace.output_tokens.nbytes
    return (taken + own) / len(trace)


def _first_call() -> dict[str, float]:
    run = [sys.executable, "-c", _FIRST_CALL]
    subprocess.run(run, check=True, capture_output=True)  # compiles what no cache has yet
    found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    return {name: float(value) for name, value in found.items()}


def _exponent(speeds: Sequence[Speed]) -> float:
    counts = np.log([one.requests for one in speeds])
    return float(np.polyfit(counts, np.log([one.cpu_s for one in speeds]), 1)[0])


def bench(
    *,
    largest: int = 1_000_000,
    many: int = 1_000,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
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
    progress
        Called with the name of what is measured next.
    """
    say = progress or (lambda _: None)
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
        return saturation(deployment, sample, router, precision=0.02).rate_rps

    def measure(
        deployment: Deployment, router: Builtin, rate: float, counts: Sequence[int]
    ) -> list[Speed]:
        return [
            _speed(
                deployment,
                requests(count, load * rate),
                router,
                load=load,
                rate_rps=load * rate,
                repeats=repeats,
            )
            for load in LOADS
            for count in counts
        ]

    for router in builtin:
        say(f"{router.name}, 8 replicas")
        saturated[router.name] = saturation_rps(eight, router)
        speeds += measure(eight, router, saturated[router.name], (smallest, largest))
    chunked = fleet(8, Engine(batching="chunked", admission="paged", max_step_tokens=2048))
    for router in (LeastRequests(), Predictive()):
        say(f"{router.name}, 8 replicas, chunked")
        speeds += measure(chunked, router, saturation_rps(chunked, router), (largest,))
    large = fleet(many)
    for router in (RoundRobin(), PowerOfTwo(), LeastRequests(), Predictive()):
        say(f"{router.name}, {many} replicas")
        scans = isinstance(router, LeastRequests | Predictive)
        rate = saturated[router.name] * many / len(eight.replicas)
        count = max(int(largest * (_SCANNED if scans else 1.0)), 100)
        speeds += measure(large, router, rate, (count,))
    say("a router in plain Python")
    rate = saturated["least tokens"]
    plain = _speed(
        eight,
        requests(max(largest // 10, 100), LOADS[0] * rate),
        FreestCache(),
        load=LOADS[0],
        rate_rps=LOADS[0] * rate,
        repeats=repeats,
    )
    recorded_trace = workload.load(TRACE, "real" if datasets.available(TRACE) else "twin")
    span_s = float(recorded_trace.arrival_s[-1] - recorded_trace.arrival_s[0])
    recorded = _speed(
        eight,
        recorded_trace,
        LeastTokens(),
        load=float("nan"),
        rate_rps=len(recorded_trace) / span_s,
        repeats=repeats,
    )
    say("decisions, memory and growth")
    decisions = {
        router.name: _decision_us(
            eight, router, LOADS[0] * saturated[router.name], min(largest, 20_000)
        )
        for router in builtin
    }
    sizes = [max(largest // share, 10) for share in (100, 10, 1)]
    rate = LOADS[0] * saturated["round robin"]
    growing = [
        _speed(
            eight,
            requests(count, rate),
            RoundRobin(),
            load=LOADS[0],
            rate_rps=rate,
            repeats=repeats,
        )
        for count in sizes
    ]
    memory = _bytes_per_request(eight, requests(largest, rate), PowerOfTwo())
    say("first call in a fresh process")
    return SimulatorBench(
        speeds=tuple(speeds),
        plain=plain,
        recorded=recorded,
        source=recorded_trace.source,
        decision_us=decisions,
        bytes_per_request=memory,
        exponent=_exponent(growing),
        first_call=_first_call(),
    )
