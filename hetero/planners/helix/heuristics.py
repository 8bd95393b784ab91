"""Placements that Helix compares with: Swarm, Petals, separate pipelines and the mixed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.errors import InfeasibleError
from hetero.grouping import grouped
from hetero.placement import Placement, Problem
from hetero.streams import stream

LayerRanges = dict[str, tuple[int, int]]


def swarm(problem: Problem, stages: int | None = None) -> Placement:
    """Swarm: stages of equal length, every node joins the stage with the least throughput.

    Parameters
    ----------
    stages
        Number of stages; by default the smallest divisor of the layers that lets the weakest node
        hold a stage.

    Raises
    ------
    InfeasibleError
        If a node cannot hold a stage, or there are fewer nodes than stages.

    Notes
    -----
    Source: Helix, section 6.2: baseline Swarm, after Ryabinin et al. (SWARM).

    Examples
    --------
    >>> from hetero.placement import FlowNetwork
    >>> from pipelines.studies.helix_artifact import problem
    >>> placement = swarm(problem("single-24", "70B"))
    >>> round(FlowNetwork(placement).max_flow().tokens_per_s, 2)
    757.85
    """
    layers = problem.llm.layers
    weakest = min(problem.nodes, key=lambda node: node.max_layers)
    if stages is None:
        stages = next(
            n for n in range(1, layers + 1) if layers % n == 0 and layers // n <= weakest.max_layers
        )
    length = layers // stages
    if layers % stages or length > weakest.max_layers or stages > len(problem.nodes):
        raise InfeasibleError(
            f"Swarm cannot part {problem.llm.name} into {stages} equal stages on the "
            f"{len(problem.nodes)} nodes of {problem.name}, of which '{weakest.name}' holds at "
            f"most {weakest.max_layers} layers.",
            resolve="give another number of stages, or leave out the weakest nodes.",
        )
    order = sorted(
        range(len(problem.nodes)),
        key=lambda k: (problem.nodes[k].tokens_per_s[length], k),
        reverse=True,
    )
    throughput = np.zeros(stages)
    ranges: list[tuple[int, int] | None] = [None] * len(problem.nodes)
    for k in order:
        stage = int(throughput.argmin())
        throughput[stage] += problem.nodes[k].tokens_per_s[length]
        ranges[k] = (length * stage, length * (stage + 1))
    return Placement(problem, tuple(ranges), f"{problem.name}, Swarm")


def petals(problem: Problem, seed: int = 0) -> Placement:
    """Petals: nodes join in random order where the layers have the least throughput so far.

    Every node holds as many layers as it can, from the start whose layers, sorted by the
    throughput they have, come first. Its network wants partial inference.

    Notes
    -----
    Source: Helix, section 6.6: baseline Petals of Borzunov and others.
    The artifact's own placements are in :mod:`pipelines.studies.helix_artifact`; it draws the
    order from another generator.
    """
    layers = problem.llm.layers
    throughput = np.zeros(layers)
    ranges: list[tuple[int, int] | None] = [None] * len(problem.nodes)
    for k in stream(seed, "petals").permutation(len(problem.nodes)):
        node = problem.nodes[int(k)]
        held = min(node.max_layers, layers)
        if not held:
            continue
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(throughput, held), axis=1)
        start = int(np.lexsort(windows.T[::-1])[0])
        throughput[start : start + held] += node.tokens_per_s[held]
        ranges[int(k)] = (start, start + held)
    return Placement(problem, tuple(ranges), f"{problem.name}, Petals")


def separate(problem: Problem) -> Placement:
    """Separate pipelines: one chain of equal parts per kind of node, where a kind suffices.

    Kinds whose nodes together hold too few layers stay idle. Nodes of a kind form as many
    pipelines of the least depth as they can.

    Raises
    ------
    InfeasibleError
        If no kind suffices.

    Notes
    -----
    Source: Helix, section 6.2: baseline of separate pipelines (SP).
    The artifact's own fill more than half of the memory with weights where a kind would not
    suffice otherwise.
    """
    ranges = _pipelines(problem)
    if not ranges:
        raise InfeasibleError(
            f"No kind of node of {problem.name} holds the {problem.llm.layers} layers of "
            f"{problem.llm.name} by itself.",
            resolve="mix kinds, as Petals and Swarm do.",
        )
    return Placement.of(problem, ranges, f"{problem.name}, separate pipelines")


def _pipelines(problem: Problem) -> LayerRanges:
    kinds = grouped((node.kind.name, k) for k, node in enumerate(problem.nodes))
    ranges: LayerRanges = {}
    for members in kinds.values():
        most = min(problem.nodes[members[0]].max_layers, problem.llm.layers)
        count = len(members) // (-(-problem.llm.layers // most) if most else len(members) + 1)
        for pipeline in range(count):
            # Nodes left over by the division make pipelines deeper, not idle.
            ranges |= _even(problem, members[pipeline::count])
    return ranges


def _even(problem: Problem, nodes: Sequence[int]) -> LayerRanges:
    """Equal parts, the longer ones last."""
    edges = [k * problem.llm.layers // len(nodes) for k in range(len(nodes) + 1)]
    return {
        problem.nodes[node].name: (edges[k], edges[k + 1])
        for k, node in enumerate(nodes)
        if edges[k] < edges[k + 1]
    }
