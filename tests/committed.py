"""Tables of data/ against what they are made from, up to the rounding of another processor."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd

from hetero import paths

RTOL = 1e-3  # least squares leaves that much open, and numbers are kept with four or five digits
ATOL = 1e-3  # below it a time [us, ns] or share is zero: a solver stops anywhere near it
PERCENT = 0.02  # errors in percent are kept with two digits


def same(made: pd.DataFrame, *name: str) -> None:
    """Assert that a frame is the table of that name, the text of it and its numbers.

    Cells that hold several numbers are compared number by number; how many there are counts.
    """
    text = paths.data(*name).read_text(encoding="utf-8")
    committed = _read(text)
    written = _read(made.to_csv(index=False, lineterminator="\n"))
    assert list(written.columns) == list(committed.columns)
    assert len(written) == len(committed)
    for column in committed.columns:
        atol = PERCENT if "percent" in column else ATOL
        for row, (a, b) in enumerate(zip(written[column], committed[column], strict=True)):
            where = f"{'/'.join(name)}, row {row}, {column}"
            one, other = a.replace(";", " ; ").split(), b.replace(";", " ; ").split()
            assert [_text(part) for part in one] == [_text(part) for part in other], where
            numbers = [[float(part) for part in cell if not _text(part)] for cell in (one, other)]
            np.testing.assert_allclose(*numbers, rtol=RTOL, atol=atol, err_msg=where)


def _read(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)


def _text(part: str) -> str:
    """The part of a cell where it is no number, else nothing."""
    try:
        float(part)
    except ValueError:
        return part
    return ""
