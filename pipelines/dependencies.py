"""Which modules the stages of dvc.yaml depend on: those that their notebooks import.

``python -m pipelines.dependencies`` writes them into dvc.yaml anew; everything else there is
written by hand. A folder stands for its modules where all of them are imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

import hetero
from hetero import paths
from hetero.errors import HeteroError
from hetero.files import writing
from pipelines import source
from pipelines.sections import SECTIONS

_RUNNER = ("hetero/notebook_engine.py", "pipelines/environment.py", "pipelines/run.py")
"""What runs every notebook, whatever it imports."""
# What only finds files or parameters does not change what the report shows.
_PLUMBING = {
    *("hetero/__init__.py", "hetero/errors.py", "hetero/paths.py", "hetero/plots/__init__.py"),
    *("hetero/plots/figures.py", "pipelines/__init__.py", "pipelines/schema.py"),
    "pipelines/sections.py",
}
_BLOCK = r"^  {}:\n(?:(?:    .*)?\n)+"
_ENTRY = re.compile(r"^( +- )((?:hetero|pipelines)/[\w/]+(?:\.py)?)\n", re.MULTILINE)


@cache
def graph() -> grimp.ImportGraph:
    """Imports of the library and the pipeline, those inside functions too."""
    return grimp.build_graph("hetero", "pipelines", exclude_type_checking_imports=True)


def imported(code: str) -> Iterator[str]:
    """Modules of this project that a piece of code imports, in any of the ways Python has."""
    modules = graph().modules
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            yield node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules:
                    yield name
                elif node.module == "hetero" and alias.name in hetero.LAZY:
                    yield hetero.LAZY[alias.name]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hetero":
            name = hetero.LAZY.get(node.attr, f"hetero.{node.attr}")
            yield from [name] if name in modules else []


def closure(code: str) -> set[str]:
    """Files that importing them executes: the modules, what they import, and their packages."""
    found = set(imported(code))
    while True:
        more = set(found)
        for module in found:
            more |= graph().find_upstream_modules(module)
            parts = module.split(".")
            more |= {".".join(parts[:k]) for k in range(1, len(parts))}
        if more == found:
            return {_file(module) for module in found}
        found = more


def files(stage: str) -> set[str]:
    """Python files that a stage depends on."""
    if stage == "report":
        text = (paths.root() / "pipelines" / "report.py").read_text(encoding="utf-8")
        return closure(text) - _PLUMBING | {"pipelines/report.py"}
    path = source.notebook_path(source.notebook_of(stage))
    # Magics are not Python; the lines stay, so that errors name the right one.
    return closure(re.sub(r"^[%!]", "#", source.code(path), flags=re.MULTILINE)) | set(_RUNNER)


def lines(wanted: Iterable[str]) -> list[str]:
    """The same as entries of a stage: a folder where all modules below it are wanted."""
    left, found = set(wanted), []
    folders = {parent.as_posix() for one in left for parent in Path(one).parents} - {"."}
    for folder in sorted(folders):  # the outer before the inner
        if len(below := _below(folder)) > 1 and below <= left:
            found.append(folder)
            left -= below
    return sorted([*found, *left])


@cache
def _below(folder: str) -> set[str]:
    root = paths.root()
    return {one.relative_to(root).as_posix() for one in (root / folder).rglob("*.py")}


def _file(module: str) -> str:
    path = Path(*module.split("."))
    package = paths.root() / path / "__init__.py"
    return (path / "__init__.py" if package.is_file() else path.with_suffix(".py")).as_posix()


def written(text: str) -> str:
    """dvc.yaml with the modules of every stage as they are imported now."""
    for stage in (*SECTIONS, "report"):
        block = re.search(_BLOCK.format(stage), text, flags=re.MULTILINE)
        if block is None:
            raise HeteroError(
                f"dvc.yaml has no stage {stage}.", resolve="add one, as the other stages are."
            )
        wanted = lines(files(stage))

        def entry(match: re.Match[str], wanted: list[str] = wanted) -> str:
            if not _of_modules(match[2]):
                return match[0]
            every = "".join(f"{match[1]}{one}\n" for one in wanted)
            wanted.clear()  # all of them stand where the first one stood
            return every

        text = text[: block.start()] + _ENTRY.sub(entry, block[0]) + text[block.end() :]
    return text


def _of_modules(entry: str) -> bool:
    """Whether an entry names modules, or named some: it is a module or a folder that has any."""
    path = paths.root() / entry
    return entry.endswith(".py") or not path.exists() or any(path.rglob("*.py"))


def main() -> int:
    """Write dvc.yaml anew; 0 where it changed nothing."""
    path = paths.root() / "dvc.yaml"
    old = path.read_text(encoding="utf-8")
    new = written(old)
    if new != old:
        with writing(path, force=True) as part:
            part.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
