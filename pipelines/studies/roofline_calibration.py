"""The roofline's efficiencies calibrated on every measured GPU, and held out to say what errs.

``data/measured/efficiencies.csv`` and ``held_out.csv`` come from here; the fit of one GPU is
:mod:`hetero.latency.calibration.roofline_fit`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from hetero.arrays import Floats
from hetero.catalog import gpu as find_gpu
from hetero.catalog import link, llm
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.latency.accuracy import Accuracy
from hetero.latency.calibration.expected import Level, held_out_frame, points_of, quantile
from hetero.latency.calibration.roofline_fit import fitted, predict, solved, takes_part
from hetero.latency.frames import SOURCES, Source
from hetero.latency.models.efficiencies import PRIOR, chip, chips_frame, fitted_frame
from hetero.latency.models.layers import helix
from hetero.latency.models.roofline import VALUES, Efficiency
from hetero.latency.sources import measured
from hetero.latency.tables import PHASES, Measurements, Phase, one_generation
from pipelines.studies import layer_profiles, operators, profile_settings

PACKAGE_ENGINES: Final[dict[operators.Backend, str]] = {
    "vllm": "0.24.0",
    "sglang": "0.5.14",
    "trtllm": "1.3.0rc20",
}
"""Engines of the package aiconfigurator-core 0.12.0 with their releases on most GPUs."""

_OTHER_RELEASES: Final = {
    "A100-SXM-80GB": {"vllm": "0.14.0", "sglang": "0.5.10", "trtllm": "1.0.0"},
    "Arc-Pro-B60": {"vllm": "0.26.0"},
}

_GRID_REPLICAS: Final = (
    *(("Llama-3.1-8B", degree) for degree in (1, 2, 4)),
    *(("Llama-3.1-70B", degree) for degree in (2, 4, 8)),
)
_POINTS = (np.arange(40) + 0.5) / 40  # of the distribution of each table's errors that is kept


def tables(source: Source, *, raw: bool = False) -> tuple[Measurements, ...]:
    """All tables of one source, as in ``data/measured`` or (``raw``) as published."""
    if source == "profiles":
        return layer_profiles.measurements() if raw else profile_settings.measurements()
    readers: dict[str, Callable[..., tuple[Measurements, ...]]] = {
        "splitwise": measured.splitwise,
        "helix": helix,
        "aiconfigurator": measured.aiconfigurator,
    }
    return readers[source](raw=raw)


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
        inner = self.efficiency.table()
        rows = [
            (*row[:3], f"x/÷ {np.exp(float(deviation)):.2f}", row[3])
            for row, deviation in zip(inner.rows, self.deviation, strict=True)
        ]
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


def calibrate(tables: Iterable[Measurements], *, hold_out: bool = True) -> Calibration:
    """Fit the efficiencies of one GPU under one engine to its measured tables.

    Raises
    ------
    FitError
        If the tables come from more than one engine generation.
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
    values, deviation = solved(used)
    label = f"calibrated on {used[0].source} ({engine}, {used[0].gpu})"
    efficiency = fitted(values, deviation, label)
    held: dict[tuple[str, Phase], Accuracy] = {}
    for kind in ("llm", "degree") if hold_out else ():
        folds = sorted({_fold(t, kind) for t in used})
        if len(folds) < 2:
            continue
        predicted, seconds, decode = [], [], []
        for fold in folds:
            trial = fitted(*solved([t for t in used if _fold(t, kind) != fold]), label)
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
    groups = [group for source in SOURCES for group in by_gpu(tables(source, raw=raw)).values()]
    return pd.DataFrame([_as_row(calibrate(group, hold_out=hold_out)) for group in groups])


def _as_row(found: Calibration) -> dict[str, object]:
    row: dict[str, object] = {
        "source": found.source,
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
    return row


def package_calibrations_frame() -> pd.DataFrame:
    """Rows of GPUs of the package alone, ``package`` in ``data/measured/efficiencies.csv``.

    The published grid has six GPUs; the package has Blackwell's others and Intel's B60, in the
    same models, degrees, batches and lengths.
    """
    known = {table.gpu for table in measured.aiconfigurator()}
    names = [name for name in operators.SYSTEMS if name not in known]
    groups = [_of_package(name, engine) for name in names for engine in PACKAGE_ENGINES]
    return pd.DataFrame([_as_row(calibrate(group)) for group in groups if group])


def package_release(name: str, engine: operators.Backend) -> str:
    """Release of an engine that the package measured on a GPU."""
    return _OTHER_RELEASES.get(name, {}).get(engine, PACKAGE_ENGINES[engine])


def _of_package(name: str, engine: operators.Backend) -> list[Measurements]:
    label, found = f"{engine} {package_release(name, engine)}", []
    operators.package()
    for model, degree in _GRID_REPLICAS:
        # Too little memory, or the engine was not measured on it.
        with contextlib.suppress(ParameterError, ValueError, RuntimeError):
            one = operators.measurements(find_gpu(name), llm(model), degree, engine=engine)
            found.append(replace(one, engine=label, provenance="measured"))
    return found


def errors_frame(*, raw: Collection[Source] = ()) -> pd.DataFrame:
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
        (row["source"], row["gpu"], row["engine"]): row for row in fitted_frame().to_dict("records")
    }
    found = []
    for source in SOURCES:
        for (name, engine), group in by_gpu(tables(source, raw=source in raw)).items():
            row = committed[source, name, engine]
            values = Efficiency.of(row[value] for value in VALUES)
            for scope in ("fitted", "not fitted"):
                chosen = [t for t in group if takes_part(t) == (scope == "fitted")]
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


