"""From blocks or chains to nodes with layers, and improvement by exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

import numpy as np

from hetero.arrays import Ints
from hetero.placement import Problem
from hetero.placement.network import connections, solve
from hetero.planners.helix.blocks import Block
from hetero.planners.helix.groups import NodeGroup

_ORDERS = 24  # orders of regions tried at most


class Layout:
    """Layers [start, stop) of every node as arrays, -1 where it holds none; evaluates itself.

    Parameters
    ----------
    starts, stops
        Shape (nodes,).
    partial
        Whether a connection may start inside a node's layers (partial inference).
    """

    __slots__ = ("partial", "problem", "starts", "stops", "value")

    def __init__(
        self, problem: Problem, starts: Ints, stops: Ints, *, partial: bool = False
    ) -> None:
        self.problem, self.starts, self.stops, self.partial = problem, starts, stops, partial
        self.value = self._flow()

    def _flow(self) -> float:
        """Exact maximum flow [tokens/s]."""
        held = np.where(self.starts >= 0, self.stops - self.starts, 0)
        capacity = np.array(
            [node.tokens_per_s[k] for node, k in zip(self.problem.nodes, held, strict=True)]
        )
        valid = connections(self.starts, self.stops, self.problem.llm.layers, self.partial)
        return solve(valid, capacity, self.problem.link_tokens_per_s)[0]

    def changed(self, nodes: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> Layout:
        """The layout with other layers on some nodes."""
        new_starts, new_stops = self.starts.copy(), self.stops.copy()
        new_starts[list(nodes)], new_stops[list(nodes)] = starts, stops
        return Layout(self.problem, new_starts, new_stops, partial=self.partial)

    def key(self) -> bytes:
        """Equal for equal layouts."""
        return self.starts.tobytes() + self.stops.tobytes()


def of_chain(
    problem: Problem, found: Sequence[NodeGroup], nodes: Sequence[tuple[int, int]]
) -> Layout:
    """Layout of one chain of (group, layers)."""
    return place(problem, found, [Block(k, ((t, 0, k),)) for t, k in nodes])


def of_line(
    problem: Problem, found: Sequence[NodeGroup], line: Sequence[Sequence[Block]], first: int
) -> Layout:
    """Best layout of a line of blocks over the orders of its regions.

    Regions before ``first`` end with their entry block, those behind it begin with it.
    """
    used = [p for p, blocks in enumerate(line) if blocks]
    layouts = []
    for order in islice(permutations(used), _ORDERS):
        blocks: list[Block] = []
        before = first in order
        for p in order:
            before = before and p != first
            own = sorted(line[p], key=lambda block: (not block.entry, -block.layers))
            blocks += own[::-1] if before else own
        layouts.append(place(problem, found, blocks))
    return max(layouts, key=lambda layout: layout.value)


def place(problem: Problem, found: Sequence[NodeGroup], blocks: Sequence[Block]) -> Layout:
    """Layout of blocks in a row."""
    free: list[Iterator[int]] = [iter(group.members) for group in found]
    starts = np.full(len(problem.nodes), -1, dtype=np.int64)
    stops = starts.copy()
    at = 0
    for block in blocks:
        for group, offset, held in block.parts:
            node = next(free[group])
            starts[node], stops[node] = at + offset, at + offset + held
        at += block.layers
    return Layout(problem, starts, stops)


def exchange(
    layout: Layout, rounds: int, draws: np.random.Generator, *, target: float = np.inf
) -> Layout:
    """Hill climbing: nodes swap or copy layers, boundaries shift; equal values are accepted.

    Parameters
    ----------
    rounds
        Layouts evaluated.
    target
        Flow that ends the search.
    """
    best = current = layout
    most = np.array([node.max_layers for node in layout.problem.nodes])
    for _ in range(rounds):
        if best.value >= target:
            break
        tried = _move(current, most, draws)
        if tried is not None and tried.value >= current.value:
            current = tried
            if current.value > best.value * (1 + 1e-9):
                best = current
    return best


def _move(layout: Layout, most: Ints, draws: np.random.Generator) -> Layout | None:
    starts, stops = layout.starts, layout.stops
    if layout.partial and draws.random() < 0.3:
        # A node takes layers that may begin or end anywhere.
        a = int(draws.integers(len(starts)))
        if not most[a]:
            return None
        first = int(draws.integers(layout.problem.llm.layers))
        end = min(first + int(draws.integers(1, most[a] + 1)), layout.problem.llm.layers)
        return layout.changed([a], [first], [end])
    kind = draws.random()
    if kind < 0.6:
        # Two nodes swap what they hold.
        a, b = (int(k) for k in draws.choice(len(starts), 2, replace=False))
        lengths = stops - starts
        if (starts[a], stops[a]) == (starts[b], stops[b]):
            return None
        if lengths[a] > most[b] or lengths[b] > most[a]:
            return None
        return layout.changed([a, b], [starts[b], starts[a]], [stops[b], stops[a]])
    if kind < 0.8:
        # A node takes layers between two boundaries that exist.
        edges = np.unique(np.concatenate([starts[starts >= 0], stops[starts >= 0]]))
        a = int(draws.integers(len(starts)))
        start = int(draws.choice(edges))
        ends = edges[(edges > start) & (edges <= start + most[a])]
        return None if not len(ends) else layout.changed([a], [start], [int(draws.choice(ends))])
    # A boundary between blocks shifts by a layer.
    edges = np.unique(stops[starts >= 0])
    edges = edges[edges < layout.problem.llm.layers]
    if not len(edges):
        return None
    edge, by = int(draws.choice(edges)), int(draws.choice([-1, 1]))
    new_starts = np.where(starts == edge, edge + by, starts)
    new_stops = np.where(stops == edge, edge + by, stops)
    held = new_stops - new_starts
    if (held[starts >= 0] < 1).any() or (held > most).any():
        return None
    return Layout(layout.problem, new_starts, new_stops, partial=layout.partial)
