"""``hetero measure``: times of a layer on the device at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


def measure(
    model: Annotated[str, typer.Argument(help="Model of the catalog; weights are random.")],
    output: Annotated[Path | None, options.output("Write the times to this CSV file.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto.")] = "auto",
    batch: Annotated[str, typer.Option(help="Batch sizes, by commas.")] = "1,2,4,8,16,32",
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt lengths.")] = "128,512,2048",
    context_tokens: Annotated[
        str, typer.Option("--context", help="Cached tokens per request of decode steps.")
    ] = "128,1024,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs per setting.")] = 10,
    force: options.Force = False,
) -> None:
    """Time one layer of a dense model over batch sizes and lengths.

    The file can be fitted with `hetero fit`; times of a whole model are those of a layer times
    the number of layers, and the head.
    """
    from hetero.apps.profiling import measuring
    from hetero.catalog import llm

    options.new_file(output, force)
    found = measuring.measure(
        llm(model),
        device=device,
        dtype=dtype,
        batches=options.whole_numbers("--batch", batch),
        inputs=options.whole_numbers("--input", input_tokens),
        contexts=options.whole_numbers("--context", context_tokens),
        repeats=repeats,
        progress=lambda name: print(name, file=sys.stderr) if sys.stderr.isatty() else None,
    )
    if output is not None:
        found.save(output, force=force)
    print(found)
    if output is not None:
        print(f"\nWrote {output}.")
