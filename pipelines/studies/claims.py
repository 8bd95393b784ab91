"""Verdicts: what the results say on every row of the ledger of published claims."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from hetero import paths
from hetero.display import Column, Table
from hetero.errors import DataError, HeteroError
from pipelines.studies.ledger import NO_TEST, QUOTED, Claim, Judgement, ledger
from pipelines.studies.published import (
    PAPERS,
    PROFILES,
    Manifest,
    Recorded,
    Rows,
    manifests,
    near,
    picked,
    rows,
)

Status = Judgement | Literal["not attempted", "not a test"]
#: A row that is no test is counted apart, so it comes last.
STATUSES: tuple[Status, ...] = (
    *("reproduced", "direction only", "undecided", "not reproduced"),
    *("not attempted", "not a test"),
)
AUDIT = ("claim", "class", "before", "why", "test", "at", "rests", "state")
#: Notebooks whose real files have no public address, with their data set.
NO_ADDRESS = {
    **dict.fromkeys(("03_tensor_parallel_search", "04_request_scheduling"), "helix_lengths"),
    **dict.fromkeys(("08_layer_placement", "09_helix_serving"), "helix_layer_latency"),
}
#: What the audit found: seven kinds of unearned verdicts, four causes of failures.
FINDINGS = {
    "V1": "quoted, or arithmetic on the paper's own numbers",
    "V2": "true by construction",
    "V3": "circular",
    "V4": "a bound that cannot fail in practice",
    "V5": "statistically void",
    "V6": "judged by the reading or metric under which it reproduces",
    "a": "the paper contradicts itself",
    "b": "a setting is not published",
    "c": "our implementation departs from the text",
    "d": "our calibration",
}


@dataclass(frozen=True, slots=True)
class Audited:
    """What an audit of every verdict found on one row.

    Attributes
    ----------
    finding
        Key of ``FINDINGS``.
    before
        The verdict that was audited.
    why
        Empty where no cause is known.
    test
        For an unearned verdict, the new test that alone can earn it; empty where none can.
    at
        Commit at which this was found.
    rests
        Files that it names, such as the planner or the calibration.
    state
        :func:`state_of` at that commit: a reason whose reading or files have changed since is void.
    """

    finding: str
    before: Status
    why: str
    test: str
    at: str
    rests: tuple[str, ...]
    state: str

    def cause(self, claim: Claim) -> str:
        """Why the value fails, with the commit; empty for an unearned verdict or a void reason."""
        void = self.finding.startswith("V") or state_of(claim, self.rests) != self.state
        return "" if void or not self.why else f"{self.why} ({self.at})"


def state_of(claim: Claim, rests: tuple[str, ...]) -> str:
    """Hash of how a claim is read and judged, and of files."""
    told = [claim.reading, claim.basis, claim.setting, claim.accepted, claim.direction]
    told += [(paths.root() / name).read_text(encoding="utf-8") for name in rests]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]


@cache
def audit() -> dict[str, Audited]:
    """Rows that the audit names, by the id of their claim.

    Source: ``data/published/claims_audit.csv``.

    Raises
    ------
    DataError
        If a row is malformed.

    Examples
    --------
    >>> audit()["xiong-8a"].before, audit()["xiong-8a"].finding
    ('reproduced', 'V4')
    """
    found = {}
    for row in rows(paths.data("published", "claims_audit.csv"), AUDIT):
        before = cast("Status", row.one_of("before", STATUSES))
        claim = row.one_of("claim", (one.id for one in ledger()))
        finding, rests = row.one_of("class", FINDINGS), tuple(row["rests"].split())
        if not re.fullmatch("[0-9a-f]{8}", row.required("at")):
            raise row.error("This is no commit.", "at", resolve="write its first eight digits.")
        if gone := [name for name in rests if not (paths.root() / name).is_file()]:
            raise row.error(f"There is no {gone[0]}.", "rests", resolve="name what it rests on.")
        found[claim] = Audited(
            finding, before, row["why"], row["test"], row["at"], rests, row["state"]
        )
    return found


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a notebook measured for a claim.

    Attributes
    ----------
    value
        Number in the claim's unit, or an order.
    judgement
        What this value and its draws say, None for a claim that is quoted or no test.
    doubt
        Why the draws do not decide, where they do not.
    interval
        Low and high end over seeds, where there are several.
    draws, iterations
        How many are behind the value; None where nothing is drawn or iterated.
    figure
        Path of the figure or table that shows it, below the results folder.
    """

    value: float | str
    judgement: Judgement | None
    doubt: str
    draws: int | None
    iterations: int | None
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
        Reason where the claim is undecided, not attempted or no test; else what the audit found on
        a value that is not reproduced.
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

    @property
    def files(self) -> str:
        """Where a reader finds what the deciding value was measured on."""
        if self.real is None or (self.twin and self.twin.value == self.real.value):
            return "here" if self.measured else ""
        name = NO_ADDRESS.get(self.real.notebook, "")
        return f"{name}, which has no public address" if name else "public"

    @property
    def audited(self) -> Audited | None:
        """What the audit found on this row, None where it stands as it was."""
        return audit().get(self.claim.id)


