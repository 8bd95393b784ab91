"""``hetero repro | status | sweep | verify | claims | figures | papers | tables``, of checkouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options
from hetero.errors import require

if TYPE_CHECKING:
    from hetero.display import Table


def repro(
    profile: Annotated[
        str | None, typer.Option(help="Set it in params.yaml first: smoke, default or paper.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Set workload.source first: twin or real traces.")
    ] = None,
) -> None:
    """Bring every figure, table and the report up to date; what is fresh is not run again."""
    from pipelines.repro import repro as bring

    bring(profile=profile, traces=source)


def status(as_json: options.AsJson = False) -> None:
    """Show which results are fresh, which are stale, and why."""
    from pipelines.status import status as found

    _print(found().table(), as_json)


def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file, as pipelines/sweeps/theta.yaml.")],
    on: Annotated[
        str, typer.Option(help="loky (this machine), dask:ADDRESS or ray:ADDRESS.")
    ] = "loky",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes at once, at least 2 here; 0 takes all.")
    ] = 0,
    output: Annotated[
        Path | None, options.output("Folder; by default results/sweeps/NAME.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run every point that is not finished yet, and collect all of them.

    Each point is a run of the notebook in a folder of its own; a stopped sweep goes on with the
    same command. Points that failed are listed, and tried again by the next call.
    """
    from pipelines.sweep import run

    found = run.sweep(file, on=on, workers=workers, folder=output)
    if as_json:
        rows = found.frame.to_dict("records")
        failed = [{"file": f, "values": v, "why": w} for f, v, w in found.failed]
        print(options.to_json({"planned": found.planned, "points": rows, "failed": failed}), end="")
    else:
        print(found)
    run.check(found)


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
    from pipelines.verify import verify as rerun

    found = rerun(traces=source, keep=keep)
    _print(found.table(), as_json)
    if not found.reproduced:
        raise typer.Exit(1)


def claims(
    paper: Annotated[
        str | None, typer.Option(help="One paper: xiong, heteroserve, rignall, helix, ...")
    ] = None,
    audit: Annotated[
        bool, typer.Option(help="Only rows that an audit named: verdict before and now, and why.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show each published value beside the measured one, and the verdict."""
    from pipelines.studies.claims import verdicts

    found = verdicts(_results())
    if paper is not None:
        found = found.of(paper)
    _print(found.audit() if audit else found.table(), as_json, found.records())


def figures(as_json: options.AsJson = False) -> None:
    """Show which figures, tables and algorithms of the papers are regenerated, and where."""
    from pipelines.studies.coverage import coverage

    found = coverage(_results())
    _print(found.table(), as_json, found.records())


def papers(
    words: Annotated[
        list[str] | None, typer.Argument(help="Such as IWRR, or helix MILP, or xiong eq. 7.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which code implements an equation, algorithm, table or named idea of the papers."""
    from pipelines.docs.papers import find, table

    require(
        bool(found := find(" ".join(words or ()))),
        f"Nothing of the papers has all of the words '{' '.join(words or ())}'.",
        resolve="leave one out, or see `hetero papers` for all that there is.",
    )
    _print(table(found), as_json)


def tables(
    names: Annotated[
        list[str] | None, typer.Argument(help="Some of them, as measured/efficiencies.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write them below this folder.")
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Make the derived tables of data/ anew from the published files, and show which differ.

    Exits with 1 if one does, beyond the rounding of another processor. Some take a minute.
    """
    from pipelines.studies.derived_tables import remake

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    found = remake(names or (), folder=output, force=force, progress=say)
    say("")
    _print(found.table(), as_json)
    if found.different:
        raise typer.Exit(1)


def _results() -> Path:
    from hetero import paths

    return paths.results()


def _print(table: Table, as_json: bool, records: list[dict[str, Any]] | None = None) -> None:
    if as_json:
        rows = records if records is not None else table.to_frame().to_dict("records")
        print(options.to_json(rows), end="")
    else:
        print(table)
