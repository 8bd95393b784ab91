"""Verdicts: what the results say on every row of the ledger of published claims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetero import paths
from hetero.display import Column, Table
from hetero.errors import DataError, HeteroError
from pipelines.studies.coverage import Coverage, Covered, PublishedFigure, coverage
from pipelines.studies.ledger import QUOTED, Claim, Judgement, ledger
from pipelines.studies.published import (
    PAPERS,
    PROFILES,
    Manifest,
    Recorded,
    Rows,
    manifests,
    near,
    picked,
)

__all__ = [
    "STATUSES",
    "Claim",
    "Coverage",
    "Covered",
    "Judgement",
    "Measurement",
    "PublishedFigure",
    "Status",
    "Verdict",
    "Verdicts",
    "coverage",
    "ledger",
    "verdicts",
]

Status = Literal["reproduced", "direction only", "not reproduced", "not attempted"]
STATUSES: tuple[Status, ...] = ("reproduced", "direction only", "not reproduced", "not attempted")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a notebook measured for a claim.

    Attributes
    ----------
    value
        Number in the claim's unit, or an order.
    judgement
        What this value alone says, None for a claim that is quoted only.
    interval
        Low and high end over seeds, where there are several.
    figure
        Path of the figure or table that shows it, below the results folder.
    """

    value: float | str
    judgement: Judgement | None
    interval: tuple[float, float] | None
    note: str
    figure: str
    notebook: str
    source: Literal["twin", "real"]
    profile: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, what was measured on the twin and on the real trace, and what follows.

    Attributes
    ----------
    status
        Judged by the real measurement where there is one, else by the twin's.
    why
        Reason where the claim is not attempted, else empty.
    """

    claim: Claim
    status: Status
    why: str = ""
    twin: Measurement | None = None
    real: Measurement | None = None

    @property
    def measured(self) -> Measurement | None:
        """The measurement that decides, None where nothing was measured."""
        return self.real or self.twin

    @property
    def figure(self) -> str:
        """Path of the figure or table that shows the deciding measurement, or empty."""
        return self.measured.figure if self.measured else ""

    @property
    def note(self) -> str:
        """The notebook's note on the deciding measurement, or empty."""
        return self.measured.note if self.measured else ""


# What a line is scanned for comes first, the long texts last.
_COLUMNS = (
    Column("claim", of="claim.id"),
    Column("verdict", of="status"),
    Column("published", of="claim.published"),
    Column("accepted", of="claim.accepted"),
    Column("twin", of="twin.value"),
    Column("real", of="real.value"),
    Column("unit", of="claim.unit"),
    Column("what", of="claim.claim"),
    Column("shown in, or why not", of=lambda row: row.why or row.figure),
)


@dataclass(frozen=True, slots=True)
class Verdicts(Rows[Verdict]):
    """One verdict per row of the ledger, in the ledger's order.

    Examples
    --------
    >>> from pathlib import Path
    >>> nothing = verdicts(Path("no results yet"))
    >>> nothing.of("thunderserve").counts["reproduced"], nothing[0].why
    (0, 'not yet measured')
    """

    def of(self, paper: str) -> Verdicts:
        """Verdicts on one paper.

        Raises
        ------
        DataError
            If the ledger has no such paper.
        """
        if paper not in PAPERS:
            raise DataError(
                f"The ledger has no paper '{paper}'.",
                path=paths.data("published", "claims.csv"),
                resolve=f"use one of: {', '.join(PAPERS)}.",
            )
        return Verdicts(tuple(row for row in self.rows if row.claim.paper == paper))

    @property
    def counts(self) -> dict[Status, int]:
        """Number of verdicts of each status."""
        return {status: sum(row.status == status for row in self.rows) for status in STATUSES}

    @property
    def summary(self) -> str:
        """The counts as one line."""
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        return f"{len(self)} published values: {counts}."

    def table(self) -> Table:
        """Published, accepted and measured value of every claim, and the verdict."""
        return Table.of("Published claims", _COLUMNS, self.rows, self.summary)

    def records(self) -> list[dict[str, object]]:
        """The same as plain values, for JSON."""
        of_claim = ("id", "paper", "where", "claim", "metric", "unit", "published", "accepted")
        measured = ("value", "judgement", "interval", "note", "figure", "notebook", "profile")
        return [
            {
                **picked(row.claim, *of_claim, "direction", "reading"),
                **picked(row, "status", "why"),
                "twin": picked(row.twin, *measured) or None,
                "real": picked(row.real, *measured) or None,
                **picked(row, "figure", "note"),
            }
            for row in self.rows
        ]


