"""Reading of data/published and of what notebooks left: every error names its place."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, StrictStr, ValidationError

from hetero.display import Shown
from hetero.errors import DataError
from hetero.rows import reading
from pipelines.studies import results

PAPERS = {
    "xiong": "Xiong et al.",
    "heteroserve": "HeteroServe",
    "rignall": "Rignall",
    "helix": "Helix",
    "thunderserve": "ThunderServe",
}
PROFILES = ("interactive", "smoke", "default", "paper")  # from the smallest to the fullest
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows(Shown, Sequence[T]):
    """One row per line of a file of ``data/published``, in its order."""

    rows: tuple[T, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.rows[index]


def picked(item: object, *names: str) -> dict[str, Any]:
    """Some attributes by their names, for JSON; nothing of nothing."""
    return {} if item is None else {name: getattr(item, name) for name in names}


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One line of a CSV file, with its place for error messages."""

    path: Path
    line: int
    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def error(self, what: str, column: str | None = None, *, resolve: str) -> DataError:
        """Error about this line, to be raised by the caller."""
        return DataError(what, path=self.path, line=self.line, column=column, resolve=resolve)

    def required(self, column: str) -> str:
        """Text of a cell that may not be empty."""
        if not self.cells[column]:
            raise self.error("The cell is empty.", column, resolve="fill it in.")
        return self.cells[column]

    def one_of(self, column: str, known: Iterable[str]) -> str:
        """Text of a cell that must be one of the known words."""
        known = list(known)
        if self.cells[column] not in known:
            raise self.error(
                f"'{self.cells[column]}' is not known here.",
                column,
                resolve=f"use one of: {', '.join(repr(word) for word in known)}.",
            )
        return self.cells[column]

    def number(self, column: str) -> float | None:
        """Number of a cell, None where it is empty."""
        if not self.cells[column]:
            return None
        try:
            number = float(self.cells[column])
        except ValueError:
            number = float("nan")
        if not abs(number) < float("inf"):
            raise self.error(
                f"'{self.cells[column]}' is not a finite number.",
                column,
                resolve="write a plain number without unit, or leave the cell empty.",
            )
        return number


def rows(path: Path, columns: Sequence[str]) -> list[CsvRow]:
    """Lines of a CSV file that has exactly these columns.

    Raises
    ------
    DataError
        If the file is missing, a column is missing or unknown, or a line is too short or long.
    """
    if not path.is_file():
        raise DataError("The file is missing.", path=path, resolve="restore it from the project.")
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        head = next(reader, [])
        if head != list(columns):
            wrong = [name for name in columns if name not in head]
            wrong = wrong or [name for name in head if name not in columns] or head
            raise DataError(
                f"The columns are not the expected ones: see {', '.join(wrong)}.",
                path=path,
                line=1,
                resolve=f"use the columns {', '.join(columns)} in this order.",
            )
        found = []
        for cells in reader:
            row = CsvRow(path, reader.line_num, dict(zip(columns, cells, strict=False)))
            if len(cells) != len(columns):
                raise row.error(
                    f"The line has {len(cells)} cells, not {len(columns)}.",
                    resolve="put text that holds commas in quotes.",
                )
            found.append(row)
    return found


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Recorded(_Frozen):
    """What a notebook measured for one claim."""

    id: str
    value: StrictInt | StrictFloat | StrictStr
    figure: str
    note: str = ""
    interval: tuple[float, float] | None = None


class Shows(_Frozen):
    """A figure or table that a notebook saved, and what it regenerates."""

    file: str
    shows: tuple[str, ...] = ()
    caption: str = ""


class Manifest(_Frozen):
    """What one run of a notebook left behind."""

    folder: Path
    notebook: str
    source: Literal["twin", "real"]
    profile: Literal["interactive", "smoke", "default", "paper"]
    seeds: tuple[int, ...] = ()
    parameters: dict[str, Any] = {}
    figures: tuple[Shows, ...] = ()
    tables: tuple[Shows, ...] = ()
    claims: tuple[Recorded, ...] = ()

    @property
    def path(self) -> Path:
        """The manifest file itself."""
        return self.folder / results.MANIFEST

    def draws(self, name: str) -> int | None:
        """How many draws a parameter lists, by default the seeds; None for what needs none."""
        if not name or name.isdigit():
            return int(name) if name else None
        return len(self.parameters.get(name, self.seeds))

    def file(self, results_folder: Path, name: str) -> str:
        """Path of one of its files below the results folder, with forward slashes."""
        return (self.folder / name).relative_to(results_folder).as_posix()


def manifests(results_folder: Path) -> list[Manifest]:
    """Every manifest below a results folder, checked; empty where the folder does not exist.

    Raises
    ------
    DataError
        If a manifest is not one.
    """
    found = []
    for path in sorted(results_folder.glob(f"*/*/{results.MANIFEST}")):
        wrong = ""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                found.append(Manifest.model_validate({**content, "folder": path.parent}))
            else:
                wrong = "The manifest is no JSON object"
        except ValidationError as error:
            first = error.errors()[0]
            wrong = f"{first['msg']} at {'.'.join(map(str, first['loc']))}"
        except (ValueError, RecursionError) as error:
            wrong = f"The manifest is not JSON: {error}"
        if wrong:
            raise DataError(f"{wrong}.", path=path, resolve="run the notebook that left it again.")
    return found


def near(word: str, known: Iterable[str]) -> str:
    """Clause that names the known words nearest to a misspelt one.

    Examples
    --------
    >>> near("helix-21", ["helix-20a", "helix-21a", "helix-21b", "xiong-1a"])
    'helix-21a or helix-21b'
    """
    known = list(known)
    begins = [other for other in known if word and other.startswith(word)]
    close = begins or difflib.get_close_matches(word, known, n=3)
    return " or ".join(close[:4]) if close else "a row that is there"
