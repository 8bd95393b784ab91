"""``hetero observe``: what a real engine or endpoint does, beside simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero.apps.cli import options


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
    from dataclasses import asdict, replace

    from hetero.apps.profiling import observed
    from hetero.deployment import Engine, Replica
    from hetero.encoding import finite
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
