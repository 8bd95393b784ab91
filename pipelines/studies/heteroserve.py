"""HeteroServe's cluster, schedulers and experiments under two decode models and two loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero import catalog, cluster, routers
from hetero.catalog import Gpu, Llm
from hetero.comparison import compare
from hetero.deployment import Deployment, Engine
from hetero.engines import EngineSpec, StepSource, replicated, roofline_steps
from hetero.intervals import interval
from hetero.latency import for_gpu
from hetero.latency.step import Piece, StepModel
from hetero.simulator import Run, Slo, metrics
from hetero.simulator.sustained import saturation
from hetero.workload import Trace, synthetic
from hetero.workload.synthetic import HETEROSERVE_INPUT, HETEROSERVE_OUTPUT, LengthDistribution

#: A router, alone or with what it does to the batch limits of eq. 6.
Scheduler = routers.Builtin | tuple[routers.Builtin, Callable[[Deployment], Deployment]]
#: Lengths of prompts and of outputs.
Workload = tuple[LengthDistribution, LengthDistribution]
#: A decode model, and which rate is its load factor 1.0.
Setting = tuple[str, str]

PUBLISHED_RPS: Final = 49.8
OWN, PUBLISHED = "own saturation", "49.8 requests/s"
#: The first is judged: appendix C prints prefill rates, section 4.1 a decode by batch size and KV
#: cache occupancy. Weights alone contradicts 4.1, but comes near the printed 49.8 requests/s.
SETTINGS: Final[list[Setting]] = list(
    product(("weights and cache", "weights only"), (OWN, PUBLISHED))
)
MAIN, WEIGHTS_ONLY = SETTINGS[0], SETTINGS[2]

TPS, SLO, P95, P99, TAIL = (
    "throughput [tokens/s]",
    "TTFT < 500 ms [%]",
    "P95 TTFT [ms]",
    "P99 TTFT [ms]",
    "TTFT > 10 s [%]",
)
COV, PASSED, EFFICIENCY = "CoV [%]", "passed [%]", "scaling efficiency [%]"

MODEL: Final = catalog.llm("LLaMA-1-13B")
WEIGHTS_GB: Final = 26.0  # as section 4.1 rounds them: 54 and 22 GB are left for the KV cache
LIMITS: Final = partial(routers.batch_limits, sequence_tokens=910.0 + 256.0)  # at the mean length
DEVICES: Final = "heteroserve-8"
#: Clusters of fig. 8; the paper names no mixes.
MIXES: Final = {
    "2 H100, 4 A100, 2 L40S": DEVICES,
    "4 H100, 2 A100, 2 L40S": "heteroserve-mix-h100",
    "1 H100, 6 A100, 1 L40S": "heteroserve-mix-a100",
    "1 H100, 2 A100, 5 L40S": "heteroserve-mix-l40s",
}
TABLE2: Final = {2: (1024,), 3: (512, 2048), 4: (512, 1024, 2048)}


def printed_steps(*, reads_kv: bool) -> StepSource:
    """Prefill at Table 4's rates (31.2 GFLOP per token), decode at the speed of memory.

    Source: HeteroServe, Table 4: step times at the calibrated prefill rates.
    """

    def steps(gpu: Gpu, llm: Llm, tensor_parallel: int) -> StepModel:
        weights_s = llm.weight_bytes() / (gpu.mem_bw_gbs * 1e9)
        token_s = 31.2e9 / (gpu.fp16_tflops * 1e12)
        cached_s = reads_kv * llm.kv_bytes_per_token() / (gpu.mem_bw_gbs * 1e9)
        knots = weights_s / token_s * np.array([0.0, 1.0, 2.0])
        piece = Piece(knots, weights_s * np.array([1.0, 1.0, 2.0]), np.array([cached_s]))
        return StepModel((piece,), source="Table 4 and memory bandwidth", provenance="assumed")

    return steps


DECODES: Final[dict[str, tuple[Llm, StepSource]]] = {
    "weights and cache": (MODEL, printed_steps(reads_kv=True)),
    "weights only": (MODEL, printed_steps(reads_kv=False)),
    "calibrated": (MODEL, roofline_steps()),
}
LOGNORMAL: Final[Workload] = HETEROSERVE_INPUT, HETEROSERVE_OUTPUT
P90: Final = routers.Quantile(0.9, sample=1_000_000)
#: Whose saturation is load factor 1.0.
RATED: Final = routers.HeteroServe(queue="outstanding")


@cache
def fleet(decode: str, devices: str = DEVICES, swap_s_per_gb: float = 2.0) -> Deployment:
    """One engine per device, its batch limited at the mean length (HeteroServe eq. 6)."""
    llm, steps = DECODES[decode]
    machines = cluster.cluster(devices)
    whole = replicated(
        machines,
        llm,
        {machine.name: 1 for machine in machines.machines},
        EngineSpec(
            name="any",
            steps=steps,
            rules=Engine(admission="predicted", eviction="swap", swap_s_per_gb=swap_s_per_gb),
            memory_fraction=1e9 / 2**30,
            overhead_gib=0.0,
        ),
    )
    room = [1e9 * (gpu.mem_gib - WEIGHTS_GB) for gpu in _gpus(whole)]
    counted = tuple(
        replace(replica, kv_tokens=int(free / replica.kv_bytes_per_token))
        for replica, free in zip(whole.replicas, room, strict=True)
    )
    return LIMITS(replace(whole, replicas=counted))


class LongToFastest(routers.HeteroServe):
    """HeteroServe as sections 4.2 and 4.4 tell it: the last bin on the fastest devices only."""

    def admissions(self, deployment: Deployment) -> NDArray[np.bool_]:
        """HeteroServe's eq. 4, and for the last bin only the devices of highest compute."""
        rows = super().admissions(deployment)
        compute = np.array([gpu.fp16_tflops for gpu in _gpus(deployment)])
        rows[-1] &= compute == compute.max()
        return rows


