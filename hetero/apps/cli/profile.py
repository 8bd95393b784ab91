"""``hetero profile``, ``measure``, ``fit`` and ``observe``: step times of what really runs."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.ask import pairs, word
from hetero.apps.cli import options
from hetero.encoding import finite
from hetero.errors import DataError, FitError, ParameterError

if TYPE_CHECKING:
    from hetero.latency.models.floor import FloorFit
    from hetero.latency.models.phase import PhaseFit


def profile(
    url: Annotated[str, typer.Argument(help="Address of the server, as http://localhost:8000.")],
    model: Annotated[str, typer.Option(help="Name under which the server knows the model.")],
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
    settings = profiling.grid(
        options.whole_numbers("--batch", batch),
        options.whole_numbers("--input", input_tokens),
        options.whole_numbers("--tokens", output_tokens),
    )
    limits = profiling.ProfileLimits(max_seconds, max_tokens)

    run = partial(
        profiling.profile,
        profiling.Endpoint(url, model, os.environ.get("HETERO_API_KEY", ""), timeout),
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


def fit(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV with columns phase (prefill or decode), batch, input_tokens, seconds or ms; "
            "decode rows give context_tokens (one step) or output_tokens (sum over the outputs)."
        ),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(help="Own heading of a column, as NAME=HEADING; may be repeated."),
    ] = None,
    weights: Annotated[
        Any,
        options.one_of(
            "hetero.latency.models.fitting:Weights",
            "Errors count relative to the time ('relative') or not ('none').",
        ),
    ] = "relative",
    non_negative: Annotated[
        bool, typer.Option("--non-negative", help="Hold every coefficient at 0 or more.")
    ] = False,
    floor: Annotated[
        bool, typer.Option("--floor", help="Fit prefill as max(floor, a b I + c) instead.")
    ] = False,
    form: Annotated[
        Any,
        options.one_of(
            "hetero.latency.models.phase:Form",
            "'full' (p1..p8), 'cross' (level and two slopes, where settings form a cross), or "
            "'tokens' (tokens of the batch and a constant).",
        ),
    ] = "full",
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the intervals.")] = 0.95,
    as_json: options.AsJson = False,
    output: Annotated[
        Path | None, options.output("Write the step model to this JSON file.")
    ] = None,
    force: options.Force = False,
) -> None:
    """Fit prefill and decode times to measurements, with intervals and errors.

    The coefficients are p1..p8 of Xiong et al. eq. 3-4.
    What the measurements cannot determine is refused, with what they do determine.
    """
    from hetero import latency
    from hetero.latency import storage
    from hetero.workload import readers

    headings = pairs("--column", column, word, "write NAME=HEADING, such as batch=bs.")
    try:
        measured = latency.read_csv(file, columns=headings)
    except DataError:
        if not (tool := readers.benchmark(file)):
            raise
        raise DataError(
            f"it is of {tool}: requests under load, whose steps are not told, and a fit needs the "
            "times of single steps.",
            path=file,
            resolve=f"refit step times to its requests with `hetero observe {file.name} --steps "
            "FILE --kv-tokens N`, or measure steps with `hetero profile URL --fit`.",
        ) from None
    prefill, decode = latency.fit(
        measured,
        form=form,
        weights=weights,
        non_negative=non_negative,
        floor=floor,
        confidence=confidence,
    )
    reduction, why = None, ""
    try:
        reduction = latency.Affine.from_fits(
            *_both(file, prefill, decode), source=f"fit of {file.name}"
        ).reduce()
    except (FitError, ParameterError) as error:
        if output is not None:
            raise
        why = error.what if isinstance(error, FitError) else str(error)
    shown = [str(part) for part in (prefill, decode, reduction) if part is not None]
    shown += [] if reduction else [f"No step model: {why}"]
    if output is not None and reduction is not None:
        storage.save(reduction.model, output, force=force)
        shown.append(f"Wrote {output}.")
    record = {
        "file": file.name,
        "weights": weights,
        "non_negative": non_negative,
        "confidence": confidence,
        "prefill": _as_dict(prefill),
        "decode": _as_dict(decode),
        "output": None if output is None else str(output),
    }
    options.show(as_json, lambda: record, *shown)


def _both(file: Path, prefill: Any, decode: Any) -> tuple[Any, Any]:
    """Fits of both phases, which a step model needs."""
    for name, part in (("prefill", prefill), ("decode", decode)):
        if part is None:
            what = f"{file.name} has no {name} rows, and a step model needs both phases."
            raise FitError(what, resolve=f"add {name} rows, or leave out --output.")
    return prefill, decode


def _as_dict(part: PhaseFit | FloorFit | None) -> dict[str, object] | None:
    if part is None:
        return None
    from hetero.latency.models.phase import PhaseFit

    linear = part.linear if isinstance(part, PhaseFit) else part
    return {
        "form": part.form if isinstance(part, PhaseFit) else "floor",
        "coefficients": {
            term.name: {
                "value": float(value),
                "low": float(low),
                "high": float(high),
                "unit": term.unit,
                "multiplies": term.column,
            }
            for term, value, low, high in zip(
                linear.terms, linear.coefficients, linear.low, linear.high, strict=True
            )
        },
        "accuracy": asdict(linear.accuracy),
    }


def observe(
    log: Annotated[
        Path,
        typer.Argument(
            help="Requests that an engine answered: what vllm bench serve, aiperf, guidellm or "
            "genai-perf wrote, or a table of your own with arrival_s, input_tokens, "
            "output_tokens, ttft_s, and tpot_s or e2e_s."
        ),
    ],
    steps: Annotated[
        Path,
        typer.Option(
            help="Step times told: a file of 'hetero profile --fit', or of an earlier observation."
        ),
    ],
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV cache told [tokens].")],
    replica: Annotated[
        str, typer.Option(help="Of a log of several engines, the one to observe.")
    ] = "",
    max_batch: Annotated[
        int, typer.Option(min=1, help="Requests that the engine decodes together, at most.")
    ] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step, at most.")] = 8192,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    free_share: Annotated[
        float,
        typer.Option(
            help="Share of the KV cache below which no prompt joins decoding requests (0 to 1); "
            "transformers serve keeps 0.15."
        ),
    ] = 0.0,
    schedule_ahead: options.ScheduleAhead = False,
    prefix_cache: options.PrefixCache = False,
    prefix_share: options.PrefixShare = None,
    tolerance: Annotated[
        float, typer.Option(help="Differences up to this share are named no fault (0 to 1).")
    ] = 0.1,
    output: Annotated[
        Path | None,
        options.output("Step times refitted (.json), for --steps of simulate and observe."),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Name the part of an engine that is off: front end, prefill, decode, KV cache, cache hits.

    The requests of LOG are simulated at the same times on an engine as it is told to be. What is
    off is told by how much, with a 95 % interval of resampled requests, and only where all of the
    interval is further away than the tolerance. OUTPUT has the step times and the time per request
    refitted; the KV cache refitted is printed, for --kv-tokens.
    """
    from hetero.apps.profiling import observed
    from hetero.deployment import Engine, Replica
    from hetero.latency import storage

    options.new_file(output, force, ".json")
    seen = observed.ServedLog.read(log, replica)
    if prefix_share is not None:
        seen = replace(seen, trace=seen.trace.with_prefix(prefix_share, block_tokens))
    told = Replica(
        replica or "engine",
        storage.load(steps),
        kv_tokens,
        engine=Engine(
            batching="chunked",
            admission="paged",
            max_batch=max_batch,
            max_step_tokens=chunk,
            block_tokens=block_tokens,
            schedule_ahead=bool(schedule_ahead),
            prefix_cache=bool(prefix_cache),
            free_share=free_share,
        ),
    )
    found = observed.observe(seen, told, tolerance=tolerance, seed=seed)
    if output is not None:
        storage.save(found.replica.step, output, force=force)
    written = f"Wrote {output}; use it with --kv-tokens {found.replica.kv_tokens}."
    options.show(
        as_json,
        lambda: {
            "off": found.named,
            "parts": [finite(asdict(one)) for one in found.parts],
            "kv_tokens": found.replica.kv_tokens,
            "error_percent": {"told": found.before_percent, "refitted": found.after_percent},
        },
        f"{found}\n{written}" if output else found,
    )
