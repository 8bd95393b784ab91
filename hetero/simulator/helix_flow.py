"""Helix's flow: pruned links, and the maximum flow that its artifact follows."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero import paths
from hetero.placement.network import Network
from hetero.placement.problem import NIC_BYTES_S, Problem
from hetero.placement.published import placement, problem

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

DEGREE = 12
"""Fastest links that pruning keeps at every node (section 6.8)."""


@lru_cache(maxsize=8)
def _order(cluster: str) -> tuple[str, ...]:
    """Our names of the nodes in the order in which the artifact numbers them."""
    import pandas as pd

    frame = pd.read_csv(paths.data("published", "helix_nodes.csv"))
    mine = frame[frame["cluster"] == cluster].sort_values("number")
    return tuple(str(node) for node in mine["node"])


def pruned(cluster: str, whole: Problem, degree: int = DEGREE) -> Flags:
    """Links that pruning keeps: the fastest of every node and of the coordinator.

    Of equally fast ones the artifact keeps those whose name sorts last, so that with equal
    bandwidths (``"hetero-42"``) its numbering decides.
    """
    n = len(whole.nodes)
    speed = whole.links.bandwidth_bytes_s
    at = [whole.index(name) for name in _order(cluster)]
    kept = np.zeros((n + 1, n + 1), bool)
    for i, k in enumerate(at):
        others = [
            (speed[k, m], f"Link-{min(i, j)}-{max(i, j)}", m) for j, m in enumerate(at) if j != i
        ]
        for _, _, m in sorted(others, reverse=True)[:degree]:
            kept[k, m] = kept[m, k] = True
    outward = sorted(((speed[n, m], j, m) for j, m in enumerate(at)), reverse=True)
    inward = sorted(((speed[m, n], j, m) for j, m in enumerate(at)), reverse=True)
    kept[n, [m for *_, m in outward[:degree]]] = True
    kept[[m for *_, m in inward[:degree]], n] = True
    return kept


def preflow(network: Network, order: list[int]) -> Floats:
    """The maximum flow that preflow-push ends with on the artifact's graph, shape (n + 1, n + 1).

    A maximum flow is not unique, and the router follows the one it is given. Vertices and links
    are added in the artifact's order, with its network interfaces as further edges.

    Notes
    -----
    Source: Helix section 4.3, which names the algorithm.
    """
    import networkx

    whole = network.placement.problem
    n, valid = len(whole.nodes), network.valid()
    both = whole.activation_bytes + whole.token_bytes
    graph = networkx.DiGraph()
    most = NIC_BYTES_S / whole.token_bytes
    graph.add_edge("source", (n, "out"), capacity=most)
    graph.add_edge((n, "in"), "sink", capacity=most)
    through = network.node_tokens_per_s()
    used = [k for k in order if network.placement.ranges[k] is not None]
    for k in used:
        into = whole.token_bytes if set(np.flatnonzero(valid[:, k])) == {n} else both
        out = whole.token_bytes if set(np.flatnonzero(valid[k])) == {n} else both
        graph.add_edge((k, "in"), (k, "start"), capacity=NIC_BYTES_S / into)
        graph.add_edge((k, "start"), (k, "end"), capacity=float(through[k]))
        graph.add_edge((k, "end"), (k, "out"), capacity=NIC_BYTES_S / out)
    pairs = [(n, k) for k in used] + [(k, n) for k in used]
    pairs += [pair for i, a in enumerate(used) for b in used[i + 1 :] for pair in ((a, b), (b, a))]
    links = [(a, b) for a, b in pairs if valid[a, b]]
    for a, b in links:
        size = whole.token_bytes if n in (a, b) else both
        speed = whole.links.bandwidth_bytes_s[a, b]
        graph.add_edge((a, "out"), (b, "in"), capacity=float(speed / size))
    _, flows = networkx.maximum_flow(graph, "source", "sink")
    found = np.zeros(valid.shape)
    for a, b in links:
        found[a, b] = flows[(a, "out")][(b, "in")]
    return found


def artifact_network(name: str, *, raw: bool = False) -> Network:
    """Network of a published placement: on pruned links and with partial inference as it was found.

    Helix's own placements of LLaMA-70B on several regions or many types were found on pruned
    links; only Petals starts in the middle of a node.
    """
    found = placement(name, raw=raw)
    cluster, model, method = name.split(" ", 2)
    was_pruned = cluster in ("geo-24", "hetero-42") and model == "70B"
    links = None
    if was_pruned and method in ("helix", "helix-scheduling", "helix-no-start"):
        links = pruned(cluster, problem(cluster, model, raw=raw))
    return Network(found, method == "petals", links)


def artifact_flow(network: Network, cluster: str) -> Floats:
    """Its preflow-push flow, in the artifact's numbering."""
    names = {node.name: k for k, node in enumerate(network.placement.problem.nodes)}
    return preflow(network, [names[name] for name in _order(cluster) if name in names])
