"""From an item of a paper to its code, by what docstrings say of themselves.

The docstring of what implements an equation, an algorithm or a named idea says so in lines of one
form, ``Source: PAPER, WHERE: WHAT; SYMBOLS.``, the symbols where there are any. Figures and tables
are those of ``data/published/figures.csv``, with the functions whose docstrings cite them.
``python -m pipelines.docs.papers`` writes the page, ``hetero papers IWRR`` searches it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetero import paths
from hetero.display import Column, Table
from pipelines import dependencies, source
from pipelines.studies.coverage import NOT_REGENERATED, figures
from pipelines.studies.published import PAPERS

PAGE = Path(__file__).parent / "pages" / "papers.md"
_NAMES = "|".join(map(re.escape, PAPERS.values()))
TAG = re.compile(rf"^ *Source: ({_NAMES}), ([^:]+): ([^;]+?)(?:; (.+))?\.$", re.MULTILINE)
_CITED = re.compile(
    rf"({_NAMES})(?:'s)?,? (Fig\.|Table)s? ([\d.]*\d)(?:[a-z]?(?: (to|and) (\d+))?)"
)
_KINDS = ("eq.", "Algorithm", "section", "appendix", "Fig.", "Table")
NOT_IMPLEMENTED = (
    ("xiong", "section 4.1", "learned output predictors (S3)", "need a trained model"),
    ("rignall", "section 4.5.1", "non-linear assignment", "section 4.8.1 makes it linear"),
    ("helix", "section 4.6", "rounding of the relaxed program", "the paper advises against it"),
    ("thunderserve", "appendix A", "NP-hardness of deployment planning", "a proof"),
)


@dataclass(frozen=True, slots=True)
class Item:
    """An equation, algorithm, table, figure or named idea of a paper.

    Attributes
    ----------
    places
        What implements it: file and name, the name empty where a whole module does.
    remark
        Why nothing does.
    """

    paper: str
    where: str
    what: str
    symbols: str = ""
    places: tuple[tuple[str, str], ...] = ()
    notebooks: tuple[str, ...] = ()
    remark: str = ""

    def matches(self, words: Sequence[str]) -> bool:
        """Whether it has every word; letters may be the beginning of one, figures are whole."""
        own = [*_words(self.paper), *_words(self.where), *_words(self.what), *_words(self.symbols)]
        return all(
            any(word == one or (word[0].isalpha() and one.startswith(word)) for one in own)
            for word in words
        )


def find(text: str = "") -> tuple[Item, ...]:
    """Items with every word of a text, such as ``"IWRR"`` or ``"xiong eq. 7"``.

    Examples
    --------
    >>> [item.places for item in find("IWRR")]
    [(('hetero/routers/pipelines.py', 'by_weight'),)]
    """
    return tuple(item for item in items() if item.matches(_words(text)))


def table(found: Sequence[Item]) -> Table:
    """Items with the code that implements them."""
    columns = (
        *(Column("paper", of=lambda item: PAPERS[item.paper]), Column("where"), Column("what")),
        Column("code", of=lambda item: ", ".join(":".join(filter(None, at)) for at in item.places)),
        *(Column("notebook", of=lambda item: ", ".join(item.notebooks)), Column("remark")),
    )
    return Table.of("From the papers to the code", columns, found)


@cache
def items() -> tuple[Item, ...]:
    """Every item, by paper, kind and number."""
    tagged, cited = [], dict[tuple[str, str], list[tuple[str, str]]]()
    keys = {title: key for key, title in PAPERS.items()}
    for file, name, text in docstrings():
        for title, where, what, symbols in TAG.findall(text):
            paper = keys[title]
            own = {figure.notebook for figure in figures() if figure.paper == paper}
            used = tuple(n[:2] for n in source.notebooks() if n in own and file in _modules(n))
            tagged.append(Item(paper, where, what, symbols, ((file, name),), used))
        for title, kind, first, word, last in _CITED.findall(text):
            numbers = map(str, range(int(first), int(last) + 1)) if word == "to" else (first, last)
            for number in filter(None, numbers):
                places = cited.setdefault((keys[title], f"{kind} {number}"), [])
                places.extend([] if (file, name) in places else [(file, name)])
    known = {(item.paper, item.where) for item in tagged}
    drawn = [
        Item(
            one.paper,
            one.where if one.where[0].isalpha() else f"section {one.where}",
            one.title,
            places=tuple(cited.get((one.paper, one.where), ())),
            notebooks=(one.notebook[:2],) if one.notebook else (),
            remark=NOT_REGENERATED.get(one.kind, ""),
        )
        for one in figures()
        if one.kind not in ("algorithm", "diagram") and (one.paper, one.where) not in known
    ]
    missing = [Item(*row[:3], remark=f"not implemented: {row[3]}") for row in NOT_IMPLEMENTED]
    return tuple(sorted([*tagged, *drawn, *missing], key=_order))


@cache
def docstrings() -> tuple[tuple[str, str, str], ...]:
    """File, name and text of every docstring of the library and the pipeline."""
    root = paths.root()
    return tuple(
        (file.relative_to(root).as_posix(), name, text)
        for folder in ("hetero", "pipelines")
        for file in sorted((root / folder).rglob("*.py"))
        if "build" not in file.relative_to(root).parts
        for name, text in _docstrings(ast.parse(file.read_text(encoding="utf-8")))
    )


def _docstrings(tree: ast.AST, name: str = "") -> Iterator[tuple[str, str]]:
    """Names within a module and texts, those below assignments under the name they stand in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield name, node.value.value
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from _docstrings(node, f"{name}.{node.name}".lstrip("."))


def page(link: Callable[[str], str] = "../../../{}".format) -> str:
    """The page; ``link`` says where a file of the checkout is read, nowhere if empty."""
    lines = [
        "# From a paper to its code",
        "",
        "Written from the docstrings by `python -m pipelines.docs.papers`; `hetero papers IWRR`",
        "searches the same rows. Formulas that a paper does not number stand under their section;",
        "its diagrams are redrawn on [a page of their own](diagrams.md).",
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", "| where | what | symbols | code | notebook |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for item in (item for item in items() if item.paper == paper):
            symbols = f"`{item.symbols}`" if item.symbols else ""
            code = _linked(link, item.places) or item.remark
            used = ", ".join(item.notebooks)
            lines.append(f"| {item.where} | {item.what} | {symbols} | {code} | {used} |")
    return "\n".join([*lines, ""])


def _linked(link: Callable[[str], str], places: Sequence[tuple[str, str]]) -> str:
    """Each file once, with the names in it."""
    files: dict[str, list[str]] = {}
    for file, name in places:
        files.setdefault(file, []).extend([f"`{name}`"] if name else [])
    return "; ".join(
        " ".join([f"[`{file}`]({to})" if (to := link(file)) else f"`{file}`", ", ".join(names)])
        for file, names in files.items()
    )


@cache
def _modules(notebook: str) -> dict[str, str]:
    return dependencies.modules(source.section(notebook))


def _words(text: str) -> list[str]:
    return [word for one in text.lower().split() if (word := one.strip(",.;:()'"))]


def _order(item: Item) -> tuple[int, int, list[int], str, bool]:
    kind = next(k for k, one in enumerate(_KINDS) if item.where.startswith(one))
    number = [int(one) for one in re.findall(r"\d+", item.where)]
    return list(PAPERS).index(item.paper), kind, number, item.where, not item.places


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
