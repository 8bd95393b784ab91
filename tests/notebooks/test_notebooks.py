"""Every notebook: as it is committed, and Run All with the small defaults it carries."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from hetero import paths
from pipelines import dependencies, run, source
from pipelines.studies import claims, coverage, ledger

NOTEBOOKS = source.notebooks()
# Those that compare routers and planners: for two calls of studies at least one of the library.
COMPARING = {"03", "04", "05", "09", "10", "11"}

# Runs before everything else in a copy of the notebook, and notes each file that is opened.
WATCH = """\
import sys
_opened = set()
sys.addaudithook(lambda event, args: _opened.add(str(args[0])) if event == "open" else None)
"""

# Runs after everything else.
NOTE = """\
import json
from pathlib import Path
_modules = sorted(name for name in sys.modules if name.split(".")[0] == "hetero")
Path({target!r}).write_text(json.dumps({{"opened": sorted(_opened), "modules": _modules}}))
"""


def read(notebook: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(source.notebook_path(notebook).read_text())
    return content


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_committed_form(notebook: str) -> None:
    content = read(notebook)
    first, second, *rest = content["cells"]
    assert first["cell_type"] == "markdown"
    assert source.text(first).startswith("# ")
    assert "parameters" in source.tags(second)
    assert set(run.GIVEN) <= set(run.parameter_names(source.notebook_path(notebook)))
    for cell in (second, *rest):
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            assert cell["execution_count"] is None
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    # Without its language the kernel of another machine is not found.
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert content["metadata"]["kernelspec"]["language"] == "python"


@pytest.mark.parametrize("notebook", [x for x in NOTEBOOKS if x[:2] in COMPARING])
def test_what_is_compared_is_said_in_the_words_of_the_library(notebook: str) -> None:
    tree, homes = ast.parse(source.code(source.notebook_path(notebook))), dict[str, str]()

    def called(call: ast.Call) -> str:
        return homes.get(ast.unparse(call.func).split(".")[0], "").split(".")[0]

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            homes |= {one.asname or one.name: str(node.module) for one in node.names}
    del homes["ResultFolder"]  # what is kept is no comparison
    for node in ast.walk(tree):
        made = node.value if isinstance(node, ast.Assign) else None  # methods count by their class
        if isinstance(made, ast.Call) and ast.unparse(made.func).split(".")[-1][0].isupper():
            homes[ast.unparse(node.targets[0])] = called(made)
    calls = [called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert 2 * calls.count("hetero") >= calls.count("pipelines") > 0


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_run_all_with_its_small_defaults(notebook: str, tmp_path: Path) -> None:
    content = read(notebook)
    note = tmp_path / "note.json"
    extra = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    watch = {**extra, "id": "watch", "source": WATCH}
    noting = {**extra, "id": "note", "source": NOTE.format(target=str(note))}
    content["cells"] = [watch, *content["cells"], noting]
    copy = tmp_path / f"{notebook}.ipynb"
    copy.write_text(json.dumps(content))
    folder = tmp_path / "results" / "twin" / notebook
    executed = run.execute(
        copy, {"output": str(folder)}, failed=tmp_path / "failed" / f"{notebook}.ipynb"
    )

    # A traceback on stderr or a warning of our own would otherwise pass unseen.
    assert "Traceback" not in executed
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["profile"] == "interactive"
    for row in (*manifest["figures"], *manifest["tables"]):
        assert (folder / row["file"]).stat().st_size > 0
        assert row["caption"]
    # Raises if a claim, a figure or a value does not fit the ledger.
    measured = [row for row in claims.verdicts(tmp_path / "results") if row.measured]
    assert len(measured) == len(manifest["claims"])
    # Some notebooks are about no published value.
    assert measured or notebook not in {claim.notebook for claim in ledger.ledger()}
    coverage.coverage(tmp_path / "results")
    _check_dependencies(notebook, json.loads(note.read_text()))


def _check_dependencies(notebook: str, seen: dict[str, list[str]]) -> None:
    """What the notebook really opened and imported is among the dependencies of its stage."""
    root = paths.root()
    stage = source.section(notebook)
    deps = [*dependencies.modules(stage), *dependencies.data(stage)]
    data = root / "data"
    files = {
        path.relative_to(root).as_posix()
        for path in map(Path, seen["opened"])
        if path.is_relative_to(data) and not path.is_relative_to(data / "raw") and path.is_file()
    }
    modules = {name.replace(".", "/") for name in seen["modules"]}
    files |= {f"{m}.py" if (root / f"{m}.py").is_file() else f"{m}/__init__.py" for m in modules}
    missing = sorted(f for f in files if not any(f == d or f.startswith(f"{d}/") for d in deps))
    assert not missing, f"its stage in dvc.yaml or its list lacks {', '.join(missing)}"
    idle = {one for one in deps if one.startswith("data/published/")} - files
    assert not idle, f"its stage in dvc.yaml has {', '.join(idle)}, which it does not read"
