"""How big the code is: lines and statements of its parts, each under a ceiling that only falls.

``make check`` prints the table. Ceilings stand in pyproject.toml under ``tool.budgets``; a commit
that adds lines to a part says which leave it elsewhere. Splitting a file lowers none of them, nor
do longer lines.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping

from hetero import paths
from hetero.display import Column, Table
from pipelines import source

PARTS = ("hetero", "pipelines", "tests")
_WIDEST = 100  # of a line: ceilings are those of lines so wide


def sizes() -> dict[str, int]:
    """Lines and statements of the parts, lines of templates and of the code cells of notebooks."""
    found = {}
    for part in PARTS:
        texts = [
            path.read_text(encoding="utf-8")
            for path in sorted((paths.root() / part).rglob("*.py"))
            if "build" not in path.relative_to(paths.root()).parts
        ]
        found[f"{part}, lines"] = sum(len(text.splitlines()) for text in texts)
        found[f"{part}, statements"] = sum(
            isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text))
        )
    templates = (paths.root() / "pipelines" / "templates").iterdir()
    cells = [
        len(source.text(cell).strip().splitlines())
        for notebook in sorted((paths.root() / "notebooks").glob("*.ipynb"))
        for cell in source.cells(notebook)
        if cell.get("cell_type") == "code"
    ]
    return found | {
        "templates, lines": sum(len(path.read_text("utf-8").splitlines()) for path in templates),
        "notebooks, lines": sum(cells),
        "longest cell": max(cells),
    }


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
    """Parts with their sizes and ceilings."""
    rows = tuple((part, count, ceilings.get(part, "none")) for part, count in found.items())
    return Table("Budgets", (Column("part"), Column("size"), Column("ceiling")), rows)


def faults(
    found: Mapping[str, int], ceilings: Mapping[str, int], again: list[str], allowed: list[str]
) -> list[str]:
    """What is above its ceiling or without one, and classes whose number of definitions differs."""
    said = []
    for part, count in found.items():
        if part not in ceilings:
            said.append(f"{part}: {count:,}, and no ceiling")
        elif count > ceilings[part]:
            said.append(f"{part}: {count:,}, {count - ceilings[part]:,} above the ceiling")
    said += [f"{part} has a ceiling and does not exist" for part in ceilings if part not in found]
    said += [f"class {name} is defined again" for name in again if name not in allowed]
    said += [f"class {name} is defined once now" for name in allowed if name not in again]
    return said


def main() -> int:
    """Print the table; 1 if something is above its ceiling."""
    told = tomllib.loads((paths.root() / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    ceilings, allowed = told["budgets"]["sizes"], told["budgets"]["classes_defined_again"]
    found, again = sizes(), defined_again()
    print(table(found, ceilings))
    print(f"Classes defined more than once: {len(again)}.")
    said = faults(found, ceilings, again, allowed)
    if told["ruff"]["line-length"] != _WIDEST:
        said.append(f"lines are not {_WIDEST} wide")
    for one in said:
        print(f"Error: {one}.", file=sys.stderr)
    if said:
        print("Resolve: make it smaller, or change [tool.budgets] and say why.", file=sys.stderr)
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
