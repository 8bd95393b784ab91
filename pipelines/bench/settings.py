"""The settings of both routing papers: what is served, how it arrives, and who enters.

Xiong et al. (Fig. 5 and 6): two links, two engines, four request rates on two clusters.
HeteroServe: two decode models, seven workloads at five loads, counted from the rate at which
HeteroServe itself saturates, and seven clusters of other sizes or compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.deployment import Deployment, Engine
from hetero.latency.step import Piece, StepModel
from hetero.planners.replicated import replicated, roofline_steps
from hetero.routers import (
    Builtin,
    CapacityProportional,
    HeteroServe,
    LatencyAware,
    LeastRequests,
    LeastTokens,
    LengthAware,
    Normal,
    PowerOfTwo,
    Predictor,
    Quantile,
    RoundRobin,
    SingleInstance,
    WeightedRoundRobin,
    Workload,
    batch_limits,
    uniform_limits,
)
from hetero.simulator import Slo, metrics, simulate
from hetero.simulator.sustained import saturation
from hetero.workload import Trace
from hetero.workload.synthetic import (
    HETEROSERVE_INPUT,
    HETEROSERVE_OUTPUT,
    Bimodal,
    Exponential,
    LengthDistribution,
    Lognormal,
    TruncatedNormal,
    synthetic,
)

Limits: TypeAlias = Callable[[Deployment], Deployment]
"""Batch limits that a published router comes with."""

METRICS = ("throughput", "SLO attainment", "P95 TTFT")
"""Tokens per second of the whole run; share of first tokens within the target; seconds."""

LOADS = (0.5, 0.9, 1.0, 1.5, 2.0)
"""Offered load over HeteroServe's saturation."""

TARGET_S = {"HeteroServe": 0.5, "Xiong": 1.0}
"""Target for the first token: HeteroServe's own; Xiong et al. have none."""

RATES = (8.0, 16.0, 24.0, np.inf)


@dataclass(frozen=True)
class Setting:
    """One thing to serve: a deployment and a trace per seed.

    Attributes
    ----------
    about
        What it is, by part.
    overload
        Whether requests come faster than HeteroServe can serve them, or all at once.
    """

    paper: str
    about: tuple[str, ...]
    deployment: Deployment
    trace: Callable[[int], Trace]
    predictor: Predictor
    overload: bool
    entrants: tuple[tuple[str, Builtin, Limits], ...]

    @property
    def slo(self) -> Slo:
        """The target of the paper."""
        return Slo(ttft_s=TARGET_S[self.paper])

    def measure(self, router: Builtin, limits: Limits, seed: int) -> tuple[float, float, float]:
        """The three :data:`METRICS` of one run."""
        run = simulate(
            limits(self.deployment),
            self.trace(seed),
            router,
            predictor=self.predictor,
            seed=seed,
        )
        found = metrics(run, self.slo)
        return found.total_tps, found.attainment["ttft"], found.percentiles["ttft_s"][95]


def as_is(deployment: Deployment) -> Deployment:
    """The deployment with the batch limits it has."""
    return deployment


def _by_memory(deployment: Deployment) -> Deployment:
    top = max(replica.engine.max_batch for replica in deployment.replicas)
    sizes = [replica.gpu.mem_gib if replica.gpu else 0.0 for replica in deployment.replicas]
    engines = [
        replace(r.engine, max_batch=max(int(top * size / max(sizes)), 1))
        for r, size in zip(deployment.replicas, sizes, strict=True)
    ]
    pairs = zip(deployment.replicas, engines, strict=True)
    return replace(deployment, replicas=tuple(replace(r, engine=e) for r, e in pairs))


