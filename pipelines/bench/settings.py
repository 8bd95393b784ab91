"""The settings of both routing papers: what is served, how it arrives, and who enters.

Xiong et al. (Fig. 5 and 6): two links, two engines, four request rates on two clusters.
HeteroServe: two decode models, seven workloads at five loads, counted from the rate at which
HeteroServe itself saturates, and seven clusters of other sizes or compositions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from hetero import workload
from hetero.deployment import Deployment
from hetero.routers import (
    CapacityProportional,
    HeteroServe,
    LatencyAware,
    LeastRequests,
    LeastTokens,
    LengthAware,
    Normal,
    PowerOfTwo,
    Predictor,
    RoundRobin,
    SingleInstance,
    WeightedRoundRobin,
    Workload,
    uniform_limits,
)
from hetero.simulator import Slo, metrics, simulate
from hetero.workload import Trace, synthetic
from hetero.workload.synthetic import HETEROSERVE_INPUT, HETEROSERVE_OUTPUT
from pipelines.studies import heteroserve as hs
from pipelines.studies import request_scheduling
from pipelines.studies.heteroserve import Scheduler

METRICS = ("throughput", "SLO attainment", "P95 TTFT")
"""Tokens per second of the whole run; share of first tokens within the target; seconds."""

LOADS = (0.5, 0.9, 1.0, 1.5, 2.0)
"""Offered load over HeteroServe's saturation."""

TARGET_S = {"HeteroServe": 0.5, "Xiong": 1.0}
"""Target for the first token: HeteroServe's own; Xiong et al. have none."""


@dataclass(frozen=True)
class RoutingSetting:
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
    entrants: dict[str, Scheduler]

    @property
    def slo(self) -> Slo:
        """The target of the paper."""
        return Slo(ttft_s=TARGET_S[self.paper])

    def measure(self, scheduler: Scheduler, seed: int) -> tuple[float, float, float]:
        """The three :data:`METRICS` of one run."""
        deployment, router = hs.system(scheduler, self.deployment)
        trace = self.trace(seed)
        run = simulate(deployment, trace, router, predictor=self.predictor, seed=seed)
        found = metrics(run, self.slo)
        return found.total_tps, found.attainment["ttft"], found.percentiles["ttft_s"][95]


_COMMON: dict[str, Scheduler] = {
    "least requests": LeastRequests(),
    "least tokens": LeastTokens(),
    "power of two": PowerOfTwo(),
    "workload (Xiong)": Workload(),
}
_HETEROSERVE: dict[str, Scheduler] = {
    "Uniform": (RoundRobin(name="Uniform"), uniform_limits),
    "Capacity-prop.": (CapacityProportional(), hs.memory_limits),
    "Oracle": LengthAware(),
    "Latency-Aware": LatencyAware(queue="outstanding"),
    "HeteroServe": hs.RATED,
    "Oracle, exclusive": LengthAware(exclusive=True),
    "HeteroServe, waiting": HeteroServe(queue="waiting"),
    "HeteroServe, proportional": HeteroServe(dispatch="proportional"),
    **_COMMON,
}
WORKLOADS: dict[str, hs.Workload] = {
    "lognormal": hs.LOGNORMAL,
    "short prompts": (synthetic.Lognormal(128, 1.2, ceiling_tokens=4096), HETEROSERVE_OUTPUT),
    "long prompts": (synthetic.Lognormal(1024, 1.2, ceiling_tokens=4096), HETEROSERVE_OUTPUT),
    "short outputs": (HETEROSERVE_INPUT, synthetic.Exponential(64)),
    "long outputs": (HETEROSERVE_INPUT, synthetic.Exponential(512)),
    "bimodal": (synthetic.Bimodal(), HETEROSERVE_OUTPUT),
    "mean 2,048": (synthetic.TruncatedNormal(2048, 512, 1, 4096), HETEROSERVE_OUTPUT),
}
"""Those of HeteroServe."""
_XIONG: dict[str, Scheduler] = {
    "RR": RoundRobin(),
    "WRR": WeightedRoundRobin(),
    "SI": SingleInstance(0),
    "MB": Workload(memory_based=True),
    "OS, ties first": Workload(ties="first"),
    **_COMMON,
}


def heteroserve(
    requests: int, decodes: Sequence[str], loads: Sequence[float]
) -> list[RoutingSetting]:
    """The settings of HeteroServe, so many requests per run on eight devices."""
    study = hs.Study((0,), requests)  # saturation is that of one seed
    found = []

    def add(
        decode: str, devices: str, about: str, workload: str, load: float, nominal_rps: float
    ) -> None:
        deployment = hs.fleet(decode, devices)
        count = requests * len(deployment.replicas) // 8
        found.append(
            RoutingSetting(
                "HeteroServe",
                (decode, about, f"load {load:g}"),
                deployment,
                partial(study.trace, WORKLOADS[workload], load * nominal_rps, count=count),
                hs.P90,
                load > 1.0,
                _HETEROSERVE,
            )
        )

    for decode in decodes:
        for name, load in product(WORKLOADS, loads):
            rate = study.saturated_rps(decode, workload=WORKLOADS[name])
            add(decode, hs.DEVICES, name, name, load, rate)
        for devices in (*(f"heteroserve-{n}" for n in (4, 16, 32)), *list(hs.MIXES.values())[1:]):
            if devices in hs.MIXES.values():
                rate = study.saturated_rps(decode, devices=devices)
            else:
                rate = study.saturated_rps(decode) * len(hs.fleet(decode, devices).replicas) / 8
            add(decode, devices, devices, "lognormal", 0.9, rate)
    return found


def xiong(
    requests: int, source: workload.TraceSource, rates: Sequence[float]
) -> list[RoutingSetting]:
    """The settings of Xiong et al., so many requests per run."""
    lengths = workload.load("sharegpt", workload.attainable("sharegpt", source))
    bench = request_scheduling.Workbench(lengths, requests, ())
    builders = {
        "Fig. 5": request_scheduling.two_instances,
        "Fig. 6": request_scheduling.two_machines,
    }
    return [
        RoutingSetting(
            "Xiong",
            (figure, *names, request_scheduling.rate_name(rate)),
            deployment,
            partial(bench.trace, rate_rps=rate),
            Normal(),
            bool(np.isinf(rate)),
            _XIONG,
        )
        for figure, build in builders.items()
        for names, deployment in request_scheduling.by_setting(build).items()
        for rate in rates
    ]


def settings(
    *,
    requests: int = 2000,
    source: workload.TraceSource = "twin",
    decodes: Sequence[str] = ("calibrated", "weights only"),
    loads: Sequence[float] = LOADS,
    rates: Sequence[float] = request_scheduling.RATES,
) -> list[RoutingSetting]:
    """All settings of both papers."""
    return [*heteroserve(requests, decodes, loads), *xiong(requests, source, rates)]
