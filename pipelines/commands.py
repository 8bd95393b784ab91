"""``hetero repro | status | verify | claims | figures``: a checkout and what it shows."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from types import ModuleType

    from hetero.display import Table


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("repro")(repro)
    app.command("status")(status)
    app.command("verify")(verify)
    app.command("claims")(claims)
    app.command("figures")(figures)


def repro(
    profile: Annotated[
        str | None, typer.Option(help="Set it in params.yaml first: smoke, default or paper.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Set workload.source first: twin or real traces.")
    ] = None,
) -> None:
    """Bring every figure, table and the report up to date; what is fresh is not run again."""
    _pipeline("repro").repro(profile=profile, traces=source)


def status(as_json: options.AsJson = False) -> None:
    """Show which results are fresh, which are stale, and why."""
    _print(_pipeline("status").status().table(), as_json)


def verify(
    source: Annotated[
        str | None, typer.Option(help="twin or real traces; by default those of params.yaml.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Leave the clone that ran in this new folder.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Rerun the last commit from nothing in a temporary clone, and compare every result.

    Exits with 1 if a result did not come out again, up to the last digits.
    """
    found = _pipeline("verify").verify(traces=source, keep=keep)
    _print(found.table(), as_json)
    if not found.reproduced:
        raise typer.Exit(1)


def claims(
    paper: Annotated[
        str | None, typer.Option(help="One paper: xiong, heteroserve, rignall, helix, ...")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that were not attempted.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show each published value beside the measured one, and the verdict."""
    from pipelines.studies.claims import Verdicts, verdicts

    found = verdicts(_results())
    if paper is not None:
        found = found.of(paper)
    summary = found.summary
    if not everything:
        found = Verdicts(tuple(row for row in found if row.status != "not attempted"))
    _print(replace(found.table(), notes=(summary,)), as_json, found.records())


def figures(as_json: options.AsJson = False) -> None:
    """Show which figures, tables and algorithms of the papers are regenerated, and where."""
    from pipelines.studies.claims import coverage

    found = coverage(_results())
    _print(found.table(), as_json, found.records())


def _pipeline(module: str) -> ModuleType:
    """Import a module of ``pipelines``, which lies beside the package in a checkout only."""
    from hetero import paths

    paths.root()
    return importlib.import_module(f"pipelines.{module}")


def _results() -> Path:
    from hetero import paths

    return paths.results()


def _print(table: Table, as_json: bool, records: list[dict[str, Any]] | None = None) -> None:
    if as_json:
        rows = records if records is not None else table.to_frame().to_dict("records")
        print(options.to_json(rows), end="")
    else:
        print(table)
