"""Answers of the notebooks: every number read off the results, none written down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from hetero import paths
from hetero.errors import DataError, DownloadError, ParameterError
from pipelines import commands, schema, source
from pipelines.studies import answers, derived_tables, operators
from pipelines.studies.derived_tables import TABLES, remake


def test_every_notebook_has_one_answer() -> None:
    assert list(answers._written()) == source.notebooks()


@pytest.mark.parametrize("notebook", source.notebooks())
def test_committed_results_answer_the_question(notebook: str) -> None:
    found = answers.answer(notebook, paths.results())
    assert found is not None
    assert found.source == answers.places(notebook, paths.results())[0]
    assert (paths.results() / found.source / notebook / found.figure).is_file()
    assert found.sentence.endswith(".")
    assert "nan" not in found.sentence
    assert len(found.sentence.split()) <= 60


def test_numbers_of_the_results_are_not_written_in_the_sentences() -> None:
    for notebook, written in answers._written().items():
        said = re.sub(r"\{[^}]*\}", "", written["says"])
        # Settings that the notebooks fix: models, GPUs, prices, shares and rates asked for.
        fixed = {"512", "128", "200", "24", "70", "90", "6", "100", "1", "2"}
        assert set(re.findall(r"\d+(?:\.\d+)?", said)) <= fixed, notebook


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cell = {"table": "t", "column": "y [s]"}
    written = {
        "figure": "f",
        "says": "{best}: {most:.1f}, {other} of {all}, {twins}.",
        "numbers": {
            "best": {"table": "t", "column": "who", "most": "y [s]"},
            "most": cell | {"reduce": "max"},
            "other": {"table": "t", "column": "who", "without": {"who": "b"}, "least": "y [s]"},
            "all": cell | {"reduce": "count"},
            "twins": cell | {"where": {"who": ["a", "c"]}, "reduce": "mean"},
        },
    }
    monkeypatch.setattr(answers, "_written", lambda: {"n": written})
    leave(tmp_path / "twin" / "n", [1.0, 3.0, 2.0])
    return tmp_path


def leave(place: Path, values: list[float], **more: object) -> None:
    place.mkdir(parents=True)
    frame = pd.DataFrame({"who": list("abc"), "y [s]": values} | more)
    frame.to_csv(place / "t.csv", index=False)


def test_cells_are_picked_and_real_traces_decide(folder: Path) -> None:
    assert answers.answer("n", folder) == answers.Answer("b: 3.0, a of 3, 1.5.", "f.svg", "twin")
    leave(folder / "real" / "n", [5.0, 3.0, 9.0])
    assert answers.answer("n", folder) == answers.Answer("c: 9.0, a of 3, 7.0.", "f.svg", "real")
    assert set(schema.SOURCES) == {"twin", "real"}


def test_no_results_no_answer_and_a_wrong_column_is_said(folder: Path) -> None:
    assert answers.answer("other", folder) is None
    assert answers.answer("n", folder / "nowhere") is None
    file = folder / "twin" / "n" / "t.csv"
    frame = pd.read_csv(file)
    frame[frame["who"] == "b"].to_csv(file, index=False)  # as of a run in small
    assert answers.answer("n", folder) is None
    frame.rename(columns={"y [s]": "y [ms]"}).to_csv(file, index=False)
    with pytest.raises(DataError, match=r"asks for 'y \[s\]'"):
        answers.answer("n", folder)


MADE = pd.DataFrame({"gpu": ["A100", "T4"], "us": [1.5, 2.5]})


def absent() -> pd.DataFrame:
    raise DownloadError("The file is not here.", resolve="fetch it.")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    (folder / "measured").mkdir(parents=True)
    for name, us in (("same", 2.5), ("other", 3.5), ("absent", 2.5)):
        MADE.assign(us=[1.5, us]).to_csv(folder / "measured" / f"{name}.csv", index=False)
    makers = {f"measured/{name}": lambda: MADE for name in ("same", "other")}
    monkeypatch.setattr(derived_tables, "TABLES", makers | {"measured/absent": absent})
    monkeypatch.setattr(paths, "data", lambda *name: folder.joinpath(*name))
    return folder


def test_what_differs_and_what_cannot_be_made_is_named(kept: Path, tmp_path: Path) -> None:
    found = remake(folder=tmp_path / "out")
    assert found.same == ("measured/same",)
    assert found.different == {"measured/other": "row 1, us: 2.5 instead of 3.5"}
    assert found.missing == {"measured/absent": "The file is not here. Resolve: fetch it."}
    assert "row 1, us: 2.5 instead of 3.5" in str(found)
    written = sorted(path.name for path in (tmp_path / "out" / "measured").iterdir())
    assert written == ["other.csv", "same.csv"]
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out/measured/other.csv"), MADE)
    with pytest.raises(ParameterError, match="exists already"):
        remake(folder=tmp_path / "out")
    with pytest.raises(ParameterError, match="No derived table is called 'measured/gone'"):
        remake(["measured/gone"])


def test_the_command_fails_where_a_table_differs(kept: Path) -> None:
    app = typer.Typer()
    app.command()(commands.tables)
    ended = CliRunner().invoke(app, ["--json"])
    assert ended.exit_code == 1
    rows = {row["table"]: row["made anew"] for row in json.loads(ended.stdout)}
    assert rows == {
        "measured/same": "the same",
        "measured/other": "different",
        "measured/absent": "not made",
    }
    assert CliRunner().invoke(app, ["measured/same", "measured/absent"]).exit_code == 0


def test_every_table_is_one_of_the_checkout() -> None:
    for name in TABLES:
        assert paths.data(f"{name}.csv").is_file()


def test_without_the_package_all_reduces_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "available", lambda: False)
    found = remake(["measured/all_reduce"])
    assert "hetero[silicon]" in found.missing["measured/all_reduce"]
