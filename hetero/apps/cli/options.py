"""Arguments and options that several commands share, and their checks."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hetero.errors import ParameterError

if TYPE_CHECKING:
    from hetero import workload
    from hetero.simulator import Metrics, Slo

Cluster = Annotated[
    str, typer.Argument(help="Cluster file (YAML) or the name of a shipped cluster.")
]
Model = Annotated[str, typer.Option(help="Model of the catalog, or a Hugging Face config.json.")]
DenseModel = Annotated[
    str, typer.Option(help="Dense model of the catalog, or a Hugging Face config.json.")
]
MoeModel = Annotated[
    str,
    typer.Option(help="Mixture-of-experts model of the catalog, or a Hugging Face config.json."),
]
Trace = Annotated[
    str, typer.Option(help="Trace file, or a shipped workload such as azure2023_conv.")
]
Source = Annotated[
    str,
    typer.Option(help="For a shipped workload: its statistical 'twin', or the 'real' trace."),
]
Targets = Annotated[
    str, typer.Option(help="Targets, as in ttft=2s,tpot=150ms,e2e=30s (us, ms, s, min).")
]
SloScale = Annotated[
    float, typer.Option(help="Without --slo: targets as multiples of a mean request on an A100.")
]
Budget = Annotated[
    float | None,
    typer.Option(help="Budget [$/h]: rent the part of the cluster that attains most."),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of all that is random; the same gives the same result.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Figure = Annotated[Path | None, typer.Option(help="Draw the plan into this file (.png, .svg).")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Record = Annotated[
    bool, typer.Option("--record", help="Write the times to data/measured/timings.csv.")
]

PICTURES = (".png", ".svg")
"""Endings of figures."""

TABLES = (".csv", ".csv.gz", ".parquet")
"""Endings of tables with a row per request."""


def output(help_: str) -> Any:
    """Option ``-o``, ``--output`` of a command, which says what it writes."""
    return typer.Option("-o", "--output", help=help_)


def choice(option: str, value: str, allowed: Any) -> Any:
    """Return ``value`` if it is one of a ``Literal``'s values, or of a collection of names.

    Raises
    ------
    ParameterError
        Naming the option, what was received and the values it may take.
    """
    values = [str(v) for v in get_args(allowed) or allowed]
    if value not in values:
        near = difflib.get_close_matches(value, values, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ParameterError(
            f"{option} does not know '{value}'.", resolve=f"{hint}use one of {', '.join(values)}."
        )
    return value


def ending(path: Path, allowed: tuple[str, ...]) -> None:
    """Refuse the name of an output file that does not end as its kind should.

    Raises
    ------
    ParameterError
        Naming the file and the endings it may have.

    Examples
    --------
    >>> ending(Path("plan.png"), PICTURES)
    """
    if not path.name.endswith(allowed):
        raise ParameterError(
            f"The ending of {path.name} is of no known kind.",
            resolve=f"end its name with {', '.join(allowed[:-1])} or {allowed[-1]}.",
        )


def positive(option: str, value: float) -> float:
    """Return ``value`` if it is a number above 0, and finite.

    Raises
    ------
    ParameterError
        Naming the option and what was received.

    Examples
    --------
    >>> positive("--rate", 4.0)
    4.0
    """
    if not 0 < value < math.inf:
        raise ParameterError(f"{option} is {value:g}.", resolve="give a number above 0, such as 4.")
    return value


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of an option that takes several, by commas.

    Raises
    ------
    ParameterError
        Naming the option and what was received.

    Examples
    --------
    >>> whole_numbers("--batch", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            f"{option} cannot read '{text}'.", resolve="write whole numbers, such as 1,2,4."
        ) from None


def targets(text: str) -> Slo:
    """Targets of an ``--slo`` option, such as ``ttft=500ms,tpot=50ms``; none for an empty text.

    Raises
    ------
    ParameterError
        If a part cannot be read or is given twice.
    """
    from hetero.simulator import Slo

    return Slo.read(text, "--slo")


def to_json(value: object) -> str:
    """JSON text with a line end, as every ``--json`` option prints it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def arrivals(
    trace: workload.Trace, requests: int | None, rate: float | None, seed: int
) -> workload.Trace:
    """The first requests, at the rate asked for: bursts kept where the trace has arrivals."""
    from hetero.streams import stream
    from hetero.workload import statistics

    if requests is not None:
        trace = trace.head(min(requests, len(trace)))
    if rate is None:
        return trace
    if not rate > 0:
        raise ParameterError(
            f"A rate of {rate:g} requests/s serves nothing.",
            resolve="give a number above 0, or inf to send all requests at once.",
        )
    if math.isinf(rate):
        return trace.all_at_once()
    if math.isinf(statistics.rate_rps(trace.arrival_s)):
        return trace.poisson(rate, stream(seed, "arrivals"))
    return trace.rescale(rate_rps=rate)


def plain(one: Metrics) -> dict[str, Any]:
    """Metrics as JSON values; what is not a number becomes null."""
    from dataclasses import asdict

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return [clean(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    record: dict[str, Any] = clean(asdict(one) | {"total_tps": one.total_tps})
    return record
