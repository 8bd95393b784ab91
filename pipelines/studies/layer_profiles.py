"""Times per operator of one layer, as LLMServingSim's profiler took them under vLLM.

A profile has three tables: the matrix products, norms and activations of a layer over the new
tokens of a step, the head over its requests, and the attention kernel over a prefill chunk, the
tokens cached before it, the decoding requests and their context. A step of the whole model is

    step_s = l (dense(n) + attention(q, start, b, context)) + embedding(n) + norm(n) + head(b)

for ``l`` layers. Profiles of two GPUs were taken on one GPU with half the heads and widths; the
two all-reduces per layer are added from ``data/measured/all_reduce.csv``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from ruamel.yaml import YAML
from scipy.optimize import lsq_linear

from hetero.arrays import Flags, Floats
from hetero.catalog import Llm, llm
from hetero.catalog import gpu as find_gpu
from hetero.errors import ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.efficiencies import efficiency
from hetero.latency.sources.profiles import (
    ENGINE,
    KINDS,
    MOST_CACHED_TOKENS,
    ProfiledStep,
    all_reduce_s,
)
from hetero.latency.sources.raggedness import longest_over_mean, skews
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.latency.tables import Measurements
from hetero.streams import stream
from hetero.workload import datasets, load
from pipelines.studies import profile_settings

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
# What the reduction is fitted to. Beyond 200,000 cached tokens mixed steps get slower than in
# proportion, by up to three times at 500,000: no workload of the papers goes there.
LONGEST_DECODE_TOKENS = 4096
LONGEST_MIXED_TOKENS = 2048
_KNOT_ERROR = 0.005


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
        return np.asarray(
            self.dense(self.chunk_tokens + self.decoding)
            + self.head(self.decoding + (self.chunk_tokens > 0).astype(float))
            + self.attention_s
        )

    @property
    def step_arguments(self) -> tuple[Floats, Floats, Floats, Floats]:
        """New tokens, decoding requests, cached tokens and pairs of every row."""
        q, b = self.chunk_tokens, self.decoding
        return q + b, b, b * self.context_tokens, q * (self.start_tokens + q / 2.0)

    def ragged_seconds(self, contexts: Floats, skew: float) -> float:
        """Time [s] of a decode step of requests of unequal ``contexts``, with that ``skew``."""
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
        return float(self.dense(b) + self.head(b) + (mean + skew * (longest - mean)))


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


def _read(folder: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, float]:
    """Dense and head tables [us] with one column per operator, attention table, skew."""
    names = ("dense.csv", "per_sequence.csv", "attention.csv")
    dense, head, attention = map(pd.read_csv, [_file(f"{folder}/{name}") for name in names])
    meta = YAML(typ="safe").load(_file(f"{folder.rpartition('/')[0]}/meta.yaml"))
    skew = meta["skew_fit"].get("per_tp", {}).get(int(folder[-1]), {}).get("alpha_default", np.nan)
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


def reduce_profile(profile: LayerProfile) -> ProfiledStep:
    """Step model of a profile, by least squares of the relative error of whole steps.

    Prefill rows give the time per new token beyond the decode batches and one rate per pair;
    decode rows a level and a rate per batch; mixed rows what :class:`~hetero.latency.step.Mixed`
    holds. Values are held at 0 or more.
    """
    n, b, cached, pairs = profile.step_arguments
    seconds = profile.seconds
    kind = _kinds(profile)
    chunks, rest, pair_s = _prefill(profile, kind == "prefill")
    batches, level, rate = _decode(profile, kind == "decode")
    last = int(batches[-1])

    knots = profile.tokens
    beyond = profile.head(1) + np.interp(knots, chunks, rest)
    small = profile.head(knots) + np.interp(knots, batches, level)
    times = profile.dense(knots) + np.where(knots <= last, small, beyond)
    kept = simplify(knots, times, _KNOT_ERROR)
    decoding = np.arange(1.0, last + 1.0)
    piece = Piece(knots[kept], times[kept], np.interp(decoding, batches, rate), pair_s)
    if (kind == "mixed").any():
        rows, mixes = [], np.unique(b[kind == "mixed"])
        for batch in mixes:
            at = (kind == "mixed") & (b == batch)
            columns = np.column_stack([cached[at], np.ones(at.sum()), (n - b)[at]])
            base = piece.seconds(n[at], 0, 0.0, pairs[at])
            rows.append(_fit(columns, seconds[at] - base, seconds[at]))
        levels = (np.interp(decoding, mixes, column) for column in np.array(rows).T)
        piece = replace(piece, mixed=Mixed(*levels))
    degree = f" x{profile.tensor_parallel}" if profile.tensor_parallel > 1 else ""
    model = StepModel(
        (piece,),
        source=f"{profile.llm} on {profile.gpu}{degree}, layer profile, {profile.engine}",
        provenance=profile.provenance,
        max_tokens=float(profile.tokens[-1]),
        max_decoding=float(last),
    )
    errors = dict.fromkeys(KINDS, (np.nan, np.nan))
    for name in KINDS[:3]:
        at = kind == name
        if at.any():
            a = Accuracy.of(model.seconds(n[at], b[at], cached[at], pairs[at]), seconds[at])
            errors[name] = (a.mape_percent, a.max_percent)
    found = ProfiledStep(
        profile.gpu, profile.llm, profile.tensor_parallel, profile.engine, model, profile.skew,
        errors, profile.note,
    )  # fmt: skip
    if not np.isnan(profile.skew):
        a = ragged_accuracy(profile, found)
        errors["ragged"] = (a.mape_percent, a.max_percent)
    return found


def ragged_accuracy(profile: LayerProfile, step: ProfiledStep, *, seed: int = 0) -> Accuracy:
    """Error on decode steps of requests drawn from the conversation trace's twin.

    The step model knows only their number and their sum, and for the raggedness what
    :func:`longest_over_mean` expects; the profile is asked for every batch as it is.
    """
    trace = load("azure2023_conv")
    key = (profile.gpu, profile.llm, profile.tensor_parallel)
    model = step.ragged(longest_over_mean(trace, int(step.model.max_decoding), seed=seed))
    rng = stream(seed, "ragged")
    own, profiled = [], []
    for b in np.unique(profile.decoding[profile.chunk_tokens == 0]).astype(int).tolist():
        for _ in range(40 if b > 1 else 0):
            drawn = rng.integers(0, len(trace), b)
            contexts = trace.input_tokens[drawn] + rng.random(b) * trace.output_tokens[drawn]
            if contexts.sum() <= MOST_CACHED_TOKENS:
                own.append(float(model.decode_seconds(contexts)))
                share = float(skews(*key, b, default=profile.skew))
                profiled.append(profile.ragged_seconds(contexts, share))
    return Accuracy.of(own, profiled)


def _kinds(profile: LayerProfile) -> NDArray[np.str_]:
    """Kind of each row that the fit rests on; empty for rows out of its range."""
    q, b = profile.chunk_tokens, profile.decoding
    start, context = profile.start_tokens, profile.context_tokens
    inside = (b * context <= MOST_CACHED_TOKENS) & (context <= LONGEST_DECODE_TOKENS)
    inside &= start <= LONGEST_DECODE_TOKENS
    shorter = (start <= LONGEST_MIXED_TOKENS) & (context <= LONGEST_MIXED_TOKENS)
    kind = np.where(q == 0, "decode", np.where(b == 0, "prefill", "mixed"))
    return np.where(inside & ((kind != "mixed") | shorter), kind, "")


def _fit(columns: Floats, values: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 that minimise the error of ``values`` as shares of whole steps."""
    weighted = columns / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    return np.asarray(lsq_linear(weighted / scale, values / seconds, (0.0, np.inf)).x / scale)


