"""``hetero estimate``: throughput of a cluster by Xiong et al.'s Algorithm 1, degree by degree."""

from __future__ import annotations

from typing import Annotated

import typer

from hetero.apps.cli import options


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("estimate")(estimate)


def estimate(
    cluster: options.Cluster,
    model: options.Model = "Llama-3-8B",
    trace: options.Trace = "sharegpt",
    source: options.Source = "twin",
    requests: Annotated[int, typer.Option(min=1, help="Requests drawn from the trace.")] = 200,
    scaling: Annotated[
        str, typer.Option(help="'instances' (section 3.2) or 'line 17' (as printed).")
    ] = "instances",
    kv_formula: Annotated[
        str, typer.Option(help="KV cache as the model has it ('model') or 2 l h ('full').")
    ] = "model",
    overhead_per: Annotated[
        str, typer.Option(help="Engine overhead counted per 'gpu' or per 'instance'.")
    ] = "gpu",
    overhead_gib: Annotated[float, typer.Option(min=0, help="Engine overhead [GiB].")] = 2.0,
    memory_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Share of GPU memory that the engine may use.")
    ] = 0.9,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Estimate the throughput of every tensor-parallel degree of every machine.

    Batches are static, as in Algorithm 1 of Xiong et al.: the ranking is what counts, an engine
    with continuous batching reaches more.
    """
    import numpy as np

    from hetero import catalog, memory, workload
    from hetero import cluster as clusters
    from hetero.planners.xiong import estimate as algorithm
    from hetero.planners.xiong import tensor_parallel

    requested = workload.open_trace(
        trace, source=options.choice("--source", source, workload.TraceSource), seed=seed
    )
    sample = requested.sample(min(requests, len(requested)), np.random.default_rng(seed))
    result = tensor_parallel.search(
        clusters.find(cluster),
        catalog.find_llm(model),
        sample,
        scaling=options.choice("--scaling", scaling, algorithm.Scaling),
        kv_formula=options.choice("--kv-formula", kv_formula, catalog.KvFormula),
        overhead_per=options.choice("--overhead-per", overhead_per, memory.OverheadPer),
        overhead_gib=overhead_gib,
        memory_fraction=memory_fraction,
    )
    if as_json:
        print(options.to_json(result.table().to_frame().to_dict("records")), end="")
    else:
        print(result)
        print(f"Requests: {len(sample)} of {requested.source}, seed {seed}.")
