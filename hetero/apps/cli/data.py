"""``hetero data`` and ``trace``, public raw data and request traces, and ``hetero gpus``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.apps.cli import options
from hetero.errors import DownloadError, require

if TYPE_CHECKING:
    from hetero.workload import Trace

data = typer.Typer(no_args_is_help=True, help="Public raw data: list, fetch, check.")
trace = typer.Typer(no_args_is_help=True, help="Request traces: describe, twin, draw, sessions.")

FileOrName = Annotated[
    str,
    typer.Argument(
        metavar="FILE_OR_NAME",
        help="Trace file (of Azure, Mooncake or a benchmark, any CSV, JSON or Parquet), or a name "
        "such as azure2023_conv.",
    ),
]


@data.command("list")
def list_() -> None:
    """Show every dataset, its licence, its size and where it is."""
    from hetero.workload import datasets

    print(datasets.listing())


@data.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Datasets to fetch.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Fetch every dataset that has a public address.")
    ] = False,
) -> None:
    """Fetch datasets into data/raw; what HETERO_DATA_MIRROR has is used in place.

    Checksums are verified. A failed download leaves earlier files as they were.
    """
    from hetero.workload import datasets

    require(
        bool(names) != everything,
        "`hetero data fetch` takes either names or --all.",
        resolve="name datasets of `hetero data list`, or say --all.",
    )
    chosen = names or [
        name for name, each in datasets.registry().items() if each.public or each.place != "missing"
    ]
    print(datasets.fetch(chosen))


@data.command()
def check() -> None:
    """Verify the checksum of every file that is here; exit 1 if one is damaged."""
    from hetero.workload import datasets

    found = datasets.check()
    print(found)
    if found.damaged:
        raise DownloadError(
            f"{len(found.damaged)} of the files are not the published ones: "
            f"{', '.join(map(str, found.damaged))}.",
            resolve="replace them with `hetero data fetch NAME`, or mend the mirror.",
        )


def gpus(
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """What is measured, derived, estimated or assumed for every GPU, with its expected error."""
    from hetero.latency.calibration import known

    text = known.markdown() if markdown else f"{known.gpus_table()}\n\n{known.levels_table()}\n"
    print(text, end="")


@trace.command()
def describe(
    file_or_name: FileOrName,
    source: options.Source = "twin",
    seed: options.Seed = 0,
    columns: options.Columns = "",
) -> None:
    """Print lengths, their correlation, rate and burstiness of a trace."""
    from hetero import workload

    print(workload.open_trace(file_or_name, source, seed, columns=columns).describe())


@trace.command()
def twin(
    file_or_name: FileOrName,
    output: Annotated[Path, options.output("Twin to write (JSON).")],
    draws: Annotated[int, typer.Option(min=1, help="Draws that the check averages over.")] = 20,
    columns: options.Columns = "",
    force: options.Force = False,
) -> None:
    """Fit a twin of a few KB to a real trace, and print how close its draws come."""
    from hetero import workload

    options.new_file(output, force)
    real = workload.open_trace(file_or_name, "real", columns=columns)
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

    options.new_file(output, force, *options.TABLES)
    named = twin_or_name in workload.names()
    require(
        named or Path(twin_or_name).is_file(),
        f"'{twin_or_name}' is neither a file nor a known trace.",
        resolve=f"check the path, or use one of {', '.join(workload.names('twin'))}.",
    )
    chosen = workload.load_twin(twin_or_name) if named else workload.Twin.load(twin_or_name)
    _write(chosen.draw(seed, rate), output, force)


def _write(drawn: Trace, output: Path, force: bool) -> None:
    if output.suffix == ".parquet":
        drawn.to_parquet(output, force=force)
    else:
        drawn.to_csv(output, force=force)
    print(f"{len(drawn):,} requests written to {output}.")
