r"""Shares of routed experts from measured kernels: no run of a server takes part.

The package aiconfigurator-core has the time of a layer's experts for shapes of models, degrees of
tensor parallelism and 1 to 16,384 tokens, per GPU, engine and data type. The three values of
:class:`~hetero.latency.models.roofline.ExpertEfficiency` minimise
:math:`\rho(\ln(predicted / measured))` over all shapes of one data type, ``rho`` scipy's
``soft_l1``. A shape that is left out tests them. Of several kernels for one shape the fastest
counts; experts in mxfp4 are computed in fp8 on GPUs that compute in fp4, where that was measured.

Latent attention takes projections of its own: ``latent_us`` is the time of its module at short
contexts on an eighth of the heads, beyond the weights that it reads and the overhead of a layer.
Where one of :data:`RELATIVES`, which share their kernels, lies more than a factor of
:data:`APART` from all others, as B200 with half of their time under vLLM, theirs counts.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hetero.arrays import Floats
from hetero.catalog import Llm, gpu, llm
from hetero.latency.models.efficiencies import efficiency, sources
from hetero.latency.models.roofline import Efficiency, ExpertEfficiency
from pipelines.studies import operators
from pipelines.studies.roofline_calibration import PACKAGE_ENGINES, package_release

# By data type: bits per value, and the tables' names for it, the first that there is.
_TYPES: Final = {
    "fp16": (16.0, ("bfloat16",)),
    "fp8": (8.0, ("fp8_block", "fp8")),
    "fp4": (4.5, ("nvfp4",)),
    "mxfp4": (4.25, ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")),
}
_KEY: Final = ["hidden_size", "inter_size", "topk", "num_experts"]
_DEGREES: Final = (1, 2, 4, 8)
_START: Final = (0.5, 1.0, 20e-6)
_BOUNDS: Final = ((1e-2, 4.0), (1e-2, 4.0), (1e-8, 1e-3))
_SCALE: Final = 0.1
_SHORT_TOKENS: Final = 129
RELATIVES: Final = ("B200-SXM", "B300-SXM", "GB200", "GB300")
APART: Final = 1.5
_LATENT: Final = "DeepSeek-R1"


def _table(name: str, engine: operators.Backend, kind: str, file: str) -> pd.DataFrame:
    """A table of the package, empty where there is none."""
    release = package_release(name, engine)
    folder = (
        Path(str(operators.package().__file__)).parent / "systems/data" / operators.SYSTEMS[name]
    )
    path = folder / kind / engine / release / f"{file}.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame()


@lru_cache(maxsize=64)
def experts_frame(name: str, engine: operators.Backend, weights: str) -> pd.DataFrame:
    """Time [s] of a layer's experts per shape, degree and tokens, with the work of each.

    Columns: the shape, ``degree``, ``tokens``, ``seconds``; and what they would take at the
    efficiencies of dense products: ``computing`` and ``reading`` [s].
    """
    frame = _table(name, engine, "moe", "moe_perf")
    bits, names = _TYPES[weights]
    if frame.empty:
        return frame
    of, base = gpu(name), _dense(name, engine)
    if weights == "mxfp4" and "fp4" not in of.rated:
        names = names[1:]
    chosen = next((one for one in names if one in set(frame["moe_dtype"])), None)
    frame = frame[(frame["moe_dtype"] == chosen) & (frame["distribution"] == "power_law_1.01")]
    frame = frame[(frame["moe_ep_size"] == 1) & frame["moe_tp_size"].isin(_DEGREES)]
    found = frame.groupby([*_KEY, "moe_tp_size", "num_tokens"])["latency"].min().reset_index()
    found = found.rename(columns={"moe_tp_size": "degree", "num_tokens": "tokens"})
    params = 3.0 * found["hidden_size"] * found["inter_size"] / found["degree"]
    share = found["topk"] / found["num_experts"]
    touched = found["num_experts"] * (1.0 - (1.0 - share) ** found["tokens"])
    peak = 1e12 * of.peak_tflops(weights if weights in of.rated else "fp16")
    computing = 2.0 * params * found["topk"] * found["tokens"] / peak / base.compute_efficiency
    reading = touched * params * bits / 8 / (1e9 * of.mem_bw_gbs) / base.bandwidth_efficiency
    return found.assign(seconds=1e-3 * found["latency"], computing=computing, reading=reading)


def _dense(name: str, engine: operators.Backend) -> Efficiency:
    """Efficiencies that a replica under the engine has, as of :mod:`hetero.latency.resolve`."""
    source = f"aiconfigurator/{engine}"
    return efficiency(gpu(name), source if source in sources(name) else None)


def predicted(frame: pd.DataFrame, found: ExpertEfficiency) -> Floats:
    """Time [s] of a layer's experts by the roofline."""
    computing, reading = frame["computing"].to_numpy(), frame["reading"].to_numpy()
    return np.asarray(
        computing / found.compute_share + reading / found.bandwidth_share + found.layer_s
    )


