"""``hetero bench phases``: how long it takes to plan a phase-split service."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("phases")(phases)


def phases(
    gpus: Annotated[
        str, typer.Option(help="Sizes of the fleet: 16, 24, 32 and 256 GPUs, by commas.")
    ] = "16,24,32,256",
    as_json: options.AsJson = False,
    record: options.Record = False,
) -> None:
    """Measure plans from scratch, by the paper's tabu search and by ours, and light rescheduling.

    LLaMA-30B on the paper's cloud, parts of it, and eight times it; CPU time of one process.
    """
    from dataclasses import asdict

    from hetero import timings
    from hetero.errors import ParameterError
    from pipelines.bench.phases import PUBLISHED_S, bench

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    sizes = options.whole_numbers("--gpus", gpus)
    if not set(sizes) <= set(PUBLISHED_S):
        raise ParameterError(f"--gpus cannot do '{gpus}'.", resolve="use 16, 24, 32 and 256.")
    found = bench(sizes, progress=say)
    say("")
    if record:
        timings.record(
            timings.Timing.here(
                f"phases.{what}.{size}",
                found.cpu_s(what, size),
                command="hetero bench phases --record",
                statistic="worst",
                repeats=sum((one.what, one.gpus) == (what, size) for one in found.searches),
            )
            for what, size in dict.fromkeys((one.what, one.gpus) for one in found.searches)
        )
    if as_json:
        print(options.to_json([asdict(one) for one in found.searches]), end="")
    else:
        print(found)
