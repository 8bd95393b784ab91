"""Helix's clusters, placements and results, as its artifact has them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from hetero import paths
from hetero.arrays import Floats
from hetero.catalog import llm as find_llm
from hetero.cluster import cluster as find_cluster
from hetero.errors import require
from hetero.placement.links import Links
from hetero.placement.network import FlowNetwork, bounds
from hetero.placement.placement import LayerRange, Placement
from hetero.placement.problem import NIC_BYTES_S, Problem
from hetero.placement.pruning import pruned
from hetero.simulator.pipeline_graph import complete

Mode: TypeAlias = Literal["offline", "online"]

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

# Nodes that a placement's cluster file gives the machine of another: the pipeline of V100 and T4
# (SP+) has eight of each there, the cluster six and ten.
_RETYPED = {"hetero-42 70B separate-v100-t4": {"t4-1": "v100-1", "t4-2": "v100-1"}}

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


@cache
def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(paths.data("published", name))


@cache
def published() -> dict[str, PublishedPlacement]:
    """Every distinct placement of the artifact by its name."""
    frame = pd.read_csv(
        paths.data("published", "helix_placements.csv"), keep_default_na=False, dtype=str
    )
    found = {}
    for row in frame.to_dict("records"):
        name = f"{row['cluster']} {row['model']} {row['method']}"
        found[name] = PublishedPlacement(
            name=name,
            ranges=ranges_of(row["layers"]),
            tokens_per_s=float(row["tokens_per_s"]) if row["tokens_per_s"] else None,
            alone=row["alone"] == "1",
            source=row["source"],
        )
    return found


def ranges_of(layers: str) -> dict[str, LayerRange]:
    """Layers by node of words such as ``a100-1:68-77``."""
    ranges = {}
    for part in layers.split():
        node, _, held = part.partition(":")
        start, _, stop = held.partition("-")
        ranges[node] = (int(start), int(stop))
    return ranges


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
    require(
        cluster in CLUSTERS and model in MODELS,
        f"Helix has no cluster '{cluster}' with a model '{model}'.",
        resolve=f"use {', '.join(CLUSTERS)} and {' or '.join(MODELS)}.",
    )
    fleet = find_cluster(CLUSTERS[cluster])
    links = geo_links() if cluster == "geo-24" else None
    return Problem.of(fleet, find_llm(MODELS[model]), links=links, raw=raw)


@cache
def numbering(cluster: str) -> tuple[str, ...]:
    """Our names of the nodes in the order in which the artifact numbers them.

    Examples
    --------
    >>> numbering("single-24")[:3]
    ('l4-1', 't4-1', 't4-2')
    """
    frame = _table("helix_nodes.csv")
    mine = frame[frame["cluster"] == cluster].sort_values("number")
    return tuple(str(node) for node in mine["node"])


def geo_links() -> Links:
    """Links of the geo-distributed cluster as the artifact drew them, in the order of our file."""
    fleet = find_cluster(CLUSTERS["geo-24"])
    at = {machine.name: k for k, machine in enumerate(fleet.machines)} | {
        COORDINATOR: len(fleet.machines)
    }
    shape = (len(at), len(at))
    bandwidth, latency = np.zeros(shape), np.zeros(shape)
    for row in _table("helix_geo_links.csv").itertuples(index=False):
        a, b = at[str(row.start)], at[str(row.end)]
        for i, j in [(a, b)] if len(at) - 1 in (a, b) else [(a, b), (b, a)]:
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
    require(
        (cluster, start) in _LOGS,
        f"The artifact has no solver log of '{cluster}' with the start '{start}'.",
        resolve=f"use one of {', '.join(f'{c} {s}'.strip() for c, s in _LOGS)}.",
    )
    frame = _table("helix_solver_logs.csv")
    log = frame[frame["run"] == _LOGS[cluster, start]]
    return tuple(log[name].to_numpy(dtype=np.float64) for name in ("time_s", "incumbent", "bound"))  # type: ignore[return-value]


def placement(name: str, *, raw: bool = False) -> Placement:
    """A placement of the artifact on its problem, with the machines that it is simulated on."""
    known = published()
    missing = f"Helix's artifact has no placement '{name}'."
    require(name in known, missing, resolve=f"use {', '.join(known)}.")
    found = known[name]
    cluster, model, _ = name.split(" ", 2)
    whole = problem(cluster, model, raw=raw)
    if found.alone:
        whole = whole.subset(list(found.ranges))
    if retyped := _RETYPED.get(name):
        nodes = {node.name: node for node in whole.nodes}
        nodes |= {node: replace(nodes[like], name=node) for node, like in retyped.items()}
        whole = replace(whole, nodes=tuple(nodes.values()))
    # Separate pipelines of a model too large for their machines fill more than half of the memory.
    return Placement.of(whole, found.ranges, name, allow_overfull=True)


def artifact_network(name: str, *, raw: bool = False) -> FlowNetwork:
    """Network of a published placement: links, their order and partial inference as it was found.

    Helix's own placements of LLaMA-70B on several regions or many types were found on pruned
    links; only Petals starts in the middle of a node.
    """
    found = placement(name, raw=raw)
    cluster, model, method = name.split(" ", 2)
    was_pruned = cluster in ("geo-24", "hetero-42") and model == "70B"
    links = None
    if was_pruned and method in ("helix", "helix-scheduling", "helix-no-start"):
        whole = found.problem
        links = pruned(whole, order=[whole.index(node) for node in numbering(cluster)])
    network = FlowNetwork(found, method == "petals", links)
    return replace(network, order=tuple(links_in_order(network)))


def links_in_order(network: FlowNetwork) -> list[tuple[int, int]]:
    """Valid connections of a published placement, in the order of the artifact's cluster file.

    Its synthesizers write them stage by stage (Swarm, the next stage drawn with seed 0), node by
    node with the slowest link first and partial inference behind (Petals), or in the order of the
    links between nodes, which pruning sorts as text (its own).

    Returns
    -------
    list
        From and to; the coordinator is n.
    """
    whole, valid = network.placement.problem, network.valid()
    cluster, _, method = network.placement.name.split(" ", 2)
    names = {node.name: k for k, node in enumerate(whole.nodes)}
    order = [names[name] for name in numbering(cluster) if name in names]
    used = [k for k in order if network.placement.ranges[k] is not None]
    n, number = len(whole.nodes), {k: i for i, k in enumerate(order)}
    starts, stops = bounds(network.placement)
    ends = [(n, k) for k in used if valid[n, k]], [(k, n) for k in used if valid[k, n]]
    if method == "swarm":
        drawn = random.Random(0)
        stages: dict[int, list[int]] = defaultdict(list)
        for k in sorted(used, key=lambda k: (network.placement.tokens_per_s(k), number[k])):
            stages[int(starts[k])].insert(0, k)
        rows = [stages[start] for start in sorted(stages)]
        return [
            *((n, k) for k in rows[0]),
            *((k, n) for k in rows[-1]),
            *((a, b) for row, to in pairwise(rows) for a in row for b in drawn.sample(to, len(to))),
        ]
    if method == "petals":
        speed = whole.links.bandwidth_bytes_s
        return [
            *sorted(ends[0] + ends[1], key=lambda link: number[min(link)]),
            *(
                (a, int(b))
                for a in used
                for b in sorted(
                    np.flatnonzero(valid[a, :n]),
                    key=lambda b: (starts[b] != stops[a], speed[a, b], number[int(b)]),
                )
            ),
        ]
    pairs = list(combinations(used, 2))
    if network.links is not None:
        pairs.sort(key=lambda pair: f"Link-{number[pair[0]]}-{number[pair[1]]}")
        for end in ends:
            end.sort(key=lambda link: str(number[min(link)]))
    both = [pair for a, b in pairs for pair in ((a, b), (b, a))]
    through = complete(valid)
    return [link for link in (*ends[0], *ends[1], *both) if through[link]]


def artifact_flow(network: FlowNetwork) -> Floats:
    """The maximum flow that the artifact's router follows, shape (n + 1, n + 1).

    A maximum flow is not unique: this is the one that preflow-push ends with on the artifact's
    graph, its vertices and links added in its order and its network interfaces as further edges.
    Vertices are whole numbers: the algorithm takes them from sets, and the order of names in a
    set would change from run to run.

    Notes
    -----
    Source: Helix, section 4.3: preflow-push algorithm.

    Examples
    --------
    >>> flow = artifact_flow(artifact_network("geo-24 70B swarm"))
    >>> f"{flow[-1].sum():.1f} tokens/s from the coordinator"
    '616.4 tokens/s from the coordinator'
    """
    import networkx

    links = network.order
    whole = network.placement.problem
    n, both = len(whole.nodes), whole.activation_bytes + whole.token_bytes
    graph = networkx.DiGraph()
    # Vertices 4k to 4k + 3: into node k, its start, its end, out of it; then source and sink.
    source, sink = 4 * n + 4, 4 * n + 5
    most = NIC_BYTES_S / whole.token_bytes
    graph.add_edge(source, 4 * n + 3, capacity=most)
    graph.add_edge(4 * n, sink, capacity=most)
    through = network.node_tokens_per_s()
    names = {node.name: k for k, node in enumerate(whole.nodes)}
    cluster = network.placement.name.split()[0]
    for k in (names[name] for name in numbering(cluster) if name in names):
        into = whole.token_bytes if [a for a, b in links if b == k] == [n] else both
        out = whole.token_bytes if [b for a, b in links if a == k] == [n] else both
        graph.add_edge(4 * k, 4 * k + 1, capacity=NIC_BYTES_S / into)
        graph.add_edge(4 * k + 1, 4 * k + 2, capacity=float(through[k]))
        graph.add_edge(4 * k + 2, 4 * k + 3, capacity=NIC_BYTES_S / out)
    for a, b in links:
        size = whole.token_bytes if n in (a, b) else both
        graph.add_edge(4 * a + 3, 4 * b, capacity=float(whole.links.bandwidth_bytes_s[a, b] / size))
    _, flows = networkx.maximum_flow(graph, source, sink)
    found = np.zeros((n + 1, n + 1))
    for a, b in links:
        found[a, b] = flows[4 * a + 3][4 * b]
    return found


def expected(
    case: str, mode: Mode, *, how: str = "simulation", experiment: str | None = None
) -> dict[str, float]:
    """What the artifact prints for a case: decode throughput and latencies by metric.

    Parameters
    ----------
    how
        ``"simulation"``, or ``"prototype"`` for its real 24 nodes.
    experiment
        ``"model_placement"`` or ``"request_scheduling"`` where not that of Helix Fig. 6 to 8.

    Examples
    --------
    >>> expected("geo-24 70B helix", "offline")
    {'decode_throughput': 98.0}
    """
    cluster, model, method = case.split(" ", 2)
    usual = {"single-24": "single_cluster", "geo-24": "geo_distributed"}
    wanted = {
        "experiment": experiment or usual.get(cluster, "high_heterogeneity"),
        "cluster": cluster,
        "model": model,
        "method": method.replace(" ", "_"),
        "mode": mode,
        "run": how,
    }
    frame = _table("helix_expected.csv")
    frame = frame[(frame[list(wanted)] == pd.Series(wanted)).all(axis=1)]
    return dict(zip(frame["metric"], frame["value"], strict=True))


def printed_tps(case: str, *, experiment: str | None = None) -> tuple[float, float]:
    """Decode throughput offline that the artifact prints [tokens/s]; NaN where it prints none.

    Returns
    -------
    tuple
        Of its simulator, and of its 24 real nodes.

    Examples
    --------
    >>> printed_tps("geo-24 70B swarm", experiment="model_placement")
    (41.6, nan)
    """
    found = (
        expected(case, "offline", how=how, experiment=experiment)
        for how in ("simulation", "prototype")
    )
    simulated, real = (printed.get("decode_throughput", np.nan) for printed in found)
    return simulated, real
