"""``hetero bench``: how fast this library is here; one module per command."""

from __future__ import annotations

import importlib

import typer

# Each module adds its command to the group in ``register(group)``.
_COMMANDS = (
    *("simulate", "routers", "phases", "placement", "islands", "pipelines", "scale", "serve"),
    *("sweep", "live", "arena"),
)


def register(app: typer.Typer) -> None:
    """Add the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Measure how fast hetero is on this machine.")
    for command in _COMMANDS:
        importlib.import_module(f"pipelines.bench.commands.{command}").register(group)
    # Keeps a command a subcommand while it is the only one.
    group.callback()(lambda: None)
    app.add_typer(group, name="bench")
