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
    HeteroServe,
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
)
from hetero.simulator import Slo, metrics, simulate
from hetero.workload import Trace
from pipelines.studies import heteroserve as hs
from pipelines.studies import request_scheduling
from pipelines.studies.heteroserve import Scheduler, as_is

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
        router, limits = scheduler
        run = simulate(
            limits(self.deployment),
            self.trace(seed),
            router,
            predictor=self.predictor,
            seed=seed,
        )
        found = metrics(run, self.slo)
        return found.total_tps, found.attainment["ttft"], found.percentiles["ttft_s"][95]


_COMMON: dict[str, Scheduler] = {
    "least requests": (LeastRequests(), as_is),
    "least tokens": (LeastTokens(), as_is),
    "power of two": (PowerOfTwo(), as_is),
    "workload (Xiong)": (Workload(), as_is),
}
_HETEROSERVE: dict[str, Scheduler] = (
    hs.PAPER
    | {
        "Oracle, exclusive": (LengthAware(exclusive=True), as_is),
        "HeteroServe, waiting": (HeteroServe(queue="waiting"), as_is),
        "HeteroServe, proportional": (HeteroServe(dispatch="proportional"), as_is),
    }
    | _COMMON
)
_XIONG: dict[str, Scheduler] = {
    "RR": (RoundRobin(), as_is),
    "WRR": (WeightedRoundRobin(), as_is),
    "SI": (SingleInstance(0), as_is),
    "MB": (Workload(memory_based=True), as_is),
    "OS, ties first": (Workload(ties="first"), as_is),
} | _COMMON


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
                partial(study.trace, workload, load * nominal_rps, count=count),
                hs.P90,
                load > 1.0,
                _HETEROSERVE,
            )
        )

    for decode in decodes:
        for name, load in product(hs.WORKLOADS, loads):
            rate = study.saturated_rps(decode, workload=name)
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
