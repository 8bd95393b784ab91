"""What each stage runs: ``pipelines/fingerprints`` lists its notebook and the modules it imports.

Stages of dvc.yaml depend on their list, and a diff of it names what made them stale. Beside a
module stands a hash of its syntax tree, the same under every Python: comments, docstrings and
layout make nothing stale. ``python -m pipelines.dependencies`` writes the lists; ``dvc repro``,
``hetero status`` and the pre-commit hook do it first.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

import hetero
from hetero import paths
from hetero.errors import DataError, HeteroError
from hetero.files import writing
from pipelines import source
from pipelines.sections import SECTIONS

FOLDER = "pipelines/fingerprints"
_RUNNER = ("hetero/notebook_engine.py", "pipelines/environment.py", "pipelines/run.py")
"""What runs every notebook, whatever it imports."""
_REPORT = "pipelines/report.py"
# What only finds files or parameters does not change what the report shows.
_PLUMBING = {
    *("hetero/__init__.py", "hetero/errors.py", "hetero/paths.py", "hetero/plots/__init__.py"),
    *("hetero/plots/figures.py", "pipelines/__init__.py", "pipelines/schema.py"),
    *("pipelines/dependencies.py", "pipelines/sections.py"),
}
_IMPLIED = {"ctx", "kind", "type_comment", "type_ignores"}  # of a node, by its place or nothing


def file(stage: str) -> Path:
    """The list of a stage."""
    return paths.root() / FOLDER / ("report" if stage == "report" else source.notebook_of(stage))


def modules(stage: str) -> dict[str, str]:
    """Files with code that a stage runs, as they are now, and their hashes."""
    root = paths.root()
    if stage == "report":
        found = closure(root / _REPORT) | {_REPORT: _parsed(root / _REPORT)[0]}
        return {name: found[name] for name in sorted(found) if name not in _PLUMBING}
    path = source.notebook_path(source.notebook_of(stage))
    # Magics are not Python; the lines stay, so that errors name the right one.
    found = closure(path, re.sub(r"^[%!]", "#", source.code(path), flags=re.MULTILINE))
    # Results show the cells: what stands there counts as it is written.
    found[path.relative_to(root).as_posix()] = source.fingerprint(path)[:16]
    found |= {name: _parsed(root / name)[0] for name in _RUNNER}
    return dict(sorted(found.items()))


def data(stage: str) -> list[str]:
    """All else that dvc.yaml says a stage depends on."""
    entry = YAML(typ="safe", pure=True).load(paths.root() / "dvc.yaml")["stages"].get(stage, {})
    return [one for one in entry.get("do", entry).get("deps", []) if not one.startswith(FOLDER)]


def state(stage: str) -> dict[str, str]:
    """Everything that results of a stage come from but its parameters, and hashes."""
    return modules(stage) | {one: digest(paths.root() / one) for one in data(stage)}


def written(stage: str) -> str:
    """The list of a stage as it is to be."""
    return "".join(f"{name} {digest}\n" for name, digest in modules(stage).items())


def current(stage: str) -> bool:
    """Whether the list of a stage is true."""
    path = file(stage)
    return path.is_file() and path.read_bytes() == written(stage).encode()


def write() -> None:
    """Write the lists that are not true; the others stay as they are."""
    (paths.root() / FOLDER).mkdir(exist_ok=True)
    for stage in (*SECTIONS, "report"):
        if not current(stage):
            with writing(file(stage), force=True) as part:
                part.write_text(written(stage), encoding="utf-8", newline="\n")


def closure(path: Path, text: str | None = None) -> dict[str, str]:
    """Files that running code imports: modules, what these import, and their packages."""
    found, seen = dict[str, str](), {""}
    left = set(_parsed(path, text)[1])
    while left := left - seen:
        seen.add(name := left.pop())
        if module := _module(name):
            found[module], more = _parsed(paths.root() / module)
            left |= {*more, name.rpartition(".")[0]}
    return found


def _module(name: str) -> str | None:
    """File of a module of this project."""
    path = Path(*name.split("."))
    if path.parts[0] not in ("hetero", "pipelines"):
        return None
    # Asked of the folder: some disks would find `Cluster` as `cluster`.
    beside = _names(paths.root() / path.parent)
    if path.name in beside and "__init__.py" in _names(paths.root() / path):
        return (path / "__init__.py").as_posix()
    return f"{path.as_posix()}.py" if f"{path.name}.py" in beside else None


@cache
def _names(folder: Path) -> frozenset[str]:
    return frozenset(one.name for one in folder.iterdir()) if folder.is_dir() else frozenset()


def _parsed(path: Path, text: str | None = None) -> tuple[str, frozenset[str]]:
    try:
        return hash_and_imports(path.read_text(encoding="utf-8") if text is None else text)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise DataError(
            f"This is no Python ({getattr(error, 'msg', error)}).",
            path=path,
            line=getattr(error, "lineno", None),
            resolve="mend it, or restore it with git.",
        ) from None


@cache
def hash_and_imports(text: str) -> tuple[str, frozenset[str]]:
    """Hash of what runs, and names of what it imports, in any of the ways that Python has."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [one for one in body if not _idle(one)]
        elif isinstance(node, ast.JoinedStr):  # some releases of Python add empty ones
            node.values = [one for one in node.values if getattr(one, "value", None) != ""]
    names = frozenset(name for node in ast.walk(tree) for name in _imports(node))
    return hashlib.sha256(_told(tree).encode()).hexdigest()[:16], names


def _idle(node: ast.AST) -> bool:
    """Whether a statement does nothing: a docstring, or imports for types alone."""
    if isinstance(node, ast.If):
        return not node.orelse and getattr(node.test, "id", "") == "TYPE_CHECKING"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _told(node: object) -> str:
    """A syntax tree in words; ``ast.dump`` writes another text in every release of Python."""
    if isinstance(node, list):
        return f"[{' '.join(map(_told, node))}]"
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = ((name, getattr(node, name)) for name in node._fields if name not in _IMPLIED)
    told = (f" {name}={_told(one)}" for name, one in fields if one is not None and one != [])
    return f"({type(node).__name__}{''.join(told)})"


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield hetero.LAZY.get(alias.name, name) if node.module == "hetero" else name
    elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "hetero":
        yield hetero.LAZY.get(node.attr, f"hetero.{node.attr}")


def digest(path: Path) -> str:
    """Hash of a file, or of all files of a folder with their names."""
    digest = hashlib.sha256()
    for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if one.is_file() and "__pycache__" not in one.parts:
            digest.update(str(one.relative_to(path)).encode())
            digest.update(one.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        write()
    except HeteroError as error:
        sys.exit(f"Error: {error}")
