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

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.catalog import gpu, llm
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.frames import SOURCES, Source
from hetero.latency.models.efficiencies import PRIOR, calibrated
from hetero.latency.models.roofline import VALUES, Efficiency, Roofline
from hetero.latency.sources import measured
from hetero.latency.sources.measured import GRID_BATCHES, GRID_LENGTHS
from hetero.latency.sources.profiles import MOST_CACHED_TOKENS
from hetero.latency.step import StepModel
from hetero.latency.tables import PHASES, Measurements, Phase, one_generation

Floats = NDArray[np.float64]

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Calibration(Shown):
    """Fitted efficiencies of one GPU under one engine, and how well they explain its tables.

    Attributes
    ----------
    efficiency
        The fitted values.
    deviation
        Shape (9,); standard deviation of the logarithm of each value.
    unmeasured
        Names of the values that the measurements say nothing about.
    accuracy
        Per phase, over the tables that were fitted.
    held_out
        Per phase and kind of fold, on tables left out in turn: ``llm`` (one model at a time) and
        ``degree`` (one tensor-parallel degree at a time), where there are two to choose from.
    """

    gpu: str
    source: str
    engine: str
    efficiency: Efficiency
    deviation: Floats
    unmeasured: tuple[str, ...]
    accuracy: dict[Phase, Accuracy]
    held_out: dict[tuple[str, Phase], Accuracy]
    tables: int

    def table(self) -> Table:
        """Value, spread and state of each efficiency, errors below."""
        rows = []
        inner = self.efficiency.table()
        for row, deviation in zip(inner.rows, self.deviation, strict=True):
            spread = f"x/÷ {np.exp(float(deviation)):.2f}"
            rows.append((*row[:3], spread, row[3]))
        columns = (*inner.columns[:3], Column("one deviation"), Column("is"))
        notes = [
            f"{phase}: mean error {a.mape_percent:.1f} %, bias {a.bias_percent:+.1f} %, "
            f"95th percentile {a.p95_percent:.1f} %, largest {a.max_percent:.1f} % of {a.rows} rows"
            for phase, a in self.accuracy.items()
        ]
        notes += [
            f"{phase} with each {kind} held out: mean error {a.mape_percent:.1f} %"
            for (kind, phase), a in self.held_out.items()
        ]
        return Table(f"{self.gpu}, {self.engine}", columns, tuple(rows), tuple(notes))


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


def accuracy(tables: Iterable[Measurements], efficiency: Efficiency) -> dict[Phase, Accuracy]:
    """Accuracy of an efficiency over all rows of some tables, per phase."""
    tables = list(tables)
    predicted = np.concatenate([predict(t, efficiency) for t in tables])
    seconds = np.concatenate([t.seconds for t in tables])
    decode = np.concatenate([t.decode for t in tables])
    return {
        phase: Accuracy.of(predicted[rows], seconds[rows])
        for phase in PHASES
        if (rows := decode == (phase == "decode")).any()
    }


