"""What is fresh, what is stale and why: ``hetero status``, or ``status()`` in a notebook."""

from __future__ import annotations

import hashlib
import logging
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import HeteroError
from pipelines import dependencies, schema, sections
from pipelines.sweep import spec


@dataclass(frozen=True, slots=True)
class StageState:
    """State of one stage: ``fresh``, ``stale`` or ``missing``, and the reasons in words.

    ``to_run`` is the command of what the pipeline itself leaves as it is, such as a sweep.
    """

    name: str
    state: str
    why: tuple[str, ...] = ()
    to_run: str = ""


@dataclass(frozen=True, slots=True)
class Status(Shown):
    """State of every stage for the traces and the profile that params.yaml asks for."""

    source: str
    profile: str
    stages: tuple[StageState, ...]

    def table(self) -> Table:
        """One row per stage: state, why, and the command that mends it."""
        columns = (Column("stage"), Column("state"), Column("why"), Column("to run"))
        rows = []
        for stage in self.stages:
            command = "" if stage.state == "fresh" else stage.to_run or "hetero repro"
            first, *rest = stage.why or ("",)
            rows.append((stage.name, stage.state, first, command))
            rows += [("", "", reason, "") for reason in rest]
        return Table(f"{self.source} traces, {self.profile} profile", columns, tuple(rows))


def status() -> Status:
    """Compare code, parameters, data and results with what dvc.lock recorded.

    Lists of modules that are not true any more are written first.

    Raises
    ------
    HeteroError
        If the pipeline tools are not installed, or this is not a checkout.
    """
    params, root = schema.load(), paths.root()
    dependencies.write()
    changed = _dvc_status(root)
    lock = _yaml(root / "dvc.lock").get("stages", {})
    stages = []
    for name in sections.SECTIONS:
        key = f"{name}@{params.source}"
        entry = lock.get(key)
        if entry is None:
            stages.append(StageState(name, "missing", ("it has never run",)))
            continue
        reasons = list(_reasons(changed.get(key, []), entry, root, params.source))
        stages.append(StageState(name, "stale" if reasons else "fresh", tuple(reasons)))
    stages.append(_report(stages, lock.get("report"), changed.get("report", []), root))
    stages += _sweeps(root)
    return Status(params.source, params.profile, tuple(stages))


def _sweeps(root: Path) -> Iterator[StageState]:
    """The shipped sweeps that were run: minutes to an hour each, which only their user starts."""
    for file in sorted((root / "pipelines" / "sweeps").glob("*.yaml")):
        folder = root / "results" / "sweeps" / file.stem
        if (folder / "points.csv").is_file():
            stale = spec.stale(file, folder)
            why = ("its code, data or parameters changed",) if stale else ()
            to_run = f"hetero sweep {file.relative_to(root)}"
            yield StageState(f"sweep {file.stem}", "stale" if stale else "fresh", why, to_run)


def _dvc_status(root: Path) -> Mapping[str, list[Any]]:
    try:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo
    except ImportError as error:
        raise HeteroError(
            f"The pipeline needs packages that are not installed ({error.name}).",
            resolve="run `make setup`, or install hetero[pipeline].",
        ) from error
    logging.getLogger("dvc").setLevel(logging.ERROR)
    try:
        with Repo(str(root)) as repo:
            found: Mapping[str, list[Any]] = repo.status()
    except DvcException as error:
        raise HeteroError(
            f"DVC cannot read the pipeline: {error}.",
            resolve="mend dvc.yaml or dvc.lock, or restore them with git.",
        ) from error
    return found


def _yaml(path: Path) -> dict[str, Any]:
    return dict(YAML(typ="safe", pure=True).load(path) or {}) if path.is_file() else {}


def _reasons(
    changes: list[Any], entry: Mapping[str, Any], root: Path, place: str = ""
) -> Iterator[str]:
    for change in changes:
        if isinstance(change, str):
            yield "its command in dvc.yaml changed"
            continue
        for path, how in change.get("changed deps", {}).items():
            if path == "params.yaml":
                yield from _parameters(entry, root)
            elif path.startswith(dependencies.FOLDER):
                yield from _code(path, entry, root, place)
            else:
                yield f"{path} {_WORDS.get(how, how)}"
        for path, how in change.get("changed outs", {}).items():
            yield f"{path} {_WORDS.get(how, how)}"


def _code(file: str, entry: Mapping[str, Any], root: Path, place: str) -> Iterator[str]:
    """Modules that differ from the list as it was: kept by the run here, or committed with it."""
    (recorded,) = (dep.get("md5") for dep in entry["deps"] if dep["path"] == file)
    kept = root / "pipelines" / "build" / "ran" / place / Path(file).name
    for old in (kept.read_bytes() if kept.is_file() else b"", _committed(file, root)):
        if hashlib.md5(old, usedforsecurity=False).hexdigest() == recorded:
            changed = {*old.splitlines()} ^ {*(root / file).read_bytes().splitlines()}
            names = sorted({line.split()[0].decode() for line in changed})
            yield from (f"the code of {name} changed" for name in names[:_NAMED])
            if len(names) > _NAMED:
                yield f"and {len(names) - _NAMED} more: see `git diff {file}`"
            return
    yield f"its code changed: see `git diff {file}`"


def _committed(file: str, root: Path) -> bytes:
    """A file as it was when dvc.lock was last committed; empty where git does not say."""
    git = ["git", "-C", str(root)]
    try:
        log = subprocess.check_output(
            [*git, "log", "-1", "--format=%h", "--", "dvc.lock"], stderr=subprocess.DEVNULL
        )
        show = [*git, "show", f"{log.decode().strip()}:./{file}"]
        return subprocess.check_output(show, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return b""


_NAMED = 8  # modules of a stage, before the others are counted
_WORDS = {
    "modified": "changed",
    "deleted": "is missing",
    "new": "is new",
    "not in cache": "is not in the cache",
}


def _parameters(entry: Mapping[str, Any], root: Path) -> Iterator[str]:
    now = _flat(_yaml(root / "params.yaml"))
    recorded: Mapping[str, Any] = entry.get("params", {}).get("params.yaml", {})
    before = _flat(recorded)
    for name in sorted(before.keys() | now.keys()):
        if name.split(".")[0] in recorded and before.get(name) != now.get(name):
            yield f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _report(
    stages: list[StageState], entry: Mapping[str, Any] | None, changes: list[Any], root: Path
) -> StageState:
    if entry is None:
        return StageState("report", "missing", ("it has never run",))
    waits = [stage.name for stage in stages if stage.state != "fresh"]
    reasons = list(_reasons(changes, entry, root))
    if waits:
        reasons.insert(0, f"it shows the results of {', '.join(waits)}")
    return StageState("report", "stale" if reasons else "fresh", tuple(reasons))
