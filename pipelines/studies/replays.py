"""Runs of real serving engines and of a real cluster, replayed by the simulators.

Two runs of vLLM 0.19.0 on RTX PRO 6000 (LLMServingSim, ``bench/examples``): 300 requests of
ShareGPT at 10 per second, more than either replica can serve, so that times to first token are
queueing. And the 24 GPUs that Helix's prototype ran on (its section 6.3). Nothing of the step
models or of the engines is fitted to them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd

from hetero.arrays import Floats
from hetero.catalog import gpu, llm
from hetero.deployment import Deployment, Engine, Replica
from hetero.display import Column, Shown, Table
from hetero.latency.frames import derived_frame
from hetero.latency.step import StepModel
from hetero.memory import Budget
from hetero.routers import SingleInstance
from hetero.simulator import Run, simulate
from hetero.workload import Trace, TraceSource, datasets
from pipelines.studies import helix

Clock = Literal["engine", "client"]

_LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
QUANTITIES = tuple(_LABELS)
PERCENTILES = (5, 10, 25, 50, 75, 90, 95, 99)
_STATISTICS = ("mean", *(f"P{p}" for p in PERCENTILES))
DATASET = "llmservingsim_e2e"
_RUNS = {"Llama-3.1-8B": 1, "Qwen3-32B": 2}
_BLOCK = 10  # requests whose mean lengths the derived load keeps


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RealRun(Shown):
    """What one run of a real engine measured.

    Attributes
    ----------
    trace
        Requests as they entered the engine's queue.
    means, percentiles
        Per quantity (``ttft_s``, ``tpot_s``, ``e2e_s``) the mean and the values at
        ``PERCENTILES`` [s].
    requests
        Per quantity the value of every request [s], shape (N,); empty where only the derived
        summary is here, whose requests are means over ten at a time.
    engine
        Batching and limits as its configuration file says.
    """

    llm: str
    tensor_parallel: int
    engine_version: str
    engine: Engine
    memory_fraction: float
    trace: Trace
    means: dict[str, float]
    percentiles: dict[str, Floats]
    requests: dict[str, Floats]
    gpu: str = "RTX-PRO-6000-Server"

    @property
    def name(self) -> str:
        """Model, GPU and their number."""
        return f"{self.llm} on {self.gpu} x{self.tensor_parallel}"

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, by the memory model at the engine's share of memory."""
        budget = Budget(
            llm(self.llm),
            gpu(self.gpu),
            tensor_parallel=self.tensor_parallel,
            memory_fraction=self.memory_fraction,
        )
        return budget.max_tokens

    def table(self) -> Table:
        """Measured percentiles."""
        columns = (Column("quantity"), *(Column(name, "s") for name in _STATISTICS))
        rows = tuple(
            (_LABELS[q], self.means[q], *map(float, self.percentiles[q])) for q in QUANTITIES
        )
        return Table(f"{self.name}, {self.engine_version}", columns, rows)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReplayedRun(Shown):
    """A real run beside its simulation."""

    real: RealRun
    run: Run

    @property
    def simulated(self) -> dict[str, Floats]:
        """Per quantity the value of every request [s]."""
        return {"ttft_s": self.run.ttft_s, "tpot_s": self.run.tpot_s, "e2e_s": self.run.e2e_s}

    def errors(self) -> pd.DataFrame:
        """Per quantity and statistic: measured [s], simulated [s] and error [%]."""
        rows = []
        for quantity, values in self.simulated.items():
            own = [float(values.mean()), *np.percentile(values, PERCENTILES)]
            measured = [self.real.means[quantity], *self.real.percentiles[quantity]]
            rows += [
                (_LABELS[quantity], name, m, s, 100.0 * (s / m - 1.0))
                for name, m, s in zip(_STATISTICS, measured, own, strict=True)
            ]
        columns = ["quantity", "statistic", "measured_s", "simulated_s", "error_percent"]
        return pd.DataFrame(rows, columns=columns)

    def request_errors(self) -> pd.DataFrame:
        """Per quantity: error [%] of each request, and the mean of its size."""
        rows = []
        for quantity, measured in self.real.requests.items():
            error = 100.0 * (self.simulated[quantity] / measured - 1.0)
            rows.append(
                (
                    _LABELS[quantity],
                    len(error),
                    float(np.abs(error).mean()),
                    float(np.median(error)),
                    float(np.quantile(np.abs(error), 0.95)),
                )
            )
        columns = ["quantity", "requests", "mape_percent", "median_percent", "p95_percent"]
        return pd.DataFrame(rows, columns=columns)

    def table(self) -> Table:
        """Error per quantity and percentile."""
        frame = self.errors().pivot(index="quantity", columns="statistic", values="error_percent")
        frame = frame.loc[list(_LABELS.values()), list(_STATISTICS)].astype(float)
        rows = tuple(frame.itertuples(name=None))
        columns = (Column("simulated / measured - 1"), *(Column(n, "%", 3) for n in _STATISTICS))
        return Table(self.real.name, columns, rows, (self.run.deployment.replicas[0].step.source,))


