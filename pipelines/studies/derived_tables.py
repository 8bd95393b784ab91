"""The derived tables of ``data/``, made anew from the published files and compared.

``hetero tables`` shows which differ from those of the checkout; it needs the published files
(``hetero data fetch``, or ``HETERO_DATA_MIRROR``), for the times of all-reduces the package
aiconfigurator-core, and for its estimates of servers aiconfigurator.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import DownloadError, ParameterError, require
from hetero.files import check_new, writing
from pipelines.studies import (
    aiconfigurator_estimates,
    calibration,
    expert_runs,
    helix_tables,
    island_outer_loop,
    measured_tables,
    replays,
    roofline_calibration,
    server_intervals,
    servers,
)

RTOL = 1e-3  # least squares leaves that much open, and numbers are kept with four or five digits
ATOL = 1e-3  # below it a time [us, ns] or share is zero: a solver stops anywhere near it
PERCENT = 0.02  # errors in percent are kept with two digits

FITTED = {
    "measured/efficiencies": 2e-2,
    "measured/expert_servers": 5e-2,
    "measured/experts": 5e-2,
    "measured/island_scan": 2e-2,
    "measured/offline_compute": 2e-2,
    "measured/server_chips": 2e-2,
    "measured/servers": 5e-2,
    "measured/servers_held_out": 2e-2,
}
"""What is open in the numbers of tables out of a long fit or solver, relative and absolute."""

TABLES: dict[str, Callable[[], pd.DataFrame]] = {
    **{f"measured/{name}": make for name, make in measured_tables.FILES.items()},
    **helix_tables.FILES,
    "measured/aiconfigurator_servers": aiconfigurator_estimates.estimates_frame,
    "measured/expert_servers": expert_runs.errors_frame,
    "measured/experts": expert_runs.shares_frame,
    "measured/engine_run_load": replays.load,
    "measured/engine_runs": replays.summary_frame,
    "measured/held_out": roofline_calibration.make_held_out,
    "measured/helix_prototype": replays.helix_prototype_frame,
    "measured/island_scan": island_outer_loop.scan,
    "measured/offline_compute": servers.offline_compute_frame,
    "measured/server_chips": calibration.chips_frame,
    "measured/server_repeats": calibration.repeats_frame,
    "measured/servers": calibration.errors_frame,
    "measured/servers_held_out": server_intervals.make_held_out,
}
"""Makers of the tables, by file below ``data/`` without its ending."""


@dataclass(frozen=True, slots=True, repr=False)
class Remade(Shown):
    """Tables made anew.

    Attributes
    ----------
    same
        Files that came out as they are in ``data/``, up to the rounding of another processor.
    different
        Where and how the others differ, by file.
    missing
        Why a table could not be made, by file.
    """

    same: tuple[str, ...]
    different: dict[str, str]
    missing: dict[str, str]

    def table(self) -> Table:
        """One row per table."""
        rows = (
            *((name, "the same", None) for name in self.same),
            *((name, "different", where) for name, where in self.different.items()),
            *((name, "not made", why) for name, why in self.missing.items()),
        )
        columns = (Column("table"), Column("made anew"), Column("where, or why not"))
        return Table("Derived tables of data/", columns, tuple(sorted(rows)))


def remake(
    names: Iterable[str] = (),
    *,
    folder: Path | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Remade:
    """Make tables anew, compare them with those of ``data/``, and write them where asked for.

    Parameters
    ----------
    names
        Some of :data:`TABLES`; all by default.
    folder
        Where to write them, in the folders that they have in ``data/``.
    progress
        Told the name of each table before it is made.
    """
    chosen = tuple(names) or tuple(TABLES)
    for name in chosen:
        unknown = f"No derived table is called '{name}'."
        require(name in TABLES, unknown, resolve=f"use some of {', '.join(TABLES)}.")
    files = {} if folder is None else {name: folder / f"{name}.csv" for name in chosen}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        check_new(file, force=force)
    same, different, missing = [], {}, {}
    for name in chosen:
        if progress is not None:
            progress(name)
        try:
            made = TABLES[name]()
        except (DownloadError, ParameterError) as error:
            missing[name] = str(error)
            continue
        kept = paths.data(f"{name}.csv").read_text(encoding="utf-8")
        if where := difference(made, kept, FITTED.get(name)):
            different[name] = where
        else:
            same.append(name)
        if name in files:
            with writing(files[name], force=force) as part:
                made.to_csv(part, index=False, lineterminator="\n")
    return Remade(tuple(same), different, missing)


def difference(made: pd.DataFrame, kept: str, open_by: float | None = None) -> str | None:
    """Where a frame differs from the text of a table, the words of it and its numbers; None if not.

    Cells that hold several numbers are compared number by number; how many there are counts.

    Parameters
    ----------
    open_by
        What numbers may be off, relative and absolute; by default as the tables are rounded.
    """
    old, new = _read(kept), _read(made.to_csv(index=False, lineterminator="\n"))
    if list(new.columns) != list(old.columns):
        return f"columns {', '.join(new.columns)} instead of {', '.join(old.columns)}"
    if len(new) != len(old):
        return f"{len(new)} rows instead of {len(old)}"
    for column in old.columns:
        rtol = open_by or RTOL
        atol = open_by or (PERCENT if "percent" in column else ATOL)
        for row, (one, other) in enumerate(zip(new[column], old[column], strict=True)):
            if not _equal(one, other, rtol, atol):
                return f"row {row}, {column}: {one} instead of {other}"
    return None


def _read(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)


def _equal(one: str, other: str, rtol: float, atol: float) -> bool:
    mine, yours = (cell.replace(";", " ; ").split() for cell in (one, other))
    return len(mine) == len(yours) and all(
        _same(a, b, rtol, atol) for a, b in zip(mine, yours, strict=True)
    )


def _same(one: str, other: str, rtol: float, atol: float) -> bool:
    try:
        a, b = float(one), float(other)
    except ValueError:
        return one == other
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= atol + rtol * abs(b)
