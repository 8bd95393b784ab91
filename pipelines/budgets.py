"""How big the house is: lines of its parts, each under a ceiling that only falls.

``make check`` prints the table. Ceilings stand in pyproject.toml under ``tool.budgets``; a commit
that raises one names the feature and the lines it takes. Splitting a file lowers none of them.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hetero import paths
from hetero.display import Column, Table
from pipelines import source


def lines() -> dict[str, int]:
    """Lines by part: whole files, and of notebooks the code cells.

    ``core`` is ``hetero`` without ``hetero/apps``; ``longest cell`` is of the notebooks.
    """
    found = {
        "core": _lines("hetero") - _lines("hetero/apps"),
        "apps": _lines("hetero/apps"),
        "studies and bench": _lines("pipelines/studies") + _lines("pipelines/bench"),
    }
    found |= {
        folder.relative_to(paths.root()).as_posix(): _lines(folder)
        for above in ("hetero", "hetero/apps", "hetero/planners", "pipelines")
        for folder in sorted((paths.root() / above).iterdir())
        if (folder / "__init__.py").is_file()
    }
    cells = [
        len(source.text(cell).strip().splitlines())
        for notebook in sorted((paths.root() / "notebooks").glob("*.ipynb"))
        for cell in source.cells(notebook)
        if cell.get("cell_type") == "code"
    ]
    return found | {"notebooks": sum(cells), "longest cell": max(cells)}


def defined_again() -> list[str]:
    """Names of classes that more than one module of the library defines."""
    found = Counter(
        node.name
        for path in (paths.root() / "hetero").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in found.items() if count > 1)


def table(found: Mapping[str, int], ceilings: Mapping[str, int]) -> Table:
    """Parts with their lines and ceilings."""
    rows = tuple((part, count, ceilings.get(part, "none")) for part, count in found.items())
    columns = (Column("part"), Column("lines"), Column("ceiling"))
    return Table("Budgets", columns, rows)


def faults(
    found: Mapping[str, int], ceilings: Mapping[str, int], again: list[str], allowed: list[str]
) -> list[str]:
    """What is above its ceiling, without one, or far enough below that the ceiling must fall."""
    said = []
    for part, count in found.items():
        if part not in ceilings:
            said.append(f"{part} has {count} lines and no ceiling")
        elif count > ceilings[part]:
            said.append(f"{part} has {count} lines, {count - ceilings[part]} above its ceiling")
    said += [f"{part} has a ceiling and does not exist" for part in ceilings if part not in found]
    said += [f"class {name} is defined again" for name in again if name not in allowed]
    said += [f"class {name} is defined once now" for name in allowed if name not in again]
    return said


def main() -> int:
    """Print the table; 1 if something is above its ceiling."""
    told = tomllib.loads((paths.root() / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    ceilings, allowed = told["budgets"]["lines"], told["budgets"]["classes_defined_again"]
    found, again = lines(), defined_again()
    print(table(found, ceilings))
    print(f"Classes defined more than once: {len(again)}.")
    said = faults(found, ceilings, again, allowed)
    for one in said:
        print(f"Error: {one}.", file=sys.stderr)
    if said:
        print("Resolve: make it smaller, or change [tool.budgets] and say why.", file=sys.stderr)
    return int(bool(said))


def _lines(folder: str | Path) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in (paths.root() / folder).rglob("*.py")
        if "build" not in path.relative_to(paths.root()).parts
    )


if __name__ == "__main__":
    sys.exit(main())
