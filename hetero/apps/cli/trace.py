"""``hetero trace``: describe traces, make twins of them, draw traces from twins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.apps.cli import options

if TYPE_CHECKING:
    from hetero.workload import Trace

trace = typer.Typer(no_args_is_help=True, help="Request traces: describe, twin, draw.")

FileOrName = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_NAME",
        help="Trace file (Azure CSV, Mooncake JSONL, any CSV or Parquet), or a name such as "
        "azure2023_conv.",
    ),
]
Sort = Annotated[bool, typer.Option("--sort", help="Sort requests by arrival.")]
Arrival = Annotated[
    str, typer.Option("--arrival-column", help="Column of the arrivals, if the file has its own.")
]
Input = Annotated[str, typer.Option("--input-column", help="Column of the input lengths.")]
Output = Annotated[str, typer.Option("--output-column", help="Column of the output lengths.")]
Unit = Annotated[
    Any,
    options.one_of(
        "hetero.workload.readers:TimeUnit", "Unit of the arrivals: s, ms, us, ns or datetime."
    ),
]
Rebase = Annotated[bool, typer.Option("--rebase", help="Count arrivals from the first request.")]


@trace.command()
def describe(
    file_or_name: FileOrName,
    source: options.Source = "twin",
    seed: options.Seed = 0,
    sort: Sort = False,
    arrival: Arrival = "",
    input_tokens: Input = "",
    output_tokens: Output = "",
    time_unit: Unit = "s",
    rebase: Rebase = False,
) -> None:
    """Print lengths, their correlation, rate and burstiness of a trace."""
    columns = (arrival, input_tokens, output_tokens)
    print(_open(file_or_name, source, seed, sort, columns, time_unit, rebase).describe())


@trace.command()
def twin(
    file_or_name: FileOrName,
    output: Annotated[Path, options.output("Twin to write (JSON).")],
    draws: Annotated[int, typer.Option(min=1, help="Draws that the check averages over.")] = 20,
    sort: Sort = False,
    arrival: Arrival = "",
    input_tokens: Input = "",
    output_tokens: Output = "",
    time_unit: Unit = "s",
    rebase: Rebase = False,
    force: options.Force = False,
) -> None:
    """Fit a twin of a few KB to a real trace, and print how close its draws come."""
    from hetero import workload

    options.new_file(output, force)
    columns = (arrival, input_tokens, output_tokens)
    real = _open(file_or_name, "real", 0, sort, columns, time_unit, rebase)
    named = file_or_name in workload.names()
    fitted = workload.Twin.fit(real, source=workload.source_of(file_or_name) if named else "")
    fitted.save(output, force=force)
    print(fitted.check(real, draws))


@trace.command()
def draw(
    twin_or_name: Annotated[
        str, typer.Argument(metavar="TWIN_OR_NAME", help="Twin (JSON), or a name.")
    ],
    output: Annotated[Path, options.output("Trace to write (.csv, .csv.gz, .parquet).")],
    seed: options.Seed = 0,
    rate: Annotated[float, typer.Option(help="Multiple of the rate of the real trace.")] = 1.0,
    force: options.Force = False,
) -> None:
    """Draw a trace from a twin."""
    from hetero import workload
    from hetero.errors import require

    options.new_file(output, force, *options.TABLES)
    named = twin_or_name in workload.names()
    require(
        named or Path(twin_or_name).is_file(),
        f"'{twin_or_name}' is neither a file nor a known trace.",
        resolve=f"check the path, or use one of {', '.join(workload.names('twin'))}.",
    )
    chosen = workload.load_twin(twin_or_name) if named else workload.Twin.load(twin_or_name)
    drawn = chosen.draw(seed, rate)
    if output.suffix == ".parquet":
        drawn.to_parquet(output, force=force)
    else:
        drawn.to_csv(output, force=force)
    print(f"{len(drawn):,} requests written to {output}.")


def _open(
    file_or_name: str,
    source: str,
    seed: int,
    sort: bool,
    columns: tuple[str, str, str],
    time_unit: Any,
    rebase: bool,
) -> Trace:
    from hetero import workload
    from hetero.errors import require
    from hetero.workload.readers import read_table

    if not any(columns) and time_unit == "s" and not rebase:
        return workload.open_trace(file_or_name, source, seed, sort=sort)  # type: ignore[arg-type]
    require(
        file_or_name not in workload.names(),
        f"The columns and units of {file_or_name} are known.",
        resolve="leave out the options on columns and units.",
    )
    return read_table(
        file_or_name,
        arrival=columns[0] or "arrival_s",
        input_tokens=columns[1] or "input_tokens",
        output_tokens=columns[2] or "output_tokens",
        time_unit=time_unit,
        sort=sort,
        rebase=rebase or None,
    )
