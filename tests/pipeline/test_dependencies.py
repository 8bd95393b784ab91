"""Every stage of dvc.yaml depends on all that its results come from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from ruamel.yaml import YAML

from hetero import paths
from pipelines import schema, source

PIPELINE = YAML(typ="safe", pure=True).load(paths.root() / "dvc.yaml")
STAGES: dict[str, dict[str, list[str]]] = {
    name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()
}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("hetero", "pipelines", exclude_type_checking_imports=True)


def imported(code: str, modules: set[str]) -> Iterator[str]:
    """Modules of this project that a piece of code imports, in any of the ways Python has."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            yield node.module
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in names if name in modules)


def closure(graph: grimp.ImportGraph, code: str) -> set[str]:
    """Files that importing them executes: the modules, what they import, and their packages."""
    found = set(imported(code, graph.modules))
    while True:
        more = set()
        for module in found:
            more |= graph.find_upstream_modules(module)
            parts = module.split(".")
            more |= {".".join(parts[:k]) for k in range(1, len(parts))}
        if more <= found:
            return found
        found |= more


def file_of(module: str) -> str:
    path = Path(*module.split("."))
    package = paths.root() / path / "__init__.py"
    return (path / "__init__.py" if package.is_file() else path.with_suffix(".py")).as_posix()


def covered(file: str, deps: list[str]) -> bool:
    return any(file == dep or file.startswith(f"{dep}/") for dep in deps)


@pytest.mark.parametrize("stage", list(schema.SECTIONS))
def test_stage_depends_on_the_modules_its_notebook_imports(
    stage: str, graph: grimp.ImportGraph
) -> None:
    notebook = source.notebook_of(stage)
    code = source.code(source.notebook_path(notebook)).replace("\n%", "\n#").replace("\n!", "\n#")
    files = {file_of(module) for module in closure(graph, code)}
    missing = sorted(file for file in files if not covered(file, STAGES[stage]["deps"]))
    assert not missing, f"add to the deps of stage {stage} in dvc.yaml: {', '.join(missing)}"


def test_report_depends_on_the_modules_it_imports(graph: grimp.ImportGraph) -> None:
    code = (paths.root() / "pipelines" / "report.py").read_text()
    # What only finds files or parameters does not change what is shown.
    plumbing = {"hetero/__init__.py", "pipelines/__init__.py", "hetero/paths.py"}
    plumbing |= {
        "hetero/errors.py",
        "hetero/plots/figures.py",
        "pipelines/schema.py",
        "pipelines/sections.py",
    }
    files = {file_of(module) for module in closure(graph, code)} - plumbing
    deps = STAGES["report"]["deps"]
    missing = sorted(file for file in files if not covered(file, deps))
    assert not missing, f"add to the deps of stage report in dvc.yaml: {', '.join(missing)}"


@pytest.mark.parametrize("stage", list(schema.SECTIONS))
def test_stage_is_wired_to_its_notebook_section_and_results(stage: str) -> None:
    notebook = source.notebook_of(stage)
    do = STAGES[stage]
    assert PIPELINE["stages"][stage]["foreach"] == ["${workload.source}"]
    assert do["cmd"] == f"python -m pipelines.run {stage} --source ${{item}}"
    assert do["params"] == ["profile", stage]
    assert f"pipelines/fingerprints/{notebook}.sha256" in do["deps"]
    # Kept on a failure (persist); in git and not in the cache.
    assert do["outs"] == [{f"results/${{item}}/{notebook}": {"cache": False, "persist": True}}]
    assert notebook in PIPELINE["stages"]["source"]["foreach"]
    assert f"results/${{workload.source}}/{notebook}" in STAGES["report"]["deps"]


def outputs() -> Iterator[tuple[str, dict[str, bool]]]:
    """Every output of every stage, with what DVC is told about it."""
    for stage in STAGES.values():
        for one in [*stage.get("outs", []), *stage.get("metrics", [])]:
            assert isinstance(one, dict), f"{one} would go to the cache"
            yield from one.items()


def test_nothing_is_in_a_cache_that_a_fresh_clone_does_not_have() -> None:
    assert [path for path, told in outputs() if told.get("cache") is not False] == []


def test_plots_are_drawn_from_what_stages_write() -> None:
    made = [path.replace("${item}", "${workload.source}") for path, _ in outputs()]
    for plot in PIPELINE["plots"]:
        ((name, drawn),) = plot.items() if isinstance(plot, dict) else [(plot, None)]
        for file in drawn["y"] if drawn else [name]:
            assert covered(file, made), f"no stage writes {file}"
        if drawn:
            assert (paths.root() / drawn["template"]).is_file()


@pytest.mark.parametrize("stage", list(STAGES))
def test_dependencies_exist(stage: str) -> None:
    made = ("pipelines/fingerprints/", "results/", "notebooks/${item}")
    fixed = [dep for dep in STAGES[stage]["deps"] if not dep.startswith(made)]
    assert [dep for dep in fixed if not (paths.root() / dep).exists()] == []


@pytest.mark.parametrize("stage", list(STAGES))
def test_dependencies_stay_inside_the_checkout(stage: str) -> None:
    # A path outside would stand in dvc.lock and differ between machines.
    assert not [
        dep for dep in STAGES[stage]["deps"] if dep.startswith(("/", "..", "~", "data/raw"))
    ]
