r"""Mixtures of experts on real servers, with what their kernels reach, and tested left out.

InferenceMAX (dataset ``serving_runs``) has closed loops of clients on gpt-oss-120b and DeepSeek-R1
under vLLM, SGLang and TensorRT-LLM, Argonne static batches of Mixtral under vLLM of 2024. Each run
is simulated as ``hetero simulate`` would, with what its launch script sets: vLLM prepares steps
ahead, SGLang puts prompts first in large chunks, KV caches of Blackwell are fp8
(github.com/InferenceMAX/InferenceMAX, benchmarks/, December 2025).

On NVIDIA's GPUs no run is fitted to: what experts reach is from tables of kernels
(:mod:`pipelines.studies.expert_kernels`), with the tables of a run's GPU left out, or the rows of
its model's shape. Of AMD's there are no tables: the three values are fitted to TPOT and TTFT (under
vLLM), or the time of a whole batch, of all runs on a die, of all but a GPU's, and of all but a
model's.

What a request takes beside its steps is fitted to TTFT (:func:`front`). Not of B200 under SGLang,
which looks for new requests every 10 or 30 steps there, as its script says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from scipy.special import ndtri

from hetero.arrays import Floats
from hetero.catalog import EngineName, gpu, llm, serving_engine
from hetero.catalog.engines import EngineOverheads
from hetero.engines import EngineSpec
from hetero.latency.calibration.expected import error_of, level_of
from hetero.latency.frames import derived_frame
from hetero.latency.models.efficiencies import die, expert_efficiency
from hetero.latency.models.roofline import ExpertEfficiency
from hetero.latency.resolve import resolve
from hetero.latency.step import StepModel
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.studies import expert_kernels, servers
from pipelines.studies.server_fit import FOLDS, LABELS, Fold
from pipelines.studies.servers import (
    AWAY,
    ServerRun,
    StepsOfRun,
    known_best,
    read,
    served,
    simulated,
)

# Smallest and largest share of compute, share of bandwidth, and time per layer [us]; and the weak
# prior of each: its centre, and the deviation of its logarithm. Two of them can explain one run.
_BOUNDS: Final = ((0.02, 2.0), (0.1, 2.0), (0.1, 500.0))
_PRIOR: Final = ((0.5, 1.0), (1.0, 0.1), (5.0, 1.5))
_SCALE: Final = 0.1
_GPUS: Final = {
    "h100": "H100-SXM",
    "h200": "H200-SXM",
    "b200": "B200-SXM",
    "mi300x": "MI300X",
    "mi325x": "MI325X",
    "mi355x": "MI355X",
}
_MODELS: Final = {"gptoss": "gpt-oss-120b", "dsr1": "DeepSeek-R1"}
_SHORTEST = 0.8  # of the lengths asked for; shorter ones are not drawn


_ENGINES: Final[dict[str, EngineName]] = {"vllm": "vllm", "sglang": "sglang", "trt": "trtllm"}
# What the launch scripts set, by engine: limits, and whether steps are prepared ahead.
_LAUNCHED: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"max_batch": 512, "max_step_tokens": 8192, "schedule_ahead": True},
    "sglang": {"max_batch": 512, "max_step_tokens": 32768, "batching": "prefill first"},
    "trtllm": {"max_batch": 512, "max_step_tokens": 20000, "schedule_ahead": True},
}
_CHUNK_OF_AMD: Final = 196608
_NARROW_CACHE: Final = ("B200",)
_POLLED: Final = {"sglang": "B200-SXM"}


def inferencemax() -> Iterator[ServerRun]:
    """The last run of every setting of one replica, under vLLM, SGLang and TensorRT-LLM."""
    frame = read("inferencemax_even.csv")
    kept = (frame["latest"] == 1) & ~frame["disagg"] & (frame["spec_decoding"] == "none")
    kept &= (
        frame["framework"].isin(list(_ENGINES)) & (frame["ep"] == 1) & (frame["dp_attention"] == 0)
    )
    for row in frame[kept].to_dict("records"):
        model, family = llm(_MODELS[row["infmax_model_prefix"]]), _ENGINES[row["framework"]]
        clients, of = int(row["conc"]), gpu(_GPUS[row["hw"].split("-")[0]])
        release = row["image"].rpartition(":")[2].lstrip("v").split("-")[0]
        release = release.split(".post")[0].split("rc")[0]
        limits = dict(_LAUNCHED[family])
        if of.vendor == "AMD":
            limits["max_step_tokens"] = _CHUNK_OF_AMD
        engine = EngineSpec(name=family, release=release, prefix_cache=False).limits(of)
        yield ServerRun(
            "inferencemax",
            f"{family} {release}",
            of.name,
            model,
            int(row["tp"]),
            f"{clients} clients, {row['isl']} + {row['osl']}",
            lengths(10 * clients, row["isl"], row["osl"]).closed_loop(clients),
            {
                "ttft_s": row["median_ttft"],
                "tpot_s": row["median_tpot"],
                "e2e_s": row["median_e2el"],
                "output_tps": row["output_tput_per_gpu"] * row["tp"],
            },
            precision="fp16" if model.expert_bits else row["precision"],
            kv_precision="fp8" if of.name.startswith(_NARROW_CACHE) else "fp16",
            engine=replace(engine, **limits),
            family=family,
        )


def lengths(count: int, inputs: int, outputs: int) -> Trace:
    """Requests of 0.8 to 1 times the lengths asked for, as the benchmark draws them."""
    rng = stream(0, "inferencemax")
    prompts, answers = (
        rng.integers(round(_SHORTEST * n), n + 1, count).astype(np.int32) for n in (inputs, outputs)
    )
    return Trace(np.zeros(count), prompts, answers, name=f"{inputs} + {outputs}")


def _steps(shares: ExpertEfficiency | None = None) -> StepsOfRun:
    """Step times with these shares, by default those of every command."""

    def of(run: ServerRun) -> StepModel:
        return resolve(
            gpu(run.gpu),
            run.llm,
            run.tensor_parallel,
            engine=run.family,
            release=run.release,
            ahead=run.engine.schedule_ahead,
            precision=run.precision,
            kv_precision=run.kv_precision,
            experts=shares,
        ).step

    return of


def front(engine: EngineName, without: str = "") -> EngineOverheads:
    r"""What an engine takes of a request to a mixture of experts, beside its steps.

    ``f``, where dense models do not show it, and ``p`` minimise
    :math:`\rho(\ln(TTFT_0 + f + p\,n) - \ln measured)` with the simulated ``TTFT_0`` without them
    and mean prompts ``n``; every GPU weighs the same.

    Parameters
    ----------
    without
        GPU, or model, whose runs take no part.
    """
    known = serving_engine(engine).overheads_of("", True)
    assert known is not None
    chosen = [
        run
        for run in inferencemax()
        if run.family == engine and run.gpu != _POLLED.get(engine) and run.measured["ttft_s"] < 2.0
    ]
    least_s = known.request_s if engine == "vllm" else 0.0
    chosen = [run for run in chosen if without not in (run.gpu, run.llm.name)]
    if not chosen:
        return replace(known, request_s=least_s, prompt_token_s=0.0)
    rows = []
    for run in chosen:
        bare = replace(known_best(run), request_s=least_s, prompt_token_s=0.0)
        own = simulated(run, served(run, {run: bare}.__getitem__))
        rows.append((own["ttft_s"], run.measured["ttft_s"], float(run.trace.input_tokens.mean())))
    said, seen, tokens = np.array(rows).T
    many = Counter(run.gpu for run in chosen)
    weight = np.array([many[run.gpu] ** -0.5 for run in chosen])

    def residuals(x: Floats) -> Floats:
        first = x[0] if engine != "vllm" else 0.0
        found = said + 1e-3 * first + 1e-6 * x[1] * tokens
        return np.asarray(weight / weight.mean() * np.log(found / seen))

    free = least_squares(residuals, [10.0, 3.0], bounds=(0, 1e3), loss="soft_l1", f_scale=_SCALE)
    first_ms, token_us = (float(f"{value:.3g}") for value in free.x)
    request_s = least_s if engine == "vllm" else 1e-3 * first_ms
    return replace(known, request_s=request_s, prompt_token_s=1e-6 * token_us)


def logs(shares: ExpertEfficiency, of: Sequence[ServerRun]) -> Floats:
    """Logarithms of simulated over measured: TPOT and TTFT or E2E; of a batch its time."""
    steps, rows = _steps(shares), []
    for run in of:
        own = simulated(run, served(run, steps))
        keys = ("tpot_s", "ttft_s" if run.family == "vllm" else "e2e_s")
        keys = ("e2e_s", "e2e_s") if run.statistic == "last" else keys
        rows.append([math.log(own[key] / run.measured[key]) for key in keys])
    return np.array(rows)


def fit(of: Sequence[ServerRun]) -> ExpertEfficiency:
    """Shares that explain some runs best; every pair of GPU and model weighs the same.

    Runs that wait for room in the KV cache say nothing of kernels and take no part.
    """
    chosen = tuple(filter(_held, of))
    many = Counter((run.gpu, run.llm.name) for run in chosen)
    weight = np.array([many[run.gpu, run.llm.name] ** -0.5 for run in chosen])[:, None]
    low, high = np.log(_BOUNDS).T + AWAY
    centre, deviation = np.log([one for one, _ in _PRIOR]), [one for _, one in _PRIOR]

    def residuals(found: Floats) -> Floats:
        far = _SCALE * (found - AWAY - centre) / deviation
        return np.append((weight * logs(_shares(found - AWAY), chosen)).ravel(), far)

    found = least_squares(
        residuals,
        centre + AWAY,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_SCALE,
        diff_step=[0.005],
        xtol=1e-3,
        ftol=1e-3,
    )
    return _shares(found.x - AWAY)


def _held(run: ServerRun) -> bool:
    """Whether the KV cache has room for all clients, or for the batch, at once."""
    (replica,) = served(run).deployment.replicas
    trace = run.trace
    each = float((trace.input_tokens + trace.output_tokens).mean())
    return (trace.clients or len(trace)) * each < replica.kv_tokens


def _shares(logs: Floats) -> ExpertEfficiency:
    compute, bandwidth, layer_us = (float(f"{value:.3g}") for value in np.exp(logs))
    return ExpertEfficiency(
        compute_share=compute, bandwidth_share=bandwidth, layer_s=1e-6 * layer_us
    )


@lru_cache(maxsize=1)
def runs() -> tuple[ServerRun, ...]:
    """Every run of a mixture of experts on one replica."""
    return (*inferencemax(), *servers.runs("argonne", experts=True))


def near(engine: EngineName, name: str, without: str = "") -> list[ServerRun]:
    """Runs under an engine on the die of a GPU without kernels; of all others if there are none."""
    rest = [
        run
        for run in runs()
        if run.family == engine and gpu(run.gpu).vendor != "NVIDIA" and run.gpu != without
    ]
    rest = [run for run in rest if run.precision != "fp4"]
    return [run for run in rest if die(run.gpu) == die(name)] or rest


@lru_cache(maxsize=16)
def _fitted(engine: EngineName, name: str, without: str = "") -> ExpertEfficiency | None:
    chosen = near(engine, name, without)
    return fit(chosen) if chosen else None


def shares_frame() -> pd.DataFrame:
    """Rows of ``data/measured/experts.csv``: of kernels, and a fit per die without any."""
    rows = []
    for engine, name in dict.fromkeys((run.family, run.gpu) for run in runs()):
        if gpu(name).vendor == "NVIDIA" or (found := _fitted(engine, name)) is None:
            continue
        those = near(engine, name)
        error = 100.0 * np.abs(np.expm1(logs(found, those)[:, 0]))
        rows.append(
            {
                "engine": engine,
                "vendor": gpu(name).vendor,
                "gpu": name,
                "type": those[0].precision,
                "compute_share": found.compute_share,
                "bandwidth_share": found.bandwidth_share,
                "layer_us": round(1e6 * found.layer_s, 2),
                "latent_us": 0.0,
                "shapes": 1,
                "error_percent": round(float(np.median(error)), 1),
                "source": f"fitted on serving_runs: {len(those)} runs of {those[0].llm.name}",
            }
        )
    return pd.concat([expert_kernels.shares_frame(), pd.DataFrame(rows)], ignore_index=True)


def left_out(run: ServerRun, fold: Fold) -> ExpertEfficiency:
    """What is said of a run's experts without its GPU, or without its model.

    Latent attention was measured on one model alone: without it, it takes what dense layers do.
    Each engine ran one model on AMD's GPUs: without it, the other engine's runs count.
    """
    of = gpu(run.gpu)
    if of.vendor == "NVIDIA":
        if fold == "gpu":
            return expert_efficiency(run.llm, of, run.family, run.precision, without=of.name)
        kind = "mxfp4" if run.llm.expert_bits else run.precision
        table = expert_kernels.experts_frame(run.gpu.replace("-40GB", "-80GB"), run.family, kind)
        return expert_kernels.fit(expert_kernels.left_out_frame(table, run.llm))
    other: EngineName = "sglang" if run.family == "vllm" else "vllm"
    found = _fitted(run.family, of.name, of.name) if fold == "gpu" else _fitted(other, of.name)
    # Without any run of the vendor, as of a GPU of which nothing is known.
    usual = replace(of, vendor="NVIDIA")
    return found or expert_efficiency(run.llm, usual, run.family, run.precision)


_front = lru_cache(maxsize=32)(front)


def _apart(run: ServerRun, fold: Fold) -> StepsOfRun:
    """Step times without the runs of its GPU, or model, in any fit."""
    step = _steps(left_out(run, fold))(run)
    if run.source == "inferencemax":
        own = _front(run.family, run.gpu if fold == "gpu" else run.llm.name)
        step = replace(step, request_s=own.request_s, prompt_token_s=own.prompt_token_s)
    return {run: step}.__getitem__


def coverage_frame(share: float = 0.9) -> pd.DataFrame:
    """How often intervals made without a run's GPU, or model, hold its TPOT and throughput.

    In a closed loop both go with the time of a decode step, whose deviation is
    :func:`hetero.latency.calibration.expected.error_of`'s. Columns: test, engine, vendor, runs, and
    both quantities with the share of runs held.
    """
    frame = derived_frame("expert_servers")
    frame = frame[(frame["test"] != "default") & (frame["source"] == "inferencemax")]
    names = frame["server"].str.split().str[0]
    frame = frame.assign(engine=names, vendor=frame["gpu"].map(lambda name: gpu(name).vendor))
    errors = [
        error_of(
            level_of(row["gpu"]),
            row["engine"],
            row["vendor"],
            without=(row["test"], row[row["test"]]),
            experts=True,
        )
        for row in frame.to_dict("records")
    ]
    width = float(ndtri((1 + share) / 2)) * np.array([error.decode_sd for error in errors])
    both = ["TPOT", "throughput"]
    held = (frame[both] / 100.0).map(np.log1p).abs().le(width, axis=0)
    groups = frame.assign(**held).groupby(["test", "engine", "vendor"])
    return groups[both].mean().assign(runs=groups.size()).reset_index()


def errors_frame() -> pd.DataFrame:
    """Rows of ``data/measured/expert_servers.csv``: the error of every run, left out and not.

    Columns as of :func:`pipelines.studies.servers.errors_frame`, and ``test``: ``gpu`` and ``llm``
    without that GPU or that model (:func:`left_out`), ``default`` with what every command takes.
    """
    every = list(runs())
    parts = [servers.errors_frame(every).assign(test="default")]
    for fold in FOLDS:
        rows = [servers.errors_frame([run], _apart(run, fold)) for run in every]
        parts.append(pd.concat(rows).assign(test=fold))
    columns = ["test", "source", "server", "gpu", "llm", "degree", "load", *LABELS]
    found = pd.concat(parts, ignore_index=True)[columns]
    return found.assign(**{label: found[label].round(1) for label in LABELS})
