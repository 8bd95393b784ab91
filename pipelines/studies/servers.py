r"""Runs of real servers beside their simulation: what a step model is worth where it is used.

Each row of the published tables (dataset ``serving_runs``) is one run of one engine on one
replica. It becomes a :class:`ServerRun`, a trace with what was measured, and is simulated as
``hetero simulate`` would: chunked batches, paged admission, the nominal memory. What a run's
record says of its engine (batch limit, token budget) counts, and that vLLM put prompts first before
it had chunks by default.

Lengths of ShareGPT are not published with the runs. Inputs are those of its twin, outputs
lognormal, both scaled to the means of the run: in the A10G rows of 750 requests the latency over
TPOT is 134 tokens at the median and 555 at P90, a ratio that the twin, that of a list cut
otherwise, does not reach; and it is the longest requests that a run of 200 ends with.

Offline runs of MLPerf queue everything at once. Their replicas have the tensor-parallel degree
that gives a GPU the highest throughput by our own simulation, as an operator would choose it, and
the list of prompts is not published: inputs of Llama-2-70B are assumed to be as long as its outputs
in the mean.

Errors are :math:`100 (simulated / measured - 1)` [%] of one statistic on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import spearmanr

from hetero.catalog import EngineName, Llm, gpu, huggingface, llm, serving_engine
from hetero.catalog.engines import EngineOverheads
from hetero.deployment import Deployment, Engine
from hetero.engines import EngineSpec
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.models.efficiencies import for_gpu
from hetero.latency.overheads import with_overheads
from hetero.latency.resolve import ResolvedSteps
from hetero.latency.step import StepModel
from hetero.routers import SingleInstance
from hetero.simulator import Run, simulate
from hetero.streams import stream
from hetero.workload import Trace, datasets, load

Ints: TypeAlias = NDArray[np.int32]
DATASET: Final = "serving_runs"
QUANTITIES: Final = ("tpot_s", "e2e_s", "ttft_s", "output_tps")
_LABELS = {"tpot_s": "TPOT", "e2e_s": "E2E", "ttft_s": "TTFT", "output_tps": "throughput"}

Statistic: TypeAlias = Literal["median", "mean", "last"]
"""Of the requests of a run; ``"last"`` for batches that are timed as a whole."""

# What `hetero simulate` runs without options.
_DEFAULT = Engine(batching="chunked", admission="paged", max_batch=256, max_step_tokens=2048)
# vLLM of 2024.
_FIRST = replace(_DEFAULT, batching="prefill first", max_step_tokens=8192)
_MEDIAN, _SIGMA = 134.0, float(np.log(555 / 134) / 1.2816)  # of outputs
_LONGEST = 1024  # inputs and outputs that the clients keep
# vLLM's client draws the same gaps for every rate; at 1/s they end 189.5 s after the first request.
_IOG_SPAN_S = 189.5
BATCH_TOKENS: Final = (128, 512, 1024)
"""Lengths of static batches that count; of longer ones not all are in memory at once."""
QUEUED_S: Final = 0.5
"""Median TTFT from which on requests queue, and it says nothing of the time per request."""
AWAY: Final = 10.0
"""Where solvers begin, since their steps are shares of what they vary."""
_ONE_BY_ONE = 1.05
_A10G_TOKENS = (245.0, 220.0)  # ShareGPT as the tokenizer of Llama 2 counts it

_MODELS = {
    "DeepSeek-R1-Distill-Llama-8B": "Llama-3.1-8B",
    "DeepSeek-R1-Distill-Qwen-7B": "Qwen2.5-7B",
    "DeepSeek-R1-Distill-Qwen-14B": "DeepSeek-R1-Distill-Qwen-14B",
    "Meta-Llama-3-8B-Instruct": "Llama-3-8B",
    "Meta-Llama-3-8B": "Llama-3-8B",
    "Meta-Llama-3-70B": "Llama-3-70B",
    "Llama-2-7b-chat-hf": "Llama-2-7B",
    "Llama-2-7b-hf": "Llama-2-7B",
    "Llama-2-70b-hf": "Llama-2-70B",
    "llama-7b": "LLaMA-1-7B",
    "OpenHermes-2.5-Mistral-7B": "Mistral-7B",
    "Mistral-7B-v0.1": "Mistral-7B",
    "CodeLlama-34b-Instruct-hf": "CodeLlama-34B",
    "Qwen2-7B": "Qwen2.5-7B",  # of one shape
    "Qwen2-72B": "Qwen2.5-72B",
    "Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
}
_SMALL_QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
}
_MLPERF_GPUS = {
    "H100-PCIe": "H100-PCIE-80GB",
    "H100-SXM": "H100-SXM",
    "H200-SXM": "H200-SXM",
    "B200-SXM": "B200-SXM",
    "MI300X": "MI300X",
    "MI325X": "MI325X",
    "MI355X": "MI355X",
}
_FP4 = ("B200", "MI355X")
# By benchmark: model, mean input tokens (assumed), prompts of a GPU's share of two passes of the
# list over eight GPUs.
_MLPERF_LISTS = {
    "llama2-70b": ("Llama-2-70B", 294, 6144),
    "llama31-8b": ("Llama-3.1-8B", 780, 3342),
    "llama31-405b": ("Llama-3.1-405B", 9400, 500),
}
_ARGONNE_GPUS = {
    "Nvidia A100 GPU": "A100-SXM-40GB",
    "Nvidia H100 GPU": "H100-SXM",
    "Nvidia GH200 GPU": "GH200-96GB",
    "AMD MI300X GPU": "MI300X",
    "Habana Gaudi2": "Gaudi2",
}


@dataclass(frozen=True, slots=True, eq=False)
class ServerRun:
    """One run of one replica.

    Attributes
    ----------
    load
        How requests came, in words.
    measured
        By quantity, some of :data:`QUANTITIES` [s, tokens/s].
    statistic
        Of the requests that ``measured`` is.
    family
        Engine whose tables step times may be from.
    """

    source: str
    server: str
    gpu: str
    llm: Llm
    tensor_parallel: int
    load: str
    trace: Trace
    measured: Mapping[str, float]
    statistic: Statistic = "median"
    precision: str = "fp16"
    kv_precision: str = "fp16"
    engine: Engine = _DEFAULT
    family: EngineName = "vllm"
    labels: Mapping[str, object] = field(default_factory=dict)

    @property
    def release(self) -> str:
        """Release of its engine; empty where it is not known."""
        last = self.server.split()[-1]
        return last if last[0].isdigit() else ""

    @property
    def overheads(self) -> EngineOverheads | None:
        """What its engine takes beside the kernels of a step, as every command takes it."""
        return serving_engine(self.family).overheads_of(self.release, self.engine.schedule_ahead)

    @property
    def spec(self) -> EngineSpec:
        """The engine as it was started."""
        return EngineSpec(
            name=self.family,
            release=self.release,
            precision=self.precision,
            kv_precision=self.kv_precision,
            rules=self.engine,
        )

    @property
    def name(self) -> str:
        """Source, model, GPU, degree and load."""
        return f"{self.source}: {self.llm.name} on {self.gpu} x{self.tensor_parallel}, {self.load}"


StepsOfRun: TypeAlias = Callable[[ServerRun], StepModel]
"""Where the step times of a run come from."""


def known_best(run: ServerRun) -> StepModel:
    """What every command takes, see :mod:`hetero.latency.resolve`."""
    return _resolved(run).step


def kernels(run: ServerRun) -> StepModel:
    """The same without what the engine takes around its kernels."""
    return _resolved(run).kernels


def _resolved(run: ServerRun) -> ResolvedSteps:
    return run.spec.resolved(gpu(run.gpu), run.llm, run.tensor_parallel, run.trace)


def served(run: ServerRun, steps: StepsOfRun = known_best) -> Run:
    """The simulation of a run.

    Raises
    ------
    InfeasibleError
        If the model does not fit the GPUs by our account of their memory.
    """
    engine = replace(run.spec, steps=lambda *_: steps(run))
    (replica,) = engine.on(gpu(run.gpu), run.llm, run.tensor_parallel).replicas(run.gpu)
    return simulate(Deployment(run.name, (replica,)), run.trace, SingleInstance(0))


def simulated(run: ServerRun, result: Run) -> dict[str, float]:
    """The quantities of a simulation by the statistic of the measured run."""
    e2e, ttft, tpot = result.e2e_s, result.ttft_s, result.tpot_s
    total = float(run.trace.output_tokens[result.finished].sum()) / max(result.span_s, 1e-300)
    if run.statistic == "last":
        values = {"e2e_s": float(np.nanmax(e2e))}
    elif run.statistic == "mean":
        values = {
            "e2e_s": float(np.nanmean(e2e)),
            "ttft_s": float(np.nanmean(ttft)),
            # Each a mean over requests; a mean of requests' means is not what these runs give.
            "tpot_s": float(
                np.nanmean(e2e - ttft) / (run.trace.output_tokens[result.finished].mean() - 1.0)
            ),
        }
    else:
        values = {
            # Where only the mean time between tokens is known, see `_client`.
            "e2e_s": float(np.nanmedian(ttft) + np.nanmean(e2e - ttft))
            if run.labels.get("e2e") == "derived"
            else float(np.nanmedian(e2e)),
            "ttft_s": float(np.nanmedian(ttft)),
            "tpot_s": float(np.nanmedian(tpot)),
        }
    return values | {"output_tps": total}


def errors_frame(runs: Iterable[ServerRun], steps: StepsOfRun = known_best) -> pd.DataFrame:
    """Error of every run; arguments as of :func:`served`.

    Returns
    -------
    One row per run: source, server, gpu, llm, degree, load, kind (of the source of step times that
    every command takes), steps (their source), and per quantity its error [%], NaN where it was not
    measured. Runs that cannot be simulated have no errors, and ``left_out`` says why.
    """
    rows = []
    for run in runs:
        row: dict[str, object] = {
            "source": run.source,
            "server": run.server,
            "gpu": run.gpu,
            "llm": run.llm.name,
            "degree": run.tensor_parallel,
            "load": run.load,
            "left_out": "",
            "kind": _resolved(run).kind,
        }
        try:
            result = served(run, steps)
        except (InfeasibleError, ParameterError) as error:
            row["left_out"] = str(error).partition("Resolve")[0].strip()
        else:
            own = simulated(run, result)
            row["steps"] = result.deployment.replicas[0].step.source
            row |= {
                _LABELS[q]: 100.0 * (own[q] / run.measured[q] - 1.0)
                for q in QUANTITIES
                if q in run.measured
            }
        rows.append(row)
    columns = ["source", "server", "gpu", "llm", "degree", "load", "left_out", "kind", "steps"]
    return pd.DataFrame(rows, columns=[*columns, *_LABELS.values()])


def medians_frame(
    frame: pd.DataFrame, by: tuple[str, ...] = ("source", "gpu", "llm")
) -> pd.DataFrame:
    """Median size and median of the errors [%] of the runs of each group.

    Examples
    --------
    >>> rows = pd.DataFrame({"gpu": ["a", "a", "a"], "TPOT": [-10.0, 2.0, 4.0]})
    >>> medians_frame(rows.reindex(columns=["gpu", *_LABELS.values()]), ("gpu",))["TPOT"].tolist()
    [4.0]
    """
    groups = frame.groupby(list(by), sort=False)
    found = {"runs": groups.size()}
    for label in _LABELS.values():
        sized = frame.assign(**{label: frame[label].abs()}).groupby(list(by), sort=False)
        found |= {label: sized[label].median(), f"{label} bias": groups[label].median()}
    return pd.DataFrame(found).reset_index()


# The published tables -------------------------------------------------------------------------


def available() -> bool:
    """Whether the published tables are here, fetched or in the mirror."""
    return datasets.available(DATASET)


def runs(source: str, *, experts: bool = False) -> tuple[ServerRun, ...]:
    """The runs of dense models of one table, or those of mixtures of experts.

    Parameters
    ----------
    source
        One of :data:`SOURCES`: ``iog`` (vLLM 0.8.5, RTX 4090), ``nm_vllm`` (A10G, the last
        version's medians over nights), ``blis`` (vLLM 0.15.1, H100, stages that were not
        overloaded), ``argonne`` (static batches, vLLM), ``dstack`` and ``dstack batches``
        (405B in fp8), ``argonne other`` (static batches under other engines), ``mlperf`` (offline
        runs of dense models, medians over submitters).

    Raises
    ------
    DownloadError
        If the tables are not here.
    """
    if source not in SOURCES:
        raise ParameterError(
            f"No runs of servers are called '{source}'.",
            resolve=f"use one of {', '.join(SOURCES)}.",
        )
    return tuple(run for run in SOURCES[source]() if bool(run.llm.experts) == experts)


def read(file: str) -> pd.DataFrame:
    """Rows of one of the published tables."""
    return pd.read_csv(datasets.path(DATASET, file))


@lru_cache(maxsize=32)
def _model(name: str) -> Llm | None:
    """Model of the catalog, or of that shape, by its name at Hugging Face."""
    short = name.rpartition("/")[2]
    if short == "DeepSeek-R1-Distill-Qwen-1.5B":
        return huggingface.read(_SMALL_QWEN, name=short)
    known = _MODELS.get(short)
    return llm(known) if known else None


@lru_cache(maxsize=256)
def share_gpt(count: int, input_mean: float, output_mean: float) -> tuple[Ints, Ints]:
    """Input and output tokens of ShareGPT requests, scaled to given means; shape (count,).

    Quantiles in random order, so that few requests have the distribution of many.
    """
    rng = stream(0, "share gpt")
    share = (np.arange(count) + 0.5) / count
    inputs = rng.permutation(np.quantile(load("sharegpt").input_tokens, share))
    outputs = rng.permutation(_MEDIAN * np.exp(_SIGMA * ndtri(share)))
    return _to_mean(inputs, input_mean), _to_mean(outputs, output_mean)


def _to_mean(values: NDArray[np.float64], mean: float) -> Ints:
    """Values times one factor, none below 4 or above 1,024 tokens, with that mean."""

    def off(factor: float) -> float:
        return float(np.clip(factor * values, 4, _LONGEST).mean()) - mean

    factor = brentq(off, 1e-3, 1e3)
    return np.asarray(np.rint(np.clip(factor * values, 4, _LONGEST)), dtype=np.int32)


def _poisson(count: int, rate_rps: float, lengths: tuple[Ints, Ints], span_s: float = 0.0) -> Trace:
    """Poisson arrivals that last ``span_s`` where it is known."""
    trace = Trace(np.zeros(count), *lengths, name="ShareGPT", source="twin:sharegpt, scaled")
    trace = trace.poisson(rate_rps, stream(0, "arrivals"))
    arrival = trace.arrival_s - trace.arrival_s[0]
    return replace(trace, arrival_s=(span_s / float(arrival[-1]) if span_s else 1.0) * arrival)


def _client(row: Mapping[Hashable, Any]) -> dict[str, float]:
    """What vLLM's client prints.

    Start-up makes the means of some runs' TTFT useless, so medians count. E2E is put together from
    the median TTFT and the mean time between tokens, where these came one by one.
    """
    later = row["total_output_tokens"] / row["completed"] - 1.0
    ttft, itl = row["median_ttft_ms"] / 1e3, row["mean_itl_ms"] / 1e3
    found = {
        "ttft_s": ttft,
        "tpot_s": row["median_tpot_ms"] / 1e3,
        "output_tps": row["output_throughput"],
    }
    return found if _bundled(row) else found | {"e2e_s": ttft + itl * later}


def _bundled(row: Mapping[Hashable, Any]) -> bool:
    """Whether the client saw several tokens at once.

    Requests that take longer have more tokens, and those of an emptying queue come faster: the mean
    over tokens is below that over requests, unless what is counted is fewer than the tokens.
    """
    return bool(row["mean_itl_ms"] > _ONE_BY_ONE * row["mean_tpot_ms"])


def _means(row: Mapping[Hashable, Any]) -> tuple[float, float]:
    done = row["completed"]
    return row["total_input_tokens"] / done, row["total_output_tokens"] / done


def _iog() -> Iterator[ServerRun]:
    for row in read("iog_rtx4090.csv").to_dict("records"):
        model = _model(row["model_id"])
        assert model is not None
        lengths = share_gpt(row["num_prompts"], *_means(row))
        rate = row["request_rate"]
        yield ServerRun(
            "iog",
            "vLLM 0.8.5",
            "RTX-4090",
            model,
            row["gpu_count"],
            f"{rate:g} req/s",
            _poisson(row["num_prompts"], rate, lengths, _IOG_SPAN_S / rate),
            _client(row),
            labels={"e2e": "derived", "bundled": _bundled(row)},
        )


def _nm_vllm() -> Iterator[ServerRun]:
    frame = read("nm_vllm_a10g.csv")
    last = frame[frame["nm_vllm"] == frame["nm_vllm"].max()]
    for (name, rate), rows in last.groupby(["model", "rate_rps"], sort=False):
        # Sparse weights need kernels that nothing here describes.
        four_bit = next((one for one in ("GPTQ", "marlin") if str(name).endswith(one)), "")
        model = _model(str(name).removesuffix(f"-{four_bit}"))
        if model is None or rows["sparsity"].notna().any():
            continue
        row = rows.median(numeric_only=True)
        count = int(row["prompts"])
        yield ServerRun(
            "nm_vllm 4-bit" if four_bit else "nm_vllm",
            f"nm-vllm {last['nm_vllm'].iloc[0]}",
            "A10G",
            model,
            1,
            f"{rate:g} req/s" + (f", {four_bit}" if four_bit else ""),
            _poisson(count, float(str(rate)), share_gpt(count, *_A10G_TOKENS)),
            {
                "ttft_s": row["median_ttft_ms"] / 1e3,
                "tpot_s": row["median_tpot_ms"] / 1e3,
                "e2e_s": row["median_request_latency"] / 1e3,
            },
            precision="int4" if four_bit else "fp16",
            engine=replace(_FIRST, max_step_tokens=4096),
        )


def _blis() -> Iterator[ServerRun]:
    """Stages of a steady load.

    100 fixed prompts come in turn, and vLLM finds each in its prefix cache.
    """
    frame = read("blis_h100_vllm_0.15.1.csv")
    for row in frame[(frame["stage"] >= 0) & (frame["overloaded"] == 0)].to_dict("records"):
        model = _model(row["model"])
        if model is None:
            continue
        count = min(row["completed"], int(240 * row["rate_rps"]))
        # Gaps between chunks, two a token, say that every output has the length asked for; the
        # client counted the text anew, and found up to 22 % fewer tokens in it.
        prompt, output = round(row["mean_prompt_tokens"]), row["asked_output_tokens"]
        blocks = (prompt - 1) // 16
        trace = Trace(
            np.arange(count) / row["rate_rps"],
            np.full(count, prompt),
            np.full(count, output),
            name=row["workload"],
            prefix_offsets=np.arange(count + 1) * blocks,
            prefix_ids=((np.arange(count) % 100)[:, None] * blocks + np.arange(blocks)).ravel(),
            block_tokens=16,
        )
        yield ServerRun(
            "blis",
            row["engine"],
            "H100-SXM",
            model,
            row["tensor_parallel"],
            f"{row['workload']}, {row['rate_rps']:g} req/s",
            trace,
            {
                "ttft_s": row["ttft_mean_s"],
                "tpot_s": (row["e2e_mean_s"] - row["ttft_mean_s"]) / (output - 1.0),
                "e2e_s": row["e2e_mean_s"],
                "output_tps": row["requests_per_s"] * output,
            },
            statistic="mean",
            engine=replace(
                _DEFAULT,
                max_batch=row["max_num_seqs"],
                max_step_tokens=row["max_num_batched_tokens"],
                schedule_ahead=True,
                prefix_cache=True,
            ),
        )


def _batch(size: int, inputs: int, outputs: int) -> Trace:
    return Trace(np.zeros(size), np.full(size, inputs), np.full(size, outputs), name="batch")


def _argonne(*, vllm: bool) -> Iterator[ServerRun]:
    frame = read("argonne_llm_inference_bench.csv")
    frame = frame[(frame["Framework"] == "vLLM") == vllm]
    frame = frame[frame["Hardware"].isin(list(_ARGONNE_GPUS)) & (frame["Latency"] > 0)]
    frame = frame[~frame["Framework"].isin(["llama.cpp", "sambaflow"])]
    keys = ["Hardware", "Framework", "Model", "Num of Hardware"]
    keys += ["Input Output Length", "Batch Size"]
    for key, rows in frame.groupby(keys):
        hardware, framework, name, count, length, size = map(str, key)
        model = _model(name)
        if model is None:
            continue
        seconds = float(rows["Latency"].median())
        tokens, batch = int(length), int(size)
        yield ServerRun(
            "argonne" if vllm else f"argonne {framework}",
            f"{framework} 0.6" if vllm else framework,  # of 2024
            _ARGONNE_GPUS[hardware],
            model,
            int(count),
            f"batch {size} of {length}",
            _batch(batch, tokens, tokens),
            {"e2e_s": seconds, "output_tps": batch * tokens / seconds},
            statistic="last",
            engine=_FIRST if vllm else _DEFAULT,
            family="vllm" if vllm else "trtllm" if "TensorRT" in framework else "any",
        )


def _dstack_gpus(text: str) -> tuple[str, int, int, str]:
    """GPU, GPUs per replica, replicas, and whose weights."""
    machine, _, rest = text.partition(" ")
    count, _, name = machine.partition("x")
    parts = int(rest.strip()[0])
    gpu_name = "H100-SXM" if "H100" in name else "MI300X"
    return gpu_name, int(count) // parts, parts, rest.rpartition("-")[2]


def _dstack() -> Iterator[ServerRun]:
    for row in read("dstack_405b_serving.csv").to_dict("records"):
        name, degree, parts, whose = _dstack_gpus(row["gpu"])
        if parts > 1:  # one client before two replicas: no run of one
            continue
        rate, count = row["request_rate"], row["num_prompts"]
        lengths = share_gpt(count, *_means(row))
        budget, batch = row["max-num-batched-tokens"], int(row["max-num-seqs"])
        engine = replace(_FIRST, max_batch=batch)
        if budget != "default":
            engine = replace(_DEFAULT, max_batch=batch, max_step_tokens=int(budget))
        at_once = Trace(np.zeros(count), *lengths, name="ShareGPT")
        yield ServerRun(
            f"dstack {whose}",
            "vLLM 0.6",
            name,
            llm("Llama-3.1-405B"),
            degree,
            f"{rate:g} req/s" if rate < 1000 else "at once",
            _poisson(count, rate, lengths) if rate < 1000 else at_once,
            _client(row),
            precision="fp8",
            engine=engine,
            labels={"e2e": "derived"},
        )


def _dstack_batches() -> Iterator[ServerRun]:
    frame = read("dstack_405b_batches.csv")
    for row in frame[frame["table"] == "throughput_comparsion"].to_dict("records"):
        name, degree, parts, whose = _dstack_gpus(row["gpu"])
        size = int(row["batch_size"]) // parts
        inputs, outputs = int(row["input_len"]), int(row["output_len"])
        seconds = row["elapsed_time"]
        yield ServerRun(
            f"dstack batches {whose}",
            "vLLM 0.6",
            name,
            llm("Llama-3.1-405B"),
            degree,
            f"batch {size} of {inputs} + {outputs}",
            _batch(size, inputs, outputs),
            {"e2e_s": seconds, "output_tps": size * outputs / seconds},
            statistic="last",
            precision="fp8",
            engine=replace(_DEFAULT, max_batch=512, max_step_tokens=512)
            if name == "H100-SXM"
            else replace(_FIRST, max_batch=1024),
        )


def offline_frame() -> pd.DataFrame:
    """Offline runs of MLPerf by benchmark and chip: medians over submitters and versions.

    Returns
    -------
    One row per benchmark and GPU: runs, output tokens per second and GPU (``tokens_per_s``), the
    spread between runs (``low``, ``high``) and mean output tokens of a request. Runs of mixed
    fleets are no chip's, and those of the open division, whose models may differ, count where there
    are no others.
    """
    frame = read("mlperf_v4.1_v5.1.csv")
    names = frame["accelerator"].fillna("")
    kept = (frame["scenario"] == "Offline") & ~names.str.contains("(x", regex=False)
    frame, names = frame[kept], names[kept]
    # Empty for those that are not in the catalog.
    gpus = (next((g for part, g in _MLPERF_GPUS.items() if part in x), "") for x in names)
    lists = frame["model"].str.removesuffix("-99.9").str.removesuffix("-99")
    lists = lists.str.replace("llama3[._]1", "llama31", regex=True)
    frame = frame.assign(gpu=list(gpus), list=lists)
    frame = frame[(frame["gpu"] != "") & frame["list"].isin(list(_MLPERF_LISTS))]
    frame = frame.assign(
        tokens_per_s=frame["tokens_per_s"] / frame["accelerators"],
        output=frame["tokens_per_s"] / frame["samples_per_s"],
    )
    rows = []
    for (name, of), every in frame.groupby(["list", "gpu"]):
        closed = every[every["division"] == "closed"]
        found = closed if len(closed) else every
        tokens = found["tokens_per_s"]
        spread = (tokens.median(), tokens.min(), tokens.max())
        rows.append((name, of, len(found), *spread, found["output"].median()))
    columns = ["list", "gpu", "runs", "tokens_per_s", "low", "high", "output"]
    return pd.DataFrame(rows, columns=columns)


def chips(
    steps: StepsOfRun = known_best, benchmarks: Iterable[str] = tuple(_MLPERF_LISTS)
) -> Iterator[ServerRun]:
    """The offline run of every chip, at the best degree by these step times."""
    for row in offline_frame().to_dict("records"):
        if row["list"] in benchmarks:
            yield _best(row, steps)[0]


def _best(row: Mapping[Hashable, Any], steps: StepsOfRun) -> tuple[ServerRun, float]:
    """The replica with the highest throughput per GPU; larger ones as long as they gain."""
    found: list[tuple[ServerRun, float]] = []
    for run in _replicas(row):
        found.append((run, _per_gpu(run, steps)))
        if found[-1][1] < max(reached for _, reached in found):
            break
    return max(found, key=lambda one: one[1])


def _per_gpu(run: ServerRun, steps: StepsOfRun) -> float:
    """Output tokens per second and GPU; 0 where the model does not fit."""
    try:
        result = served(run, steps)
    except (InfeasibleError, ParameterError):
        return 0.0
    return simulated(run, result)["output_tps"] / run.tensor_parallel


def _replicas(row: Mapping[Hashable, Any]) -> list[ServerRun]:
    name, inputs, prompts = _MLPERF_LISTS[row["list"]]
    found = []
    for degree in (1, 2, 4, 8):
        count = prompts * degree
        trace = _batch(count, inputs, round(row["output"]))
        if name == "Llama-2-70B":
            trace = Trace(
                np.zeros(count), *share_gpt(count, inputs, row["output"]), name="OpenOrca"
            )
        found.append(
            ServerRun(
                "mlperf",
                "MLPerf v4.1-v5.1",
                row["gpu"],
                llm(name),
                degree,
                f"offline, {row['list']}",
                trace,
                {"output_tps": degree * row["tokens_per_s"]},
                precision="fp4" if row["gpu"].startswith(_FP4) else "fp8",
                kv_precision="fp8",
                engine=replace(_DEFAULT, max_batch=1024, max_step_tokens=8192),
            )
        )
    return found


def without_its_gpu(run: ServerRun, overheads: EngineOverheads | None = None) -> StepModel:
    """Step times of a run from measurements of all other GPUs; with its engine's overheads."""
    roofline = for_gpu(
        gpu(run.gpu),
        run.llm,
        run.tensor_parallel,
        precision=run.precision,
        kv_precision=run.kv_precision,
        without=run.gpu,
    )
    found = overheads or run.overheads
    step = roofline.step_model()
    return with_overheads(step, found, run.llm, run.tensor_parallel) if found else step


