"""What ``%load_ext hetero`` adds to IPython: ``%%fleet`` and ``%plan``."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

import hetero
from hetero.apps.ask import PLAN
from hetero.apps.cli import options
from hetero.cluster import Cluster
from hetero.errors import HeteroError, require


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%fleet`` and ``%plan``; a sentence tells what is wrong with a question."""
    for magic, kind in ((fleet, "cell"), (plan, "line")):
        call = partial(_told, magic, shell.user_ns)
        shell.register_magic_function(call, kind, magic.__name__)


def _told(magic: Callable[..., Any], names: dict[str, Any], *given: str) -> Any:
    from IPython.core.error import UsageError

    try:
        return magic(names, *given)
    except typer.TyperException as error:
        raise UsageError(f"{error.format_message()} Resolve: see `%plan --help`.") from None
    except HeteroError as error:
        raise UsageError(str(error)) from None


def fleet(names: dict[str, Any], line: str, cell: str) -> Cluster:
    """``%%fleet NAME``: the cluster file in the cell, kept under the name (``fleet`` for none)."""
    name = line.strip() or "fleet"
    require(name.isidentifier(), f"'{name}' is no name.", resolve="write one, as %%fleet mine.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.yaml")
        file.write_text(cell, encoding="utf-8")
        try:
            names[name] = found = Cluster.load(file)
        except HeteroError as error:
            what = (one.replace(str(file), "%%fleet") for one in (error.what, error.resolve))
            raise HeteroError(next(what), resolve=next(what)) from None
    return found


def plan(names: dict[str, Any], line: str) -> Any:
    """``%plan FLEET --model M ...``: the card of ``hetero plan`` for a variable, a name or a file.

    What is given as cluster, model or trace is looked for among the variables first.
    """
    cards: list[Any] = []

    @options.asking(PLAN)
    def card(asked: dict[str, Any]) -> None:
        """The options of ``hetero plan``."""
        asked |= {key: names.get(asked[key], asked[key]) for key in ("cluster", "model", "trace")}
        cards.append(options.told("plan", hetero.plan, **asked))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("%plan")(card)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise HeteroError(f"%plan: {error}.", resolve="close the quotation.") from None
    typer.main.get_command(app).main(words, "%plan", standalone_mode=False)
    return cards[0] if cards else None