_COMMON: tuple[tuple[str, Builtin, Limits], ...] = (
    ("least requests", LeastRequests(), as_is),
    ("least tokens", LeastTokens(), as_is),
    ("power of two", PowerOfTwo(), as_is),
    ("workload (Xiong)", Workload(), as_is),
)
_HETEROSERVE: tuple[tuple[str, Builtin, Limits], ...] = (
    ("Uniform", RoundRobin(), uniform_limits),
    ("Capacity-prop.", CapacityProportional(), _by_memory),
    ("Oracle", LengthAware(), as_is),
    ("Oracle, exclusive", LengthAware(exclusive=True), as_is),
    ("Latency-Aware", LatencyAware(queue="outstanding"), as_is),
    ("HeteroServe", HeteroServe(queue="outstanding"), as_is),
    ("HeteroServe, waiting", HeteroServe(queue="waiting"), as_is),
    ("HeteroServe, proportional", HeteroServe(dispatch="proportional"), as_is),
    *_COMMON,
)
_XIONG: tuple[tuple[str, Builtin, Limits], ...] = (
    ("RR", RoundRobin(), as_is),
    ("WRR", WeightedRoundRobin(), as_is),
    ("SI", SingleInstance(0), as_is),
    ("MB", Workload(memory_based=True), as_is),
    ("OS, ties first", Workload(ties="first"), as_is),
    *_COMMON,
)
_P90 = Quantile(0.9, sample=1_000_000)
_WORKLOADS: dict[str, tuple[LengthDistribution, LengthDistribution]] = {
    "lognormal": (HETEROSERVE_INPUT, HETEROSERVE_OUTPUT),
    "short prompts": (Lognormal(128, 1.2, ceiling_tokens=4096), HETEROSERVE_OUTPUT),
    "long prompts": (Lognormal(1024, 1.2, ceiling_tokens=4096), HETEROSERVE_OUTPUT),
    "short outputs": (HETEROSERVE_INPUT, Exponential(64)),
    "long outputs": (HETEROSERVE_INPUT, Exponential(512)),
    "bimodal": (Bimodal(), HETEROSERVE_OUTPUT),
    "mean 2,048": (TruncatedNormal(2048, 512, 1, 4096), HETEROSERVE_OUTPUT),
}
_CLUSTERS = (
    "heteroserve-4",
    "heteroserve-16",
    "heteroserve-32",
    "heteroserve-mix-h100",
    "heteroserve-mix-a100",
    "heteroserve-mix-l40s",
)


def _weights_only(gpu: Any, llm: Any, tensor_parallel: int) -> StepModel:
    """Prefill at the rates of HeteroServe's Table 4, decode at the speed of reading weights."""
    weights_s = llm.weight_bytes() / (gpu.mem_bw_gbs * 1e9)
    token_s = 31.2e9 / (gpu.fp16_tflops * 1e12)
    knots = weights_s / token_s * np.array([0.0, 1.0, 2.0])
    piece = Piece(knots, weights_s * np.array([1.0, 1.0, 2.0]), np.array([0.0]))
    return StepModel((piece,), source="Table 4 and memory bandwidth", provenance="assumed")


def _devices(name: str, decode: str) -> Deployment:
    found = cluster(name)
    whole = replicated(
        found,
        catalog.llm("LLaMA-1-13B"),
        {machine.name: 1 for machine in found.machines},
        steps=roofline_steps() if decode == "calibrated" else _weights_only,
        engine=Engine(admission="predicted", eviction="swap"),
        memory_fraction=1e9 / 2**30,
        overhead_gib=0.0,
    )
    return batch_limits(whole, sequence_tokens=910.0 + 256.0)


