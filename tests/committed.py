"""Tables of data/ against what they are made from, up to the rounding of another processor."""

from __future__ import annotations

import pandas as pd

from hetero import paths
from pipelines.studies.derived_tables import difference


def same(made: pd.DataFrame, *name: str) -> None:
    """Assert that a frame is the table of that name, the words of it and its numbers."""
    where = difference(made, paths.data(*name).read_text(encoding="utf-8"))
    assert where is None, f"{'/'.join(name)}: {where}"
