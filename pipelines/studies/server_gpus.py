r"""Efficiencies of GPUs that runs of servers alone were published of.

Nobody published operators or steps of them. The nine values ``x`` of a GPU minimise

.. math::
    \sum_i w_i\,\rho\Big(\frac{\ln T_i(x) - \ln y_i}{s}\Big)
      + \sum_k \Big(\frac{\ln x_k - \ln x^0_k}{\sigma_k}\Big)^2

over the runs ``y`` (TPOT, of batches the whole time, TTFT where nobody queues) of its simulations
``T``, which have the overheads of the engine's release where there are any; ``s`` is 10 %, times
what a quantity answers to slower steps where that is more (near saturation), ``rho`` scipy's
``soft_l1``, and each triple of model, degree and quantity has one weight. The second sum is
the prior of :mod:`hetero.latency.calibration.roofline_fit` around what other GPUs lend; values that
the runs leave open are ``estimated`` by its rule.

Rows of ``data/measured/efficiencies.csv`` have the grid ``runs``; ``release`` where they hold for
the releases alone that they name, as vLLM of 2024 is several times as slow on MI300X in fp16 as
what came after it, or as 405B in fp8; and ``several`` where they hold for several GPUs alone. Of
several RTX 4090 the link and the time per step are fitted. Errors are of the fitted runs, and with
each model left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hetero.arrays import Floats
from hetero.catalog import gpu
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.models.efficiencies import PRIOR, efficiency
from hetero.latency.models.roofline import VALUES, Efficiency, Roofline
from hetero.latency.overheads import with_overheads
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from pipelines.studies import servers
from pipelines.studies.servers import AWAY, QUEUED_S, ServerRun

_ERROR = 0.10
_DIGITS = 4
_BY = 0.25
_MOVES = 0.01  # of a simulated time, by one deviation of a value's prior
_COMPUTE = ("compute_efficiency", "kv_efficiency", "link_efficiency", "padding_tokens")
LINK: Final = ("link_efficiency", "step_overhead_s", "hop_latency_s")


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that the efficiencies of a GPU are fitted to.

    Attributes
    ----------
    engine
        Engine and release, or the releases that the row holds for.
    grid
        Of the row.
    least_degree
        Smaller replicas take no part.
    free
        The values that are fitted; the others are lent. On MI300X products bound every step, so
        that the runs say nothing of the bandwidth.
    ttft
        Whether TTFT counts where it is below half a second.
    """

    gpu: str
    source: str
    engine: str
    grid: Literal["runs", "release", "several"] = "runs"
    least_degree: int = 1
    free: tuple[str, ...] = VALUES
    ttft: bool = False

    def has(self, run: ServerRun) -> bool:
        """Whether a run is of these replicas."""
        own = run.gpu == self.gpu and run.precision in ("fp16", "int4")
        return own and run.tensor_parallel >= self.least_degree

    def runs(self) -> tuple[ServerRun, ...]:
        """The runs, those that fit the memory by our account; of static batches some lengths."""
        return tuple(
            run
            for run in filter(self.has, servers.runs(self.source))
            if run.precision == "fp16"
            # Longer static batches are not in memory at once, mostly.
            if not run.source.startswith("argonne")
            or int(run.trace.input_tokens[0]) in servers.BATCH_TOKENS
            if _fits(run)
        )

    def lent(self) -> Efficiency:
        """What is known without the runs."""
        of = gpu(self.gpu)
        return efficiency(of, "profiles") if self.free == LINK else efficiency(of, without=of.name)


GROUPS: Final = (
    Group(
        "MI300X", "argonne", "vllm 0.4-0.6", grid="release", free=(*_COMPUTE, "layer_overhead_s")
    ),
    Group("A10G", "nm_vllm", "nm-vllm 0.5.0", ttft=True),
    Group("Gaudi2", "argonne other", "Deepspeed 2024"),
    Group("RTX-4090", "iog", "vllm 0.8.5", "several", least_degree=2, free=LINK),
)


def group_of(run: ServerRun) -> Group | None:
    """The group that a run belongs to, also where it takes no part in the fit."""
    return next((one for one in GROUPS if one.has(run)), None)


def left_out(run: ServerRun, fold: str) -> StepModel | None:
    """Kernels of a run without the runs of its ``gpu`` or ``llm``; None where none are fitted so.

    They have the level of what is left.
    """
    group, of = group_of(run), gpu(run.gpu)
    if fold == "gpu" and of.vendor != "NVIDIA":  # their share of compute is from offline runs
        return replace(kernels(run, efficiency(of, without=of.name)), level="carried")
    if group is None or fold == "unfitted":
        return None
    if fold == "gpu":
        return replace(kernels(run, group.lent()), level="carried")
    level = "same chip" if group.grid == "several" else "calibrated"
    return replace(kernels(run, fitted(group, run.llm.name)[0]), level=level)


def _fits(run: ServerRun) -> bool:
    try:
        servers.served(run)
    except (InfeasibleError, ParameterError):
        return False
    return True


def kernels(run: ServerRun, values: Efficiency) -> StepModel:
    """Step times of a run's kernels from efficiencies."""
    return Roofline(
        gpu=gpu(run.gpu),
        llm=run.llm,
        efficiency=values,
        tensor_parallel=run.tensor_parallel,
        precision=run.precision,
        kv_precision=run.kv_precision,
    ).step_model()


