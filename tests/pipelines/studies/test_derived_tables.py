"""Derived tables made anew: which come out as they are kept, which differ, which cannot be made."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from hetero import paths
from hetero.errors import DownloadError, ParameterError
from pipelines import commands
from pipelines.studies import derived_tables, operators
from pipelines.studies.derived_tables import TABLES, remake

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
