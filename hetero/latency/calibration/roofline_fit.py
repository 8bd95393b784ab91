r"""Roofline efficiencies fitted to measurements, per GPU and engine generation, with their error.

The nine values ``x`` of :class:`hetero.latency.models.roofline.Efficiency` minimise

.. math::
    \sum_i \rho\Big(\frac{\ln T_i(x) - \ln y_i}{s_i}\Big)
      + \sum_k \Big(\frac{\ln x_k - \ln x^0_k}{\sigma_k}\Big)^2

over the measured steps ``y`` of one GPU and engine; ``s_i`` is 10 % plus the rounding of the
printed value, ``rho`` scipy's ``soft_l1``. The second sum is a weak prior. A value whose standard
deviation stays above half the prior's is listed as ``estimated``: the measurements leave it open,
often because another value can take its place. Where no predicted time moves by 1 % as the value
moves by one deviation of its prior (the link of a GPU measured alone, the time per step in a table
per layer), it is ``unmeasured``, and other GPUs lend theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetero.arrays import Floats
from hetero.catalog import gpu, llm
from hetero.latency.models.efficiencies import PRIOR
from hetero.latency.models.roofline import VALUES, Efficiency, Roofline
from hetero.latency.sources.measured import GRID_BATCHES, GRID_LENGTHS
from hetero.latency.sources.profiles import MOST_CACHED_TOKENS
from hetero.latency.step import StepModel
from hetero.latency.tables import Measurements

MODEL_ERROR = 0.10
_DIGITS = 4


def takes_part(table: Measurements) -> bool:
    """Whether a table takes part in calibration; those that do not still get their error.

    Left out: L40S on four and more GPUs in aiconfigurator. Its all-reduce there is that of one
    host's PCIe topology (3.4 GB/s with four GPUs, 0.9 GB/s with eight), no property of the L40S.
    And layer profiles that are themselves estimated, two GPUs from one.
    """
    one_host = table.source == "aiconfigurator" and of_one_host(table.gpu, table.tensor_parallel)
    return table.provenance != "estimated" and not one_host


def of_one_host(gpu: str, tensor_parallel: int) -> bool:
    """Whether aiconfigurator's all-reduce of a replica is that of one host and of no other."""
    return gpu == "L40S" and tensor_parallel > 2


def roofline_of(table: Measurements, efficiency: Efficiency) -> Roofline:
    """Roofline of the replica that a table was measured on."""
    return Roofline(
        gpu=gpu(table.gpu),
        llm=llm(table.llm),
        efficiency=efficiency,
        tensor_parallel=table.tensor_parallel,
        layers=table.layers,
    )


def predict(table: Measurements, efficiency: Efficiency) -> Floats:
    """Roofline times [s] of every row of a table."""
    return roofline_of(table, efficiency).seconds(*table.step_arguments)


def solved(tables: list[Measurements]) -> tuple[Floats, Floats]:
    """Fitted values and the standard deviation of their logarithms."""
    from scipy.optimize import least_squares

    centre, spread, low, high = np.array([PRIOR[name] for name in VALUES]).T
    logs = np.log(np.concatenate([t.seconds for t in tables]))
    rounding = np.concatenate(
        [np.broadcast_to(t.resolution_s, t.seconds.shape) / t.seconds for t in tables]
    )
    noise = np.sqrt(MODEL_ERROR**2 + rounding**2 / 12.0)

    def residuals(x: Floats) -> Floats:
        trial = Efficiency.of(np.exp(x))
        predicted = np.concatenate([predict(t, trial) for t in tables])
        return np.concatenate([(np.log(predicted) - logs) / noise, (x - np.log(centre)) / spread])

    found = least_squares(
        residuals,
        np.log(centre),
        bounds=(np.log(low), np.log(high)),
        loss="soft_l1",
        f_scale=2.0,
        x_scale=spread,
        xtol=1e-10,
        ftol=1e-10,
        gtol=1e-10,
    )
    jacobian = np.asarray(found.jac, dtype=np.float64)
    return np.exp(found.x), np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))


def fitted(values: Floats, deviation: Floats, source: str) -> Efficiency:
    """Efficiencies of what was :func:`solved`, those left open marked as estimated."""
    loose = tuple(
        name for name, d in zip(VALUES, deviation, strict=True) if d > 0.5 * PRIOR[name][1]
    )
    return Efficiency.of(
        (float(f"{v:.{_DIGITS}g}") for v in values),
        estimated=loose,
        source=source,
        provenance="derived",
    )


def efficiency_of_step(step: StepModel, gpu: str, llm: str, tensor_parallel: int = 1) -> Efficiency:
    """Efficiencies of the roofline that comes nearest to a step model of a replica.

    Asked for prompts and decode steps within its range.
    """
    batch, length = (
        values.ravel() for values in np.meshgrid(GRID_BATCHES, GRID_LENGTHS, indexing="ij")
    )
    prompts = batch * length <= step.max_tokens
    decodes = (batch <= step.max_decoding) & (batch * length <= MOST_CACHED_TOKENS)
    count = (int(prompts.sum()), int(decodes.sum()))
    table = Measurements(
        decode=np.repeat([False, True], count),
        batch=np.concatenate([batch[prompts], batch[decodes]]),
        length_tokens=np.concatenate([length[prompts], length[decodes]]),
        seconds=np.ones(sum(count)),
        gpu=gpu,
        llm=llm,
        tensor_parallel=tensor_parallel,
        engine=step.source,
        source="step model",
        provenance=step.provenance,
    )
    table = replace(table, seconds=step.seconds(*table.step_arguments))
    return fitted(*solved([table]), f"fitted to {step.source}")