def real_runs(*, raw: bool = False, clock: Clock = "engine") -> tuple[RealRun, ...]:
    """The two runs; without ``raw`` their derived summary, with mean lengths of ten requests.

    Parameters
    ----------
    clock
        When a request counts as there, with ``raw``: when its ``"engine"`` took it into its
        queue, which it looks at between steps; or when its ``"client"`` sent it, that clock being
        set so that the quickest request took no time to the queue.

    Raises
    ------
    DownloadError
        If ``raw`` is set and the files are not there.
    """
    return tuple(_published(name, clock) if raw else _derived(name) for name in _RUNS)


def raw_available() -> bool:
    """Whether the published runs are here, fetched or in the mirror."""
    return datasets.available(DATASET)


def replay(real: RealRun, step: StepModel, *, engine: Engine | None = None) -> ReplayedRun:
    """Serve the same requests with a step model, under the same engine.

    Parameters
    ----------
    engine
        In place of the run's own, for what if.
    """
    replica = Replica(
        real.gpu,
        step,
        kv_tokens=real.kv_tokens,
        kv_bytes_per_token=float(llm(real.llm).kv_bytes_per_token()),
        engine=engine or real.engine,
        gpu=gpu(real.gpu),
        gpus=real.tensor_parallel,
    )
    run = simulate(Deployment(real.name, (replica,)), real.trace, SingleInstance(0))
    return ReplayedRun(real, run)


def summary_frame() -> pd.DataFrame:
    """Measured statistics of the published runs, as ``data/measured/engine_runs.csv`` has them."""
    rows = []
    for real in real_runs(raw=True):
        for quantity in QUANTITIES:
            values = (real.means[quantity], *real.percentiles[quantity])
            rows.append((real.llm, quantity, *(round(float(v), 6) for v in values)))
    return pd.DataFrame(rows, columns=["llm", "quantity", "mean", *(f"p{p}" for p in PERCENTILES)])


def load() -> pd.DataFrame:
    """Work that arrived, ten requests to a row: first arrival [s] and mean lengths [tokens]."""
    rows = []
    for real in real_runs(raw=True):
        trace = real.trace
        for first in range(0, len(trace), _BLOCK):
            part = slice(first, first + _BLOCK)
            rows.append(
                (
                    real.llm,
                    len(trace.arrival_s[part]),
                    round(float(trace.arrival_s[first]), 3),
                    round(float(trace.input_tokens[part].mean()), 1),
                    round(float(trace.output_tokens[part].mean()), 1),
                )
            )
    columns = ["llm", "requests", "arrival_s", "mean_input_tokens", "mean_output_tokens"]
    return pd.DataFrame(rows, columns=columns)


@lru_cache(maxsize=4)
def _published(name: str, clock: Clock = "engine") -> RealRun:
    folder = f"llmservingsim/e2e/RTXPRO6000/{name}"
    meta = json.loads(datasets.path(DATASET, f"{folder}/meta.json").read_text(encoding="utf-8"))
    config = json.loads(datasets.path(DATASET, f"{folder}/config.json").read_text(encoding="utf-8"))
    lines = datasets.path(DATASET, f"{folder}/requests.jsonl").read_text(encoding="utf-8")
    frame = pd.DataFrame([json.loads(line) for line in lines.splitlines() if line])
    if clock == "client":  # another clock, off by what the quickest request took at least
        offset = (frame["queued_ts"] - frame["arrival_time"]).min()
        frame = frame.assign(queued_ts=frame["arrival_time"] + offset)
    frame = frame.sort_values("queued_ts", kind="stable")
    start = frame["queued_ts"].min()
    queued, first, last = (
        (frame[f"{stamp}_ts"] - start).to_numpy(dtype=float)
        for stamp in ("queued", "first_token", "last_token")
    )
    outputs = frame["output_toks"].to_numpy(dtype=np.int32)
    requests = {
        "ttft_s": first - queued,
        "tpot_s": (last - first) / (outputs - 1),
        "e2e_s": last - queued,
    }
    arguments = meta["engine_kwargs"]
    started = datetime.fromisoformat(meta["started_at"])
    trace = Trace(
        queued,
        frame["input_toks"].to_numpy(dtype=np.int32),
        outputs,
        name=f"ShareGPT on {name}",
        source=f"{DATASET}, {started:%Y-%m-%d}",
    )
    return RealRun(
        llm=name,
        tensor_parallel=int(arguments["tensor_parallel_size"]),
        engine_version=f"vLLM {meta['vllm_version']}",
        engine=_engine(arguments["max_num_seqs"], arguments["max_num_batched_tokens"]),
        memory_fraction=float(config["nodes"][0]["instances"][0]["npu_mem"]["mem_util"]),
        trace=trace,
        means={q: float(v.mean()) for q, v in requests.items()},
        percentiles={q: np.percentile(v, PERCENTILES) for q, v in requests.items()},
        requests=requests,
    )


