"""Rerun from nothing, and see whether every committed result comes out again.

The last commit is cloned into a temporary folder without its results, the pipeline runs there, and
each file is compared with the committed one: byte for byte, then number by number.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import HeteroError, ParameterError
from pipelines import guard, schema
from pipelines.studies.results import MANIFEST

TOLERANCE = 1e-6
"""Relative difference up to which a number is called close. Close is not reproduced: stages run on
the same kernels whatever the processor (`pipelines.environment`). A stage whose path depends on it
nevertheless, by Ax, says in its manifest how far its tables may go: of their largest number."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Compared:
    """One stage: its files by how they compare.

    Attributes
    ----------
    identical, close, changed
        Numbers of files with the same bytes, with all numbers within the tolerance, and others;
        a file that only one side has is changed.
    largest
        Largest relative difference of a number [1]; infinite where the text around the numbers
        differs.
    worst
        File with that difference.
    allowed
        Tolerance that the committed manifest states; 0 without one.
    """

    stage: str
    identical: int
    close: int
    changed: int
    largest: float
    worst: str
    allowed: float = 0.0


@dataclass(frozen=True, slots=True)
class Verified(Shown):
    """What a rerun of the committed pipeline gave."""

    commit: str
    source: str
    stages: tuple[Compared, ...]

    @property
    def reproduced(self) -> bool:
        """Whether every file came out again, byte for byte or as its manifest allows."""
        apart = (one.changed or (one.close and not one.allowed) for one in self.stages)
        return bool(self.stages) and not any(apart)

    def table(self) -> Table:
        """One row per stage."""
        columns = (
            Column("stage"),
            Column("same bytes", "files"),
            Column(f"within {TOLERANCE:g}", "files"),
            Column("changed", "files"),
            Column("largest difference", "relative", 3),
            Column("where"),
        )
        rows = tuple(
            (
                *(one.stage, one.identical, one.close, one.changed),
                one.largest if math.isfinite(one.largest) else "text",
                one.worst,
            )
            for one in self.stages
        )
        says = "not every result came out"
        if self.reproduced:
            says = "every result came out again"
        elif not any(one.changed for one in self.stages):
            says = (
                f"every number came out again within {TOLERANCE:g}, but not every byte: "
                "another version of the system's mathematical library, or no x86-64 machine"
            )
        notes = (f"commit {self.commit}, {self.source} traces: {says}",)
        return Table("Rerun from nothing against the committed results", columns, rows, notes)


def verify(*, traces: str | None = None, keep: Path | None = None) -> Verified:
    """Rerun the last commit from nothing and compare its results.

    Parameters
    ----------
    traces
        ``twin`` or ``real``; by default what params.yaml says.
    keep
        Folder to leave the new clone in; by default it is removed.

    Raises
    ------
    HeteroError
        If the pipeline fails in the clone.
    """
    root = paths.root()
    commit = _git(root, "rev-parse", "--short", "HEAD")
    source = schema.load(source=traces).source
    if keep is not None and keep.exists():
        raise ParameterError(f"{keep} exists already.", resolve="name a new folder.")
    with tempfile.TemporaryDirectory(prefix="hetero-verify-") as folder:
        clone = keep if keep is not None else Path(folder) / "hetero"
        _git(root, "clone", "--quiet", "--no-hardlinks", str(root), str(clone))
        before = Path(folder) / "before"
        committed = clone / "results"
        if not (committed / source).is_dir():
            raise ParameterError(
                f"The last commit holds no results of the {source} traces.",
                resolve="run `hetero repro` and commit results/ and dvc.lock first.",
            )
        shutil.move(committed, before)
        for kept in (schema.PAPER, "sweeps"):  # what runs long, and no stage repeats
            if (before / kept).is_dir():
                shutil.copytree(before / kept, committed / kept)
        (clone / "dvc.lock").unlink(missing_ok=True)
        _repro(clone, source)
        return Verified(commit, source, compare(before / source, clone / "results" / source))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ParameterError(
            f"git {arguments[0]} failed: {done.stderr.strip() or 'no reason given'}.",
            resolve="run this inside a git checkout of hetero.",
        )
    return done.stdout.strip()


def _repro(clone: Path, source: str) -> None:
    command = [sys.executable, "-m", "pipelines.repro", "--source", source]
    with guard.ended_with_block(patience_s=2.0):
        environment = os.environ | {"PYTHONPATH": str(clone)}
        done = subprocess.run(command, cwd=clone, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise HeteroError(
            "The pipeline did not run to its end in a fresh clone.",
            resolve="mend what is said above; the committed results were not touched.",
        )


def compare(before: Path, after: Path) -> tuple[Compared, ...]:
    """Compare two folders of results, stage by stage."""
    stages = sorted({p.name for folder in (before, after) for p in folder.glob("*") if p.is_dir()})
    return tuple(_stage(name, before / name, after / name) for name in stages)


def _stage(name: str, before: Path, after: Path) -> Compared:
    files = sorted(
        {
            str(path.relative_to(folder))
            for folder in (before, after)
            for path in folder.rglob("*")
            if path.is_file()
        }
    )
    counts = {"identical": 0, "close": 0, "changed": 0}
    manifest = before / MANIFEST
    told = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    allowed = float(told.get("tolerance", 0.0))
    largest, worst = 0.0, ""
    for file in files:
        old, new = before / file, after / file
        there = old.is_file() and new.is_file()
        if there and old.read_bytes() == new.read_bytes():
            counts["identical"] += 1
            continue
        apart = difference(old, new, of_largest=bool(allowed)) if there else math.inf
        counts["close" if apart <= (allowed or TOLERANCE) else "changed"] += 1
        if apart >= largest:
            largest, worst = apart, file
    return Compared(name, **counts, largest=largest, worst=worst, allowed=allowed)


def difference(old: Path, new: Path, *, of_largest: bool = False) -> float:
    """Largest relative difference of the numbers of two text files; infinite where text differs.

    With ``of_largest`` it is a share of a table's largest number, and what is drawn from tables, or
    told of them, differs by nothing.
    """
    if of_largest and old.suffix != ".csv":
        return 0.0
    if old.suffix not in (".csv", ".json", ".svg", ".ipynb"):
        return math.inf
    a, b = _plain(old), _plain(new)
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return math.inf
    x, y = ([float(one) for one in _NUMBER.findall(text)] for text in (a, b))
    least = max(map(abs, x + y), default=0.0) if of_largest else 0.0
    pairs = ((one, two) for one, two in zip(x, y, strict=True) if one != two)
    apart = (abs(one - two) / max(abs(one), abs(two), least) for one, two in pairs)
    return max(apart, default=0.0)


def _plain(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return text
    # The digest of the code is no result; all else of a manifest is.
    values = json.loads(text)
    if isinstance(values, dict):
        values.pop("code_sha256", None)
    return json.dumps(values, sort_keys=True)