def heteroserve(requests: int, decodes: Sequence[str], loads: Sequence[float]) -> list[Setting]:
    """The settings of HeteroServe, so many requests per run on eight devices."""
    found = []
    for decode in decodes:
        eight = _devices("heteroserve-8", decode)
        for name, lengths in _WORKLOADS.items():
            rate = _saturated_rps(eight, name, requests)
            found += [
                Setting(
                    "HeteroServe",
                    (decode, name, f"load {load:g}"),
                    eight,
                    _synthetic(requests, lengths, load * rate),
                    _P90,
                    load > 1.0,
                    _HETEROSERVE,
                )
                for load in loads
            ]
        rate = _saturated_rps(eight, "lognormal", requests)
        for devices in _CLUSTERS:
            deployment = _devices(devices, decode)
            size = len(deployment.replicas)
            if devices[-1].isdigit():
                scaled = rate * size / 8
            else:
                scaled = _saturated_rps(deployment, "lognormal", requests)
            found.append(
                Setting(
                    "HeteroServe",
                    (decode, devices, "load 0.9"),
                    deployment,
                    _synthetic(requests * size // 8, _WORKLOADS["lognormal"], 0.9 * scaled),
                    _P90,
                    False,
                    _HETEROSERVE,
                )
            )
    return found


def _synthetic(
    count: int, lengths: tuple[LengthDistribution, LengthDistribution], rate_rps: float
) -> Callable[[int], Trace]:
    return lambda seed: synthetic(count, *lengths, rate_rps=rate_rps, seed=seed)


def _saturated_rps(deployment: Deployment, name: str, requests: int) -> float:
    trace = synthetic(requests, *_WORKLOADS[name], rate_rps=1.0, seed=0)
    router = HeteroServe(queue="outstanding")
    return saturation(deployment, trace, router, precision=0.02, predictor=_P90).rate_rps


def xiong(requests: int, source: workload.TraceSource, rates: Sequence[float]) -> list[Setting]:
    """The settings of Xiong et al., so many requests per run."""
    lengths = workload.load("sharegpt", workload.attainable("sharegpt", source))
    engines = {
        "prefill first": Engine(batching="prefill first", admission="paged"),
        "chunked": Engine(batching="chunked", admission="paged", max_step_tokens=2048),
    }
    found = []
    for figure in ("Fig. 5", "Fig. 6"):
        for link in ("PCIe 3", "NVLink 2"):
            for name, engine in engines.items():
                deployment = _instances(figure, link, engine)
                for rate in rates:
                    label = "all at once" if np.isinf(rate) else f"{rate:g} requests/s"
                    found.append(
                        Setting(
                            "Xiong",
                            (figure, link, name, label),
                            deployment,
                            _sampled(lengths, requests, rate),
                            Normal(),
                            bool(np.isinf(rate)),
                            _XIONG,
                        )
                    )
    return found


def _sampled(lengths: Trace, requests: int, rate_rps: float) -> Callable[[int], Trace]:
    def trace(seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        sample = lengths.sample(min(requests, len(lengths)), rng)
        return sample.all_at_once() if np.isinf(rate_rps) else sample.poisson(rate_rps, rng)

    return trace


@cache
def _instances(figure: str, link: str, engine: Engine) -> Deployment:
    fast = roofline_steps(link=catalog.link("NVLink2") if link == "NVLink 2" else None)
    if figure == "Fig. 5":
        machines, llm = cluster("xiong-8xv100"), catalog.llm("Llama-3-8B")
        return replicated(machines, llm, {"v100": (4, 1)}, steps=fast, engine=engine)

    def of_gpu(gpu: Any, llm: Any, tensor_parallel: int) -> StepModel:
        return (fast if "V100" in gpu.name else roofline_steps())(gpu, llm, tensor_parallel)

    machines, llm = cluster("xiong-v100-a800"), catalog.llm("DeepSeek-R1-Distill-Qwen-14B")
    return replicated(machines, llm, {"v100": 2, "a800": 1}, steps=of_gpu, engine=engine)


def settings(
    *,
    requests: int = 2000,
    source: workload.TraceSource = "twin",
    decodes: Sequence[str] = ("calibrated", "weights only"),
    loads: Sequence[float] = LOADS,
    rates: Sequence[float] = RATES,
) -> list[Setting]:
    """All settings of both papers."""
    return [*heteroserve(requests, decodes, loads), *xiong(requests, source, rates)]
