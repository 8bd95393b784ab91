from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hetero.display import Column, Shown, Table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (0.0004, "0.0004000"),
        (0.0000123, "1.23e-05"),
        (1234567.8, "1,234,568"),
        (9.9999, "10.00"),
        (-0.5, "-0.5000"),
        (1e12, "1e+12"),
        (math.nan, "-"),
        (math.inf, "inf"),
        (None, "-"),
        (True, "yes"),
        (12345, "12,345"),
        ("text", "text"),
    ],
)
def test_cells_keep_their_significant_digits(value: object, shown: str) -> None:
    assert Column("x", digits=4).show(value) == shown


def test_text_and_html_hold_the_same_cells() -> None:
    table = Table("T", (Column("name"), Column("size", "GiB")), (("a<b", 1.5),), ("note",))
    assert "a<b" in str(table)
    assert "a&lt;b" in table._repr_html_()
    for text in ("1.500", "size [GiB]", "note"):
        assert text in str(table)
        assert text in table._repr_html_()
    assert list(table.to_frame().columns) == ["name", "size [GiB]"]


def test_an_object_with_a_table_shows_it() -> None:
    class Thing(Shown):
        def table(self) -> Table:
            return Table("", (Column("x"),), ((1,),))

    assert str(Thing()) == "x\n-\n1"
    assert "<table>" in Thing()._repr_html_()


def test_a_table_takes_its_cells_from_objects() -> None:
    columns = (Column("name", of="gpu.name"), Column("double", "s", 3, lambda one: 2 * one.count))
    machines = [
        SimpleNamespace(gpu=SimpleNamespace(name="A"), count=2),
        SimpleNamespace(gpu=None, count=3),
    ]
    table = Table.of("both", columns, machines, "", "a note")
    assert table.rows == (("A", 4), (None, 6))
    assert table.notes == ("a note",)
    assert Table.figures("one", ("time", 2.0, "s")).rows == (("time", 2.0, "s"),)
