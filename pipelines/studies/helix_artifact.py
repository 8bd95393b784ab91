"""Helix's clusters and placements, as its artifact has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero import paths
from hetero.catalog import llm as find_llm
from hetero.cluster import cluster as find_cluster
from hetero.errors import ParameterError
from hetero.placement.links import Links
from hetero.placement.placement import LayerRange, Placement
from hetero.placement.problem import Problem

Floats = NDArray[np.float64]

CLUSTERS = {
    "single-24": "helix-single-24",
    "geo-24": "helix-geo-24",
    "hetero-42": "helix-42",
    "small-10": "helix-10",
}
"""Short names of Helix's clusters."""

MODELS = {"30B": "LLaMA-1-30B", "70B": "Llama-2-70B"}
"""Short names of Helix's models."""

COORDINATOR = "coordinator"

_LOGS = {
    ("single-24", ""): "single_cluster/layout_llama70b/ilp",
    ("geo-24", ""): "distributed_clusters/layout_llama70b/ilp",
    ("geo-24", "none"): "ablation/layouts/raw_24",
    ("geo-24", "no-prune"): "ablation/layouts/no_prune_24",
    ("hetero-42", ""): "high_heterogeneity/layout_llama70b/ilp",
    ("hetero-42", "none"): "ablation/layouts/raw_42",
    ("hetero-42", "no-prune"): "ablation/layouts/no_prune_42",
    ("small-10", ""): "ablation/layouts/quality",
}


@dataclass(frozen=True, slots=True)
class PublishedPlacement:
    """A placement of the artifact.

    Attributes
    ----------
    name
        ``"<cluster> <model> <method>"``, such as ``"geo-24 70B helix"``.
    ranges
        Layers by node, under the names of our cluster file.
    tokens_per_s
        Objective that the artifact prints for it, None where it prints none.
    alone
        Whether throughput is that of these nodes as a cluster of their own, as the artifact
        plans one pipeline per machine type.
    source
        File of the artifact.
    """

    name: str
    ranges: dict[str, LayerRange]
    tokens_per_s: float | None
    alone: bool
    source: str


@lru_cache(maxsize=1)
def published() -> dict[str, PublishedPlacement]:
    """Every distinct placement of the artifact by its name."""
    import pandas as pd

    frame = pd.read_csv(
        paths.data("published", "helix_placements.csv"), keep_default_na=False, dtype=str
    )
    found = {}
    for row in frame.to_dict("records"):
        ranges = {}
        for part in row["layers"].split():
            node, _, held = part.partition(":")
            start, _, stop = held.partition("-")
            ranges[node] = (int(start), int(stop))
        name = f"{row['cluster']} {row['model']} {row['method']}"
        found[name] = PublishedPlacement(
            name=name,
            ranges=ranges,
            tokens_per_s=float(row["tokens_per_s"]) if row["tokens_per_s"] else None,
            alone=row["alone"] == "1",
            source=row["source"],
        )
    return found


def problem(cluster: str, model: str, *, raw: bool = False) -> Problem:
    """Problem of one of Helix's clusters, with the links that its artifact drew.

    Parameters
    ----------
    cluster
        ``"single-24"``, ``"geo-24"``, ``"hetero-42"`` or ``"small-10"``.
    model
        ``"30B"`` or ``"70B"``.

    Examples
    --------
    >>> problem("geo-24", "70B").regions
    ('region-1', 'region-2', 'region-3')
    """
    if cluster not in CLUSTERS or model not in MODELS:
        raise ParameterError(
            f"Helix has no cluster '{cluster}' with a model '{model}'.",
            resolve=f"use {', '.join(CLUSTERS)} and {' or '.join(MODELS)}.",
        )
    fleet = find_cluster(CLUSTERS[cluster])
    links = geo_links() if cluster == "geo-24" else None
    return Problem.of(fleet, find_llm(MODELS[model]), links=links, raw=raw)


@lru_cache(maxsize=8)
def numbering(cluster: str) -> tuple[str, ...]:
    """Our names of the nodes in the order in which the artifact numbers them.

    Examples
    --------
    >>> numbering("single-24")[:3]
    ('l4-1', 't4-1', 't4-2')
    """
    import pandas as pd

    frame = pd.read_csv(paths.data("published", "helix_nodes.csv"))
    mine = frame[frame["cluster"] == cluster].sort_values("number")
    return tuple(str(node) for node in mine["node"])


def geo_links() -> Links:
    """Links of the geo-distributed cluster as the artifact drew them, in the order of our file."""
    import pandas as pd

    fleet = find_cluster(CLUSTERS["geo-24"])
    at = {machine.name: k for k, machine in enumerate(fleet.machines)} | {
        COORDINATOR: len(fleet.machines)
    }
    frame = pd.read_csv(paths.data("published", "helix_geo_links.csv"))
    shape = (len(at), len(at))
    bandwidth, latency = np.zeros(shape), np.zeros(shape)
    for row in frame.itertuples(index=False):
        a, b = at[str(row.start)], at[str(row.end)]
        both = [(a, b)] if len(at) - 1 in (a, b) else [(a, b), (b, a)]
        for i, j in both:
            bandwidth[i, j] = 1e6 * float(row.mbyte_s)  # type: ignore[arg-type]
            latency[i, j] = 1e-3 * float(row.latency_ms)  # type: ignore[arg-type]
    return Links(bandwidth, latency)


def solver_log(cluster: str, *, start: str = "") -> tuple[Floats, Floats, Floats]:
    """Time [s], best objective and bound [tokens/s] of the artifact's solver, thinned.

    Parameters
    ----------
    cluster
        Short name of a cluster.
    start
        Which of its runs, where there are several: empty for the one the paper used, ``"none"``
        without a heuristic start, ``"no-prune"`` on all links.

    Notes
    -----
    Gurobi 11 on 20 threads; see the README of ``data/published``.
    """
    import pandas as pd

    if (cluster, start) not in _LOGS:
        raise ParameterError(
            f"The artifact has no solver log of '{cluster}' with the start '{start}'.",
            resolve=f"use one of {', '.join(f'{c} {s}'.strip() for c, s in _LOGS)}.",
        )
    frame = pd.read_csv(paths.data("published", "helix_solver_logs.csv"))
    log = frame[frame["run"] == _LOGS[cluster, start]]
    return tuple(log[name].to_numpy(dtype=np.float64) for name in ("time_s", "incumbent", "bound"))  # type: ignore[return-value]


def placement(name: str, *, raw: bool = False) -> Placement:
    """A placement of the artifact on its problem.

    Raises
    ------
    ParameterError
        If there is none of that name.
    """
    known = published()
    if name not in known:
        raise ParameterError(
            f"Helix's artifact has no placement '{name}'.", resolve=f"use {', '.join(known)}."
        )
    found = known[name]
    cluster, model, _ = name.split(" ", 2)
    whole = problem(cluster, model, raw=raw)
    if found.alone:
        whole = whole.subset(list(found.ranges))
    # Separate pipelines of a model too large for their machines fill more than half of the memory.
    return Placement.of(whole, found.ranges, name, allow_overfull=True)