# What a line is scanned for comes first, the long texts last.
_COLUMNS = (
    Column("claim", of="claim.id"),
    Column("verdict", of="status"),
    Column("published", of="claim.published"),
    Column("accepted", of="claim.accepted"),
    Column("twin", of="twin.value"),
    Column("real", of="real.value"),
    Column("unit", of="claim.unit"),
    Column("files", of="files"),
    Column("draws", of="measured.draws"),
    Column("iterations", of="measured.iterations"),
    Column("what", of="claim.claim"),
    Column("shown in, or why not", of=lambda row: row.why or row.figure),
)
_AUDITED = (
    Column("claim", of="claim.id"),
    Column("class", of="audited.finding"),
    Column("before", of="audited.before"),
    Column("now", of="status"),
    Column("found at", of="audited.at"),
    Column("why", of=lambda row: row.audited.why or "no cause is known"),
    Column("new test", of="audited.test"),
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
                path=paths.data("published", "claims"),
                resolve=f"use one of: {', '.join(PAPERS)}.",
            )
        return Verdicts(tuple(row for row in self.rows if row.claim.paper == paper))

    @property
    def counts(self) -> dict[Status, int]:
        """Number of verdicts of each status."""
        return {status: sum(row.status == status for row in self.rows) for status in STATUSES}

    @property
    def summary(self) -> str:
        """The counts as one line; what is no test stands apart, by its kind."""
        *tests, apart = (f"{number} {status}" for status, number in self.counts.items())
        no_test = (row.why for row in self.rows if row.status == STATUSES[-1])
        kinds = Counter(why.partition(":")[0] for why in no_test)
        told = ", ".join(f"{kinds[kind]} {kind}" for kind in NO_TEST if kinds[kind]) or "none"
        hidden = [r for r in self.rows if r.status == "reproduced" and "no public" in r.files]
        same = sum(row.twin is not None and row.twin.judgement == row.status for row in hidden)
        more = f" {len(hidden)} of the reproduced rest on files without a public address; {same} of"
        more = f"{more} these are reproduced on the twin as well." * bool(hidden)
        return f"{len(self)} published values: {', '.join(tests)}; {apart} ({told}).{more}"

    def audit(self) -> Table:
        """Verdict before and now of every row that the audit names, and why."""
        named = [row for row in self.rows if row.audited]
        notes = (f"{key}: {text}." for key, text in FINDINGS.items())
        return Table.of("Audited claims", _AUDITED, named, *notes)

    def table(self) -> Table:
        """Published, accepted and measured value of every claim, and the verdict."""
        return Table.of("Published claims", _COLUMNS, self.rows, self.summary)

    def records(self) -> list[dict[str, object]]:
        """The same as plain values, for JSON."""
        of_claim = ("id", "paper", "where", "claim", "metric", "unit", "published", "accepted")
        measured = (
            *("value", "judgement", "doubt", "interval", "draws", "iterations"),
            *("note", "figure", "notebook", "profile"),
        )
        return [
            {
                **picked(row.claim, *of_claim, "direction", "reading", "basis", "not_a_test"),
                **picked(row, "status", "why"),
                "audit": picked(row.audited, "finding", "before", "why", "test", "at") or None,
                "twin": picked(row.twin, *measured) or None,
                "real": picked(row.real, *measured) or None,
                **picked(row, "files", "figure", "note"),
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
                    resolve=f"record {near(recorded.id, claims)}, or add the row to the ledger.",
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
    if claim.not_a_test:
        return Verdict(claim, "not a test", claim.not_a_test, twin, real)
    if real is None and claim.requires:
        return Verdict(claim, "not attempted", f"needs the {claim.requires}", twin, real)
    decides = real or twin
    if decides is None or decides.judgement is None:
        return Verdict(claim, "not attempted", "not yet measured")
    status, why = decides.judgement, decides.doubt
    if status == "reproduced" and claim.basis.startswith("numbers"):
        # A reading that was chosen after the outcome earns nothing; where it fails it still fails.
        return Verdict(claim, "not a test", "fitted: the outcome chose the reading", twin, real)
    worse = {*STATUSES[STATUSES.index(status) + 1 :]} - {"undecided"}
    if real and twin and not claim.requires and twin.judgement in worse:
        status, why = "undecided", why or "fails on the twin: it hangs on the draw of requests"
    if not why and status != "reproduced":
        why = (audit()[claim.id].cause(claim) if claim.id in audit() else "") or "no cause is known"
    return Verdict(claim, status, why, twin, real)


def _measurement(claim: Claim, recorded: Recorded, manifest: Manifest, folder: Path) -> Measurement:
    saved = {Path(item.file).stem: item.file for item in (*manifest.tables, *manifest.figures)}
    if recorded.figure not in saved:
        raise DataError(
            f"Notebook {manifest.notebook} shows claim '{recorded.id}' in '{recorded.figure}', "
            "which it did not save.",
            path=manifest.path,
            resolve=f"name {near(recorded.figure, saved)}.",
        )
    judgement, doubt, draws = None, "", manifest.draws(claim.draws)
    over = recorded.value, recorded.interval, draws
    try:
        if claim.requires not in QUOTED and not claim.not_a_test:
            judgement, doubt = claim.judge(*over), claim.doubt(*over)
    except HeteroError as error:
        raise DataError(error.what, path=manifest.path, resolve=error.resolve) from error
    return Measurement(
        value=recorded.value,
        judgement=judgement,
        doubt=doubt,
        draws=draws,
        iterations=manifest.parameters.get(claim.iterations),
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
