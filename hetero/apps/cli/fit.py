"""``hetero fit``: a latency model from the user's own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.ask import pairs, word
from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.latency.models.floor import FloorFit
    from hetero.latency.models.phase import PhaseFit


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
    from hetero.errors import DataError, FitError, ParameterError
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
    from hetero.errors import FitError

    for name, part in (("prefill", prefill), ("decode", decode)):
        if part is None:
            what = f"{file.name} has no {name} rows, and a step model needs both phases."
            raise FitError(what, resolve=f"add {name} rows, or leave out --output.")
    return prefill, decode


def _as_dict(part: PhaseFit | FloorFit | None) -> dict[str, object] | None:
    if part is None:
        return None
    from dataclasses import asdict

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
