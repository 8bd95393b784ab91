"""``hetero gpus``: what is measured, derived, estimated or assumed for every GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def gpus(
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """What is measured, derived, estimated or assumed for every GPU, with its expected error."""
    from hetero.latency.calibration import known

    text = known.markdown() if markdown else f"{known.known()}\n\n{known.levels()}\n"
    print(text, end="")
