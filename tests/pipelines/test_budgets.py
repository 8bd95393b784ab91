"""The table of budgets, and what it refuses."""

from __future__ import annotations

import shutil

import pytest

from hetero import paths
from pipelines import budgets


def test_what_is_above_its_ceiling_or_has_none_is_named() -> None:
    found = {"core": 11, "apps": 5, "plots": 3}
    said = budgets.faults(found, {"core": 10, "apps": 5, "fleet": 4}, [], [])
    assert said == [
        "core: 11, 1 above the ceiling",
        "plots: 3, and no ceiling",
        "fleet has a ceiling and does not exist",
    ]
    assert budgets.faults({"core": 10}, {"core": 10}, [], []) == []


def test_the_list_of_classes_defined_again_only_shrinks() -> None:
    assert budgets.faults({}, {}, ["Plan"], []) == ["class Plan is defined again"]
    assert budgets.faults({}, {}, [], ["Plan"]) == ["class Plan is defined once now"]
    assert budgets.faults({}, {}, ["Plan"], ["Plan"]) == []


def test_every_line_and_statement_counts_wherever_it_stands(tmp_path, monkeypatch) -> None:
    shutil.copytree(paths.root() / "notebooks", tmp_path / "notebooks")
    for part in (*budgets.PARTS, "hetero/deep", "pipelines/build", "pipelines/templates"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "one.py").write_text("if True:\n    x = 1; y = 2\n")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    found = budgets.sizes()
    assert [found[f"{part}, lines"] for part in budgets.PARTS] == [4, 4, 2]
    assert [found[f"{part}, statements"] for part in budgets.PARTS] == [6, 6, 3]
    assert found["templates, lines"] == 2
    assert found["longest cell"] < found["notebooks, lines"]


@pytest.mark.parametrize("above", [0, 1])
def test_a_fault_ends_in_what_to_do(monkeypatch, capsys, above) -> None:
    sizes = budgets.sizes()
    more = {"hetero, lines": 10**9} if above else {}
    monkeypatch.setattr(budgets, "sizes", lambda: sizes | more)
    assert budgets.main() == above
    shown = capsys.readouterr()
    assert "ceiling" in shown.out
    assert ("Resolve:" in shown.err) == bool(above)