def _solve(tables: list[Measurements]) -> tuple[Floats, Floats]:
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

    solved = least_squares(
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
    jacobian = np.asarray(solved.jac, dtype=np.float64)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    return np.exp(solved.x), np.sqrt(np.diag(covariance))


def _unmeasured(tables: list[Measurements], efficiency: Efficiency) -> tuple[str, ...]:
    names = []
    base = np.concatenate([predict(t, efficiency) for t in tables])
    for name, (_, spread, low, high) in PRIOR.items():
        moved = [
            float(np.clip(getattr(efficiency, name) * np.exp(way * spread), low, high))
            for way in (-1.0, 1.0)
        ]
        trials = [replace(efficiency, **{name: value}) for value in moved]  # type: ignore[arg-type]
        change = [np.concatenate([predict(t, e) for t in tables]) / base - 1.0 for e in trials]
        if np.abs(change).max() < 0.01:
            names.append(name)
    return tuple(names)


def _efficiency(values: Floats, deviation: Floats, source: str) -> Efficiency:
    loose = tuple(
        name for name, d in zip(VALUES, deviation, strict=True) if d > 0.5 * PRIOR[name][1]
    )
    return Efficiency.of(
        (float(f"{v:.{_DIGITS}g}") for v in values),
        estimated=loose,
        source=source,
        provenance="derived",
    )


def calibrate(tables: Iterable[Measurements], *, hold_out: bool = True) -> Calibration:
    """Fit the efficiencies of one GPU under one engine to its measured tables.

    Raises
    ------
    FitError
        If the tables come from more than one engine generation.
    ParameterError
        If they come from more than one GPU, or there is none to fit.
    """
    every = list(tables)
    engine = one_generation(every)
    names = {t.gpu for t in every}
    used = [t for t in every if takes_part(t)]
    if len(names) != 1 or not used:
        raise ParameterError(
            f"Efficiencies belong to one GPU; the tables to fit are of {sorted(names)}.",
            resolve="calibrate each GPU on its own.",
        )
    values, deviation = _solve(used)
    label = f"calibrated on {used[0].source} ({engine}, {used[0].gpu})"
    efficiency = _efficiency(values, deviation, label)
    held: dict[tuple[str, Phase], Accuracy] = {}
    for kind in ("llm", "degree") if hold_out else ():
        folds = sorted({_fold(t, kind) for t in used})
        if len(folds) < 2:
            continue
        predicted, seconds, decode = [], [], []
        for fold in folds:
            rest = [t for t in used if _fold(t, kind) != fold]
            trial = _efficiency(*_solve(rest), label)
            for t in used:
                if _fold(t, kind) == fold:
                    predicted.append(predict(t, trial))
                    seconds.append(t.seconds)
                    decode.append(t.decode)
        for phase in PHASES:
            rows = np.concatenate(decode) == (phase == "decode")
            held[kind, phase] = Accuracy.of(
                np.concatenate(predicted)[rows], np.concatenate(seconds)[rows]
            )
    return Calibration(
        gpu=used[0].gpu,
        source=used[0].source,
        engine=engine,
        efficiency=efficiency,
        deviation=deviation,
        unmeasured=_unmeasured(used, efficiency),
        accuracy=accuracy(used, efficiency),
        held_out=held,
        tables=len(used),
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
    return _efficiency(*_solve([table]), f"fitted to {step.source}")


def _fold(table: Measurements, kind: str) -> str:
    return table.llm if kind == "llm" else f"x{table.tensor_parallel}"


def by_gpu(tables: Iterable[Measurements]) -> dict[tuple[str, str], list[Measurements]]:
    """Tables grouped by GPU and engine, in order."""
    groups: dict[tuple[str, str], list[Measurements]] = {}
    for table in tables:
        groups.setdefault((table.gpu, table.engine), []).append(table)
    return dict(sorted(groups.items()))


def calibrate_all(*, raw: bool = False, hold_out: bool = True) -> pd.DataFrame:
    """One row per source, GPU and engine: values, deviations, errors. See ``data/measured``."""
    rows = []
    for source in SOURCES:
        for group in by_gpu(measured.tables(source, raw=raw)).values():
            found = calibrate(group, hold_out=hold_out)
            row: dict[str, object] = {
                "source": source,
                "gpu": found.gpu,
                "engine": found.engine,
                "tables": found.tables,
                **dict(zip(VALUES, found.efficiency.values.tolist(), strict=True)),
                "estimated": " ".join(found.efficiency.estimated),
                "unmeasured": " ".join(found.unmeasured),
            }
            for phase in PHASES:
                a = found.accuracy[phase]
                row |= {f"{phase}_{name}": round(value, 2) for name, value in a.percents.items()}
                for kind in ("llm", "degree"):
                    held = found.held_out.get((kind, phase))
                    row[f"{phase}_held_out_{kind}_mape_percent"] = (
                        round(held.mape_percent, 2) if held else None
                    )
            rows.append(row)
    return pd.DataFrame(rows)


def errors(*, raw: Collection[Source] = ()) -> pd.DataFrame:
    """Error of the calibrated roofline on every measured table, per GPU, engine and phase.

    Columns: source, gpu, engine, scope (``fitted``, or ``not fitted`` for tables left out), phase,
    rows, mape_percent, bias_percent, p95_percent, max_percent, and the held-out mean errors
    held_out_llm_percent and held_out_degree_percent as committed.

    Parameters
    ----------
    raw
        Sources whose published files are used; for the others the derived reductions are.
    """
    committed = {
        (row["source"], row["gpu"], row["engine"]): row for row in calibrated().to_dict("records")
    }
    found = []
    for source in SOURCES:
        groups = by_gpu(measured.tables(source, raw=source in raw))
        for (name, engine), tables in groups.items():
            row = committed[source, name, engine]
            values = Efficiency.of(row[value] for value in VALUES)
            for scope in ("fitted", "not fitted"):
                chosen = [t for t in tables if takes_part(t) == (scope == "fitted")]
                for phase, a in accuracy(chosen, values).items() if chosen else ():
                    held = {
                        f"held_out_{kind}_percent": row[f"{phase}_held_out_{kind}_mape_percent"]
                        if scope == "fitted"
                        else np.nan
                        for kind in ("llm", "degree")
                    }
                    found.append(
                        {
                            "source": source,
                            "gpu": name,
                            "engine": engine,
                            "scope": scope,
                            "phase": phase,
                            "rows": a.rows,
                            **a.percents,
                            **held,
                        }
                    )
    return pd.DataFrame(found)
