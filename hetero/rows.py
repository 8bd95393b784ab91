"""Tables read from files as rows of checked values; what is wrong is told by line and column."""

from __future__ import annotations

import csv
import math
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from hetero.errors import DataError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a reader raises about a file as a whole into one DataError."""
    if not path.is_file():
        raise DataError("there is no such file.", path=path, resolve="check the path.")
    try:
        yield
    except pd.errors.EmptyDataError:
        raise DataError("it is empty.", path=path, resolve="pass a file with rows.") from None
    except (pd.errors.ParserError, csv.Error) as error:
        line = re.search(r"line (\d+)", str(error))
        raise DataError(
            "it cannot be split into columns.",
            path=path,
            line=int(line.group(1)) if line else None,
            resolve="give every row as many fields as the heading has, and close quotes.",
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table in a file as checked values; what is wrong with one is told by its place.

    Attributes
    ----------
    lines
        Line of each row, counted from 1; None for binary files, which have rows but no lines.
    """

    frame: pd.DataFrame
    path: Path
    lines: Sequence[int] | None

    def __len__(self) -> int:
        return len(self.frame)

    def error(self, what: str, row: int | None, column: str | None, resolve: str) -> DataError:
        """The error that says what is wrong at a row (counted from 0) and column."""
        line = None
        if row is not None and self.lines is None:
            what = f"row {row + 1}: {what}"
        elif row is not None and self.lines is not None:
            line = self.lines[row]
        return DataError(what, path=self.path, line=line, column=column, resolve=resolve)

    def where(self, keep: NDArray[np.bool_]) -> Rows:
        """The rows for which ``keep`` is True."""
        lines = self.lines and [line for line, kept in zip(self.lines, keep, strict=True) if kept]
        return Rows(self.frame[keep], self.path, lines)

    def filled(self, column: str) -> NDArray[np.bool_]:
        """Whether each row has a value in a column, which need not be there."""
        if column not in self.frame:
            return np.zeros(len(self), dtype=bool)
        values = self.frame[column]
        return ~np.asarray(values.isna() | (values.astype(str).str.strip() == ""))

    def numbers(
        self,
        column: str,
        *,
        needed: NDArray[np.bool_] | None = None,
        above: float = -math.inf,
        least: float = -math.inf,
    ) -> NDArray[np.float64]:
        """Finite numbers within bounds, or an error at the first value that is none.

        Parameters
        ----------
        needed
            Rows whose value counts, by default all; the others give 0.
        """
        due = np.ones(len(self), dtype=bool) if needed is None else needed
        if not due.any():
            return np.zeros(len(self))
        values = pd.to_numeric(self.frame[column], errors="coerce")
        found = values.to_numpy(dtype=np.float64, na_value=np.nan)
        bound = f" > {above:g}" * (above > -math.inf) + f" >= {least:g}" * (least > -math.inf)
        good = np.isfinite(found) & (found > above) & (found >= least)
        self.refuse(due & ~good, column, f"a number{bound}", "correct or remove the row.")
        return np.where(due, found, 0.0)

    def whole(self, column: str, least: int = -(2**63), most: int = 2**63) -> NDArray[np.int64]:
        """Whole numbers of a column within bounds, exact up to 64 bits."""
        exact = pd.to_numeric(self.frame[column], errors="coerce")
        if pd.api.types.is_signed_integer_dtype(exact.dtype):
            found = exact.to_numpy(dtype=np.int64)
        else:
            numbers = self.numbers(column)
            rule = "name the column that holds whole numbers, or correct the row."
            self.refuse(numbers != np.floor(numbers), column, "a whole number", rule)
            # Beyond 64 bits a cast would give any number at all.
            wide = np.abs(numbers) >= 2.0**63
            self.refuse(wide, column, "a number of 64 bits", "correct the row.")
            found = numbers.astype(np.int64)
        rule = f"a possible number of tokens (at least {least})"
        self.refuse((found < least) | (found > most), column, rule, "correct or remove the row.")
        return found

    def labels(self, column: str) -> NDArray[np.int64]:
        """Whole numbers of a column as they are; other labels numbered by first appearance."""
        self.refuse(~self.filled(column), column, "a label", "give every row a label.")
        exact = pd.to_numeric(self.frame[column], errors="coerce")
        if pd.api.types.is_signed_integer_dtype(exact.dtype):
            return exact.to_numpy(dtype=np.int64)
        return pd.factorize(self.frame[column])[0].astype(np.int64)

    def refuse(self, bad: NDArray[np.bool_], column: str, kind: str, resolve: str) -> None:
        """Raise for the first bad value of a column, which should have been of some kind."""
        if not bad.any():
            return
        row = int(np.argmax(bad))
        shown = textwrap.shorten(str(self.frame[column].iloc[row]), 60, placeholder="...")
        missing = not self.filled(column)[row]
        what = "the value is missing." if missing else f"'{shown}' is not {kind}."
        raise self.error(what, row, column, resolve)


