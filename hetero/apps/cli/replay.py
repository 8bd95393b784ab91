"""``hetero replay``: what a real endpoint does with a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetero.apps.ask import REQUIRED, Ask, words
from hetero.apps.cli import options


@options.asking(
    words(
        "trace source columns requests rate arrivals clients think slo seed",
        trace={"default": REQUIRED, "argument": True},
        requests={"help": "Send only the first requests of the trace."},
    )
)
def replay(
    asked: dict[str, Any],
    url: options.Url,
    model: options.ServedModel,
    output: Annotated[Path, options.output("One row per request (.csv), as hetero simulate's.")],
    in_flight: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 1024,
    max_seconds: Annotated[float, typer.Option(help="No request is sent later [s].")] = 3600.0,
    timeout: Annotated[float, typer.Option(help="Longest wait for the next token [s].")] = 120.0,
    deployment: Annotated[
        Path | None, typer.Option(help="Deployment file that `hetero serve` runs there.")
    ] = None,
    as_json: options.AsJson = False,
    force: options.Force = False,
) -> None:
    """Send the requests of a trace to an OpenAI-compatible server when the trace or --clients say.

    Writes the same table, and prints the same metrics, as a simulation; Ctrl-C ends it with what
    has come by then. A key for the server is taken from the environment variable HETERO_API_KEY.
    """
    from hetero.apps.serving.replay import Bounds
    from hetero.apps.serving.replay import replay as run_replay
    from hetero.apps.serving.settings import load
    from hetero.files import writing
    from hetero.progress import progress
    from hetero.simulator import metrics

    options.new_file(output, force, ".csv")
    settings = None if deployment is None else load(deployment)
    ask = Ask(**asked)
    requested, came = ask.came(ask.opened(), ask.seed)
    endpoint = options.endpoint(url, model, timeout)
    with progress(len(requested), "replay") as advance:
        run = run_replay(
            endpoint,
            requested,
            bounds=Bounds(in_flight, max_seconds),
            deployment=None if settings is None else settings.deployment(),
            router="measured" if settings is None else settings.chosen().name,
            seed=ask.seed,
            progress=advance,
        )
    found = metrics(run, ask.targets)
    due = len(requested) - len(run.requests)
    with writing(output, force=force) as part:
        run.frame().to_csv(part, index=False, lineterminator="\n")
    note = f"{len(run.requests):,} rows written to {output}; {due:,} requests were not sent."
    options.show(
        as_json,
        lambda: found.to_dict() | {"due": due, "arrivals": came},
        f"{found}\n{requested.source}: {came}. {note}",
    )
