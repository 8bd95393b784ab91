"""What is committed: tables of data/ beside what they are made from, and what notebooks compare."""

from __future__ import annotations

import ast
from typing import Any

import pandas as pd

from hetero import paths
from pipelines import source
from pipelines.studies.derived_tables import difference


def same(made: pd.DataFrame, *name: str) -> None:
    """Assert that a frame is the table of that name, the words of it and its numbers."""
    where = difference(made, paths.data(*name).read_text(encoding="utf-8"))
    assert where is None, f"{'/'.join(name)}: {where}"


def told(notebook: str, *names: str, **given: object) -> dict[str, Any]:
    """What a notebook gives these names, by the statements that do."""
    body = ast.parse(source.code(source.notebook_path(notebook))).body
    wanted = [x for x in body if isinstance(x, ast.Import | ast.ImportFrom) or _given(x, names)]
    exec(compile(ast.Module(wanted, []), notebook, "exec"), given)
    return given


def _given(statement: ast.stmt, names: tuple[str, ...]) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name in names
    stored = (x for x in ast.walk(statement) if isinstance(getattr(x, "ctx", None), ast.Store))
    return any(ast.unparse(x).split("[")[0] in names for x in stored)