def coverage_frame(level: Level = "calibrated", share: float = 0.9) -> pd.DataFrame:
    """How many held-out steps lie within intervals made without their chip.

    For each chip the interval is the central ``share`` of the errors of the tables of all other
    chips at the same level and phase, each chip with the same weight. Columns: chip, phase, rows,
    low, high (factors on a predicted time), covered (share of the rows).
    """
    frame = held_out_frame()
    frame = frame[frame["level"] == level]
    found = []
    for phase in PHASES:
        rows = frame[frame["phase"] == phase]
        chips = rows["gpu"].map(chip)
        for name in sorted(set(chips)):
            own, rest = rows[chips == name], rows[chips != name]
            low, high = (
                quantile(rest, points_of(rest), q) for q in ((1 - share) / 2, (1 + share) / 2)
            )
            points = points_of(own)
            inside = ((points >= low) & (points <= high)).mean(axis=1)
            weight = own["rows"].to_numpy()
            covered = float(inside @ weight / weight.sum())
            # The truth is the prediction over exp(error).
            found.append((name, phase, int(weight.sum()), np.exp(-high), np.exp(-low), covered))
    return pd.DataFrame(found, columns=["chip", "phase", "rows", "low", "high", "covered"])


def make_held_out(*, raw: bool = True) -> pd.DataFrame:
    """Rows of ``data/measured/held_out.csv``; fits every model and chip left out in turn."""
    rows = []
    for level, table, efficiency in _folds(raw=raw):
        error = np.log(predict(table, efficiency) / table.seconds)
        for phase in PHASES:
            own = error[table.decode == (phase == "decode")]
            if len(own):
                rows.append(_row(level, table, phase, own))
    return pd.DataFrame(rows)


def _row(level: Level, table: Measurements, phase: Phase, error: Floats) -> dict[str, object]:
    mean = float(error.mean())
    return {
        "level": level,
        "source": table.source,
        "gpu": table.gpu,
        "engine": table.engine,
        "llm": table.llm,
        "degree": table.tensor_parallel,
        "phase": phase,
        "rows": len(error),
        "mean": round(mean, 4),
        "scatter": round(float(np.sqrt(np.mean((error - mean) ** 2))), 4),
        "points": " ".join(f"{v:.3f}" for v in np.quantile(error, _POINTS)),
    }


def _folds(*, raw: bool) -> Iterator[tuple[Level, Measurements, Efficiency]]:
    for source in SOURCES:
        for group in by_gpu(tables(source, raw=raw)).values():
            used = [table for table in group if takes_part(table)]
            for name in sorted({table.llm for table in used}):
                rest = [table for table in used if table.llm != name]
                if rest:
                    one = calibrate(rest, hold_out=False).efficiency
                    linked = any(table.tensor_parallel > 1 for table in rest)
                    for table in used:
                        # A link that no other model was measured over is not calibrated.
                        if table.llm == name and (linked or table.tensor_parallel == 1):
                            yield "calibrated", table, one
            borrowed = without_chip(used[0].gpu)
            for table in used:
                yield "carried", table, borrowed


def without_chip(name: str) -> Efficiency:
    """Efficiencies of a GPU as if nothing had been measured on its chip: medians of the others.

    The link's share and latency are taken over the same kind of link where there are any; what
    no other chip determines is the centre of the prior.
    """
    frame = chips_frame()
    frame = frame[frame["gpu"].map(chip) != chip(name)]
    chips = frame["gpu"].map(chip)
    kind = link(find_gpu(name).link_type).kind
    same = np.array([link(find_gpu(g).link_type).kind == kind for g in frame["gpu"]])
    values = []
    for value in VALUES:
        known = np.array([value not in names for names in frame["estimated"]])
        if value in ("link_efficiency", "hop_latency_s") and (known & same).any():
            known &= same
        each = frame[value][known].groupby(chips[known]).median()
        values.append(float(each.median()) if len(each) else PRIOR[value][0])
    return Efficiency.of(
        values, estimated=VALUES, source=f"medians without {chip(name)}", provenance="estimated"
    )