def verdicts(results_folder: Path | None = None) -> Verdicts:
    """Join the ledger with what the notebooks measured.

    Parameters
    ----------
    results_folder
        Folder that the pipeline writes to; by default the one of this checkout. Of several
        profiles of one notebook the fullest counts.

    Raises
    ------
    DataError
        If a notebook recorded a claim that the ledger does not have, a value that its check
        cannot judge, or a figure that it did not save; or if two notebooks recorded one claim.
    """
    folder = results_folder if results_folder is not None else paths.results()
    claims = {claim.id: claim for claim in ledger()}
    found: dict[tuple[str, str], Measurement] = {}
    # Fuller profiles come later and replace the others.
    for manifest in sorted(manifests(folder), key=lambda one: PROFILES.index(one.profile)):
        for recorded in manifest.claims:
            if recorded.id not in claims:
                raise DataError(
                    f"Notebook {manifest.notebook} measured '{recorded.id}', which is no row "
                    "of the ledger.",
                    path=manifest.path,
                    resolve=f"record {near(recorded.id, claims)}, or add the row to claims.csv.",
                )
            measurement = _measurement(claims[recorded.id], recorded, manifest, folder)
            key = recorded.id, manifest.source
            if key in found:
                _must_replace(measurement, found[key], manifest, recorded.id)
            found[key] = measurement
    return Verdicts(
        tuple(
            _verdict(claim, found.get((claim.id, "twin")), found.get((claim.id, "real")))
            for claim in claims.values()
        )
    )


def _verdict(claim: Claim, twin: Measurement | None, real: Measurement | None) -> Verdict:
    if claim.requires in QUOTED:
        return Verdict(claim, "not attempted", f"needs {claim.requires}", twin, real)
    if real is None and claim.requires:
        return Verdict(claim, "not attempted", f"needs the {claim.requires}", twin, real)
    decides = real or twin
    if decides is None or decides.judgement is None:
        return Verdict(claim, "not attempted", "not yet measured")
    return Verdict(claim, decides.judgement, "", twin, real)


def _measurement(claim: Claim, recorded: Recorded, manifest: Manifest, folder: Path) -> Measurement:
    saved = {Path(item.file).stem: item.file for item in (*manifest.tables, *manifest.figures)}
    if recorded.figure not in saved:
        raise DataError(
            f"Notebook {manifest.notebook} shows claim '{recorded.id}' in '{recorded.figure}', "
            "which it did not save.",
            path=manifest.path,
            resolve=f"name {near(recorded.figure, saved)}.",
        )
    try:
        judgement = None if claim.requires in QUOTED else claim.judge(recorded.value)
    except HeteroError as error:
        raise DataError(error.what, path=manifest.path, resolve=error.resolve) from error
    return Measurement(
        value=recorded.value,
        judgement=judgement,
        interval=recorded.interval,
        note=recorded.note,
        figure=manifest.file(folder, saved[recorded.figure]),
        notebook=manifest.notebook,
        source=manifest.source,
        profile=manifest.profile,
    )


def _must_replace(new: Measurement, old: Measurement, manifest: Manifest, claim: str) -> None:
    if (new.notebook, new.profile) == (old.notebook, old.profile):
        where = f"two {new.profile} runs of notebook {new.notebook}"
    elif new.notebook != old.notebook:
        where = f"notebooks {old.notebook} and {new.notebook}"
    else:
        return
    raise DataError(
        f"Claim '{claim}' was measured by {where} on the {new.source} trace.",
        path=manifest.path,
        resolve="record it in one of them, and remove results that no stage leaves any more.",
    )
