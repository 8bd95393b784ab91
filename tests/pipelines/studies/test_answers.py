"""Answers of the notebooks: every number read off the results, none written down."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from hetero import paths
from hetero.errors import DataError
from pipelines import schema, source
from pipelines.studies import answers


def test_every_notebook_has_one_answer() -> None:
    assert list(answers._written()) == source.notebooks()


@pytest.mark.parametrize("notebook", source.notebooks())
def test_committed_results_answer_the_question(notebook: str) -> None:
    found = answers.answer(notebook, paths.results())
    assert found is not None
    assert found.source == "real"
    assert (paths.results() / "real" / notebook / found.figure).is_file()
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
