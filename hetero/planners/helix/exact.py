r"""The placement as an integer program over intervals: exact, for clusters of a few nodes.

For every group t, first layer s and number of layers k there are x_{tsk} nodes and a flow f_{tsk}:

.. math::

    \max F, \qquad f_{tsk} \le \min(T_t(k), U)\, x_{tsk}, \qquad \sum_{sk} x_{tsk} \le N_t, \qquad
    \sum_{s + k = b} f_{tsk} = \sum_{s = b} f_{tsk} \quad \text{at every boundary } b

with U an upper bound on the flow. With partial inference a flow f_{tskb} enters at any boundary b
from s to s + k - 1, and their sum is within the rate. Where links bind, every node is a group of
its own and the flow across a boundary is told apart by pairs of nodes, with f_{ijb} summed over b
within the link.
"""

from __future__ import annotations

import numpy as np

from hetero.errors import InfeasibleError
from hetero.placement import Problem
from hetero.planners.helix.assemble import Layout
from hetero.planners.helix.groups import NodeGroup, groups
from hetero.programs import Program, SolverError, SolverLimits

_LARGEST = 3_000  # variables of a program that is tried at all
_NODES = 12  # nodes of a cluster that is tried at all


def exact(
    problem: Problem,
    *,
    known: float,
    upper: float,
    nodes: int,
    partial: bool = False,
) -> tuple[Layout | None, float] | None:
    """A layout with more than ``known`` flow (None where there is none), and a bound.

    Parameters
    ----------
    known, upper
        Flow of a known placement, and a bound on the flow of any.
    nodes
        Nodes of the search tree.
    partial
        Whether a node may start in the middle of its layers.

    Returns
    -------
    tuple or None
        None where the program is too large or its limit came before a verdict.
    """
    layers, capacity = problem.llm.layers, problem.link_tokens_per_s
    n = len(problem.nodes)
    bound_by_links = bool((capacity[~np.eye(n + 1, dtype=bool)] < upper).any())
    kinds = (
        [NodeGroup(node.region, node.tokens_per_s, (k,)) for k, node in enumerate(problem.nodes)]
        if bound_by_links
        else list(groups(problem, by_region=False))
    )
    spots = [
        (t, s, k)
        for t, group in enumerate(kinds)
        for k in range(1, min(group.max_layers, layers) + 1)
        for s in range(layers - k + 1)
    ]
    entries = [
        (spot, s + offset) for spot, (_, s, k) in enumerate(spots) for offset in range(k)
        if partial or not offset
    ]  # fmt: skip
    size = len(spots) + len(entries) + (n * (n - 1) * (layers - 1) if bound_by_links else 0)
    if size > _LARGEST or n > _NODES:
        return None
    group, start, held = (np.array(part) for part in zip(*spots, strict=True))
    of, entry = (np.array(part) for part in zip(*entries, strict=True))
    stop = (start + held)[of]
    rate = np.array([min(float(kinds[t].tokens_per_s[k]), upper) for t, _, k in spots])
    counts = np.array([g.count for g in kinds], dtype=np.float64)
    program = Program()
    x = program.variables(len(spots), integer=True, upper=counts[group])
    f = program.variables(len(entries), objective=(entry == 0).astype(float))
    program.entries(program.rows(len(counts), upper=counts)[group], x, 1.0)
    served = program.rows(len(spots), upper=0.0)
    program.entries(served[of], f, 1.0)
    program.entries(served, x, -rate)
    program.entries(program.rows(1, lower=known * (1 + 1e-6), upper=upper)[0], f[entry == 0], 1.0)
    # Every layer is held by nodes that together carry what is sought.
    covered = program.rows(layers, lower=known * (1 + 1e-6))
    for layer in range(layers):
        here = (start <= layer) & (layer < start + held)
        program.entries(covered[layer], x[here], rate[here])
    if bound_by_links:
        _pairs(program, capacity, group[of], entry, stop, layers, f)
    else:
        through = program.rows(layers - 1, lower=0.0, upper=0.0)
        for boundary in range(1, layers):
            ends, begins = stop == boundary, entry == boundary
            program.entries(through[boundary - 1], f[ends], 1.0)
            program.entries(through[boundary - 1], f[begins], -1.0)
    try:
        solution = program.solve(SolverLimits(gap=1e-6, nodes=nodes), names="the exact placement")
    except InfeasibleError:
        return None, known * (1 + 1e-6)
    except SolverError:
        return None
    members = [list(g.members) for g in kinds]
    starts = np.full(n, -1, dtype=np.int64)
    stops = starts.copy()
    for spot, number in enumerate(np.rint(solution.values[: len(spots)]).astype(int)):
        for _ in range(number):
            node = members[group[spot]].pop()
            starts[node], stops[node] = start[spot], start[spot] + held[spot]
    return Layout(problem, starts, stops, partial=partial), min(upper, solution.bound)


def _pairs(
    program: Program,
    capacity: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    group: np.ndarray[tuple[int], np.dtype[np.int64]],
    start: np.ndarray[tuple[int], np.dtype[np.int64]],
    stop: np.ndarray[tuple[int], np.dtype[np.int64]],
    layers: int,
    f: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    """Flow between pairs of nodes at every boundary, within the links."""
    n = len(capacity) - 1
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    a, b = (np.array(part) for part in zip(*pairs, strict=True))
    link = program.rows(len(pairs), upper=capacity[a, b])
    for boundary in range(1, layers):
        moved = program.variables(len(pairs))
        program.entries(link, moved, 1.0)
        leave = program.rows(n, lower=0.0, upper=0.0)
        enter = program.rows(n, lower=0.0, upper=0.0)
        program.entries(leave[a], moved, 1.0)
        program.entries(enter[b], moved, 1.0)
        ends, begins = stop == boundary, start == boundary
        program.entries(leave[group[ends]], f[ends], -1.0)
        program.entries(enter[group[begins]], f[begins], -1.0)
    gate = program.rows(2 * n, upper=np.concatenate([capacity[n, :n], capacity[:n, n]]))
    first, last = start == 0, stop == layers
    program.entries(gate[group[first]], f[first], 1.0)
    program.entries(gate[n + group[last]], f[last], 1.0)
