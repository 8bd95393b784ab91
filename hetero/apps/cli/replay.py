"""``hetero replay``: what a real endpoint does with a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


def replay(
    trace: Annotated[
        str, typer.Argument(help="Trace file, or a shipped workload such as azure2023_conv.")
    ],
    url: options.Url,
    model: options.ServedModel,
    output: Annotated[Path, options.output("One row per request (.csv), as hetero simulate's.")],
    source: options.Source = "twin",
    columns: options.Columns = "",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Send only the first requests of the trace.")
    ] = None,
    rate: options.Rate = None,
    arrivals: options.Arrivals = None,
    clients: options.Clients = None,
    think: options.Think = None,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 1024,
    max_seconds: Annotated[float, typer.Option(help="No request is sent later [s].")] = 3600.0,
    timeout: Annotated[float, typer.Option(help="Longest wait for the next token [s].")] = 120.0,
    deployment: Annotated[
        Path | None, typer.Option(help="Deployment file that `hetero serve` runs there.")
    ] = None,
    slo: options.Targets = "",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Send the requests of a trace to an OpenAI-compatible server when the trace or --clients say.

    Writes the same table, and prints the same metrics, as a simulation. Each request is kept in
    OUTPUT.journal as it ends, so a stopped replay goes on with the same command. A key for the
    server is taken from the environment variable HETERO_API_KEY.
    """
    from hetero.apps.serving.replay import Bounds
    from hetero.apps.serving.replay import replay as run_replay
    from hetero.apps.serving.settings import load
    from hetero.files import writing
    from hetero.progress import progress
    from hetero.simulator import metrics

    options.new_file(output, force, ".csv")
    settings = None if deployment is None else load(deployment)
    requested, came = options.arrivals(
        options.opened(trace, source, seed, columns),
        *(requests, rate, seed, arrivals, clients, think),
    )
    endpoint = options.endpoint(url, model, timeout)
    journal = output.with_name(output.name + ".journal")
    with progress(len(requested), "replay") as advance:
        run = run_replay(
            endpoint,
            requested,
            journal,
            bounds=Bounds(in_flight, max_seconds),
            deployment=None if settings is None else settings.deployment(),
            router="measured" if settings is None else settings.chosen().name,
            seed=seed,
            progress=advance,
        )
    found = metrics(run, slo)
    due = len(requested) - len(run.requests)
    if due == 0:
        with writing(output, force=force) as part:
            run.frame().to_csv(part, index=False, lineterminator="\n")
        journal.unlink()
        note = f"{len(requested):,} rows written to {output}."
    else:
        note = f"{due:,} of {len(requested):,} requests are due; the same command goes on."
    options.show(
        as_json,
        lambda: options.plain(found) | {"due": due, "arrivals": came},
        f"{found}\n{requested.source}: {came}. {note}",
    )
