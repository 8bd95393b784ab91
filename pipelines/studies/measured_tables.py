"""Makes the derived reductions of ``data/measured`` from the published files.

``hetero tables`` compares what is committed with what comes out; it needs the published files
(``hetero data fetch``, or ``HETERO_DATA_MIRROR``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from hetero.latency.frames import raw_frame
from hetero.latency.models.layers import layer_latencies
from hetero.latency.sources import measured
from pipelines.studies import layer_profiles, operators, roofline_calibration, server_gpus
from pipelines.studies.layer_profiles import simplify, words
from pipelines.studies.table_reduction import reduce_table

#: Largest relative error of the knots that are kept of a published table.
KNOT_ERROR = 0.03
# vLLM's own all-reduce takes messages up to this size and leaves larger ones to NCCL.
_CUSTOM_BYTES = 8 * 2**20
#: Up to here every entry is kept: planners read node throughput off this part of the tables.
EXACT_TO = {"prefill": 1000.0, "decode": 30.0}


def splitwise_medians_frame() -> pd.DataFrame:
    """Median and coefficient of variation over the repeats of each Splitwise setting."""
    groups = raw_frame("splitwise").groupby(
        ["gpu", "llm", "tensor_parallel", "batch", "input_tokens", "output_tokens"]
    )
    out = groups.size().rename("repeats").reset_index()
    for name in ("prefill", "decode"):
        times = groups[f"{name}_ms"]
        out[f"{name}_ms"] = times.median().round(3).to_numpy()
        out[f"{name}_spread_percent"] = (100 * times.std() / times.mean()).round(2).to_numpy()
    return out


def helix_layer_knots_frame() -> pd.DataFrame:
    """Knots that carry each Helix table with at most ``KNOT_ERROR`` relative error.

    Where a planner's operating point lies (``EXACT_TO``), every entry is kept.
    """
    rows = []
    for node in layer_latencies(raw=True):
        for phase, x, y in (
            ("prefill", node.prompt_tokens, node.prompt_ms),
            ("decode", node.decode_requests, node.decode_ms),
        ):
            first = int(np.searchsorted(x, EXACT_TO[phase]))
            kept = [*range(first), *(first + k for k in simplify(x[first:], y[first:], KNOT_ERROR))]
            error = 100 * np.abs(np.interp(x, x[kept], y[kept]) / y - 1.0)
            rows += [
                (
                    node.gpu,
                    node.llm,
                    node.tensor_parallel,
                    phase,
                    int(x[k]),
                    y[k],
                    round(float(error.mean()), 2),
                    round(float(error.max()), 2),
                )
                for k in kept
            ]
    columns = ["gpu", "llm", "tensor_parallel", "phase", "batch_tokens", "ms_per_layer"]
    return pd.DataFrame(rows, columns=[*columns, "mean_error_percent", "max_error_percent"])


def aiconfigurator_steps_frame() -> pd.DataFrame:
    """Step model of every GPU, engine, model and degree of the grid, with its error."""
    rows = []
    for table in measured.aiconfigurator(raw=True):
        reduction = reduce_table(table)
        piece = reduction.model.pieces[0]
        decode = table.phase("decode")
        batches = np.unique(decode.batch)
        longest = [
            int(decode.length_tokens[decode.batch == b].max(initial=0.0))
            for b in measured.GRID_BATCHES
        ]
        prefill, step = reduction.accuracy["prefill"], reduction.accuracy["decode"]
        contexts, extra_s, start_s = np.zeros(0), np.zeros((0, 0)), 0.0
        if piece.bends is not None:
            contexts = piece.bends.context_tokens
            extra_s = piece.bends.extra_s[batches.astype(int) - 1]
            start_s = extra_s[:, 0]
        rows.append(
            {
                "gpu": table.gpu,
                "engine": table.engine,
                "llm": table.llm,
                "tensor_parallel": table.tensor_parallel,
                "knots_tokens": " ".join(f"{n:.0f}" for n in piece.knots_tokens),
                "knots_us": words(1e6 * piece.knots_s, 4),
                "longest_tokens": " ".join(map(str, longest)),
                "decode_us": words(1e6 * (reduction.model.seconds(batches, batches) - start_s), 4),
                "per_cached_ns": words(1e9 * piece.per_cached_token_s[batches.astype(int) - 1], 4),
                "bend_tokens": " ".join(f"{x:.0f}" for x in contexts),
                "bend_us": "; ".join(words(1e6 * row, 4) for row in extra_s),
                "per_pair_ns": float(f"{1e9 * piece.per_pair_s:.4g}"),
                "prefill_mean_error_percent": round(prefill.mape_percent, 2),
                "prefill_max_error_percent": round(prefill.max_percent, 2),
                "decode_mean_error_percent": round(step.mape_percent, 2),
                "decode_max_error_percent": round(step.max_percent, 2),
            }
        )
    return pd.DataFrame(rows)


def profile_steps_frame() -> pd.DataFrame:
    """Step model of every layer profile, with its error per kind of step."""
    return pd.DataFrame(
        layer_profiles.to_rows(map(layer_profiles.reduce_profile, layer_profiles.layer_profiles()))
    )


def efficiencies_frame() -> pd.DataFrame:
    """Efficiencies with their errors: published grid, the package's other GPUs, and servers."""
    parts = {
        "published": roofline_calibration.calibrate_all(raw=True),
        "package": roofline_calibration.package_calibrations_frame(),
    }
    tables = [one.assign(grid=grid) for grid, one in parts.items()]
    return pd.concat([*tables, server_gpus.rows_frame()], ignore_index=True)[
        ["grid", *parts["package"].columns]
    ]


