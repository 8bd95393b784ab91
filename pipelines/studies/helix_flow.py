"""Helix's flow: the maximum flow that its artifact follows, on the links that it keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.placement.network import FlowNetwork
from hetero.placement.problem import NIC_BYTES_S
from hetero.placement.pruning import pruned
from pipelines.studies.helix_artifact import numbering, placement

Floats = NDArray[np.float64]


def preflow(network: FlowNetwork, order: list[int]) -> Floats:
    """The maximum flow that preflow-push ends with on the artifact's graph, shape (n + 1, n + 1).

    A maximum flow is not unique, and the router follows the one it is given. Vertices and links
    are added in the artifact's order, with its network interfaces as further edges. Vertices are
    whole numbers: the algorithm takes them from sets, and the order of names in a set would
    change from run to run.

    Notes
    -----
    Source: Helix, section 4.3: preflow-push algorithm.
    """
    import networkx

    whole = network.placement.problem
    n, valid = len(whole.nodes), network.valid()
    both = whole.activation_bytes + whole.token_bytes
    graph = networkx.DiGraph()
    # Vertices 4k to 4k + 3: into node k, its start, its end, out of it; then source and sink.
    source, sink = 4 * n + 4, 4 * n + 5
    most = NIC_BYTES_S / whole.token_bytes
    graph.add_edge(source, 4 * n + 3, capacity=most)
    graph.add_edge(4 * n, sink, capacity=most)
    through = network.node_tokens_per_s()
    used = [k for k in order if network.placement.ranges[k] is not None]
    for k in used:
        into = whole.token_bytes if set(np.flatnonzero(valid[:, k])) == {n} else both
        out = whole.token_bytes if set(np.flatnonzero(valid[k])) == {n} else both
        graph.add_edge(4 * k, 4 * k + 1, capacity=NIC_BYTES_S / into)
        graph.add_edge(4 * k + 1, 4 * k + 2, capacity=float(through[k]))
        graph.add_edge(4 * k + 2, 4 * k + 3, capacity=NIC_BYTES_S / out)
    pairs = [(n, k) for k in used] + [(k, n) for k in used]
    pairs += [pair for i, a in enumerate(used) for b in used[i + 1 :] for pair in ((a, b), (b, a))]
    links = [(a, b) for a, b in pairs if valid[a, b]]
    for a, b in links:
        size = whole.token_bytes if n in (a, b) else both
        speed = whole.links.bandwidth_bytes_s[a, b]
        graph.add_edge(4 * a + 3, 4 * b, capacity=float(speed / size))
    _, flows = networkx.maximum_flow(graph, source, sink)
    found = np.zeros(valid.shape)
    for a, b in links:
        found[a, b] = flows[4 * a + 3][4 * b]
    return found


def artifact_network(name: str, *, raw: bool = False) -> FlowNetwork:
    """Network of a published placement: on pruned links and with partial inference as it was found.

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
    return FlowNetwork(found, method == "petals", links)


def artifact_flow(network: FlowNetwork, cluster: str) -> Floats:
    """Its preflow-push flow, in the artifact's numbering."""
    names = {node.name: k for k, node in enumerate(network.placement.problem.nodes)}
    return preflow(network, [names[name] for name in numbering(cluster) if name in names])
