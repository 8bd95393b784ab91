"""Two engines of different size, as the live experiment starts, profiles and describes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from hetero import workload
from hetero.apps import profiling
from hetero.apps.serving.plan import FleetPlan
from hetero.catalog import Gpu
from hetero.deployment import Engine, Replica
from hetero.routers import (
    Builtin,
    HeteroServe,
    Predictive,
    RoundRobin,
    WeightedRoundRobin,
    Workload,
)
from hetero.workload import Trace
from pipelines.bench.engines import Running

Say = Callable[[str], None]

SIZES: Final = {"small": (768, 8), "large": (1024, 12)}  # hidden size, layers
BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 24, 64, 2048
_BATCHES, _INPUTS, _OUTPUTS = (1, 3, 8), (16, 48, 112), (12,)
PATIENCE_S: Final = 300.0  # a loaded machine is slow, not broken


def profiles(
    running: dict[str, Running], sizes: dict[str, int], folder: Path, say: Say
) -> tuple[pd.DataFrame, dict[str, profiling.Fitted]]:
    """Rounds of every engine, one engine after the other, and what is fitted to them."""
    frames, fits = [], {}
    for called, one in running.items():
        file = folder / f"{called}.csv"
        endpoint = profiling.Endpoint(one.url, one.model, timeout_s=PATIENCE_S)
        settings = profiling.grid(_BATCHES, _INPUTS, _OUTPUTS)
        say(f"profiling '{called}'")
        profiling.profile(endpoint, settings, file, repeats=3, progress=say)
        fits[called] = profiling.fitted(file)
        frame = pd.read_csv(file).drop(columns=["model"])  # a folder of this machine
        frames.append(frame.assign(engine=called, parameters=sizes[called]))
    return pd.concat(frames, ignore_index=True), fits


def replica(called: str, fit: profiling.Fitted, sizes: dict[str, int]) -> Replica:
    """The engine as planners, routers and the simulator know it.

    Routers that read capabilities get those of the core per parameter of the model: the cores are
    equal, and it is the models that make one engine slower. Only ratios count.
    """
    hidden, layers = SIZES[called]
    slower = sizes[called] / sizes["small"]
    per_token = 4.0 * hidden * layers  # keys and values of half the heads, 4 bytes each
    core = Gpu(
        name=f"core with '{called}'",
        mem_gib=BLOCKS * BLOCK_TOKENS * per_token / 2**30,
        mem_bw_gbs=10.0 / slower,
        fp16_tflops=0.05 / slower,
        link_type="none",
        link_gbs=1.0,
        pcie_gbs=1.0,
        source="assumed",
    )
    rules = Engine(
        batching="chunked",
        admission="paged",
        max_step_tokens=STEP_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )
    return Replica(called, fit.step, BLOCKS * BLOCK_TOKENS, per_token, engine=rules, gpu=core)


def requests(count: int, rng: np.random.Generator) -> Trace:
    """Conversations of the Azure trace's twin, inputs a 24th and outputs an eighth as long."""
    whole = workload.load("azure2023_conv").sample(count, rng)
    inputs = np.clip(whole.input_tokens // 24, 8, 128)
    outputs = np.clip(whole.output_tokens // 8, 4, 64)
    return Trace(whole.arrival_s, inputs, outputs, name="short conversations")


def routers(plan: FleetPlan, sample: Trace) -> tuple[Builtin, ...]:
    """The routers that are compared; weights are planned, bins and lengths those of the sample."""
    tail = int(np.quantile(sample.output_tokens, 0.9))
    edges = [int(np.quantile(sample.input_tokens, q)) for q in (1 / 3, 2 / 3)]
    return (
        RoundRobin(),
        WeightedRoundRobin([round(x, 4) for x in plan.shares]),
        Workload(),
        HeteroServe(
            bins_tokens=edges,
            footprint_tokens=tail,
            longest_tokens=int(sample.input_tokens.max()),
        ),
        Predictive(),
    )