def _prefill(profile: LayerProfile, rows: Flags) -> tuple[Floats, Floats, float]:
    """Chunk sizes, attention time apart from pairs at each, and time per pair."""
    chunks, group = np.unique(profile.chunk_tokens[rows], return_inverse=True)
    each = np.eye(len(chunks))[group]
    _, _, _, pairs = profile.step_arguments
    columns = np.column_stack([each, pairs[rows]])
    found = _fit(columns, profile.attention_s[rows], profile.seconds[rows])
    return chunks, found[:-1], float(found[-1])


def _decode(profile: LayerProfile, rows: Flags) -> tuple[Floats, Floats, Floats]:
    """Decode batches, and level and time per cached token of attention at each."""
    b = profile.decoding[rows]
    cached = (profile.decoding * profile.context_tokens)[rows]
    attention, seconds = profile.attention_s[rows], profile.seconds[rows]
    batches = np.unique(b)
    found = []
    for batch in batches:
        at = b == batch
        columns = np.column_stack([np.ones(at.sum()), cached[at]])
        found.append(_fit(columns, attention[at], seconds[at]))
    level, rate = np.array(found).T
    return batches, level, rate


def to_rows(steps: Iterable[ProfiledStep]) -> list[dict[str, object]]:
    """Rows of ``data/measured/profile_steps.csv``; rates at the decode batches 1, 2, 4, ..."""
    rows: list[dict[str, object]] = []
    for step in steps:
        piece = step.model.pieces[0]
        batches = 2 ** np.arange(int(np.log2(int(step.model.max_decoding))) + 1) - 1
        mixed = piece.mixed_rows[:, batches] if piece.mixed is not None else np.zeros((3, 0))
        row: dict[str, object] = {
            "gpu": step.gpu,
            "llm": step.llm,
            "tensor_parallel": step.tensor_parallel,
            "engine": step.engine,
            "provenance": step.model.provenance,
            "knots_tokens": " ".join(f"{n:.0f}" for n in piece.knots_tokens),
            "knots_us": words(1e6 * piece.knots_s),
            "per_cached_ns": words(1e9 * piece.per_cached_token_s[batches]),
            "per_pair_ns": words(1e9 * np.array([piece.per_pair_s])),
            "mixed_per_cached_ns": words(1e9 * mixed[0]),
            "mixed_level_us": words(1e6 * mixed[1]),
            "mixed_per_token_ns": words(1e9 * mixed[2]),
            "skew": None if np.isnan(step.skew) else step.skew,
        }
        for kind in KINDS:
            mean, largest = (None if np.isnan(e) else round(e, 2) for e in step.errors[kind])
            row |= {f"{kind}_mean_error_percent": mean, f"{kind}_max_error_percent": largest}
        rows.append(row | {"note": step.note})
    return rows


