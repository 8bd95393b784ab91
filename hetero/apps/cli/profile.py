"""``hetero profile`` and ``measure``: the latency of a running server, and of a layer."""

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