def fit(frame: pd.DataFrame) -> ExpertEfficiency:
    """The values that explain a table best; every shape weighs the same."""
    weight = frame.groupby(_KEY)["tokens"].transform("size").to_numpy() ** -0.5
    weight = weight / weight.mean()

    def residuals(logs: Floats) -> Floats:
        return np.asarray(weight * np.log1p(_errors(frame, _shares(logs))))

    low, high = np.log(_BOUNDS).T
    found = least_squares(
        residuals, np.log(_START), bounds=(low, high), loss="soft_l1", f_scale=_SCALE
    )
    return _shares(found.x)


def _errors(frame: pd.DataFrame, found: ExpertEfficiency) -> Floats:
    return np.asarray(predicted(frame, found) / frame["seconds"].to_numpy() - 1.0)


def _shares(logs: Floats) -> ExpertEfficiency:
    compute, bandwidth, layer_s = map(float, np.exp(logs))
    return ExpertEfficiency(compute_share=compute, bandwidth_share=bandwidth, layer_s=layer_s)


def left_out_frame(frame: pd.DataFrame, model: Llm) -> pd.DataFrame:
    """The rows of a table that are not of a model's shape."""
    inner = round(model.expert_params / (3 * model.hidden))
    own = [model.hidden, inner, model.experts_active, model.experts]
    rest: pd.DataFrame = frame.loc[(frame[_KEY].to_numpy() != own).any(axis=1)]
    return rest


def left_out(frame: pd.DataFrame) -> float:
    """Median size of the error of each shape from a fit without it [%]; NaN with one shape."""
    parts = [own for _, own in frame.groupby(_KEY) if len(own) < len(frame)]
    errors = [np.abs(_errors(own, fit(frame.drop(own.index)))) for own in parts]
    return 100.0 * float(np.median(np.concatenate(errors))) if errors else float("nan")


def latent_us(name: str, engine: operators.Backend) -> tuple[float, str]:
    """Time of latent attention beyond a dense layer's [us], and whose where it is not its own."""
    own = _latent_us(name, engine)
    others = [_latent_us(one, engine) for one in RELATIVES if one != name and name in RELATIVES]
    away = others and all(max(own[0] / one[0], one[0] / own[0]) > APART for one in others)
    return (float(np.median([one[1] for one in others])), "its relatives") if away else own[1:]


@lru_cache(maxsize=64)
def _latent_us(name: str, engine: operators.Backend) -> tuple[float, float, str]:
    """Time of latent attention, of it beyond a dense layer's [us; NaN: nowhere], and whose."""
    frame = _table(name, engine, "mla", "mla_generation_module_perf")
    if frame.empty:
        none = (float("nan"), float("nan"), "the other GPUs")
        found = none if engine == "vllm" else _latent_us(name, "vllm")
        return found[0], found[1], found[2] or "vllm"
    of, model, base = gpu(name), llm(_LATENT), _dense(name, engine)
    kind = "fp8_block" if "fp8_block" in set(frame["gemm_type"]) else "bfloat16"
    short = frame[(frame["num_heads"] == model.heads // 8) & (frame["gemm_type"] == kind)]
    short = short[(short["isl"] + short["step"] <= _SHORT_TOKENS) & (short["batch_size"] <= 64)]
    params = model.params - model.embedding_params - model.output_params
    params -= model.moe_layers * (model.experts + model.shared_experts) * model.expert_params
    dense = model.first_dense_layers * 3 * model.hidden * model.intermediate
    own = (params - dense) / model.layers / 8 * (1.0 if kind == "fp8_block" else 2.0)
    reading = own / (1e9 * of.mem_bw_gbs * base.bandwidth_efficiency)
    whole = 1e3 * float(short["latency"].median())
    return whole, max(0.0, whole - 1e6 * (reading + base.layer_overhead_s)), ""


def row(
    name: str, engine: operators.Backend, weights: str, frame: pd.DataFrame
) -> dict[str, object]:
    """A row of ``data/measured/experts.csv``."""
    found, (latent, whose) = fit(frame), latent_us(name, engine)
    return {
        "engine": engine,
        "vendor": gpu(name).vendor,
        "gpu": name,
        "type": weights,
        "compute_share": float(f"{found.compute_share:.3g}"),
        "bandwidth_share": float(f"{found.bandwidth_share:.3g}"),
        "layer_us": round(1e6 * found.layer_s, 2),
        "latent_us": round(latent, 1),
        "shapes": frame.groupby(_KEY).ngroups,
        "error_percent": round(100.0 * float(np.median(np.abs(_errors(frame, found)))), 1),
        "left_out_percent": round(left_out(frame), 1),
        "source": f"aiconfigurator-core, kernels of {engine} {package_release(name, engine)}"
        + (whose and f"; latent attention of {whose}"),
    }


def shares_frame() -> pd.DataFrame:
    """Rows of ``data/measured/experts.csv`` that kernels give.

    Where latent attention was not measured, it takes the median of the engine's other GPUs.
    """
    rows = [
        row(name, engine, weights, frame)
        for name in operators.SYSTEMS
        if gpu(name).vendor == "NVIDIA"
        for engine in PACKAGE_ENGINES
        for weights in _TYPES
        if len(frame := experts_frame(name, engine, weights))
    ]
    found = pd.DataFrame(rows)
    usual = found.groupby("engine")["latent_us"].transform("median")
    return found.assign(latent_us=found["latent_us"].fillna(usual).round(1))
