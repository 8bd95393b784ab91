"""Columns of a trace file as checked numbers; whatever is wrong with one is told by its place."""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from hetero.errors import DataError

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns", "datetime"]
"""What the arrival column counts; ``datetime`` is text such as 2023-11-16 18:17:03.97."""

PER_SECOND: dict[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a file, and how to point at one of them.

    Attributes
    ----------
    lines
        Line of each row, counted from 1; None for binary files, which have rows but no lines.
    """

    frame: pd.DataFrame
    path: Path
    lines: Sequence[int] | None

    def error(self, what: str, row: int | None, column: str | None, resolve: str) -> DataError:
        """The error that says what is wrong at a row (counted from 0) and column."""
        line = None
        if row is not None and self.lines is None:
            what = f"row {row + 1}: {what}"
        elif row is not None and self.lines is not None:
            line = self.lines[row]
        return DataError(what, path=self.path, line=line, column=column, resolve=resolve)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """Finite numbers of a column, or an error at the first value that is none."""
        values = self.frame[column]
        found = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        self._refuse(~np.isfinite(found), column, "a number", "correct or remove the row.")
        return found

    def whole(self, column: str) -> NDArray[np.int64]:
        """Whole numbers of a column, exact up to 64 bits."""
        exact = pd.to_numeric(self.frame[column], errors="coerce")
        if pd.api.types.is_signed_integer_dtype(exact.dtype):
            return exact.to_numpy(dtype=np.int64)
        found = self.numbers(column)
        self._refuse(
            found != np.floor(found),
            column,
            "a whole number",
            "name the column that holds whole numbers, or correct the row.",
        )
        # Beyond 64 bits a cast would give any number at all.
        self._refuse(np.abs(found) >= 2.0**63, column, "a number of 64 bits", "correct the row.")
        return found.astype(np.int64)

    def tokens(self, column: str, lowest: int) -> NDArray[np.int32]:
        """Token counts of a column, at least ``lowest`` each."""
        found = self.whole(column)
        self._refuse(
            (found < lowest) | (found > _INT32),
            column,
            f"a possible number of tokens (at least {lowest})",
            "correct or remove the row.",
        )
        return found.astype(np.int32)

    def labels(self, column: str) -> NDArray[np.int64]:
        """Whole numbers of a column as they are; other labels numbered by first appearance."""
        values = self.frame[column]
        blank = values.isna() | (values.astype(str).str.strip() == "")
        self._refuse(blank.to_numpy(), column, "a label", "give every request a session.")
        exact = pd.to_numeric(values, errors="coerce")
        if pd.api.types.is_signed_integer_dtype(exact.dtype):
            return exact.to_numpy(dtype=np.int64)
        return pd.factorize(values)[0].astype(np.int64)

    def seconds(self, column: str, unit: TimeUnit) -> NDArray[np.float64]:
        """Arrivals of a column in seconds; dates count from the earliest."""
        if unit != "datetime":
            found = self.numbers(column)
            self._refuse(
                found < 0,
                column,
                "a time of arrival (it is negative)",
                "count arrivals from a moment before the first request.",
            )
            return found / PER_SECOND[unit]
        # Stamps with and without a fraction of a second may alternate in one file.
        stamps = pd.to_datetime(self.frame[column], errors="coerce", utc=True, format="ISO8601")
        self._refuse(
            stamps.isna().to_numpy(),
            column,
            "a date and time",
            "write dates as 2023-11-16 18:17:03.97, or pass the time_unit of the column.",
        )
        ticks = stamps.astype("datetime64[ns, UTC]").astype("int64").to_numpy()
        return np.asarray((ticks - ticks.min()) / 1e9)

    def _refuse(self, bad: NDArray[np.bool_], column: str, kind: str, resolve: str) -> None:
        if not bad.any():
            return
        row = int(np.argmax(bad))
        value: Any = self.frame[column].iloc[row]
        missing = pd.isna(value) or str(value).strip() == ""
        shown = textwrap.shorten(str(value), 60, placeholder="...")
        what = "the value is missing." if missing else f"'{shown}' is not {kind}."
        raise self.error(what, row, column, resolve)


def heading(path: Path) -> set[str]:
    """Names of the columns of a CSV or Parquet file."""
    with readable(path):
        if path.suffix == ".parquet":
            return set(pyarrow.parquet.read_schema(path).names)
        return {str(column).strip() for column in pd.read_csv(path, nrows=0).columns}


def load(path: Path, wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> Rows:
    """The named columns of a CSV or Parquet file; ``optional`` ones only where they exist."""
    found = heading(path)
    for column in wanted:
        if column not in found:
            raise DataError(
                f"this column is missing; the file has {listed(found)}.",
                path=path,
                line=None if path.suffix == ".parquet" else 1,
                column=column,
                resolve="name the columns that the file has, or mend its heading.",
            )
    chosen = [*wanted, *(column for column in optional if column in found)]
    with readable(path):
        if path.suffix == ".parquet":
            # The file's own notes for pandas may be damaged, and tell nothing that is needed.
            table = pyarrow.parquet.read_table(path, columns=chosen)
            if lost := [column for column in chosen if column not in table.column_names]:
                raise pa.ArrowInvalid(f"no column '{lost[0]}' after all")
            frame = table.replace_schema_metadata(None).to_pandas()
            return Rows(frame, path, lines=None)
        # As text, and blank lines kept: else a bad value would have no line to point at.
        frame = pd.read_csv(
            path, dtype=str, keep_default_na=False, skip_blank_lines=False, skipinitialspace=True
        )
    if not isinstance(frame.index, pd.RangeIndex):
        # pandas takes what the first row has too much for names of rows, and shifts all columns.
        raise DataError(
            "the row has more fields than the heading.",
            path=path,
            line=2,
            resolve="give every row as many fields as the heading has.",
        )
    frame.columns = frame.columns.str.strip()
    blank = (frame.isna() | (frame == "")).all(axis=1).to_numpy()
    filled = np.flatnonzero(~blank)
    end = int(filled[-1]) + 1 if len(filled) else 0  # blank lines at the end are no requests
    return Rows(frame.iloc[:end][chosen], path, lines=range(2, end + 2))


def listed(names: Iterable[str]) -> str:
    """Names in order, with commas; cut where there are too many to read."""
    text = ", ".join(sorted(names)) or "(none)"
    return text if len(text) <= 400 else f"{text[:400]}..."


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what the parsers raise about a file as a whole into one DataError."""
    if not path.is_file():
        raise DataError("there is no such file.", path=path, resolve="check the path.")
    try:
        yield
    except pd.errors.EmptyDataError:
        raise DataError("it is empty.", path=path, resolve="pass a file with requests.") from None
    except pd.errors.ParserError as error:
        line = re.search(r"line (\d+)", str(error))
        raise DataError(
            "it cannot be split into columns.",
            path=path,
            line=int(line.group(1)) if line else None,
            resolve="give every row as many fields as the heading has.",
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"it is not UTF-8 text ({error.reason} at byte {error.start}).",
            path=path,
            resolve="save it as UTF-8, or pass a .gz or .parquet file under its own ending.",
        ) from None
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(
            f"it cannot be read ({str(error).splitlines()[0] if str(error) else 'cut off'}).",
            path=path,
            resolve="check that it is whole and that its ending tells its kind.",
        ) from None
