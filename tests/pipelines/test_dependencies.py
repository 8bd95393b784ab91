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


@pytest.mark.parametrize("stage", [*schema.SECTIONS, "report"])
def test_lists_of_modules_are_true(stage: str) -> None:
    assert dependencies.current(stage), "run `python -m pipelines.dependencies`"
    # What writes the lists runs again when a module changes.
    watched = STAGES["fingerprints"]["deps"]
    assert all(covered(one, watched) for one in dependencies.modules(stage))
    there = {path.name for path in dependencies.file(stage).parent.iterdir()}
    assert there == {*source.notebooks(), "report"}


def test_every_way_to_import_is_followed() -> None:
    code = (
        "import hetero.streams\nfrom hetero import plan, naming\nfrom hetero.memory import budget"
    )
    assert set(dependencies.hash_and_imports(code)[1]) == {
        *("hetero", "hetero.streams", "hetero.naming", "hetero.memory", "hetero.memory.budget"),
        "hetero.apps.cards.answer",
    }
    used = dependencies.hash_and_imports("import hetero\ncard = hetero.plan(fleet)")[1]
    assert used == {"hetero", "hetero.apps.cards.answer"}
    found = dependencies.closure(paths.root() / "x", "from hetero.memory import budget")
    assert {"hetero/catalog/gpus.py", "hetero/memory/__init__.py"} < {*found}


CODE = 'def f(x: int, w=9) -> str:\n    return f"{x:{w}}" + ("a" if x else "")\n'


@pytest.mark.parametrize(
    ("code", "same"),
    [
        (CODE.replace("    ", '    """Say it."""\n    # why\n    '), True),
        ("if TYPE_CHECKING:\n    import numpy\n" + CODE.replace("w=9) ", "w = 9,\n) "), True),
        (CODE.replace('else ""', "else None"), False),
        (CODE.replace('"a"', '"b"'), False),
        (CODE.replace("{w}", "4"), False),
        (CODE.replace("x: int", "x: float"), False),
    ],
)
def test_a_hash_is_that_of_what_runs(code: str, same: bool) -> None:
    digest = dependencies.hash_and_imports(CODE)[0]
    assert digest == "c895be7db0c55b95"  # under every Python
    assert (dependencies.hash_and_imports(code)[0] == digest) == same


@pytest.mark.parametrize("stage", list(schema.SECTIONS))
def test_stage_is_wired_to_its_notebook_section_and_results(stage: str) -> None:
    notebook = source.notebook_of(stage)
    do = STAGES[stage]
    assert PIPELINE["stages"][stage]["foreach"] == ["${workload.source}"]
    assert do["cmd"] == f"python -m pipelines.run {stage} --source ${{item}}"
    assert do["params"] == ["profile", stage]
    assert f"pipelines/fingerprints/{notebook}" in do["deps"]
    # Kept on a failure (persist); in git and not in the cache.
    assert do["outs"] == [{f"results/${{item}}/{notebook}": {"cache": False, "persist": True}}]
    assert "results/${workload.source}" in STAGES["report"]["deps"]


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
    made = ("pipelines/fingerprints/", "results/")
    fixed = [dep for dep in STAGES[stage]["deps"] if not dep.startswith(made)]
    assert [dep for dep in fixed if not (paths.root() / dep).exists()] == []
    assert "data/published" not in fixed  # one by one: a word of an audit makes no notebook stale


@pytest.mark.parametrize("stage", list(STAGES))
def test_dependencies_stay_inside_the_checkout(stage: str) -> None:
    # A path outside would stand in dvc.lock and differ between machines.
    assert not [
        dep for dep in STAGES[stage]["deps"] if dep.startswith(("/", "..", "~", "data/raw"))
    ]
