"""params.yaml: what is read, what is refused, and the documentation written from the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from hetero import paths
from hetero.errors import DataError, ParameterError
from pipelines import run, schema, source

PATH = Path("params.yaml")


def text() -> str:
    return (paths.root() / "params.yaml").read_text()


@pytest.mark.parametrize("profile", schema.PROFILES)
@pytest.mark.parametrize("traces", schema.SOURCES)
def test_committed_parameters_are_valid(profile: str, traces: str) -> None:
    values = YAML(typ="safe", pure=True).load(text())
    said = text().replace(f"profile: {values['profile']}", f"profile: {profile}", 1)
    params = schema.parse(said, PATH, source=traces)
    assert (params.profile, params.source) == (profile, traces)
    for name in schema.SECTIONS:
        expected = {k: v for k, v in values[name].items() if k not in ("smoke", "paper")}
        assert params.of(name) == expected | values[name].get(profile, {})


def test_sections_are_the_notebooks_there_are() -> None:
    assert list(schema.SECTIONS) == [source.section(name) for name in source.notebooks()]


@pytest.mark.parametrize("stage", list(schema.SECTIONS))
def test_notebook_has_exactly_the_parameters_of_its_section(stage: str) -> None:
    path = source.notebook_path(source.notebook_of(stage))
    run.check_names(path, stage, schema.load().of(stage))


def test_every_parameter_is_described() -> None:
    for kind in schema.SECTIONS.values():
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"


def test_documentation_is_in_step_with_the_schema() -> None:
    written = (paths.root() / "pipelines" / "PARAMETERS.md").read_text()
    assert written == schema.documentation(), "run `python -m pipelines.schema`"


def test_unknown_section_names_the_near_one() -> None:
    with pytest.raises(ParameterError, match="did you mean workloads"):
        schema.parse(text() + "\nworkload_s: {}\n", PATH)
    with pytest.raises(ParameterError, match="did you mean workloads"):
        schema.load().of("worklods")


def test_missing_section() -> None:
    cut = text()[: text().index("tensor_parallel_search:")]
    with pytest.raises(ParameterError, match="'tensor_parallel_search' is missing"):
        schema.parse(cut, PATH)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: &a [1, 1]\nb: [*a, *a]\n", "aliases"),
        ("profile: [1,\n", "Not valid YAML"),
        ("profile: default\nprofile: smoke\n", "duplicate key"),
        ("x: " + "1" * 300_000, "characters"),
        ("profile: !!python/object/apply:os.system ['true']\n", "Not valid YAML"),
    ],
)
def test_hostile_or_broken_yaml_is_refused(content: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        schema.parse(content, PATH)


def test_text_instead_of_named_values() -> None:
    with pytest.raises(ParameterError, match="where named values belong"):
        schema.parse("just text\n", PATH)
    with pytest.raises(ParameterError, match="'workload': got 'twin'"):
        schema.parse(text().replace("workload:\n  source: twin", "workload: twin"), PATH)


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        schema.load(tmp_path / "params.yaml")
