"""``hetero gpus``: what is measured, derived, estimated or assumed for every GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("gpus")(gpus)


def gpus(
    markdown: Annotated[bool, typer.Option(help="Print the table as the README has it.")] = False,
) -> None:
    """What is measured, derived, estimated or assumed for every GPU, with its expected error."""
    from hetero.latency.calibration import known

    if markdown:
        print(known.markdown(), end="")
    else:
        print(known.known())
        print()
        print(known.levels())
