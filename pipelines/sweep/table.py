"""What a sweep found: one row per point, main effects with intervals, interactions."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from hetero.errors import DataError, ParameterError, require
from hetero.intervals import draws_needed, interval
from pipelines.studies.results import MANIFEST
from pipelines.sweep.point import Job
from pipelines.sweep.spec import Measure, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHANGE = ("change", "change low", "change high")
_SMALL = 5.0  # change in percent or points that a sweep should tell from none
_MOST_LINES = 8  # of an interaction: more cannot be told apart


def collect(sweep: Sweep, jobs: Sequence[Job]) -> pd.DataFrame:
    """One row per finished point, in the order of the sweep: parameters, then measures."""
    rows = []
    for job in (one for one in jobs if one.target.is_dir()):
        varied = job.record["swept"] | job.record["repeat"]
        values = {name: _plain(value) for name, value in varied.items()}
        for along in itertools.product(*sweep.along.values()):
            own = dict(zip(sweep.along, along, strict=True))
            given = job.record["parameters"] | own
            found = {
                name: _read(one, job.target, given, name) for name, one in sweep.measures.items()
            }
            rows.append({"point": job.key} | values | own | found)
    return pd.DataFrame(rows, columns=["point", *sweep.swept, *sweep.repeat, *sweep.measures])


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else json.dumps(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _read(measure: Measure, folder: Path, parameters: dict[str, Any], name: str) -> float:
    if measure.claim:
        return _claim(measure.claim, folder, name)
    file = folder / f"{measure.table}.csv"
    require(
        file.is_file(),
        f"Measure '{name}': the notebook saves no table '{measure.table}'.",
        resolve=f"use one of {', '.join(sorted(path.stem for path in folder.glob('*.csv')))}.",
    )
    frame = pd.read_csv(file)
    for column in [measure.column, *measure.where]:
        require(
            column in frame.columns,
            f"Measure '{name}': table '{measure.table}' has no column '{column}'.",
            resolve=f"use one of {', '.join(map(str, frame.columns))}.",
        )
    for column, wanted in measure.where.items():
        value = _of_point(wanted, parameters, name) if isinstance(wanted, dict) else wanted
        frame = frame[frame[column] == value]
        require(
            not frame.empty,
            f"Measure '{name}': no row of '{measure.table}' has {column} = {value!r}.",
            resolve="use a value that the table holds.",
        )
    return float(frame[measure.column].agg(measure.reduce))


def _of_point(wanted: dict[str, Any], parameters: dict[str, Any], name: str) -> Any:
    """Value of ``{parameter: NAME}`` in a point."""
    parameter = wanted.get("parameter", "")
    require(
        set(wanted) == {"parameter"} and parameter in parameters,
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


def effects_frame(frame: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """Mean of every measure over each value of each parameter, with a 95 % interval.

    Columns: parameter, value, measure, mean, low, high, points, and where the sweep compares with
    a value change, change low, change high: in percent of that value's mean, or in the measure's
    own unit where it has ends. All other parameters and the repeats are averaged over; the interval
    is Student's t over these points, on the scale of the log odds for a measure with ends. That of
    a change is over pairs of points, and holds for all values of the parameter together.
    """
    rows = []
    for parameter in sweep.swept:
        numbers = pd.api.types.is_numeric_dtype(frame[parameter])  # else in the order of the file
        for value, part in frame.groupby(parameter, sort=numbers):
            for measure, one in sweep.measures.items():
                values = part.loc[np.isfinite(part[measure]), measure].to_numpy(dtype=float)
                if len(values):
                    low, high = spread(values, one.within) if len(values) > 1 else (np.nan, np.nan)
                    row = (parameter, value, measure, values.mean(), low, high, len(values))
                    rows.append((*row, *_change(frame, sweep, parameter, value, measure)))
    columns = ["parameter", "value", "measure", "mean", "low", "high", "points", *_CHANGE]
    found = pd.DataFrame(rows, columns=columns)
    return found if sweep.against else found.drop(columns=list(_CHANGE))


def spread(values: ArrayLike, within: tuple[float, float] | None = None) -> tuple[float, float]:
    r"""95 % interval of a mean, between the ends ``within`` if it has them.

    The half width is that of the mean carried to the log odds of :math:`p`, its place between the
    ends, :math:`t_{n-1} s / (\sqrt n\, p (1 - p))`; at an end itself there is nothing to carry.

    Examples
    --------
    >>> low, high = spread([90.0, 99.0, 100.0], (0.0, 100.0))
    >>> round(low, 1), round(high, 1)
    (35.3, 99.9)
    """
    low, high = interval(values)
    if within is None:
        return low, high
    least, most = within
    place = ((low + high) / 2.0 - least) / (most - least)
    if not 0.0 < place < 1.0:
        return low, high
    half = (high - low) / 2.0 / (most - least) / (place * (1.0 - place))
    middle = np.log(place / (1.0 - place))
    ends = [least + (most - least) / (1.0 + np.exp(-middle - sign * half)) for sign in (-1, 1)]
    return float(ends[0]), float(ends[1])


def _change(
    frame: pd.DataFrame, sweep: Sweep, parameter: str, value: Any, measure: str
) -> tuple[float, float, float]:
    """Mean change over the value compared with, and its interval."""
    others = [name for name in (*sweep.swept, *sweep.repeat) if name != parameter]
    base = sweep.against.get(parameter)
    if base is None or value == base:
        return np.nan, np.nan, np.nan
    wide = frame.pivot(index=others, columns=parameter, values=measure)
    change = (wide[value] - wide[base]).to_numpy()
    if sweep.measures[measure].within is None:
        change = 100.0 * change / float(wide[base].mean())
    change = change[np.isfinite(change)]
    if len(change) < 2:
        return float(change.mean()) if len(change) else np.nan, np.nan, np.nan
    low, high = interval(change, 1.0 - 0.05 / (frame[parameter].nunique() - 1))
    return float(change.mean()), low, high


def sentences(found: pd.DataFrame, sweep: Sweep) -> list[str]:
    """What a sweep supports, measure by measure.

    The largest clear change; else what none exceeds, where that is at most 5; else that it cannot
    be told, and how many repeats would tell 5.
    """
    said = []
    for parameter, measure in itertools.product(sweep.against, sweep.measures):
        part = found[(found["parameter"] == parameter) & (found["measure"] == measure)]
        changes = part.dropna(subset=["change"])
        if changes.empty:
            continue
        unit = "%" if sweep.measures[measure].within is None else "points"
        label, names = sweep.label(parameter), _names(part["value"])
        base = names[sweep.against[parameter]]
        low, high = changes["change low"], changes["change high"]
        most = float(max(-low.min(), high.max()))
        if clear := changes[(low > 0.0) | (high < 0.0)].to_dict("records"):
            row = max(clear, key=lambda one: abs(one["change"]))
            says = (
                f"{label} = {names[row['value']]} in place of {base} gives "
                f"{row['change']:+.3g} {unit} ({row['change low']:+.3g} to "
                f"{row['change high']:+.3g})"
            )
        elif np.isnan(most):
            says = f"cannot tell what {label} does from one repeat"
        elif not most:
            says = f"{label} does nothing, every value gives the same"
        elif most <= _SMALL:
            says = f"no value of {label} changes it by more than {_up(most)} {unit} against {base}"
        else:
            needed = _repeats(changes, sweep)
            says = (
                f"cannot tell; {label} may change it by {low.min():+.2g} to {high.max():+.2g} "
                f"{unit} against {base}, and about {_up(needed)} repeats would tell {_SMALL:g}"
            )
        said.append(f"{measure}: {says}.")
    return said


def _up(value: float) -> str:
    """A number to two digits, never rounded down."""
    digit = 10.0 ** np.floor(np.log10(value) - 1.0)
    return f"{float(f'{np.ceil(value / digit) * digit:.2g}'):,g}"


def _repeats(changes: pd.DataFrame, sweep: Sweep) -> float:
    """Repeats that would bring the widest interval of a change to 5 on either side."""
    widest = changes.iloc[int((changes["change high"] - changes["change low"]).argmax())]
    half, now = (widest["change high"] - widest["change low"]) / 2.0, int(widest["points"])
    needed = draws_needed(half, now, _SMALL, 1.0 - 0.05 / len(changes))
    return needed / now * math.prod(map(len, sweep.repeat.values()))


def _names(values: Iterable[Any]) -> dict[Any, str]:
    """Numbers plainly, texts without the words that all of them begin or end with."""
    words = [f"{v:g}".split() if isinstance(v, int | float) else str(v).split() for v in values]
    first, last = (
        next((k for k, at in enumerate(zip(*ends, strict=False)) if len(set(at)) > 1), 0)
        for ends in (words, [one[::-1] for one in words])
    )
    names = (" ".join(one[first : len(one) - last] or one) for one in words)
    return dict(zip(values, names, strict=True))


def figure(frame: pd.DataFrame, sweep: Sweep) -> Figure:
    """Main effects: a row per measure, a column per parameter; lines part the second parameter.

    Where two parameters or more are swept, each panel draws one line per value of the next
    parameter, so that lines that are not parallel show an interaction. Where a single parameter is
    compared with one of its values, the change stands below each measure, and measures side by
    side.
    """
    import matplotlib.pyplot as plt

    from hetero.plots import figures

    figures.use_style()
    swept, measures = sweep.swept, tuple(sweep.measures)
    if len(swept) == 1 and sweep.against:
        return _compared(effects_frame(frame, sweep), sweep)
    size = (max(4.2, 3.4 * len(swept)), max(3.0, 2.5 * len(measures)))
    drawn, axes = plt.subplots(len(measures), len(swept), figsize=size, squeeze=False, sharey="row")
    for i, measure in enumerate(measures):
        axes[i, 0].set_ylabel(measure)
        for j, parameter in enumerate(swept):
            axis = axes[i, j]
            other = swept[(j + 1) % len(swept)] if len(swept) > 1 else None
            lines = frame.groupby(other, sort=True) if other else [("", frame)]
            if other and (frame[other].nunique() > _MOST_LINES or sweep.grid is None):
                lines, other = [("", frame)], None
            for label, part in lines:
                named = f"{sweep.label(other)} = {label}" if other else None
                _line(axis, part, parameter, measure, named)
            axis.set_xlabel(sweep.label(parameter))
            if other:
                axis.legend(fontsize=7)
    return drawn


def _compared(found: pd.DataFrame, sweep: Sweep) -> Figure:
    """Means from 0 above, changes on one scale per unit below, with their intervals."""
    import matplotlib.pyplot as plt

    count, names = len(sweep.measures), _names(found["value"])
    long = max(map(len, names.values())) > 6  # letters, which would run into each other
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    size, bracket = (max(4.6, 2.9 * count), 6.4 if long else 5.0), "\n[" if long else " ["
    drawn, axes = plt.subplots(2, count, figsize=size, squeeze=False, sharex="col")
    (base,) = sweep.against.values()
    for k, (measure, one) in enumerate(sweep.measures.items()):
        part = found[found["measure"] == measure]
        places = np.arange(len(part))
        for axis, name, low, high in (
            (axes[0, k], "mean", "low", "high"),
            (axes[1, k], "change", "change low", "change high"),
        ):
            reach = np.abs(part[[low, high]].to_numpy().T - part[name].to_numpy())
            axis.errorbar(places, part[name], np.nan_to_num(reach), fmt="o", capsize=3)
        axes[1, k].set_xticks(places, list(names.values()), **(slanted if long else {}))
        axes[1, k].set_xlim(-0.5, len(part) - 0.5)
        low, high = axes[0, k].get_ylim()
        axes[0, k].set_ylim(*(one.within or (min(0.0, low), 1.05 * high)))
        alike = [m for m, o in sweep.measures.items() if (o.within is None) == (one.within is None)]
        ends = found.loc[found["measure"].isin(alike), ["change low", "change high"]]
        reach = 1.1 * max(_SMALL, float(np.nan_to_num(ends.abs().to_numpy()).max()))
        axes[1, k].set_ylim(-reach, reach)
        unit = "%" if one.within is None else "points"
        axes[0, k].set_ylabel(measure.replace(", ", "\n").replace(" [", bracket))
        axes[1, k].axhline(0.0, color="0.4", linewidth=0.8)
        axes[1, k].set_ylabel(f"change from {names[base]}{bracket}{unit}]")
        axes[1, k].set_xlabel(textwrap.fill(sweep.label(sweep.swept[0]), 28))
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
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # noise should not look like an effect
