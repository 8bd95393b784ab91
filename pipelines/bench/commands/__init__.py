"""``hetero bench``: how fast this library is here; one module per command."""

from __future__ import annotations

import importlib

import typer

# Each module adds its command to the group in ``register(group)``.
_COMMANDS = (
    *("simulate", "routers", "phases", "placement", "islands", "pipelines", "scale", "serve"),
    *("sweep", "live", "arena"),
)


group = typer.Typer(no_args_is_help=True, help="Measure how fast hetero is on this machine.")
for _command in _COMMANDS:
    importlib.import_module(f"pipelines.bench.commands.{_command}").register(group)
