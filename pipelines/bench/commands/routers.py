"""``hetero bench routers``: our own router against the best other one, setting by setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


def register(group: typer.Typer) -> None:
    """Add the command to the group."""
    group.command("routers")(routers)


def routers(
    requests: Annotated[
        int, typer.Option(min=100, help="Requests per run on eight devices or two instances.")
    ] = 2000,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds, 0 and up.")] = 5,
    source: options.Source = "twin",
    as_json: options.AsJson = False,
    output: Annotated[Path | None, options.output("One row per setting and metric (.csv).")] = None,
    force: options.Force = False,
) -> None:
    """Count wins, ties and losses of our own router in every setting of both routing papers.

    Against the best of all other routers, chosen anew for every setting and metric: throughput,
    share of first tokens within the target, P95 of the time to first token. Without a target and
    with it. The same numbers come out in every run.
    """
    from hetero.files import writing
    from hetero.progress import progress
    from pipelines.bench.contest import contest, settings

    options.new_file(output, force, ".csv", ".csv.gz")
    chosen = settings(requests=requests, source=source)
    with progress(len(chosen), "routers", unit="settings") as advance:
        found = contest(chosen, seeds=range(seeds), progress=advance)
    if output is not None:
        with writing(output, force=force) as part:
            found.rows.to_csv(part, index=False, lineterminator="\n")
    if as_json:
        print(options.to_json(found.counts().to_dict("records")), end="")
    else:
        print(found, found.losses_table(), sep="\n\n")