def logs(
    group: Group, runs: Sequence[ServerRun], values: Efficiency, slower: float = 0.0
) -> pd.DataFrame:
    """Logarithms of simulated over measured, a row per run and quantity.

    Parameters
    ----------
    slower
        Logarithm by which all steps are scaled.
    """
    rows: list[tuple[str, int, str, float]] = []
    made: dict[tuple[str, int], StepModel] = {}
    for run in runs:
        key = (run.llm.name, run.tensor_parallel)
        if key not in made:
            made[key] = step = kernels(run, values)
            if (around := run.overheads) is not None:
                made[key] = with_overheads(step, around, run.llm, run.tensor_parallel)
        step = scaled(made[key], math.exp(slower), math.exp(slower)) if slower else made[key]
        found = servers.simulated(run, servers.served(run, {run: step}.__getitem__))
        of = ["tpot_s" if "tpot_s" in run.measured else "e2e_s"]
        if group.ttft and run.measured["ttft_s"] < QUEUED_S:
            of.append("ttft_s")
        rows += [(*key, q, float(np.log(found[q] / run.measured[q]))) for q in of]
    return pd.DataFrame(rows, columns=["llm", "degree", "quantity", "log"])


@lru_cache(maxsize=32)
def fitted(group: Group, without: str = "") -> tuple[Efficiency, tuple[str, ...]]:
    """Efficiencies of a GPU from its runs, and the values that these say nothing about.

    Parameters
    ----------
    without
        Model whose runs take no part.
    """
    every = group.runs()
    runs = [run for run in every if run.llm.name != without]
    if without and len(runs) == len(every):
        return fitted(group)
    base = fitted(group)[0] if without else group.lent()
    free = [VALUES.index(name) for name in group.free]
    centre = np.log(group.lent().values[free])
    _, spread, low, high = np.array([PRIOR[name] for name in group.free]).T
    start = np.log(np.clip(base.values[free], low, high)) - centre + AWAY

    def made(x: Floats, digits: int = 9) -> Efficiency:
        values = group.lent().values
        values[free] = [float(f"{v:.{digits}g}") for v in np.exp(x - AWAY + centre)]
        return Efficiency.of(values)

    names = ["llm", "degree", "quantity"]
    size = logs(group, runs, made(start))[names].groupby(names)["llm"].transform("size").to_numpy()
    far, near = (logs(group, runs, made(start), by)["log"] for by in (_BY, -_BY))
    weight = np.asarray(1.0 / np.sqrt(size) / _ERROR / np.maximum((far - near) / (2.0 * _BY), 1.0))

    def residuals(x: Floats) -> Floats:
        off = logs(group, runs, made(x))["log"].to_numpy()
        return np.concatenate([weight * off, (x - AWAY) / spread])

    found = least_squares(
        residuals,
        start,
        bounds=(np.log(low) - centre + AWAY - 1e-9, np.log(high) - centre + AWAY + 1e-9),
        loss="soft_l1",
        f_scale=2.0,
        x_scale=spread,
        diff_step=np.array(0.05 / AWAY),
        xtol=1e-3,
        ftol=1e-3,
    )
    jacobian = np.asarray(found.jac, dtype=np.float64)
    deviation = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    moved = np.abs(jacobian[: len(size)] / weight[:, None]).max(axis=0) * spread
    silent = {name for name, by in zip(group.free, moved, strict=True) if by < _MOVES}
    loose = {n for n, d, s in zip(group.free, deviation, spread, strict=True) if d > 0.5 * s}
    loose |= {name for name in group.lent().estimated if name not in group.free}
    values = Efficiency.of(
        made(found.x, _DIGITS).values,
        estimated=tuple(name for name in VALUES if name in loose | silent),
        source=f"calibrated on servers ({group.engine}, {group.gpu})",
        provenance="derived",
    )
    return values, tuple(name for name in VALUES if name in silent)


def rows_frame() -> pd.DataFrame:
    """Rows of ``data/measured/efficiencies.csv`` that are of runs of servers.

    Errors are those of TPOT and of batches' times, as of decode steps.

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    found = []
    for group in GROUPS:
        values, silent = fitted(group)
        runs = group.runs()
        here = _steps_off(logs(group, runs, values))
        apart = []
        for name in dict.fromkeys(run.llm.name for run in runs):
            out = [run for run in runs if run.llm.name == name]
            apart.append(_steps_off(logs(group, out, fitted(group, name)[0])))
        found.append(
            {
                "grid": group.grid,
                "source": "several" if group.grid == "several" else "servers",
                "gpu": group.gpu,
                "engine": group.engine,
                "tables": len({(run.llm.name, run.tensor_parallel) for run in runs}),
                **dict(zip(VALUES, values.values.tolist(), strict=True)),
                "estimated": " ".join(values.estimated),
                "unmeasured": " ".join(silent),
                "decode_mape_percent": round(here.abs().mean(), 2),
                "decode_bias_percent": round(here.mean(), 2),
                "decode_p95_percent": round(here.abs().quantile(0.95), 2),
                "decode_max_percent": round(here.abs().max(), 2),
                "decode_held_out_llm_mape_percent": round(pd.concat(apart).abs().mean(), 2),
            }
        )
    return pd.DataFrame(found)


def _steps_off(frame: pd.DataFrame) -> pd.Series[float]:
    own = frame.loc[frame["quantity"] != "ttft_s", "log"]
    off: pd.Series[float] = 100.0 * (np.exp(own) - 1.0)
    return off
