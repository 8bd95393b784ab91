"""Which figures, tables and algorithms of the papers the results regenerate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetero import paths
from hetero.display import Column, Table
from hetero.errors import DataError
from pipelines.studies.published import PAPERS, Rows, manifests, near, picked, rows

COLUMNS = ("paper", "where", "title", "kind", "notebook", "remark")
#: Kinds that a notebook regenerates, and why it does not for the others.
REGENERATED = ("data", "algorithm")
NOT_REGENERATED = {
    "diagram": "not yet redrawn",
    "quoted": "quoted",
    "needs weights": "needs model weights",
}
DRAWINGS = "pipelines/docs/figures"  # the diagrams of the papers, redrawn


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A figure, table or algorithm of a paper, and the notebook that regenerates it."""

    paper: str
    where: str
    title: str
    kind: str
    notebook: str
    remark: str

    @property
    def key(self) -> str:
        """Name under which a notebook says that it shows it, such as ``"helix/Fig. 5"``."""
        return f"{self.paper}/{self.where}"


@dataclass(frozen=True, slots=True)
class Covered:
    """A published figure with the files that regenerate it, or why there are none."""

    figure: PublishedFigure
    files: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Coverage(Rows[Covered]):
    """One row per published figure, in the order of ``data/published/figures.csv``.

    Examples
    --------
    >>> from pathlib import Path
    >>> covered = coverage(Path("no results yet"))
    >>> next(row.why for row in covered if row.figure.key == "helix/Fig. 5")
    'not yet: 01_workloads'
    """

    @property
    def summary(self) -> str:
        """How many of the figures with data and of the algorithms are regenerated."""
        due = [row for row in self.rows if row.figure.kind in REGENERATED]
        diagrams = [row for row in self.rows if row.figure.kind == "diagram"]
        done, drawn = (sum(bool(row.files) for row in rows) for rows in (due, diagrams))
        rest = len(self) - len(due) - len(diagrams)
        return (
            f"{done} of {len(due)} figures, tables and algorithms regenerated, {drawn} of "
            f"{len(diagrams)} diagrams redrawn; {rest} more are only quoted or need model weights."
        )

    def table(self) -> Table:
        """Every published figure with its files."""
        columns = (
            *(Column(name, of=f"figure.{name}") for name in COLUMNS[:4]),
            Column("files", of=lambda row: ", ".join(row.files)),
            Column("why not", of="why"),
        )
        return Table.of("Published figures", columns, self.rows, self.summary)

    def records(self) -> list[dict[str, object]]:
        """The same as plain values, for JSON."""
        return [
            {**picked(row.figure, *COLUMNS[:5]), "files": list(row.files), "why": row.why}
            for row in self.rows
        ]


@cache
def figures() -> tuple[PublishedFigure, ...]:
    """Every row of ``data/published/figures.csv``, in its order.

    Raises
    ------
    DataError
        If a row is malformed; the text names file, line and column.
    """
    return read(paths.data("published", "figures.csv"))


def read(path: Path) -> tuple[PublishedFigure, ...]:
    """Rows of a list of figures in any place, checked as ``figures()`` does."""
    found: dict[str, PublishedFigure] = {}
    for row in rows(path, COLUMNS):
        row.one_of("paper", PAPERS)
        row.one_of("kind", (*REGENERATED, *NOT_REGENERATED))
        for column in ("where", "title"):
            row.required(column)
        if row["kind"] in REGENERATED:
            row.required("notebook")
        figure = PublishedFigure(**row.cells)
        if figure.key in found:
            raise row.error(f"'{figure.key}' is there twice.", resolve="keep one of the two.")
        found[figure.key] = figure
    return tuple(found.values())


def coverage(results_folder: Path | None = None) -> Coverage:
    """Find the files in the results that regenerate each published figure.

    Parameters
    ----------
    results_folder
        Folder that the pipeline writes to; by default the one of this checkout.

    Raises
    ------
    DataError
        If a notebook says that it shows something that the list of figures does not have.
    """
    folder = results_folder if results_folder is not None else paths.results()
    files: dict[str, list[str]] = {figure.key: [] for figure in figures()}
    for manifest in manifests(folder):
        for item in (*manifest.figures, *manifest.tables):
            for key in item.shows:
                if key not in files:
                    raise DataError(
                        f"'{item.file}' of notebook {manifest.notebook} shows '{key}', which is "
                        "not among the published figures.",
                        path=manifest.path,
                        resolve=f"write {near(key, files)}.",
                    )
                files[key].append(manifest.file(folder, item.file))
    for figure in figures():
        drawing = f"{DRAWINGS}/{drawing_name(figure.key)}"
        if figure.kind == "diagram" and (paths.root() / drawing).is_file():
            files[figure.key].append(drawing)
    return Coverage(
        tuple(
            Covered(figure, tuple(files[figure.key]), "" if files[figure.key] else _why(figure))
            for figure in figures()
        )
    )


def drawing_name(key: str) -> str:
    """Name of the file that redraws a diagram.

    Examples
    --------
    >>> drawing_name("helix/Fig. 3")
    'helix-fig-3.svg'
    """
    return re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-") + ".svg"


def _why(figure: PublishedFigure) -> str:
    if figure.kind in REGENERATED:
        return f"not yet: {figure.notebook}"
    reason = NOT_REGENERATED[figure.kind]
    return f"{reason}: {figure.remark}" if figure.kind == "quoted" and figure.remark else reason
