"""What is fresh, what is stale and why: ``hetero status``, or ``status()`` in a notebook."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from hetero import paths
from hetero.display import Column, Shown, Table
from hetero.errors import HeteroError
from pipelines import schema, sections, source


@dataclass(frozen=True, slots=True)
class StageState:
    """State of one stage: ``fresh``, ``stale`` or ``missing``, and the reasons in words."""

    name: str
    state: str
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Status(Shown):
    """State of every stage for the traces and the profile that params.yaml asks for."""

    source: str
    profile: str
    stages: tuple[StageState, ...]

    @property
    def fresh(self) -> bool:
        """Whether there is nothing to run."""
        return all(stage.state == "fresh" for stage in self.stages)

    def table(self) -> Table:
        """One row per stage: state, why, and the command that mends it."""
        columns = (Column("stage"), Column("state"), Column("why"), Column("to run"))
        rows = []
        for stage in self.stages:
            command = "" if stage.state == "fresh" else "hetero repro"
            first, *rest = stage.why or ("",)
            rows.append((stage.name, stage.state, first, command))
            rows += [("", "", reason, "") for reason in rest]
        return Table(f"{self.source} traces, {self.profile} profile", columns, tuple(rows))


def status() -> Status:
    """Compare code, parameters, data and results with what dvc.lock recorded.

    Raises
    ------
    HeteroError
        If the pipeline tools are not installed, or this is not a checkout.
    """
    params = schema.load()
    root = paths.root()
    changed = _dvc_status(root)
    lock = _yaml(root / "dvc.lock").get("stages", {})
    stages = []
    for name in sections.SECTIONS:
        key = f"{name}@{params.source}"
        entry = lock.get(key)
        if entry is None:
            stages.append(StageState(name, "missing", ("it has never run",)))
            continue
        reasons = [*_code(name, entry), *_reasons(changed.get(key, []), entry, root)]
        stages.append(StageState(name, "stale" if reasons else "fresh", tuple(reasons)))
    stages.append(_report(stages, lock.get("report"), changed.get("report", []), root))
    return Status(params.source, params.profile, tuple(stages))


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
    if not path.is_file():
        return {}
    return dict(YAML(typ="safe", pure=True).load(path) or {})


def _code(stage: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Compare the notebook itself with the lock: the fingerprint on disk may be an older one."""
    notebook = source.notebook_of(stage)
    file = source.fingerprint_path(notebook).relative_to(paths.root()).as_posix()
    recorded = {dep["path"]: dep.get("md5") for dep in entry.get("deps", [])}
    text = f"{source.fingerprint(source.notebook_path(notebook))}\n".encode()
    if recorded.get(file) != hashlib.md5(text, usedforsecurity=False).hexdigest():
        yield f"the code of notebooks/{notebook}.ipynb changed"


def _reasons(changes: list[Any], entry: Mapping[str, Any], root: Path) -> Iterator[str]:
    for change in changes:
        if isinstance(change, str):
            yield "its command in dvc.yaml changed"
            continue
        for path, how in change.get("changed deps", {}).items():
            if path == "params.yaml":
                yield from _parameters(entry, root)
            elif not path.startswith("pipelines/fingerprints/"):
                yield f"{path} {_WORDS.get(how, how)}"
        for path, how in change.get("changed outs", {}).items():
            yield f"{path} {_WORDS.get(how, how)}"


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


def main() -> None:
    """Print the state of every stage, without the installed ``hetero``."""
    try:
        print(status())
    except HeteroError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
