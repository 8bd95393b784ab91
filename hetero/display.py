"""One table per object, shown as text in a shell and as HTML in JupyterLab."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

PLAIN = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML where dollar signs are prices; JupyterLab would typeset what is between two."""

_WHOLE = 24  # characters of a cell that is never broken into lines
_LINES = 40  # of what an interpreter shows unasked
_TEX = str.maketrans(
    {one: f"\\{one}" for one in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its label, its unit, how many significant digits it shows, and of what.

    Attributes
    ----------
    of
        What of an object stands in the column (:meth:`Table.of`): the path of an attribute, as
        ``"gpu.name"``, or a function of the object.
    """

    label: str
    unit: str = ""
    digits: int = 4
    of: str | Callable[[Any], object] | None = None

    @property
    def heading(self) -> str:
        """Label with the unit in brackets, as it stands above the column."""
        return f"{self.label} [{self.unit}]" if self.unit else self.label

    def cell(self, item: object) -> object:
        """What of an object stands in the column; nothing where a part of the path is None."""
        if callable(self.of):
            return self.of(item)
        for name in (self.of or self.label).split("."):
            if item is None:
                return None
            item = getattr(item, name)
        return item

    def show(self, value: object) -> str:
        """Text of one cell; numbers are rounded to ``digits`` significant digits."""
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int):
            return f"{value:,}"
        if isinstance(value, float):
            if math.isnan(value):
                return "-"
            if math.isinf(value):
                return "inf" if value > 0 else "-inf"
            if value == 0:
                return "0"
            power = math.floor(math.log10(abs(float(f"{value:.{self.digits}g}"))))
            if -self.digits <= power < 9:
                return f"{value:,.{max(0, self.digits - 1 - power)}f}"
            return f"{value:.{self.digits}g}"
        return str(value)


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """Rows under headings with units, a title above and notes below.

    Examples
    --------
    >>> print(Table("GPUs", (Column("name"), Column("memory", "GiB")), (("A100", 80),)))
    GPUs
    name  memory [GiB]
    ----  ------------
    A100            80
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[object, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, columns: Sequence[Column], items: Iterable[object], *notes: str
    ) -> Table:
        """A row per object, each column by its own ``of``; empty notes are left out.

        Examples
        --------
        >>> print(Table.of("", (Column("real"), Column("half", "1", of=lambda z: z / 2)), [3]))
        real  half [1]
        ----  --------
           3     1.500
        """
        rows = tuple(tuple(column.cell(item) for column in columns) for item in items)
        return cls(title, tuple(columns), rows, tuple(note for note in notes if note))

    @classmethod
    def figures(
        cls, title: str, *figures: tuple[str, object, str], notes: Iterable[str] = ()
    ) -> Table:
        """One row per figure: what it is, its value and its unit."""
        columns = (Column("figure"), Column("value"), Column("unit"))
        return cls(title, columns, figures, tuple(note for note in notes if note))

    def _cells(self) -> list[list[str]]:
        return [
            [column.show(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def _numeric(self) -> list[bool]:
        return [
            any(isinstance(row[k], int | float) for row in self.rows)
            for k in range(len(self.columns))
        ]

    def __str__(self) -> str:
        cells, numeric = self._cells(), self._numeric()
        head = [column.heading for column in self.columns]
        widths = [max(len(line[k]) for line in [head, *cells]) for k in range(len(head))]

        def line(values: Sequence[str]) -> str:
            padded = [
                value.rjust(width) if right else value.ljust(width)
                for value, width, right in zip(values, widths, numeric, strict=True)
            ]
            return "  ".join(padded).rstrip()

        body = [line(head), "  ".join("-" * width for width in widths), *map(line, cells)]
        return "\n".join(([self.title] if self.title else []) + body + list(self.notes))

    def __repr__(self) -> str:
        return _short(str(self))

    def to_latex(self) -> str:
        r"""The same as a ``tabular`` of LaTeX, with the rules of booktabs.

        Examples
        --------
        >>> print(Table("", (Column("share", "%"), Column("GPU")), ((50.0, "A_1"),)).to_latex())
        \begin{tabular}{rl}
        \toprule
        share [\%] & GPU \\
        \midrule
        50.00 & A\_1 \\
        \bottomrule
        \end{tabular}
        """
        lines = [[c.heading for c in self.columns], *self._cells()]
        head, *body = (" & ".join(one.translate(_TEX) for one in line) + r" \\" for line in lines)
        sides = "".join("r" if right else "l" for right in self._numeric())
        begin, end = rf"\begin{{tabular}}{{{sides}}}", r"\end{tabular}"
        return "\n".join((begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end))

    def _repr_html_(self) -> str:
        # Only inherited colours, so that light and dark themes both work.
        def cell(tag: str, text: str, right: bool) -> str:
            side = "right" if right else "left"
            # Names of GPUs would break at their hyphens.
            whole = ";white-space:nowrap" if tag == "td" and len(text) <= _WHOLE else ""
            style = f"text-align:{side};padding:2px 10px{whole}"
            return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'

        numeric = self._numeric()
        head = "".join(
            cell("th", c.heading, right) for c, right in zip(self.columns, numeric, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(cell("td", v, right) for v, right in zip(row, numeric, strict=True))
            + "</tr>"
            for row in self._cells()
        )
        notes = "".join(f"<div><small>{html.escape(note)}</small></div>" for note in self.notes)
        title = f"<div><b>{html.escape(self.title)}</b></div>" if self.title else ""
        return (
            f'<div class="{PLAIN}">{title}<table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>{notes}</div>"
        )

    def to_frame(self) -> pd.DataFrame:
        """The same rows as a pandas frame, headings with units."""
        import pandas as pd

        return pd.DataFrame(
            [list(row) for row in self.rows], columns=[c.heading for c in self.columns]
        )


def _short(text: str) -> str:
    lines = text.split("\n")
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = [f"[{len(lines) - _LINES + 1:,} more lines: print() shows them]"]
    return "\n".join(lines)


class Shown(ABC):
    """Mixin: an object with a ``table()`` shows it in the shell and in JupyterLab."""

    __slots__ = ()

    @abstractmethod
    def table(self) -> Table:
        """The table that shows this object."""

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        # For dataclasses with repr=False, whose arrays would fill the screen.
        return _short(str(self))

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