def _engine(max_batch: int, max_step_tokens: int) -> Engine:
    """VLLM 0.19: chunked prefill beside decoding, paged cache, recomputation, one step ahead."""
    return Engine(
        batching="chunked",
        admission="paged",
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        schedule_ahead=True,
    )


def _derived(name: str) -> RealRun:
    statistics = derived_frame("engine_runs")
    statistics = statistics[statistics["llm"] == name].set_index("quantity")
    means = statistics["mean"].astype(float).to_dict()
    blocks = derived_frame("engine_run_load")
    blocks = blocks[blocks["llm"] == name]
    counts = blocks["requests"].to_numpy()
    starts = blocks["arrival_s"].to_numpy(dtype=float)
    gaps = np.diff(starts, append=2.0 * starts[-1] - starts[-2])
    within = np.concatenate([np.arange(count) / count for count in counts])
    trace = Trace(
        np.repeat(starts, counts) + within * np.repeat(gaps, counts),
        np.repeat(np.round(blocks["mean_input_tokens"]).astype(np.int32), counts),
        np.repeat(np.round(blocks["mean_output_tokens"]).astype(np.int32), counts),
        name=f"ShareGPT on {name}, means over {_BLOCK}",
        source="data/measured/engine_run_load.csv",
    )
    return RealRun(
        llm=name,
        tensor_parallel=_RUNS[name],
        engine_version="vLLM 0.19.0",
        engine=_engine(128, 2048),
        memory_fraction=0.9,
        trace=trace,
        means={q: means[q] for q in QUANTITIES},
        percentiles={
            q: statistics.loc[q, [f"p{p}" for p in PERCENTILES]].to_numpy(dtype=float)
            for q in QUANTITIES
        },
        requests={},
    )


# Helix's cluster ------------------------------------------------------------------------------

_HELIX_MODELS = {"30B": "LLaMA-1 30B", "70B": "LLaMA-2 70B"}
_HELIX_METRICS = {
    "decode_throughput": "decode_tps",
    "prompt_latency_mean": "prompt_s",
    "decode_latency_mean": "decode_s",
}


def helix_prototype_frame() -> pd.DataFrame:
    """What Helix's prototype did on 24 real GPUs, as ``data/measured/helix_prototype.csv`` has it.

    One row per method, mode and part of the cluster that serves on its own: decode throughput
    [tokens/s], mean prompt and decode latency [s].
    """
    frame = pd.read_csv(datasets.path("helix_expected"))
    frame = frame[frame["experiment"] == "single_cluster"]
    rows = []
    for case in helix.cases().values():
        if case.cluster != "single-24":
            continue
        for mode in ("offline", "online"):
            of = frame[
                (frame["setting"] == f"single24/{mode}/prototype")
                & (frame["model"] == _HELIX_MODELS[case.model])
            ]
            for part in case.parts:
                kind = part.placement.split()[-1].split("-")[-1]
                name = case.method if len(case.parts) == 1 else f"{case.method}_{kind}"
                own = of[of["method"] == name].set_index("metric")["value"].astype(float)
                rows.append((case.name, mode, name, *(own[m] for m in _HELIX_METRICS)))
    return pd.DataFrame(rows, columns=["case", "mode", "part", *_HELIX_METRICS.values()])


def replay_helix(
    source: TraceSource, *, offline_s: float = 600.0, online_s: float = 1800.0
) -> pd.DataFrame:
    """Helix's methods on its cluster, simulated, beside what its prototype measured.

    Parameters
    ----------
    offline_s, online_s
        Length of the runs after a minute of warm-up offline and none online; the paper's are 600
        and 1,800 s.

    Returns
    -------
    One row per part and quantity: case, mode, part, quantity, measured, simulated, error_percent.
    """
    prototype = derived_frame("helix_prototype")
    rows = []
    for (name, mode), group in prototype.groupby(["case", "mode"], sort=False):
        result = helix.run(
            helix.cases()[str(name)],
            "offline" if mode == "offline" else "online",
            source,
            offline_s=(60.0, 60.0 + offline_s),
            online_s=online_s,
        )
        for measured, run in zip(group.to_dict("records"), result.runs, strict=True):
            served = run.serving()
            own = (served.decode_tps, served.prompt.mean_s, served.decode.mean_s)
            for quantity, simulated in zip(_HELIX_METRICS.values(), own, strict=True):
                truth = float(measured[quantity])
                error = 100.0 * (simulated / truth - 1.0)
                rows.append((name, mode, measured["part"], quantity, truth, simulated, error))
    columns = ["case", "mode", "part", "quantity", "measured", "simulated", "error_percent"]
    return pd.DataFrame(rows, columns=columns)
