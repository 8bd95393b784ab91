"""Times per operator of one layer, as LLMServingSim's profiler took them under vLLM.

A profile has three tables: the matrix products, norms and activations of a layer over the new
tokens of a step, the head over its requests, and the attention kernel over a prefill chunk, the
tokens cached before it, the decoding requests and their context. A step of the whole model is

    step_s = l (dense(n) + attention(q, start, b, context)) + embedding(n) + norm(n) + head(b)

for ``l`` layers. Profiles of two GPUs were taken on one GPU with half the heads and widths; the
two all-reduces per layer are added from ``data/measured/all_reduce.csv``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from ruamel.yaml import YAML

from hetero.catalog import Llm, llm
from hetero.catalog import gpu as find_gpu
from hetero.errors import ParameterError
from hetero.latency.frames import derived_frame
from hetero.latency.models.efficiencies import efficiency
from hetero.workload import datasets

Floats = NDArray[np.float64]

ENGINE = "vLLM 0.19.0"
OLD_ENGINE = "LLMServingSim v0 profiler"
_KEYS = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
_ONCE = ("embedding", "final_layernorm")  # per step, not per layer
_FOLDERS = {
    ("RTX-4090", "Llama-3.1-8B", 1): "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
    ("RTX-PRO-6000-Server", "Llama-3.1-8B", 1): "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1",
    ("RTX-PRO-6000-Server", "Llama-3.1-8B", 2): "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp2",
    ("RTX-PRO-6000-Server", "Qwen3-32B", 1): "RTXPRO6000/Qwen/Qwen3-32B/bf16/tp1",
}
_OLD = {"RTX-A6000": "A6000", "RTX-3090": "RTX3090"}


@dataclass(frozen=True, slots=True, eq=False)
class LayerProfile:
    """Profile of one model on one kind of replica, summed to the whole model.

    Attributes
    ----------
    tokens, dense_s
        Shape (K,): new tokens of a step, and the time of all that is neither attention nor head.
    sequences, head_s
        Shape (S,): requests that get a token, and the time of head and sampler.
    chunk_tokens, start_tokens, decoding, context_tokens, attention_s
        Shape (N,): rows of the attention table; prefill chunk after ``start_tokens`` cached ones,
        beside ``decoding`` requests of ``context_tokens`` each; time of all layers.
    skew
        Share of the difference between longest and mean context that a ragged batch pays:
        ``attention = t(mean) + skew (t(longest) - t(mean))``; NaN where it was not measured.
    """

    gpu: str
    llm: str
    tensor_parallel: int
    engine: str
    provenance: str
    note: str
    tokens: Floats
    dense_s: Floats
    sequences: Floats
    head_s: Floats
    chunk_tokens: Floats
    start_tokens: Floats
    decoding: Floats
    context_tokens: Floats
    attention_s: Floats
    skew: float

    def dense(self, tokens: ArrayLike) -> Floats:
        """Time [s] of matrix products, norms and activations of a step."""
        return np.asarray(np.interp(np.asarray(tokens, np.float64), self.tokens, self.dense_s))

    def head(self, requests: ArrayLike) -> Floats:
        """Time [s] of the head for that many requests."""
        return np.asarray(np.interp(np.asarray(requests, np.float64), self.sequences, self.head_s))

    @property
    def seconds(self) -> Floats:
        """Time [s] of the whole step of every row of the attention table; shape (N,)."""
        prompts = (self.chunk_tokens > 0).astype(float)
        return np.asarray(
            self.dense(self.chunk_tokens + self.decoding)
            + self.head(self.decoding + prompts)
            + self.attention_s
        )

    @property
    def step_arguments(self) -> tuple[Floats, Floats, Floats, Floats]:
        """New tokens, decoding requests, cached tokens and pairs of every row."""
        q, b = self.chunk_tokens, self.decoding
        return q + b, b, b * self.context_tokens, q * (self.start_tokens + q / 2.0)

    def ragged_seconds(self, contexts: Floats, skew: float) -> float:
        """Time [s] of a decode step of requests of unequal ``contexts``, with that ``skew``.

        Raises
        ------
        ParameterError
            If that number of requests was not profiled, or the skew was not.
        """
        b = len(contexts)
        rows = (self.chunk_tokens == 0) & (self.decoding == b)
        if not rows.any() or np.isnan(skew):
            raise ParameterError(
                f"The profile of {self.llm} on {self.gpu} has no ragged decode steps of {b} "
                "requests.",
                resolve=f"use one of {sorted(set(self.decoding.astype(int)))} requests.",
            )
        order = np.argsort(self.context_tokens[rows])
        x, y = self.context_tokens[rows][order], self.attention_s[rows][order]
        mean, longest = np.interp([contexts.mean(), contexts.max()], x, y)
        attention = mean + skew * (longest - mean)
        return float(self.dense(b) + self.head(b) + attention)


def layer_profiles() -> tuple[LayerProfile, ...]:
    """Every profile of the published files, two GPUs of Qwen3-32B estimated from one.

    Raises
    ------
    DownloadError
        If the files are not there.
    """
    found = [_profile(*key) for key in _FOLDERS]
    found.append(_split_in_two())
    found += [_old_profile(gpu) for gpu in _OLD]
    return tuple(found)


def all_reduce_s(gpu: str, gpus: int, size_bytes: ArrayLike, engine: str = ENGINE) -> Floats:
    """Time [s] of an all-reduce between GPUs of one machine, as aiconfigurator measured it.

    Parameters
    ----------
    engine
        ``vLLM 0.19.0`` or ``vLLM 0.24.0``; they were measured on different hosts, and without
        NVLink it is the host that decides.

    Raises
    ------
    ParameterError
        If it was not measured there.
    """
    frame = derived_frame("all_reduce")
    rows = frame[(frame["gpu"] == gpu) & (frame["gpus"] == gpus) & (frame["engine"] == engine)]
    if rows.empty:
        known = ", ".join(sorted(set(frame["gpu"] + " under " + frame["engine"])))
        raise ParameterError(
            f"No all-reduce of {gpus} {gpu} under {engine} is in data/measured.",
            resolve=f"use two of {known}.",
        )
    x, y = rows["message_bytes"].to_numpy(float), rows["us"].to_numpy(float)
    # Linear in the size between knots: a latency and a bandwidth.
    return np.asarray(np.interp(np.asarray(size_bytes, np.float64), x, y) * 1e-6)


def _read(folder: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, float]:
    """Dense and head tables [us] with one column per operator, attention table, skew."""
    names = ("dense.csv", "per_sequence.csv", "attention.csv")
    paths = [_file(f"{folder}/{name}") for name in names]
    dense, head, attention = map(pd.read_csv, paths)
    meta = YAML(typ="safe").load(_file(f"{folder.rpartition('/')[0]}/meta.yaml"))
    degree = int(folder[-1])
    skew = meta["skew_fit"].get("per_tp", {}).get(degree, {}).get("alpha_default", np.nan)
    return (
        dense.pivot(index="tokens", columns="layer", values="time_us"),
        head.pivot(index="sequences", columns="layer", values="time_us"),
        attention,
        float(skew),
    )


def _file(name: str) -> Path:
    return datasets.path("llmservingsim_profile", f"llmservingsim/profile/{name}")


def _profile(gpu: str, name: str, degree: int) -> LayerProfile:
    dense, head, attention, skew = _read(_FOLDERS[gpu, name, degree])
    note = "two all-reduces per layer added from aiconfigurator" if degree > 1 else ""
    return _sum(gpu, name, degree, dense, head, attention, skew, "measured", note)


def _split_in_two() -> LayerProfile:
    """Qwen3-32B on two RTX PRO 6000: its times on one, as Llama-3.1-8B's change from one to two.

    Its own tables for two GPUs are not among the published files used here. The ratio is taken
    operator by operator and row by row; norms of heads split as rotary embeddings do.
    """
    gpu = "RTX-PRO-6000-Server"
    dense, head, attention, _ = _read(_FOLDERS[gpu, "Qwen3-32B", 1])
    one, two = (_read(_FOLDERS[gpu, "Llama-3.1-8B", degree]) for degree in (1, 2))
    ratio = two[0] / one[0]
    ratio["qk_norm"] = ratio["rotary_emb"]
    merged = attention.merge(one[2], on=_KEYS, suffixes=("", "_one")).merge(
        two[2], on=_KEYS, suffixes=("", "_two")
    )
    merged["time_us"] *= merged["time_us_two"] / merged["time_us_one"]
    note = (
        "estimated from its times on one GPU and the change of Llama-3.1-8B's from one to two; "
        "two all-reduces per layer added from aiconfigurator"
    )
    return _sum(
        gpu, "Qwen3-32B", 2, dense * ratio, head * (two[1] / one[1]), merged, two[3], "estimated",
        note,
    )  # fmt: skip


def _sum(
    gpu: str,
    name: str,
    degree: int,
    dense: pd.DataFrame,
    head: pd.DataFrame,
    attention: pd.DataFrame,
    skew: float,
    provenance: str,
    note: str,
) -> LayerProfile:
    model = llm(name)
    # One table row stands for both norms of a layer.
    layer = dense.drop(columns=list(_ONCE)).sum(axis=1) + dense["layernorm"]
    total_us = model.layers * layer + dense[list(_ONCE)].sum(axis=1)
    tokens = total_us.index.to_numpy(dtype=float)
    dense_s = total_us.to_numpy(dtype=float) * 1e-6
    if degree > 1:
        dense_s = dense_s + 2 * model.layers * all_reduce_s(gpu, degree, 2 * model.hidden * tokens)
    chunk, start, decoding, context = (attention[key].to_numpy(dtype=float) for key in _KEYS)
    return LayerProfile(
        gpu=gpu,
        llm=name,
        tensor_parallel=degree,
        engine=ENGINE,
        provenance=provenance,
        note=note,
        tokens=tokens,
        dense_s=dense_s,
        sequences=head.index.to_numpy(dtype=float),
        head_s=head.sum(axis=1).to_numpy(dtype=float) * 1e-6,
        chunk_tokens=chunk,
        start_tokens=start,
        decoding=decoding,
        context_tokens=context,
        attention_s=model.layers * attention["time_us"].to_numpy(dtype=float) * 1e-6,
        skew=skew,
    )


def _old_profile(gpu: str) -> LayerProfile:
    """Layers of Llama-3.1-8B on A6000 and RTX 3090, whose decode attention was not profiled.

    Reading the cache is estimated as its bytes over the bandwidth times ``kv_efficiency``, the
    median of the calibrated GPUs.
    """
    name = f"llmservingsim/profile_v0/{_OLD[gpu]}/llama-3.1-8b_tp1_layers.csv.gz"
    frame = pd.read_csv(datasets.path("llmservingsim_profile_v0", name))
    table = frame.pivot(index="input", columns="layer_name", values="latency(ns)") / 1e3
    model: Llm = llm("Llama-3.1-8B")
    once = table[["embedding", "final_layernorm"]].sum(axis=1)
    per_layer = table.drop(columns=["embedding", "final_layernorm", "lm_head", "attn"]).sum(axis=1)
    tokens = table.index.to_numpy(dtype=float)
    share = efficiency(find_gpu(gpu), "median").kv_efficiency
    per_token_s = model.kv_bytes_per_token() / (share * find_gpu(gpu).mem_bw_gbs * 1e9)
    batches = 2.0 ** np.arange(9)
    contexts = np.array([64.0, 512.0, 1024.0, 2048.0, 4096.0])
    chunks = np.array([16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0])
    prefill_s = model.layers * np.interp(chunks, tokens, table["attn"].to_numpy(float)) * 1e-6
    b, c = (grid.ravel() for grid in np.meshgrid(batches, contexts, indexing="ij"))
    zeros, none = np.zeros(len(chunks)), np.zeros(len(b))
    return LayerProfile(
        gpu=gpu,
        llm=model.name,
        tensor_parallel=1,
        engine=OLD_ENGINE,
        provenance="derived",
        note="attention of decode steps was not profiled: bytes of the cache over a median share "
        "of the bandwidth",
        tokens=tokens,
        dense_s=(model.layers * per_layer + once).to_numpy(dtype=float) * 1e-6,
        sequences=tokens,
        head_s=table["lm_head"].to_numpy(dtype=float) * 1e-6,
        chunk_tokens=np.concatenate([chunks, none]),
        start_tokens=np.concatenate([zeros, none]),
        decoding=np.concatenate([zeros, b]),
        context_tokens=np.concatenate([zeros, c]),
        attention_s=np.concatenate([prefill_s, b * c * per_token_s]),
        skew=float("nan"),
    )
