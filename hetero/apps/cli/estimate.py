"""``hetero estimate``: throughput of a cluster by Xiong et al.'s Algorithm 1, degree by degree."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hetero.apps.cli import options


def estimate(
    cluster: options.Cluster,
    model: options.Model = "Llama-3-8B",
    trace: options.Trace = "sharegpt",
    source: options.Source = "twin",
    columns: options.Columns = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests drawn from the trace.")] = 200,
    scaling: Annotated[
        Any,
        options.one_of(
            "hetero.planners.xiong.estimate:Scaling",
            "'instances' (section 3.2) or 'line 17' (as printed).",
        ),
    ] = "instances",
    kv_formula: Annotated[
        Any,
        options.one_of(
            "hetero.catalog:KvFormula", "KV cache as the model has it ('model') or 2 l h ('full')."
        ),
    ] = "model",
    overhead_per: Annotated[
        Any,
        options.one_of(
            "hetero.memory:OverheadPer", "Engine overhead counted per 'gpu' or per 'instance'."
        ),
    ] = "gpu",
    overhead_gib: Annotated[float, typer.Option(min=0, help="Engine overhead [GiB].")] = 2.0,
    memory: Annotated[float, typer.Option(help="Share of a GPU's memory that is used.")] = 0.9,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Estimate the throughput of every tensor-parallel degree of every machine.

    Batches are static, as in Algorithm 1 of Xiong et al.: the ranking is what counts, an engine
    with continuous batching reaches more.
    """
    import numpy as np

    from hetero import catalog, workload
    from hetero import cluster as clusters
    from hetero.engines import EngineSpec
    from hetero.planners.xiong import tensor_parallel

    requested = workload.open_trace(trace, source, seed, columns=columns)
    sample = requested.sample(min(requests, len(requested)), np.random.default_rng(seed))
    result = tensor_parallel.search(
        clusters.find(cluster),
        catalog.find_llm(model),
        sample,
        latency=tensor_parallel.padded(EngineSpec().source()),
        scaling=scaling,
        kv_formula=kv_formula,
        overhead_per=overhead_per,
        overhead_gib=overhead_gib,
        memory_fraction=memory,
    )
    about = f"Requests: {len(sample)} of {requested.source}, seed {seed}."
    options.show(
        as_json, lambda: result.table().to_frame().to_dict("records"), f"{result}\n{about}"
    )
