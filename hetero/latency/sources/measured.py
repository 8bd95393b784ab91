"""Published latency measurements: Splitwise, Helix and aiconfigurator, each as it came or reduced.

With ``raw=False`` (the default) every function reads the derived reductions in ``data/measured``,
so that nothing has to be fetched; with ``raw=True`` it reads the published files themselves, see
``hetero data list``. ``data/measured/README.md`` says how each reduction was made. Layer profiles
are :mod:`hetero.latency.sources.profiles`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats
from hetero.latency.frames import derived_frame, raw_frame, replicas
from hetero.latency.reduction import with_bends
from hetero.latency.step import Piece, StepModel
from hetero.latency.tables import Measurements

Replica: TypeAlias = tuple[str, str, str, int]
"""GPU, engine, model and tensor-parallel degree that a table is of."""
SPLITWISE_ENGINE = "vLLM 2023"


# Splitwise ------------------------------------------------------------------------------------


def splitwise(*, raw: bool = False, overflow: bool = False) -> tuple[Measurements, ...]:
    """Llama-2-70B and BLOOM-176B on A100 and H100 under vLLM of 2023 (Splitwise, Patel et al.).

    Settings form a cross (batch 1 over lengths, 512 tokens over batches, one row of outputs), each
    repeated 5 times; the derived rows are medians over the repeats. A decode step is taken at the
    mean context, prompt plus half the output. Prefills are the rows with 128 output tokens.

    Parameters
    ----------
    overflow
        Keep Llama-2-70B on two GPUs at batch 64. Its memory overflows there (prefill 0.8 s after
        6.6 s at half the batch, end to end 160 s), so by default these rows are left out.
    """
    frame = raw_frame("splitwise") if raw else derived_frame("splitwise_medians")
    if not overflow:
        frame = frame[~((frame["tensor_parallel"] == 2) & (frame["batch"] == 64))]
    found = []
    for gpu, llm, degree, _, rows in replicas(frame):
        first = rows[rows["output_tokens"] == 128]
        context = rows["input_tokens"] + rows["output_tokens"] / 2.0
        found.append(
            Measurements(
                decode=np.repeat([False, True], [len(first), len(rows)]),
                batch=np.concatenate([first["batch"], rows["batch"]]),
                length_tokens=np.concatenate([first["input_tokens"], context]),
                seconds=np.concatenate([first["prefill_ms"], rows["decode_ms"]]) / 1e3,
                gpu=gpu,
                llm=llm,
                tensor_parallel=degree,
                engine=SPLITWISE_ENGINE,
                source="splitwise",
                provenance="measured" if raw else "derived",
            )
        )
    return tuple(found)


# aiconfigurator -------------------------------------------------------------------------------

GRID_BATCHES = np.array([1, 2, 4, 8, 16, 32, 64, 128], dtype=np.float64)
GRID_LENGTHS = np.array([128, 512, 1024, 2048, 4096, 8192], dtype=np.float64)


def aiconfigurator(*, raw: bool = False) -> tuple[Measurements, ...]:
    """Llama-3.1-8B and 70B on six GPUs and three engines, summed from measured operators.

    NVIDIA's aiconfigurator 0.12.0 adds up its measurements of single operators; nothing between
    the operators (scheduling, sampling) is in it. Prefills are of the whole batch. The derived
    tables are the derived step models read off at the grid of the published one.

    L40S with four and more GPUs was measured on a host whose all-reduce drops to 3.4 GB/s with
    four and 0.9 GB/s with eight; see :func:`hetero.latency.calibration.roofline_fit.takes_part`.
    """
    if not raw:
        return tuple(
            replace(grid, seconds=model.seconds(*grid.step_arguments))
            for grid, model in _derived_steps().values()
        )
    return tuple(
        _grid(
            rows["batch"],
            rows["isl"],
            np.concatenate([rows["ttft_ms"], rows["tpot_ms"]]) / 1e3,
            gpu=gpu,
            llm=llm,
            tensor_parallel=degree,
            engine=engine,
            provenance="measured",
        )
        for gpu, llm, degree, engine, rows in replicas(raw_frame("aiconfigurator"))
    )


def aiconfigurator_step_models() -> dict[Replica, StepModel]:
    """The derived step models by GPU, engine, model and degree; the smallest error there."""
    return {key: model for key, (_, model) in _derived_steps().items()}


def _grid(
    batch: ArrayLike,
    length: ArrayLike,
    seconds: Floats,
    **labels: Any,
) -> Measurements:
    batch = np.asarray(batch, dtype=np.float64)
    return Measurements(
        decode=np.repeat([False, True], len(batch)),
        batch=np.tile(batch, 2),
        length_tokens=np.tile(np.asarray(length, dtype=np.float64), 2),
        seconds=seconds,
        source="aiconfigurator",
        **labels,
    )


@lru_cache(maxsize=1)
def _derived_steps() -> dict[Replica, tuple[Measurements, StepModel]]:
    found = {}
    for row in derived_frame("aiconfigurator_steps").to_dict("records"):
        numbers = {
            name: np.array(str(row[name]).split(), dtype=np.float64)
            for name in (
                "knots_tokens",
                "knots_us",
                "decode_us",
                "longest_tokens",
                "per_cached_ns",
            )
        }
        longest, rates = numbers["longest_tokens"], numbers["per_cached_ns"] / 1e9
        batches = GRID_BATCHES[longest > 0]
        decoding = np.arange(1.0, batches[-1] + 1.0)
        piece = Piece(
            numbers["knots_tokens"],
            numbers["knots_us"] / 1e6,
            np.interp(decoding, batches, rates),
            row["per_pair_ns"] / 1e9,
        )
        alone = np.interp(decoding, batches, numbers["decode_us"] / 1e6)
        piece = replace(piece, decode_level_s=alone - piece.seconds(decoding, 0, 0.0, 0.0))
        if isinstance(row["bend_us"], str):
            extra = [np.array(part.split(), float) / 1e6 for part in row["bend_us"].split(";")]
            contexts = np.array(row["bend_tokens"].split(), dtype=np.float64)
            piece = with_bends(piece, batches, contexts, np.array(extra))
        batch, length = map(np.ravel, np.meshgrid(GRID_BATCHES, GRID_LENGTHS, indexing="ij"))
        held = length <= np.repeat(longest, len(GRID_LENGTHS))
        grid = _grid(
            batch[held],
            length[held],
            np.ones(2 * int(held.sum())),
            gpu=row["gpu"],
            llm=row["llm"],
            tensor_parallel=int(row["tensor_parallel"]),
            engine=row["engine"],
            provenance="derived",
        )
        model = StepModel(
            (piece,),
            source=f"{grid.label}, {grid.engine}",
            provenance="derived",
            max_tokens=float(numbers["knots_tokens"][-1]),
            max_decoding=float(batches[-1]),
        )
        found[grid.gpu, grid.engine, grid.llm, grid.tensor_parallel] = (grid, model)
    return found
