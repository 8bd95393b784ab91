"""Small random problems of placement, and all their placements tried one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero.catalog import llm
from hetero.placement import Links, Node, Problem, machine_kind
from hetero.placement.network import connections, solve


def random_problem(seed: int, nodes: int, layers: int, most: int, *, slow: bool) -> Problem:
    """Nodes of up to three kinds with falling throughput; slow links bind."""
    draws = np.random.default_rng(seed)
    kind = machine_kind("L4", "Llama-2-70B")
    tables = []
    for _ in range(int(draws.integers(1, 4))):
        held = int(draws.integers(1, most + 1))
        curve = draws.uniform(300, 3000) / np.arange(1, held + 1) ** draws.uniform(0.8, 1.4)
        tables.append(np.concatenate([[0.0], curve]))
    chosen = [tables[int(draws.integers(len(tables)))] for _ in range(nodes)]
    bandwidth = np.full((nodes + 1, nodes + 1), 1e9)
    if slow:
        bandwidth[:nodes, :nodes] = draws.uniform(1e6, 3e7, (nodes, nodes))
    return Problem(
        "small",
        replace(llm("Llama-2-70B"), name="small model", layers=layers),
        tuple(Node(f"n{k}", f"r{k % 2}", kind, table) for k, table in enumerate(chosen)),
        Links(bandwidth, np.full_like(bandwidth, 1e-3)),
    )


def two_slow_regions(seed: int, nodes: int) -> Problem:
    """Five layers on nodes in two regions with slow links between them."""
    small = random_problem(seed, nodes, 5, 4, slow=False)
    draws = np.random.default_rng(seed)
    bandwidth = small.links.bandwidth_bytes_s.copy()
    apart = np.array([[a.region != b.region for a in small.nodes] for b in small.nodes])
    bandwidth[:nodes, :nodes][apart] = draws.uniform(1e6, 2e7, apart.sum())
    return replace(small, links=Links(bandwidth, small.links.latency_s))


def _flow(
    problem: Problem, starts: NDArray[np.int64], stops: NDArray[np.int64], partial: bool
) -> float:
    """Maximum flow [tokens/s] of nodes that hold [start, stop), -1 for none."""
    held = np.where(starts >= 0, stops - starts, 0)
    capacity = np.array([node.tokens_per_s[k] for node, k in zip(problem.nodes, held, strict=True)])
    valid = connections(starts, stops, problem.llm.layers, partial)
    return solve(valid, capacity, problem.link_tokens_per_s)[0]


def exhaustive(problem: Problem, *, partial: bool = False) -> float:
    """Largest flow over every placement; nodes may stay idle.

    Left out are placements of which a layer has too little throughput, or whose nodes that are
    still free hold too little work, to beat the best so far; and, where all links are equal, all
    but one order of equal nodes.
    """
    layers, n = problem.llm.layers, len(problem.nodes)
    tables = [node.tokens_per_s for node in problem.nodes]
    equal_links = np.ptp(problem.links.bandwidth_bytes_s) == 0
    order = sorted(range(n), key=lambda k: tables[k].tobytes()) if equal_links else list(range(n))
    choices = [
        [(-1, -1)] + [(s, s + k) for k in range(1, len(table)) for s in range(layers - k + 1)]
        for table in tables
    ]
    work = [float((table * np.arange(len(table))).max()) for table in tables]
    starts, stops = np.full(n, -1), np.full(n, -1)
    through = np.zeros(layers)
    best = 0.0

    def place(depth: int) -> None:
        nonlocal best
        missing = np.maximum(best * (1 + 1e-9) - through, 0.0).sum()
        if missing > sum(work[k] for k in order[depth:]) + 1e-9:
            return
        if depth == n:
            best = max(best, _flow(problem, starts, stops, partial))
            return
        node = order[depth]
        first = 0
        before = order[depth - 1]
        if equal_links and depth and tables[before].tobytes() == tables[node].tobytes():
            first = choices[node].index((int(starts[before]), int(stops[before])))
        for start, stop in choices[node][first:]:
            starts[node], stops[node] = start, stop
            if start >= 0:
                through[start:stop] += tables[node][stop - start]
            place(depth + 1)
            if start >= 0:
                through[start:stop] -= tables[node][stop - start]
        starts[node] = stops[node] = -1

    place(0)
    return best
