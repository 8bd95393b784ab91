"""What a sweep found: one row per point, main effects with intervals, interactions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from hetero.errors import DataError, ParameterError
from hetero.intervals import interval
from pipelines.studies.results import MANIFEST
from pipelines.sweep.point import Job
from pipelines.sweep.spec import Measure, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 8  # of an interaction: more cannot be told apart


def collect(sweep: Sweep, jobs: Sequence[Job]) -> pd.DataFrame:
    """One row per finished point, in the order of the sweep: parameters, then measures.

    Raises
    ------
    ParameterError
        If a measure names a table, column, row or claim that the notebook did not leave.
    """
    rows = []
    for job in jobs:
        if not job.target.is_dir():
            continue
        values = {
            name: _plain(value)
            for name, value in (job.record["swept"] | job.record["repeat"]).items()
        }
        found = {name: _read(one, job, name) for name, one in sweep.measures.items()}
        rows.append({"point": job.key} | values | found)
    columns = ["point", *sweep.swept, *sweep.repeat, *sweep.measures]
    return pd.DataFrame(rows, columns=columns)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else json.dumps(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _read(measure: Measure, job: Job, name: str) -> float:
    folder = job.target
    if measure.claim:
        return _claim(measure.claim, folder, name)
    file = folder / f"{measure.table}.csv"
    if not file.is_file():
        there = ", ".join(sorted(path.stem for path in folder.glob("*.csv")))
        raise ParameterError(
            f"Measure '{name}': the notebook saves no table '{measure.table}'.",
            resolve=f"use one of {there}.",
        )
    frame = pd.read_csv(file)
    for column in [measure.column, *measure.where]:
        if column not in frame.columns:
            raise ParameterError(
                f"Measure '{name}': table '{measure.table}' has no column '{column}'.",
                resolve=f"use one of {', '.join(map(str, frame.columns))}.",
            )
    for column, wanted in measure.where.items():
        value = _of_point(wanted, job, name) if isinstance(wanted, dict) else wanted
        frame = frame[frame[column] == value]
        if frame.empty:
            raise ParameterError(
                f"Measure '{name}': no row of '{measure.table}' has {column} = {value!r}.",
                resolve="use a value that the table holds.",
            )
    return float(frame[measure.column].agg(measure.reduce))


def _of_point(wanted: dict[str, Any], job: Job, name: str) -> Any:
    """Value of ``{parameter: NAME}`` in a point."""
    parameters = job.record["parameters"]
    parameter = wanted.get("parameter")
    if set(wanted) != {"parameter"} or parameter not in parameters:
        raise ParameterError(
            f"Measure '{name}': {wanted} names no parameter of the notebook.",
            resolve=f"write {{parameter: NAME}} with one of {', '.join(sorted(parameters))}.",
        )
    value = parameters[parameter]
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _claim(claim: str, folder: Path, name: str) -> float:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for row in manifest["claims"]:
        if row["id"] == claim:
            try:
                return float(row["value"])
            except (TypeError, ValueError):
                raise DataError(
                    f"Measure '{name}': claim '{claim}' is {row['value']!r}, no number.",
                    path=folder / MANIFEST,
                    resolve="measure a claim whose value is a number.",
                ) from None
    raise ParameterError(
        f"Measure '{name}': the notebook records no claim '{claim}'.",
        resolve=f"use one of {', '.join(row['id'] for row in manifest['claims'])}.",
    )


def effects(frame: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """Mean of every measure over each value of each parameter, with a 95 % interval.

    Columns: parameter, value, measure, mean, low, high, points. All other parameters and the
    repeats are averaged over; the interval is Student's t over these points.
    """
    rows = []
    for parameter in sweep.swept:
        for value, part in frame.groupby(parameter, sort=True):
            for measure in sweep.measures:
                values = part[measure].to_numpy(dtype=float)
                values = values[np.isfinite(values)]
                if len(values):
                    mean, low, high = values.mean(), np.nan, np.nan
                    if len(values) > 1:
                        low, high = interval(values)
                    rows.append((parameter, value, measure, mean, low, high, len(values)))
    columns = ["parameter", "value", "measure", "mean", "low", "high", "points"]
    return pd.DataFrame(rows, columns=columns)


def figure(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    """Main effects: a row per measure, a column per parameter; lines part the second parameter.

    Where two parameters or more are swept, each panel draws one line per value of the next
    parameter, so that lines that are not parallel show an interaction.
    """
    import matplotlib.pyplot as plt

    from hetero.plots import figures

    figures.use_style()
    swept, measures = sweep.swept, tuple(sweep.measures)
    drawn, axes = plt.subplots(
        len(measures),
        len(swept),
        figsize=(max(4.2, 3.4 * len(swept)), max(3.0, 2.5 * len(measures))),
        squeeze=False,
        sharey="row",
    )
    for i, measure in enumerate(measures):
        for j, parameter in enumerate(swept):
            axis = axes[i, j]
            other = swept[(j + 1) % len(swept)] if len(swept) > 1 else None
            lines = frame.groupby(other, sort=True) if other else [("", frame)]
            if other and (frame[other].nunique() > _MOST_LINES or sweep.grid is None):
                lines, other = [("", frame)], None
            for label, part in lines:
                _line(axis, part, parameter, measure, f"{other} = {label}" if other else None)
            axis.set_xlabel(parameter)
            if j == 0:
                axis.set_ylabel(measure)
            if other:
                axis.legend(fontsize=7)
    return drawn


def _line(axis: Any, part: pd.DataFrame, parameter: str, measure: str, label: str | None) -> None:
    import seaborn as sns

    numeric = pd.api.types.is_numeric_dtype(part[parameter])
    if numeric and part[parameter].nunique() > len(part) / 1.5 and len(part) > 2:
        axis.plot(part[parameter], part[measure], ".", label=label)  # a scatter of single points
        return
    part = part.sort_values(parameter, kind="stable")
    if not numeric:
        part[parameter] = part[parameter].map(str)
    style = {"err_style": "bars", "err_kws": {"capsize": 2}, "errorbar": interval}
    sns.lineplot(part, x=parameter, y=measure, marker="o", label=label, **style, ax=axis)