def memory_limits(deployment: Deployment) -> Deployment:
    """Batch limits in proportion to memory (Capacity-prop.): HeteroServe's eq. 6, scaled."""
    top = max(replica.engine.max_batch for replica in deployment.replicas)
    memory_gib = [gpu.mem_gib for gpu in _gpus(deployment)]
    limits = [int(top * gib / max(memory_gib)) for gib in memory_gib]
    replicas = (
        replace(replica, engine=replace(replica.engine, max_batch=limit))
        for replica, limit in zip(deployment.replicas, limits, strict=True)
    )
    return replace(deployment, replicas=tuple(replicas))


def system(scheduler: Scheduler, whole: Deployment) -> tuple[Deployment, routers.Builtin]:
    """A fleet with the limits of a scheduler, by default HeteroServe's eq. 6, and its router."""
    if isinstance(scheduler, tuple):
        return scheduler[1](whole), scheduler[0]
    return whole, scheduler


def at(rows: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """The rows of one setting."""
    return rows[rows["setting"] == ", ".join(setting)]


def values(rows: pd.DataFrame, metric: str, **where: object) -> NDArray[np.float64]:
    """A metric of the rows whose columns have these values, in their order: one per seed."""
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return np.asarray(rows[metric])


def grid(rows: pd.DataFrame, key: str, metric: str, **where: object) -> NDArray[np.float64]:
    """A metric for each value of a column, in order of appearance; shape (values, seeds)."""
    return np.array([values(rows, metric, **{key: x}, **where) for x in rows[key].unique()])


def joined_frame(frames: Mapping[Any, pd.DataFrame], name: str) -> pd.DataFrame:
    """The rows of several tables, with their keys in a column of that name."""
    return pd.concat([rows.assign(**{name: key}) for key, rows in frames.items()])


def with_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds and half of the 95 % t-interval of every metric."""
    groups = rows.groupby(["decode", "load", "scheduler"], sort=False)
    columns = {}
    for metric in (TPS, SLO, P95, TAIL):
        columns[metric] = groups[metric].agg(lambda x: x.mean())
        columns[f"{metric}, +-"] = groups[metric].agg(lambda x: np.ptp(interval(x)) / 2)
    return pd.DataFrame(columns).reset_index()


def measured(run: Run, warmup_s: float = 0.0, until_s: float | None = None) -> dict[str, float]:
    """The paper's metrics; throughput counts prompt and generated tokens."""
    counted = metrics(run, Slo(ttft_s=0.5), warmup_s=warmup_s, until_s=until_s)
    ttft_ms = {p: 1e3 * value for p, value in counted.percentiles["ttft_s"].items()}
    since_s = run.requests["arrival_s"] - run.requests["arrival_s"][0]
    inside = (since_s >= warmup_s) & (since_s <= (until_s or np.inf))
    return {
        TPS: counted.total_tps,
        SLO: 100.0 * counted.attainment["ttft"],
        P95: ttft_ms[95],
        P99: ttft_ms[99],
        TAIL: 100.0 * float(np.mean(run.ttft_s[inside] > 10.0)),
        "evictions": counted.preemptions,
    }


def load_cov(run: Run) -> float:
    """Coefficient of variation [%] over time of the unfinished requests of a device (4.5)."""
    r = run.requests
    times = np.arange(r["arrival_s"][len(r) // 2], r["arrival_s"][-1], 0.1)
    variations = []
    for k in range(len(run.deployment.replicas)):
        mine = r["node"] == k
        load = np.searchsorted(r["arrival_s"][mine], times)
        load = load - np.searchsorted(np.sort(r["finish_s"][mine]), times)
        if load.mean() > 0:
            variations.append(100.0 * load.std() / load.mean())
    return float(np.mean(variations))


def passed_best(run: Run) -> float:
    """Share of requests [%] that a device other than those of highest capability served."""
    best = [gpu.name.startswith("H100") for gpu in _gpus(run.deployment)]
    return 100.0 * float(np.mean(~np.array(best)[run.requests["node"]]))


@dataclass(frozen=True)
class Study:
    """Experiments of ``requests`` requests per run, each repeated for every seed.

    Tables have a row per setting, scheduler and seed: columns ``setting``, ``decode``, ``load``,
    ``scheduler``, ``seed`` and the metrics.
    """

    seeds: tuple[int, ...]
    requests: int

    def trace(self, workload: Workload, rate_rps: float, seed: int, count: int = 0) -> Trace:
        """Requests of a workload with Poisson arrivals; ``requests`` of them unless told."""
        return synthetic.synthetic(count or self.requests, *workload, rate_rps=rate_rps, seed=seed)

    def compared(
        self,
        setting: Setting,
        schedulers: Mapping[Any, Scheduler],
        rate_rps: float,
        measure: Callable[[Run], Mapping[str, Any]] = measured,
        *,
        workload: Workload = LOGNORMAL,
        count: int = 0,
        **engine: Any,
    ) -> pd.DataFrame:
        """A row per scheduler and seed at a rate; ``engine`` are options of :func:`fleet`."""
        whole = fleet(setting[0], **engine)
        systems = {name: system(one, whole) for name, one in schedulers.items()}
        found = compare(
            systems, None, lambda rate, seed: self.trace(workload, rate, seed, count), rate_rps,
            self.seeds, predictor=P90, measure=measure,
        ).frame.rename(columns={"plan": "scheduler"})  # fmt: skip
        found = found.drop(columns=["rate_rps", "router"])
        labels = {"setting": ", ".join(setting), "decode": setting[0], "load": setting[1]}
        return pd.DataFrame(labels, found.index).join(found)

    @cache  # noqa: B019 - by value, and few
    def saturated_rps(
        self,
        decode: str,
        scheduler: Scheduler = RATED,
        workload: Workload = LOGNORMAL,
        devices: str = DEVICES,
    ) -> float:
        """Saturation of a scheduler [requests/s], mean over seeds."""
        deployment, router = system(scheduler, fleet(decode, devices))
        rates = [
            saturation(
                deployment,
                self.trace(workload, 1.0, seed),
                router,
                precision=0.02,
                predictor=P90,
                seed=seed,
            )
            for seed in self.seeds
        ]
        return float(np.mean(rates))

    def nominal_rps(
        self, setting: Setting, workload: Workload = LOGNORMAL, devices: str = DEVICES
    ) -> float:
        """Arrival rate of load factor 1.0 [requests/s]."""
        decode, load = setting
        if load == PUBLISHED:
            return PUBLISHED_RPS
        return self.saturated_rps(decode, workload=workload, devices=devices)

    def runs(
        self,
        schedulers: Mapping[Any, Scheduler],
        load: float = 1.0,
        *,
        workload: Workload = LOGNORMAL,
        devices: str = DEVICES,
        rated: str | None = None,
        settings: Iterable[Setting] = SETTINGS,
        **options: Any,
    ) -> pd.DataFrame:
        """Every scheduler under every setting, at ``load`` times the nominal rate.

        The rate is that of ``devices`` or, where given, of the cluster ``rated``; ``options`` are
        those of :meth:`compared`.
        """
        options |= {"workload": workload, "devices": devices}
        rates = ((one, self.nominal_rps(one, workload, rated or devices)) for one in settings)
        parts = (self.compared(one, schedulers, load * rate, **options) for one, rate in rates)
        return pd.concat(parts, ignore_index=True)

    def windowed(
        self, schedulers: Mapping[str, Scheduler], duration_s: float, load: float = 1.0
    ) -> pd.DataFrame:
        """Schedulers over ``duration_s`` of arrivals, a sixth of it warm-up."""
        return pd.concat(
            self.compared(
                setting, schedulers, rate, count=int(rate * duration_s),
                measure=lambda run: measured(
                    run, duration_s / 6, float(np.ptp(run.requests["arrival_s"]))
                ),
            )
            for setting in SETTINGS
            for rate in [load * self.nominal_rps(setting)]
        ).reset_index(drop=True)  # fmt: skip

    def by_size(self, schedulers: Mapping[str, Scheduler], sizes: Sequence[int]) -> pd.DataFrame:
        """Clusters of ``size`` devices, 1 to 2 to 1, rate and requests in proportion (fig. 7).

        Their scaling efficiency is throughput per device over that of the first size.
        """
        sized = {
            size: self.runs(
                schedulers,
                size / 8,
                devices=f"heteroserve-{size}",
                rated=DEVICES,
                count=self.requests * size // 8,
            )
            for size in sizes
        }
        rows = joined_frame(sized, "size")
        per_device = rows[TPS] / rows["size"]
        smallest = per_device.groupby([rows[key] for key in ("setting", "scheduler", "seed")])
        return rows.assign(**{EFFICIENCY: 100.0 * per_device / smallest.transform("first")})

    def sweeps(self, swept: Mapping[str, Mapping[Any, Scheduler]]) -> pd.DataFrame:
        """What is ``swept`` and its ``value``, at load factor 1.0 (HeteroServe Table 2)."""
        parts = []
        for setting, (name, tried) in product(SETTINGS, swept.items()):
            found = self.compared(
                setting, tried, self.nominal_rps(setting),
                lambda run: {COV: load_cov(run), PASSED: passed_best(run), **measured(run)},
            )  # fmt: skip
            parts.append(found.rename(columns={"scheduler": "value"}).assign(swept=name))
        return pd.concat(parts, ignore_index=True)

    def contest(
        self,
        setting: Setting,
        ours: Mapping[str, Scheduler],
        rivals: pd.DataFrame,
        where: str,
        load: float,
        **options: Any,
    ) -> list[dict[str, object]]:
        """Routers against the best of the others for every metric, in one setting.

        A win or a loss is a paired difference beyond its 95 % interval and beyond what counts as
        none: 1 %, 0.5 points of attainment.
        """
        found = self.runs(ours, load, settings=[setting], **options)
        here = at(rivals[~rivals["scheduler"].isin([*ours])], setting)
        rows: list[dict[str, object]] = []
        for (metric, least), mode in product({TPS: 0.01, SLO: 0.5, P95: 0.01}.items(), ours):
            names = here["scheduler"].unique()
            others = {name: values(here, metric, scheduler=name) for name in names}
            mine, lower = values(found, metric, scheduler=mode), metric == P95
            one = against_best(mine, others, least, lower=lower, scaled=metric != SLO)
            labels = {"decode": setting[0], "setting": where, "router": mode, "metric": metric}
            rows.append(labels | {name: one[name] for name in one if name != "margin"})
        return rows


def against_best(
    mine: NDArray[np.float64],
    others: Mapping[str, NDArray[np.float64]],
    least: float,
    *,
    lower: bool,
    scaled: bool,
) -> dict[str, object]:
    """Our mean over the seeds, the best of the others by mean, and who wins by what margin.

    Parameters
    ----------
    least
        A gain that counts as none, of the other's mean where they are ``scaled`` by it.
    lower
        Whether lower values are better.
    """
    sign = -1.0 if lower else 1.0
    best = max(others, key=lambda name: float(sign * others[name].mean()))
    theirs = others[best]
    gain = sign * (mine - theirs) / (theirs.mean() if scaled else 1.0)
    return {
        "ours": mine.mean(),
        "best other": best,
        "its": theirs.mean(),
        "margin": gain.mean(),
        "verdict": verdict(gain, least),
    }


def verdict(gain: NDArray[np.float64], least: float) -> str:
    """Win or loss by paired gains over the seeds, a tie unless clear and more than ``least``."""
    low, high = interval(gain)
    clear = abs(gain.mean()) > least and (low > 0 or high < 0)
    return ("win" if gain.mean() > 0 else "loss") if clear else "tie"


def prefill_rates_frame() -> pd.DataFrame:
    """Prefill rates of HeteroServe's Table 4, from peak compute, and of the calibrated roofline."""
    gpus = {machine.gpu.name: machine.gpu for machine in cluster.cluster(DEVICES).machines}
    rows = []
    for gpu, (batch, prompt) in product(gpus.values(), ((1, 512), (4, 1024))):
        printed = gpu.fp16_tflops * 1e12 / 31.2e9
        seconds = for_gpu(gpu, MODEL).step_model().prefill_seconds([prompt] * batch)
        ours = batch * prompt / float(seconds)
        rows.append((gpu.name, batch, prompt, printed, ours, ours / printed))
    rates = ("Table 4 [tokens/s]", "calibrated [tokens/s]", "calibrated over Table 4")
    return pd.DataFrame(rows, columns=["GPU", "batch", "prompt [tokens]", *rates])


def _gpus(deployment: Deployment) -> list[Gpu]:
    return [replica.gpu for replica in deployment.replicas if replica.gpu is not None]
