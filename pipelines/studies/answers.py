"""What each notebook answers: a sentence whose numbers are read off its results, and a figure.

``pipelines/templates/answers.yaml`` has the sentences. ``{name}`` in one stands for a cell, or for
many that are reduced, of a table that the notebook leaves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from hetero import paths
from hetero.errors import DataError
from pipelines import schema
from pipelines.studies.results import MANIFEST


@dataclass(frozen=True, slots=True)
class Answer:
    """A sentence, the name of the figure that shows it, and the folder of runs that it is of."""

    sentence: str
    figure: str
    source: str


def answer(notebook: str, folder: Path) -> Answer | None:
    """Answer of a notebook by the fullest of its results below ``folder`` (:func:`places`).

    Returns None where no answer is written, or a run in small left out what it rests on.

    Raises
    ------
    DataError
        If a sentence asks for a column that its table does not have.
    """
    written = _written().get(notebook)
    if written is None:
        return None
    numbers = written.get("numbers", {})
    for traces in places(notebook, folder):
        place = folder / traces / notebook
        if not all((place / f"{one['table']}.csv").is_file() for one in numbers.values()):
            continue
        try:
            found = {name: _cell(place, **one) for name, one in numbers.items()}
        except LookupError:
            continue
        return Answer(written["says"].format(**found), f"{written['figure']}.svg", traces)
    return None


def places(notebook: str, folder: Path) -> list[str]:
    """Folders of runs below ``folder``, the fullest first: ``paper/twin``, ``real``, ``twin``.

    One in the paper profile counts that has pictures and is of the code of the default one.
    """
    usual = list(reversed(schema.SOURCES))
    fuller = [
        traces
        for traces in usual
        if any((run := folder / schema.PAPER / traces / notebook).glob("*.svg"))
        and code_of(run) == code_of(folder / traces / notebook)
    ]
    return [*(f"{schema.PAPER}/{traces}" for traces in fuller), *usual]


def code_of(run: Path) -> str:
    """Hash of the code that a run was of; empty where there is none."""
    file = run / MANIFEST
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return str(told.get("code_sha256", ""))


@cache
def _written() -> dict[str, Any]:
    return schema.plain_yaml(paths.root() / "pipelines" / "templates" / "answers.yaml")


def _cell(
    place: Path,
    table: str,
    column: str,
    where: dict[str, Any] | None = None,
    without: dict[str, Any] | None = None,
    reduce: str = "first",
    most: str = "",
    least: str = "",
) -> Any:
    """One value: of all rows that are asked for, or of the one with the ``most`` of a column."""
    frame = pd.read_csv(place / f"{table}.csv")
    for name in (column, *(where or {}), *(without or {}), *filter(None, (most, least))):
        if name not in frame.columns:
            raise DataError(
                f"The answer of {place.name} asks for '{name}', which '{table}' does not have.",
                path=place / f"{table}.csv",
                resolve=f"use one of {', '.join(map(str, frame.columns))}.",
            )
    for name, value in (where or {}).items():
        frame = frame[frame[name].isin(value if isinstance(value, list) else [value])]
    for name, value in (without or {}).items():
        frame = frame[frame[name] != value]
    if reduce == "count":
        return int(frame[column].count())
    if frame.empty:
        raise LookupError(table)
    if ordered := most or least:
        frame = frame.sort_values(ordered, ascending=not most, kind="stable")
    return frame[column].iloc[0] if reduce == "first" else frame[column].agg(reduce)
