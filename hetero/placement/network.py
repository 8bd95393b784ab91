"""The flow network of a placement, and its exact maximum flow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse.csgraph import breadth_first_order

from hetero.arrays import Flags, Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError
from hetero.placement.placement import Placement

_SCALE = float(2**20)  # capacities are whole numbers to the solver: steps of 1e-6 tokens/s


@dataclass(frozen=True, slots=True, eq=False)
class FlowNetwork:
    """Vertices in and out of every node, and the coordinator as source and sink.

    A connection is valid from the coordinator to a node with the first layer, from a node with
    the last layer to the coordinator, and from a node to another one that goes on where it stops:
    at its first layer, or with ``partial_inference`` at any of its layers but none behind it.

    Attributes
    ----------
    partial_inference
        Whether a node may start in the middle of its layers: s_j <= e_i < e_j instead of e_i = s_j.
    links
        Links that may be used, shape (n + 1, n + 1), all by default; the last index is the
        coordinator.
    order
        Links, from and to, in the order in which a router takes equal ones; by node by default.

    Notes
    -----
    Source: Helix, section 4.3: graph abstraction of a placement; c_in, c_out.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import placement
    >>> round(FlowNetwork(placement("single-24 70B helix")).max_flow().tokens_per_s, 2)
    1289.56
    """

    placement: Placement
    partial_inference: bool = False
    links: Flags | None = None
    order: tuple[tuple[int, int], ...] = ()

    def valid(self) -> Flags:
        """Valid connections, shape (n + 1, n + 1)."""
        starts, stops = bounds(self.placement)
        return connections(
            starts, stops, self.placement.problem.llm.layers, self.partial_inference, self.links
        )

    def node_tokens_per_s(self) -> Floats:
        """Capacity from in to out of every node [tokens/s], shape (n,)."""
        held = enumerate(self.placement.ranges)
        return np.array([self.placement.tokens_per_s(k) if layers else 0.0 for k, layers in held])

    def max_flow(self) -> Flow:
        """Exact maximum flow from source to sink.

        Source: Helix, section 4.3: throughput of a placement as a maximum flow.

        Raises
        ------
        InfeasibleError
            If nothing can flow; names the layer or the link that is missing.
        """
        problem = self.placement.problem
        valid = self.valid()
        value, flow, cut = solve(valid, self.node_tokens_per_s(), problem.link_tokens_per_s)
        if value <= 0:
            raise self._nothing_flows(valid)
        return Flow(self, value, flow, cut)

    def _nothing_flows(self, valid: Flags) -> InfeasibleError:
        problem = self.placement.problem
        missing = np.flatnonzero(self.placement.copies == 0)
        if len(missing):
            return InfeasibleError(
                f"No node of {problem.name} holds layer {missing[0]} of {problem.llm.name}.",
                resolve="place it on a node.",
            )
        dead = np.argwhere(valid & (problem.link_tokens_per_s <= 0))
        if len(dead):
            a, b = (self._name(int(k)) for k in dead[0])
            return InfeasibleError(
                f"The link from {a} to {b} of {problem.name} has no bandwidth, and nothing flows "
                "around it.",
                resolve="give the link a bandwidth, or place the layers so that it is not needed.",
            )
        reached = _reached(valid)
        last = max(sorted(reached), key=lambda k: bounds(self.placement)[1][k], default=-1)
        where = self._name(last) if last >= 0 else "the coordinator"
        return InfeasibleError(
            f"No node of {problem.name} goes on where {where} stops.",
            resolve="let a node start at the layer behind it, or allow partial inference.",
        )

    def _name(self, node: int) -> str:
        nodes = self.placement.problem.nodes
        return "the coordinator" if node == len(nodes) else f"'{nodes[node].name}'"


def bounds(placement: Placement) -> tuple[Ints, Ints]:
    """First layer and layer behind the last one of every node, -1 where it holds none."""
    pairs = np.array([held or (-1, -1) for held in placement.ranges], dtype=np.int64)
    return pairs[:, 0], pairs[:, 1]


def connections(
    starts: Ints,
    stops: Ints,
    layers: int,
    partial_inference: bool,
    links: Flags | None = None,
) -> Flags:
    """Valid connections between nodes that hold [start, stop), shape (n + 1, n + 1).

    Source: Helix, section 4.4: partial inference and valid connections; s_j <= e_i < e_j.
    """
    n = len(starts)
    used = starts >= 0
    valid = np.zeros((n + 1, n + 1), dtype=bool)
    end, start = stops[:, None], starts[None, :]
    if partial_inference:
        valid[:n, :n] = (start <= end) & (end < stops[None, :])
    else:
        valid[:n, :n] = end == start
    valid[:n, :n] &= used[:, None] & used[None, :]
    np.fill_diagonal(valid, False)
    valid[n, :n] = starts == 0
    valid[:n, n] = stops == layers
    return valid if links is None else valid & links


def solve(
    valid: Flags, node_tokens_per_s: Floats, link_tokens_per_s: Floats
) -> tuple[float, Floats, Flags]:
    """Maximum flow, flow per link, and which nodes and links are full in its smallest cut.

    Returns
    -------
    value
        Tokens per second.
    flow
        On every link, shape (n + 1, n + 1).
    cut
        Diagonal: the node is in the cut; elsewhere: the link is. Shape (n + 1, n + 1).
    """
    from ortools.graph.python import max_flow

    n = len(node_tokens_per_s)
    rows, columns = np.nonzero(valid)
    # Vertex 2k is the way into node k, 2k + 1 the way out; the coordinator is 2n + 1 as source
    # and 2n as sink.
    tails = np.concatenate([2 * np.arange(n), 2 * rows + 1])
    heads = np.concatenate([2 * np.arange(n) + 1, 2 * columns])
    capacity = np.concatenate([node_tokens_per_s, link_tokens_per_s[rows, columns]])
    whole = np.floor(np.minimum(capacity, node_tokens_per_s.sum()) * _SCALE + 0.5)
    solver = max_flow.SimpleMaxFlow()
    arcs = solver.add_arcs_with_capacity(
        tails.astype(np.int32), heads.astype(np.int32), whole.astype(np.int64)
    )
    status = solver.solve(2 * n + 1, 2 * n)
    if status != solver.OPTIMAL:
        raise AssertionError(f"The maximum flow ended with status {status}.")
    moved = np.asarray(solver.flows(arcs), dtype=np.float64) / _SCALE
    flow, cut = np.zeros(valid.shape), np.zeros(valid.shape, dtype=bool)
    flow[rows, columns] = moved[n:]
    inside = np.zeros(2 * n + 2, dtype=bool)
    inside[solver.get_source_side_min_cut()] = True
    crossing = inside[tails] & ~inside[heads]
    cut[np.arange(n), np.arange(n)] = crossing[:n]
    cut[rows, columns] |= crossing[n:]
    return solver.optimal_flow() / _SCALE, flow, cut


def _reached(valid: Flags) -> set[int]:
    """Nodes that a path from the coordinator leads to."""
    n = len(valid) - 1
    order = breadth_first_order(valid & (np.arange(n + 1) < n), n, return_predecessors=False)
    return set(order[1:].tolist())


@dataclass(frozen=True, slots=True)
class Path:
    """A pipeline: nodes in order, and the tokens per second that take it."""

    nodes: tuple[int, ...]
    tokens_per_s: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Flow(Shown):
    """A maximum flow.

    Attributes
    ----------
    tokens_per_s
        Its value.
    link_tokens_per_s
        Flow on every link, shape (n + 1, n + 1); the last index is the coordinator.
    cut
        A smallest cut: nodes on the diagonal, links elsewhere.
    """

    network: FlowNetwork
    tokens_per_s: float
    link_tokens_per_s: Floats
    cut: Flags

    @property
    def node_tokens_per_s(self) -> Floats:
        """Flow through every node, shape (n,)."""
        return np.asarray(self.link_tokens_per_s[:, :-1].sum(axis=0))

    @property
    def utilisation(self) -> Floats:
        """Flow of every node over its throughput, 0 where it holds nothing, shape (n,)."""
        capacity = self.network.node_tokens_per_s()
        return np.divide(
            self.node_tokens_per_s, capacity, out=np.zeros(len(capacity)), where=capacity > 0
        )

    def paths(self) -> tuple[Path, ...]:
        """Pipelines whose tokens per second add up to the flow, the widest first.

        Each takes the widest connection on, so few pipelines carry most of the flow.
        """
        left = self.link_tokens_per_s.copy()
        left[left < 1e-9 * self.tokens_per_s] = 0.0
        n = len(left) - 1
        found: list[Path] = []
        while True:
            nodes, width, at = [], np.inf, n
            while True:
                step = int(left[at].argmax())
                if left[at, step] <= 0:
                    return tuple(sorted(found, key=lambda path: -path.tokens_per_s))
                width, at = min(width, left[at, step]), step
                if at == n:
                    break
                nodes.append(at)
            hops = [n, *nodes, n]
            left[hops[:-1], hops[1:]] -= width
            left[left < 1e-9 * self.tokens_per_s] = 0.0
            found.append(Path(tuple(nodes), float(width)))

    @property
    def depth(self) -> float:
        """Mean number of nodes that a token passes."""
        return float(self.node_tokens_per_s.sum() / self.tokens_per_s)

    @property
    def bottleneck(self) -> str:
        """Nodes and links of a smallest cut in words."""
        nodes = self.network.placement.problem.nodes
        names = [*(node.name for node in nodes), "coordinator"]
        parts = [
            names[a] if a == b else f"{names[a]} to {names[b]}" for a, b in np.argwhere(self.cut)
        ]
        return ", ".join(parts)

    def table(self) -> Table:
        """One row per node that holds layers, by their first layer."""
        placement = self.network.placement
        through, busy = self.node_tokens_per_s, self.utilisation
        node, gpus, layers, throughput, _ = placement.columns()
        columns = (
            node,
            gpus,
            layers,
            throughput,
            Column("flow", "tokens/s", of=lambda k: float(through[k])),
            Column("used", "%", 3, of=lambda k: 100 * float(busy[k])),
            Column("bottleneck", of=lambda k: bool(self.cut[k, k])),
        )
        title = placement.name or f"{placement.problem.llm.name} on {placement.problem.name}"
        return Table.of(
            f"{title}: {self.tokens_per_s:,.2f} tokens/s",
            columns,
            placement.by_layer(),
            f"Bottleneck: {self.bottleneck}.",
            f"Mean depth: {self.depth:.1f} nodes.",
        )
