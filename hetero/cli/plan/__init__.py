"""``hetero plan``: how to deploy a model on a fleet; one module per method."""

from __future__ import annotations

import importlib

import typer

# Each module adds its command to the group in ``register(group)``.
_COMMANDS: tuple[str, ...] = ("phases", "layers", "islands")


def register(app: typer.Typer) -> None:
    """Add the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Plan how a fleet serves a model.")
    for command in _COMMANDS:
        importlib.import_module(f"hetero.cli.plan.{command}").register(group)
    # Keeps a command a subcommand while it is the only one.
    group.callback()(lambda: None)
    if _COMMANDS:
        app.add_typer(group, name="plan")
