"""What a batch costs whose contexts differ: how ragged batches are, and what that costs."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.latency.frames import derived_frame
from hetero.streams import stream
from hetero.workload import Trace


def skews(
    gpu: str,
    llm: str,
    tensor_parallel: int,
    requests: ArrayLike,
    *,
    steps: Literal["decode", "mixed"] = "decode",
    default: float = np.nan,
) -> Floats:
    """Share of the gap between longest and mean context that a ragged batch pays, by its size.

    The profiler measured batches of 2, 4, ..., 256 requests and fitted the share for each size;
    here are its values for batches like those of conversations, mean context 15 to 40 % of the
    way from shortest to longest, longest to 4,096 tokens, linear in between. What came out below
    0 is noise and is taken as 0. A replica of several GPUs has the values of one GPU where its own
    were not published.

    Parameters
    ----------
    requests
        Decoding requests.
    default
        Where no shares by size are known.

    Examples
    --------
    >>> skews("RTX-PRO-6000-Server", "Llama-3.1-8B", 1, [1, 16, 64, 128]).tolist()
    [0.02, 0.0, 0.0498, 0.0436]
    """
    frame = derived_frame("profile_skew")
    frame = frame[(frame["gpu"] == gpu) & (frame["llm"] == llm) & (frame["steps"] == steps)]
    own = frame[frame["tensor_parallel"] == tensor_parallel]
    rows = own if len(own) else frame[frame["tensor_parallel"] == 1]
    sizes = np.asarray(requests, dtype=np.float64)
    if rows.empty:
        return np.full(sizes.shape, default)
    values = np.maximum(rows["skew"].to_numpy(dtype=np.float64), 0.0)
    return np.asarray(np.interp(sizes, rows["requests"].to_numpy(dtype=np.float64), values))


def longest_over_mean(trace: Trace, batches: int = 256, *, seed: int = 0) -> Floats:
    """Expected ratio of the longest to the mean context of 1, ..., ``batches`` requests.

    Requests are drawn from the trace and are at a uniform point of their output. Shape
    (batches,).

    Examples
    --------
    >>> from hetero import workload
    >>> ratio = longest_over_mean(workload.load("azure2023_conv"), 64)
    >>> float(ratio[0]), bool(ratio[63] > ratio[7] > 1.5)
    (1.0, True)
    """
    sizes = np.unique(np.round(np.geomspace(1, batches, 24)).astype(int))
    rng = stream(seed, "contexts")
    found = []
    for size in sizes.tolist():
        drawn = rng.integers(0, len(trace), (max(200, 4096 // size), size))
        inputs, outputs = trace.input_tokens[drawn], trace.output_tokens[drawn]
        contexts = inputs + rng.random(drawn.shape) * outputs
        found.append(float((contexts.max(axis=1) / contexts.mean(axis=1)).mean()))
    return np.asarray(np.interp(np.arange(1, batches + 1), sizes, found))
