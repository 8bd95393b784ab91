"""Plans chosen by what they deliver: parallel pipelines beside the placements of largest flow.

The maximum flow counts the work of nodes at a fixed operating point. What a cluster that is kept
full delivers is its requests in flight over the time of a token, and both depend on more:

- in flight is what the KV cache of the scarcest layer holds;
- decoding tokens cannot overtake a prompt on a chain of single nodes, so that a token takes nearly
  as long as a prompt, and a deep chain of fast nodes is no better than its prompts are.

Several shorter pipelines share the same cache among them, but a token of one does not wait for the
prompts of the others. So nodes are divided (by type, by region, into alike copies), every part
becomes a chain whose slowest stages have copies, and all candidates are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.display import Column, Shown, Table
from hetero.errors import HeteroError, InfeasibleError
from hetero.placement import FlowNetwork, LayerRange, Placement, Problem
from hetero.routers.pipelines import FlowRouter
from hetero.simulator.pipeline_run import OFFLINE_S, PipelineRun, WindowFigures, combine
from hetero.simulator.pipelines import Feed, simulate_pipelines
from hetero.workload import Trace

PROMPT_TOKENS = 750.0
"""Prompt that speeds of nodes are compared with (Helix's operating point)."""
SHARES = (1.0, 0.9, 0.8, 0.7, 0.55)
"""Of the largest cache per layer that a chain of the nodes can have; less leaves slow nodes over,
which then share the work of the stages that take longest."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A way to use a cluster: one placement, or several that serve side by side.

    Attributes
    ----------
    name
        How it came about.
    placements
        On the same problem, no node in two of them.
    """

    name: str
    placements: tuple[Placement, ...]

    @property
    def tokens_per_s(self) -> float:
        """Maximum flow, added up."""
        return sum(FlowNetwork(one).max_flow().tokens_per_s for one in self.placements)


@dataclass(frozen=True, slots=True, eq=False)
class DeliveredOption:
    """An option and what it delivers when it is kept full.

    Attributes
    ----------
    flow_tps, depth
        Maximum flow, and mean number of nodes that a token passes.
    serving
        Decode throughput and latencies.
    in_flight
        Requests in flight at the end.
    node_use
        Mean share of the window that the used nodes spent in batches.
    """

    option: Option
    flow_tps: float
    depth: float
    serving: WindowFigures
    in_flight: int
    node_use: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking(Shown):
    """Options by what they deliver, the best first."""

    problem: Problem
    ranked: tuple[DeliveredOption, ...]

    @property
    def best(self) -> DeliveredOption:
        """The option with the largest decode throughput."""
        return self.ranked[0]

    @property
    def by_flow(self) -> DeliveredOption:
        """The option with the largest maximum flow."""
        return max(self.ranked, key=lambda one: one.flow_tps)

    @property
    def gain(self) -> float:
        """Decode throughput of the best over that of the largest flow."""
        return self.best.serving.decode_tps / self.by_flow.serving.decode_tps

    def table(self) -> Table:
        """One row per option."""
        columns = (
            Column("option", of="option.name"),
            Column("pipelines apart", of=lambda one: len(one.option.placements)),
            Column("flow", "tokens/s", of="flow_tps"),
            Column("depth", "nodes", 3),
            Column("decoded", "tokens/s", of="serving.decode_tps"),
            Column("prompt latency", "s", 3, "serving.prompt.mean_s"),
            Column("decode latency", "s", 3, "serving.decode.mean_s"),
            Column("in flight", of="in_flight"),
            Column("nodes busy", "%", 3, lambda one: 100 * one.node_use),
        )
        title = f"{self.problem.llm.name} on {self.problem.name}: flow and what is delivered"
        return Table.of(title, columns, self.ranked)


def chain(problem: Problem, nodes: Sequence[int], share: float = 1.0) -> Placement:
    """One pipeline with the largest KV cache per layer, or a share of it, fast nodes first.

    Every node may hold as many layers as leave that cache; the fastest are filled, the slowest
    hold what remains, or nothing. Nodes of one region follow each other.

    Raises
    ------
    InfeasibleError
        If the nodes hold too few layers.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> whole = problem("single-24", "30B")
    >>> a100 = [k for k, node in enumerate(whole.nodes) if node.kind.gpu.startswith("A100")]
    >>> [held for held in chain(whole, a100).ranges if held]
    [(0, 15), (15, 30), (30, 45), (45, 60)]
    """
    layers = problem.llm.layers
    cache = {
        k: [problem.nodes[k].kind.kv_tokens(x) for x in range(1, problem.nodes[k].max_layers + 1)]
        for k in nodes
    }
    if sum(map(len, cache.values())) < layers:
        raise InfeasibleError(
            f"{len(nodes)} nodes of {problem.name} hold {sum(map(len, cache.values()))} of the "
            f"{layers} layers of {problem.llm.name}.",
            resolve="give the pipeline more nodes.",
        )

    def most(least_tokens: float) -> dict[int, int]:
        return {k: sum(one >= least_tokens for one in held) for k, held in cache.items()}

    sizes = sorted({one for held in cache.values() for one in held}, reverse=True)
    largest = next(size for size in sizes if sum(most(size).values()) >= layers)
    held = most(share * largest)
    left = layers
    taken: dict[int, int] = {}
    for k in sorted(nodes, key=lambda k: (_layer_ms(problem, k), k)):
        taken[k] = min(held[k], left)
        left -= taken[k]
    ranges: list[LayerRange | None] = [None] * len(problem.nodes)
    at = 0
    order = {region: k for k, region in enumerate(problem.regions)}
    for k in sorted(nodes, key=lambda k: (order[problem.nodes[k].region], k)):
        if taken[k]:
            ranges[k] = (at, at + taken[k])
            at += taken[k]
    return Placement(problem, tuple(ranges))


def copied(placement: Placement, nodes: Sequence[int]) -> Placement:
    """Idle ones of some nodes hold what the stage holds that takes a prompt longest per copy.

    Stages with copies let tokens pass each other's prompts.
    """
    problem = placement.problem
    ranges = list(placement.ranges)
    for k in nodes:
        if ranges[k] is not None:
            continue
        best, longest = None, 0.0
        for j in nodes:
            held = ranges[j]
            if held is None or held[1] - held[0] > problem.nodes[k].max_layers:
                continue
            time = (held[1] - held[0]) * _layer_ms(problem, j) / ranges.count(held)
            if time > longest:
                best, longest = held, time
        ranges[k] = best
    return Placement(problem, tuple(ranges))


def _layer_ms(problem: Problem, node: int) -> float:
    return float(problem.nodes[node].kind.latency.prompt_layer_ms(PROMPT_TOKENS))


def divisions(problem: Problem) -> dict[str, list[list[int]]]:
    """Ways to divide the nodes into pipelines: by type, by region, and into alike copies.

    Parts that cannot hold the model are left out, and divisions of which nothing is left.
    """
    nodes = range(len(problem.nodes))
    layers = problem.llm.layers
    room = [node.max_layers for node in problem.nodes]
    found: dict[str, list[list[int]]] = {}
    for copies in range(1, sum(room) // layers + 1):
        parts: list[list[int]] = [[] for _ in range(copies)]
        # The largest nodes first, each to the part that holds least.
        for k in sorted(nodes, key=lambda k: (-room[k], k)):
            min(parts, key=lambda part: sum(room[j] for j in part)).append(k)
        found[f"{copies} alike" if copies > 1 else "one chain"] = parts
    for name, key in (
        ("by type", [node.kind.name for node in problem.nodes]),
        ("by region", [node.region for node in problem.nodes]),
    ):
        found[name] = [[k for k in nodes if key[k] == one] for one in dict.fromkeys(key)]
    kept: dict[str, list[list[int]]] = {}
    for name, parts in found.items():
        whole = [part for part in parts if sum(room[k] for k in part) >= layers]
        if whole and whole not in kept.values():
            kept[name] = whole
    return kept


def options(problem: Problem, shares: Sequence[float] = SHARES) -> tuple[Option, ...]:
    """Chains side by side for every division of the nodes, several sizes of cache, and copies."""
    found: list[Option] = []
    seen: set[tuple[tuple[LayerRange | None, ...], ...]] = set()
    for name, parts in divisions(problem).items():
        for share in shares:
            label = name if share == 1.0 else f"{name}, {share:g} of the cache"
            chains = tuple(chain(problem, part, share) for part in parts)
            copies = tuple(copied(one, part) for one, part in zip(chains, parts, strict=True))
            for option in (Option(label, chains), Option(f"{label}, copies", copies)):
                shape = tuple(one.ranges for one in option.placements)
                if shape not in seen:
                    seen.add(shape)
                    found.append(option)
    return tuple(found)


def deliver(
    option: Option, requests: Trace, window_s: tuple[float, float] = OFFLINE_S
) -> tuple[tuple[PipelineRun, ...], WindowFigures]:
    """Simulate an option offline: Helix's router and feed, each pipeline fed on its own."""
    runs = tuple(
        simulate_pipelines(
            FlowNetwork(one),
            requests,
            FlowRouter.offline(),
            feed=Feed(),
            window_s=window_s,
            until_s=window_s[1],
        )
        for one in option.placements
    )
    return runs, combine(option.name, runs)


def rank(
    problem: Problem,
    candidates: Sequence[Option],
    requests: Trace,
    window_s: tuple[float, float] = OFFLINE_S,
) -> Ranking:
    """Simulate candidates and sort them by decode throughput.

    Those through which nothing flows are left out.

    Raises
    ------
    InfeasibleError
        If nothing flows through any.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> from pipelines.studies.helix import offline_requests
    >>> found = rank(
    ...     problem("single-24", "30B"),
    ...     options(problem("single-24", "30B"), shares=(1.0,)),
    ...     offline_requests("twin", 500),
    ...     (10.0, 70.0),
    ... )
    >>> found.best.option.name
    'by type'
    """
    found = []
    for option in candidates:
        try:
            flows = [FlowNetwork(one).max_flow() for one in option.placements]
            runs, serving = deliver(option, requests, window_s)
        except HeteroError:
            continue
        total = sum(flow.tokens_per_s for flow in flows)
        found.append(
            DeliveredOption(
                option,
                total,
                sum(flow.tokens_per_s * flow.depth for flow in flows) / total,
                serving,
                sum(run.counts["in flight"] for run in runs),
                float(np.mean(np.concatenate([run.node_use for run in runs]))),
            )
        )
    if not found:
        raise InfeasibleError(
            f"Nothing flows through any of {len(candidates)} options on {problem.name}.",
            resolve="check the links to the coordinator and between the nodes.",
        )
    return Ranking(problem, tuple(sorted(found, key=lambda one: -one.serving.decode_tps)))
