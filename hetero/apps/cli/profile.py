"""``hetero profile``: the latency model of a running server."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


def profile(
    url: options.Url,
    model: options.ServedModel,
    output: Annotated[
        Path, options.output("CSV file of the measurements; one that is there is gone on with.")
    ],
    batch: Annotated[str, typer.Option(help="Requests at once, by commas.")] = "1,2,4,8",
    input_tokens: Annotated[str, typer.Option("--input", help="Input lengths.")] = "64,256,1024",
    output_tokens: Annotated[str, typer.Option("--tokens", help="Output lengths.")] = "32",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per setting.")] = 3,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before, not kept.")] = 1,
    max_seconds: Annotated[float, typer.Option(help="No round begins that would end later.")] = 600,
    max_tokens: Annotated[float, typer.Option(help="Tokens of all rounds together.")] = 1e6,
    timeout: Annotated[float, typer.Option(help="Longest wait for the next token [s].")] = 60,
    precision: Annotated[
        float, typer.Option(help="Half-width of a time's interval that would do [%].")
    ] = 5.0,
    check: Annotated[
        int,
        typer.Option(min=0, help="Fresh rounds after the fit, at other settings, to test it on."),
    ] = 0,
    fit: Annotated[
        Path | None, typer.Option(help="Write the fitted step model to this JSON file.")
    ] = None,
    force: options.Force = False,
    seed: options.Seed = 0,
) -> None:
    """Measure a server's prefill and decode times, and fit p1..p8 of Xiong et al. eq. 3-4.

    Sends rounds of streamed completions: never more at once than the largest batch, none twice.
    Each round is kept as it ends, so a stopped profile goes on with the same command. With
    --check the fit is then asked for rounds at settings between and beside the measured ones.
    A key for the server is taken from the environment variable HETERO_API_KEY.
    """
    from hetero.apps import profiling
    from hetero.latency import storage

    options.new_file(fit, force)
    endpoint = options.endpoint(url, model, timeout)
    settings = profiling.grid(
        options.whole_numbers("--batch", batch),
        options.whole_numbers("--input", input_tokens),
        options.whole_numbers("--tokens", output_tokens),
    )
    limits = profiling.ProfileLimits(max_seconds, max_tokens)

    run = partial(
        profiling.profile,
        endpoint,
        path=output,
        warm_up=warm_up,
        limits=limits,
        seed=seed,
        progress=partial(print, file=sys.stderr),
    )
    found = run(settings, repeats=repeats)
    print(found)
    result = profiling.fitted(output, wanted_percent=precision)
    print("\n" + "\n\n".join(str(table) for table in result.tables()))
    if check:
        others = profiling.between(settings, check, seed=seed)
        fresh = run(others, repeats=1, kept_for="check", after=found)
        print(f"\n{fresh}\n\n{profiling.checked(output, result.step)}")
    if fit is not None:
        storage.save(result.step, fit, force=force)
        print(f"\nWrote {fit}.")