def words(values: Floats, digits: int = 5) -> str:
    """Numbers with so many digits and no exponent: whole where they are large."""
    return " ".join(np.format_float_positional(v, digits, False, False, "-") for v in values)


def measurements() -> tuple[Measurements, ...]:
    """Single prompts and decode steps of every profiled replica, read off the published tables."""
    found = []
    for table, profile in zip(profile_settings.measurements(), layer_profiles(), strict=True):
        rows = zip(
            table.decode.tolist(), table.batch.tolist(), table.length_tokens.tolist(), strict=True
        )
        found.append(replace(table, seconds=np.array([_profiled(profile, *row) for row in rows])))
    return tuple(found)


def _profiled(profile: LayerProfile, decode: bool, batch: float, length: float) -> float:
    """Time [s] of a prompt or a decode step in the table, linear between its lengths."""
    if decode:
        rows = (profile.chunk_tokens == 0) & (profile.decoding == batch)
        x = profile.context_tokens[rows]
    else:
        rows = (profile.decoding == 0) & (profile.start_tokens == 0)
        x = profile.chunk_tokens[rows]
    order = np.argsort(x)
    return float(np.interp(length, x[order], profile.seconds[rows][order]))


def simplify(x: Floats, y: Floats, error: float) -> list[int]:
    """Indices of the knots that Douglas and Peucker's split keeps: ends first, then the worst.

    Examples
    --------
    >>> simplify(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 8.0]), 0.01)
    [0, 2, 3]
    """
    kept, open_spans = {0, len(x) - 1}, [(0, len(x) - 1)]
    while open_spans:
        a, b = open_spans.pop()
        if b - a < 2:
            continue
        inner = slice(a + 1, b)
        off = np.abs(np.interp(x[inner], x[[a, b]], y[[a, b]]) / y[inner] - 1.0)
        worst = int(off.argmax())
        if off[worst] > error:
            kept.add(a + 1 + worst)
            open_spans += [(a, a + 1 + worst), (a + 1 + worst, b)]
    return sorted(kept)
