"""The table of budgets, and what it refuses."""

from __future__ import annotations

import pytest

from pipelines import budgets


def test_what_is_above_its_ceiling_or_has_none_is_named() -> None:
    found = {"core": 11, "apps": 5, "plots": 3}
    said = budgets.faults(found, {"core": 10, "apps": 5, "fleet": 4}, [], [])
    assert said == [
        "core has 11 lines, 1 above its ceiling",
        "plots has 3 lines and no ceiling",
        "fleet has a ceiling and does not exist",
    ]
    assert budgets.faults({"core": 10}, {"core": 10}, [], []) == []


def test_the_list_of_classes_defined_again_only_shrinks() -> None:
    assert budgets.faults({}, {}, ["Plan"], []) == ["class Plan is defined again"]
    assert budgets.faults({}, {}, [], ["Plan"]) == ["class Plan is defined once now"]
    assert budgets.faults({}, {}, ["Plan"], ["Plan"]) == []


def test_parts_add_up() -> None:
    found = budgets.lines()
    inner = [part for part in found if part.startswith("hetero/apps/")]
    assert sum(found[part] for part in inner) <= found["hetero/apps"] == found["apps"]
    folders = [part for part in found if part.startswith("hetero/") and part.count("/") == 1]
    flat = found["core"] + found["apps"] - sum(found[part] for part in folders)
    assert 0 < flat < found["core"]
    assert found["longest cell"] < found["notebooks"]


@pytest.mark.parametrize("above", [0, 1])
def test_a_fault_ends_in_what_to_do(monkeypatch, capsys, above) -> None:
    lines = budgets.lines()
    monkeypatch.setattr(budgets, "lines", lambda: lines | {"core": 10**9} if above else lines)
    assert budgets.main() == above
    shown = capsys.readouterr()
    assert "ceiling" in shown.out
    assert ("Resolve:" in shown.err) == bool(above)
