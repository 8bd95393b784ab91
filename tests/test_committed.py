"""The comparison of committed tables itself: rounding passes, anything more does not."""

from __future__ import annotations

import pandas as pd
import pytest

from hetero import paths
from tests import committed


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda *name: tmp_path.joinpath(*name))
    frame = pd.DataFrame(
        {"gpu": ["A100"], "knots_us": ["3.9e-12 271.2; 1320.5"], "error_percent": [1.74]}
    )
    frame.to_csv(tmp_path / "steps.csv", index=False)
    return frame


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("knots_us", "2.1e-10 271.2; 1320.6"),
        ("error_percent", 1.75),
        ("knots_us", "0 271.2; 1320.5"),
    ],
)
def test_rounding_of_another_processor_passes(kept, column, value):
    committed.same(kept.assign(**{column: value}), "steps.csv")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("gpu", "H100"),
        ("knots_us", "3.9e-12 271.2; 1323.5"),
        ("knots_us", "3.9e-12; 1320.5"),
        ("knots_us", "3.9e-12; 271.2 1320.5"),
        ("knots_us", ""),
        ("error_percent", 1.8),
    ],
)
def test_anything_more_does_not(kept, column, value):
    with pytest.raises(AssertionError, match=column):
        committed.same(kept.assign(**{column: value}), "steps.csv")


def test_a_missing_row_or_column_does_not_pass(kept):
    with pytest.raises(AssertionError):
        committed.same(kept.iloc[:0], "steps.csv")
    with pytest.raises(AssertionError):
        committed.same(kept.drop(columns="gpu"), "steps.csv")