def heading(path: Path) -> list[str]:
    """Names of the columns of a CSV or Parquet file."""
    with reading(path):
        if path.suffix == ".parquet":
            return list(pyarrow.parquet.read_schema(path).names)
        return [str(column).strip() for column in pd.read_csv(path, nrows=0).columns]


def read_rows(path: Path, wanted: Iterable[str] = (), optional: Iterable[str] = ()) -> Rows:
    """Rows of a CSV, CSV.gz or Parquet file up to the last that is not blank, cells of CSV as text.

    Parameters
    ----------
    wanted, optional
        Columns that must be there, and that are read where they are; without any, all are.

    Raises
    ------
    DataError
        If the file cannot be read or a column is missing.
    """
    found, wanted = heading(path), tuple(wanted)
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
    with reading(path):
        if path.suffix == ".parquet":
            # The file's own notes for pandas may be damaged, and tell nothing that is needed.
            table = pyarrow.parquet.read_table(path, columns=chosen or None)
            if lost := [column for column in chosen if column not in table.column_names]:
                raise pa.ArrowInvalid(f"no column '{lost[0]}' after all")
            return Rows(table.replace_schema_metadata(None).to_pandas(), path, lines=None)
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
    filled = np.flatnonzero(~(frame.isna() | (frame == "")).all(axis=1).to_numpy())
    end = int(filled[-1]) + 1 if len(filled) else 0
    return Rows(frame.iloc[:end][chosen] if chosen else frame.iloc[:end], path, range(2, end + 2))


def read_records(path: Path, kind: type) -> list[dict[str, object]]:
    """Cells of a CSV file per line, typed as the fields of a dataclass; blank cells left out.

    Raises
    ------
    DataError
        If a column is unknown or a cell has the wrong type, naming line and column.
    """
    hints = get_type_hints(kind)
    adapters = {name: TypeAdapter(hint) for name, hint in hints.items()}
    rows = read_rows(path)
    for column in rows.frame:
        if column not in hints:
            what = f"the column is unknown; known are {', '.join(hints)}."
            raise rows.error(what, None, str(column), "correct the heading.")
    found = []
    for number, cells in enumerate(rows.frame.to_dict("records")):
        row: dict[str, object] = {}
        for column, text in ((str(column), str(text)) for column, text in cells.items()):
            if isinstance(cells[column], float) or text.strip() == "":  # NaN where a row ends early
                continue
            value = text.split(";") if hints[column] == tuple[str, ...] else text.strip()
            try:
                row[column] = adapters[column].validate_python(value)
            except ValidationError as error:
                what = f"'{text}' does not fit: {error.errors()[0]['msg'].lower()}."
                raise rows.error(what, number, column, "correct the value.") from None
        found.append(row)
    return found


def listed(names: Iterable[str]) -> str:
    """Names in order, with commas; cut where there are too many to read.

    Examples
    --------
    >>> listed({"b", "a"}), listed(())
    ('a, b', '(none)')
    """
    return textwrap.shorten(", ".join(sorted(names)) or "(none)", 400, placeholder="...")