def ranked(
    steps: StepsOfRun = without_its_gpu, benchmarks: Iterable[str] = tuple(_MLPERF_LISTS)
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Chips by throughput per GPU, simulated without their own measurements, and measured.

    Returns
    -------
    One row per benchmark and chip: as of :func:`offline_frame`, with ``degree``, ``simulated``
    output tokens per second and GPU, and ``error_percent``; and per benchmark the rank correlation
    over its chips (Spearman).
    """
    rows = []
    for row in offline_frame().to_dict("records"):
        if row["list"] in benchmarks:
            run, reached = _best(row, steps)
            rows.append({**row, "degree": run.tensor_parallel, "simulated": reached})
    frame = pd.DataFrame(rows)
    frame["error_percent"] = 100.0 * (frame["simulated"] / frame["tokens_per_s"] - 1.0)
    order = {
        str(name): float(spearmanr(each["simulated"], each["tokens_per_s"]).statistic)
        for name, each in frame.groupby("list")
    }
    return frame, order


def offline_compute_frame() -> pd.DataFrame:
    """Share of peak compute of chips without operator tables, from offline runs of Llama-2-70B.

    What an offline run is bound by is its matrix products: the share at which the simulation gives
    the median throughput of the submitters, everything else as it is lent by other GPUs. This is
    ``data/measured/offline_compute.csv``.
    """
    rows = []
    for row in offline_frame().to_dict("records"):
        found = gpu(row["gpu"])
        if row["list"] != "llama2-70b" or found.vendor == "NVIDIA":
            continue

        def off(share: float, row: Mapping[Hashable, Any] = row) -> float:
            def steps(run: ServerRun) -> StepModel:
                base = for_gpu(gpu(run.gpu), run.llm, run.tensor_parallel, precision=run.precision)
                own = replace(base.efficiency, compute_efficiency=share)
                step = replace(base, efficiency=own, kv_precision=run.kv_precision).step_model()
                assert run.overheads is not None
                return with_overheads(step, run.overheads, run.llm, run.tensor_parallel)

            return float(np.log(_best(row, steps)[1] / row["tokens_per_s"]))

        share = brentq(off, 0.1, 1.0, xtol=1e-3)
        source = f"fitted on serving_runs: MLPerf Llama-2-70B offline, {row['runs']} runs"
        rows.append((found.name, found.vendor, round(share, 3), source))
    return pd.DataFrame(rows, columns=["gpu", "vendor", "compute_efficiency", "source"])


SOURCES: Final[dict[str, Callable[[], Iterator[ServerRun]]]] = {
    "iog": _iog,
    "nm_vllm": _nm_vllm,
    "blis": _blis,
    "argonne": lambda: _argonne(vllm=True),
    "dstack": _dstack,
    "dstack batches": _dstack_batches,
    "argonne other": lambda: _argonne(vllm=False),
    "mlperf": chips,
}