def all_reduce_knots_frame() -> pd.DataFrame:
    """Rows of ``data/measured/all_reduce.csv``: two RTX PRO 6000, in steps of 3 % error.

    Two versions of vLLM were measured, each on a host of its own.
    """
    folder = (
        Path(str(operators.package().__file__)).parent / "systems/data/rtx_pro_6000_server/comm"
    )
    nccl = pd.read_parquet(folder / "nccl/2.29.2/nccl_perf.parquet")
    nccl = nccl[(nccl["num_gpus"] == 2) & (nccl["op_name"] == "all_reduce")]
    nccl = nccl[(nccl["nccl_dtype"] == "half") & (nccl["message_size"] > _CUSTOM_BYTES)]
    rows = []
    for version in ("0.19.0", "0.24.0"):
        own = pd.read_parquet(folder / f"vllm/{version}/custom_allreduce_perf.parquet")
        own = own[(own["num_gpus"] == 2) & (own["backend"] == "vllm_graph")]
        own = own[own["message_size"] <= _CUSTOM_BYTES]
        for kernel, table in (("custom", own), ("NCCL 2.29.2", nccl)):
            table = table.sort_values("message_size")
            x = table["message_size"].to_numpy(dtype=np.float64)
            y = 1e3 * table["latency"].to_numpy(dtype=np.float64)
            rows += [
                (
                    "RTX-PRO-6000-Server",
                    2,
                    f"vLLM {version}",
                    kernel,
                    int(x[k]),
                    round(float(y[k]), 2),
                )
                for k in simplify(x, y, KNOT_ERROR)
            ]
    return pd.DataFrame(rows, columns=["gpu", "gpus", "engine", "kernel", "message_bytes", "us"])


FILES: dict[str, Callable[[], pd.DataFrame]] = {
    "all_reduce": all_reduce_knots_frame,
    "splitwise_medians": splitwise_medians_frame,
    "helix_layer_knots": helix_layer_knots_frame,
    "aiconfigurator_steps": aiconfigurator_steps_frame,
    "profile_steps": profile_steps_frame,
    "efficiencies": efficiencies_frame,
}
