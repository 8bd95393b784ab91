"""Rows of tables and YAML settings read from files; what is wrong is told by line and column."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from hetero.errors import DataError

T = TypeVar("T")


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
        Line of each row, counted from 1; None where rows are not lines of text.
    left_out
        Rows of the file that are not among these, as they are bad or of failed requests.
    """

    frame: pd.DataFrame
    path: Path
    lines: Sequence[int] | None
    left_out: int = 0

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
        return Rows(self.frame[keep], self.path, lines, self.left_out)

    def without(self, bad: NDArray[np.bool_]) -> Rows:
        """The other rows, those that are bad counted as left out."""
        return replace(self.where(~bad), left_out=self.left_out + int(bad.sum()))

    def made(self, make: Callable[[Rows], T], *, skip_bad: bool) -> T:
        """What is made of the rows, or of those that are good if bad ones may be left out."""
        rows = self
        while True:
            try:
                return make(rows)
            except DataError as error:
                if not skip_bad or error.bad is None:
                    raise
                rows = rows.without(error.bad)

    def need(self, columns: Iterable[str]) -> None:
        """Raise for the first of the columns that is not there."""
        for column in columns:
            if column not in self.frame:
                raise DataError(
                    f"this column is missing; the file has {listed(map(str, self.frame))}.",
                    path=self.path,
                    line=None if self.lines is None else 1,
                    column=column,
                    resolve="name the columns that the file has, or mend its heading.",
                )

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
        error = self.error(what, row, column, resolve)
        error.bad = bad
        raise error


def _kind(path: Path) -> tuple[str, Literal["gzip", "infer"]]:
    """Kind of a table by how it begins, and how it is compressed."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with (gzip.open if packed else open)(path, "rb") as file:
        start = bytes(file.read(256)).removeprefix(b"\xef\xbb\xbf").lstrip()
    kind = "parquet" if start[:4] == b"PAR1" else "json" if start[:1] in (b"{", b"[") else "csv"
    return kind, "gzip" if packed else "infer"


def read_rows(
    path: Path,
    wanted: Sequence[str] = (),
    *,
    within: Sequence[str] = (),
    skip_bad: bool = False,
) -> Rows:
    """Rows of a CSV, Parquet or JSON file, also by gzip, told by its content.

    CSV has rows up to the last that is not blank, and its cells are text. JSON has an object per
    line, or a list of them, whose fields are named by their path (``metrics.length.value``).

    Parameters
    ----------
    wanted
        Columns that must be there, and are read; without any, all are.
    within
        Of a JSON file of another form: paths of the lists that may hold its rows, or of one column
        as a list, beside which the others stand.
    skip_bad
        Count lines that are no JSON objects as left out.

    Raises
    ------
    DataError
        If the file cannot be read or a column is missing.
    """
    with reading(path):
        kind, compression = _kind(path)
        if kind == "parquet":
            # The file's own notes for pandas may be damaged, and tell nothing that is needed.
            table = pyarrow.parquet.read_table(path).replace_schema_metadata(None)
            rows = Rows(table.to_pandas(), path, lines=None)
        elif kind == "json":
            rows = _of_json(path, compression, within, skip_bad)
        else:
            rows = _of_csv(path, compression)
    rows.need(wanted)
    return replace(rows, frame=rows.frame[[*wanted]]) if wanted else rows


def _of_csv(path: Path, compression: Literal["gzip", "infer"]) -> Rows:
    # As text, and blank lines kept: else a bad value would have no line to point at.
    frame = pd.read_csv(
        path,
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
        skipinitialspace=True,
        compression=compression,
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
    return Rows(frame.iloc[:end], path, range(2, end + 2))


def _of_json(path: Path, compression: str, within: Sequence[str], skip_bad: bool) -> Rows:
    opened = gzip.open if compression == "gzip" else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        text = str(file.read())
    said = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    lines: list[int] | None = None
    whole = None if isinstance(_json(said[0][1]), dict) else _json(text)
    values = whole if isinstance(whole, list) else [whole]
    if whole is None:
        lines, values = [number for number, _ in said], [_json(line) for _, line in said]
    for key in within:
        if found := [one for value in values for one in _inside(value, key)]:
            values, lines = found, None
            break
    good = np.array([isinstance(value, dict) for value in values], dtype=bool)
    if not good.all() and not skip_bad:
        bad = int(np.argmin(good))
        shown = (said[bad][1] if lines else str(values[bad])).strip()[:40]
        rows = Rows(pd.DataFrame(index=range(len(good))), path, lines)
        hint = "write one request per line as a JSON object, or a list of them."
        raise rows.error(f"this is no JSON object: {shown!r}.", bad, None, hint)
    frame = pd.json_normalize([one for one in values if isinstance(one, dict)], max_level=3)
    kept = lines and [line for line, one in zip(lines, good, strict=True) if one]
    return Rows(frame, path, kept, int((~good).sum()))


def _json(text: str) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        # Integers that no column can hold end as infinite, and are refused by their line.
        return json.loads(text, parse_int=lambda one: (int if len(one) < 20 else float)(one))
    except (ValueError, RecursionError):
        return None


def _inside(value: Any, key: str) -> list[Any]:
    """Rows in the list that a path of keys leads to, or of the columns beside that list."""
    if isinstance(value, list):
        return [found for one in value for found in _inside(one, key)]
    first, _, rest = key.partition(".")
    held = value.get(first) if isinstance(value, dict) else None
    if rest:
        return _inside(held, rest)
    if not isinstance(held, list) or all(isinstance(one, dict) for one in held):
        return held if isinstance(held, list) else []
    columns = {k: v for k, v in value.items() if isinstance(v, list) and len(v) == len(held)}
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


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
