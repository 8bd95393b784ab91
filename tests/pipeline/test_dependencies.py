"""Every stage of dvc.yaml depends on all that its results come from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from hetero import paths
from pipelines import dependencies, schema, source

PIPELINE = YAML(typ="safe", pure=True).load(paths.root() / "dvc.yaml")
STAGES: dict[str, dict[str, list[str]]] = {
    name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()
}


def covered(file: str, deps: list[str]) -> bool:
    return any(file == dep or file.startswith(f"{dep}/") for dep in deps)


def modules(deps: list[str]) -> set[str]:
    """Python files that entries of a stage stand for."""
    found = set()
    for one in deps:
        path = paths.root() / one
        below = path.rglob("*.py") if path.is_dir() else [path] * one.endswith(".py")
        found |= {file.relative_to(paths.root()).as_posix() for file in below}
    return found


@pytest.mark.parametrize("stage", [*schema.SECTIONS, "report"])
def test_stage_depends_on_the_modules_it_imports_and_on_no_others(stage: str) -> None:
    files, deps = dependencies.files(stage), modules(STAGES[stage]["deps"])
    assert not files - deps, f"missing in stage {stage}: run `python -m pipelines.dependencies`"
    assert not deps - files, f"too much in stage {stage}: run `python -m pipelines.dependencies`"


def test_dvc_yaml_is_as_it_would_be_written() -> None:
    text = (paths.root() / "dvc.yaml").read_text(encoding="utf-8")
    assert dependencies.written(text) == text
    # Entries of modules that are gone, or that nobody imports, leave.
    stale = text.replace("        - hetero/errors.py\n", "        - hetero/gone.py\n", 1)
    assert stale != text
    assert dependencies.written(stale) == text


def test_every_way_to_import_is_followed() -> None:
    code = (
        "import hetero.streams\nfrom hetero import plan, naming\nfrom hetero.memory import engines"
    )
    assert set(dependencies.imported(code)) == {
        *("hetero", "hetero.streams", "hetero.naming", "hetero.memory", "hetero.memory.engines"),
        "hetero.apps.cards.answer",
    }
    used = set(dependencies.imported("import hetero\ncard = hetero.plan(fleet)"))
    assert used == {"hetero", "hetero.apps.cards.answer"}
    assert "hetero/catalog/gpus.py" in dependencies.closure("from hetero.memory import engines")


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
