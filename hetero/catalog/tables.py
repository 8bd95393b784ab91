"""Reading the tables of data/specs, and looking names up in them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar, overload

from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, DataError
from hetero.naming import RULE, good, one_line


class Record(Protocol):
    """What a row of a catalog offers: a name, other names for it, and what a list shows."""

    @property
    def name(self) -> str:
        """Name of the row, unique in its table."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that find it."""
        ...

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of them shows of each."""
        ...


T = TypeVar("T", bound=Record)


class Records(Shown, Sequence[T], Generic[T]):
    """All rows of one catalog table, in the order of the file; shows itself as a table."""

    __slots__ = ("_by_key", "_records", "kind")

    def __init__(self, kind: str, records: Iterable[T]) -> None:
        self.kind = kind
        self._records = tuple(records)
        self._by_key: dict[str, T] = {}
        for record in self._records:
            for name in (record.name, *record.aliases):
                if self._by_key.setdefault(key_of(name), record) is not record:
                    raise CatalogError(
                        f"The name '{name}' stands for two rows of the {kind} table.",
                        resolve="give each row its own name and aliases.",
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows, without aliases."""
        return tuple(record.name for record in self._records)

    def get(self, name: str) -> T | None:
        """Row of that name or alias, as :meth:`find` takes them; None without one."""
        return self._by_key.get(key_of(name))

    def find(self, name: str, fit: Callable[[T], bool] | None = None) -> T:
        """Row of that name or alias; upper and lower case, spaces and hyphens do not matter.

        Near names are told of rows that ``fit``.

        Raises
        ------
        CatalogError
            If there is none, with the nearest names.
        """
        record = self.get(name) if isinstance(name, str) else None
        if record is not None:
            return record
        alike = self.near(str(name))
        near = [one for one in alike if fit is None or fit(self.find(one))]
        rule = f"use {' or '.join(near)}." if near else f"use one of {', '.join(self.names)}."
        if alike and not near:
            rule = f"describe it under gpus: in the cluster file; it is not {alike[0]}."
        raise CatalogError(f"No {self.kind} is called '{name}'.", resolve=rule)

    def near(self, name: str) -> list[str]:
        """Up to five names that hold the given one, are held by it, or begin much like it."""
        key, few = key_of(name), len(key_of(name)) < _NAME
        # Few characters are part of names that are nothing like them: L5 of RubinU-NVL576.
        holds = str.startswith if few else str.__contains__
        found = [r.name for k, r in self._by_key.items() if key and holds(k, key)]
        if not found and (held := [k for k in self._by_key if len(k) >= _NAME and k in key]):
            longest = max(map(len, held))  # "org/Llama-3.1-8B-Instruct" holds Llama-3.1-8B
            found = [self._by_key[k].name for k in held if len(k) == longest]
        if not found and key:
            starts = {k: k[: len(key)] for k in self._by_key}
            close = difflib.get_close_matches(key, starts.values(), n=5, cutoff=0.5 if few else 0.7)
            found = [self._by_key[k].name for start in close for k in starts if starts[k] == start]
        return list(dict.fromkeys(found))[:5]

    def table(self) -> Table:
        """One line per row."""
        columns = type(self._records[0]).columns() if self._records else ()
        return Table.of("", columns, self._records)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[T]:
        return iter(self._records)


_NAME = 4  # letters and digits that tell a name in a longer one


def key_of(name: str, kept: str = "") -> str:
    """Small letters, digits and dots of a name, by which it is found, and what else is kept."""
    return "".join(c for c in name.lower() if c.isalnum() or c in ("." + kept))


def read_table(path: Path, kind: str, record: type[T]) -> Records[T]:
    """Rows of a CSV file as records of a dataclass, its headings being the field names.

    Raises
    ------
    DataError
        If a column, a value or a required cell is wrong.
    """
    from hetero.rows import read_records

    rows = read_records(path, record)
    return Records(kind, [build(record, row, path, k + 2) for k, row in enumerate(rows)])


def build(record: type[T], row: Mapping[str, object], path: Path, line: int) -> T:
    """One record from typed cells; missing cells take the dataclass's defaults."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in row:
            raise DataError(
                "the cell is empty, but a value is needed.",
                path=path,
                line=line,
                column=name,
                resolve="fill the cell.",
            )
    called = row.get("name")
    if isinstance(called, str) and not good(called):
        raise DataError(
            f"'{one_line(called)}' is no name.", path=path, line=line, resolve=f"give {RULE}."
        )
    try:
        return record(**row)
    except CatalogError as error:
        raise DataError(error.what, path=path, line=line, resolve=error.resolve) from None
