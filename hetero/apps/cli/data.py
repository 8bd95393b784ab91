"""``hetero data``, public raw data listed, fetched and checked, and ``hetero gpus``."""

from __future__ import annotations

from typing import Annotated

import typer

data = typer.Typer(no_args_is_help=True, help="Public raw data: list, fetch, check.")


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
    from hetero.errors import require
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
    from hetero.errors import DownloadError
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
