"""Routers of pipelines: which nodes, one after another, serve a request.

A router settles the whole path of a request when it comes (flow), or decides hop by hop (Swarm),
or when an edge is free (random, shortest queue). Decoding follows the path of the prefill, where
the KV cache is. Each is one compiled kernel; :meth:`PipelineRouter.live` calls it for one
dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Flags
from hetero.engine.compiled import compiled
from hetero.engine.pipeline_kv import room
from hetero.engine.pipeline_state import DRAWS
from hetero.errors import InfeasibleError, require_not_negative, require_share
from hetero.placement.network import FlowNetwork
from hetero.routers.base import Floats, Request

FLOW, SWARM, RANDOM, SHORTEST_QUEUE = 0, 1, 2, 3

#: Edges with less than this share of what leaves a node are not used (Helix).
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What a dispatcher knows of the nodes; live views of shape (M,), not to be written.

    Attributes
    ----------
    now_s
        Time of the decision.
    outstanding, queued
        Requests whose path leads over each node, and messages waiting before its first layer.
    kv_entries, kv_reserved
        KV cache of each node, and what is counted on [tokens times layers].
    records
        The records behind these figures, which the built-in routers read.
    """

    now_s: float
    outstanding: NDArray[np.int64]
    queued: NDArray[np.int64]
    kv_entries: NDArray[np.int64]
    kv_reserved: NDArray[np.int64]
    records: tuple[Any, ...]


@dataclass(frozen=True)
class PipelineRouter:
    """A router whose decisions are a compiled kernel; subclasses say which."""

    code: ClassVar[int]
    late: ClassVar[bool] = False
    """Whether a message takes an edge only when one is free."""
    reserves: ClassVar[bool] = False
    """Whether it counts on KV cache and masks nodes that have too little."""
    name: str = ""

    def weights(self, network: FlowNetwork, links: Flags) -> Floats:
        """Weight of every connection over working links, shape (n + 1, n + 1)."""
        return np.ones(links.shape)

    def parameters(self) -> dict[str, float]:
        """Settings of the run that the kernel reads, by name."""
        return {}

    def live(self) -> LivePipelineRouter:
        """The router for one dispatcher that decides for whole paths."""
        return LivePipelineRouter(self.name, self.code)


@compiled
def by_weight(p, V, L, i, tokens, expected):
    """IWRR (Helix section 5.1) over the edges of a node that have room; -1 for none.

    Source: Helix, section 5.1: interleaved weighted round robin (IWRR) over the flow; w_uv.
    """
    first, stop = V[i].out_first, V[i].out_first + V[i].out_count
    total = 0.0
    for e in range(first, stop):
        total += L[e].weight
    best, least = np.int64(-1), np.inf
    for e in range(first, stop):
        edge = L[e]
        if not edge.up or edge.weight <= 0.0 or edge.weight < LEAST_SHARE * total:
            continue
        if edge.target < p.nodes and not room(p, V[edge.target], expected):
            continue
        after = edge.load + tokens / edge.weight
        if after < least:
            best, least = np.int64(e), after
    if best >= 0:
        L[best].load = least
    return best


@dataclass(frozen=True)
class FlowRouter(PipelineRouter):
    """Helix: interleaved weighted round robin (IWRR) at every vertex, KV cache masked as expected.

    The weight of a connection is what the maximum flow sends over it. A vertex gives a request of
    ``n`` tokens to the edge with the least (load + n) / weight; a decoded token adds 1 to the load
    of every edge on its path. A node is masked when the tokens that are expected of its requests
    and of this one, n + ``expected_output_tokens`` each, would take more than ``high_water`` of
    its cache.

    Parameters
    ----------
    high_water
        Share of the KV cache of a node that may be counted on.
    expected_output_tokens
        Output that a request is expected to have, whatever it turns out to be.
    flow
        Flow on every link [tokens/s], shape (n + 1, n + 1), where not the maximum flow of the
        network is to be followed. Without it, the flow is found anew when something fails.

    Notes
    -----
    Source: Helix, section 5.1: pipelines per request.
    Its artifact expects 0.6 x 240 tokens and fills 90 % when requests arrive by themselves, 240
    tokens and 85 % when it feeds the cluster itself.

    Examples
    --------
    >>> FlowRouter.offline().high_water
    0.85
    """

    code: ClassVar[int] = FLOW
    reserves: ClassVar[bool] = True
    name: str = "flow"
    high_water: float = 0.9
    expected_output_tokens: float = 144.0
    flow: Floats | None = None

    def __post_init__(self) -> None:
        require_share(high_water=self.high_water)
        require_not_negative(expected_output_tokens=self.expected_output_tokens)

    def parameters(self) -> dict[str, float]:
        """Share of the cache and expected output that the mask counts on."""
        return {"high_water": self.high_water, "expected_output": self.expected_output_tokens}

    @classmethod
    def offline(cls, flow: Floats | None = None) -> FlowRouter:
        """As the artifact routes when it keeps the cluster full."""
        return cls(high_water=0.85, expected_output_tokens=240.0, flow=flow)

    def weights(self, network: FlowNetwork, links: Flags) -> Floats:
        """Flow on every link; none where nothing flows."""
        if self.flow is not None:
            return np.where(links, self.flow, 0.0)
        try:
            working = FlowNetwork(network.placement, network.partial_inference, links)
            return working.max_flow().link_tokens_per_s
        except InfeasibleError:
            return np.zeros(links.shape)


@compiled
def by_delay(V, L, i):
    """Swarm: the edge whose turn it is; its next turn comes a mean delay later. -1 for none."""
    best, least = np.int64(-1), np.inf
    for e in range(V[i].out_first, V[i].out_first + V[i].out_count):
        if L[e].up and L[e].priority < least:
            best, least = np.int64(e), L[e].priority
    if best >= 0:
        L[best].priority += L[best].delay_s
    return best


@compiled
def observe_delay(p, L, e, seconds):
    """Swarm: what a message took from the start of its sending to the end of its batch."""
    L[e].delay_s = p.smoothing * seconds + (1.0 - p.smoothing) * L[e].delay_s


@dataclass(frozen=True)
class SwarmRouter(PipelineRouter):
    """Swarm: every vertex takes the neighbour whose turn comes first.

    A turn comes a mean delay after the one before; the mean moves by ``smoothing`` towards what
    the latest message took, from the start of its sending until the neighbour was done with it.

    Notes
    -----
    Source: Helix, section 6.7: Swarm scheduling.
    Helix adopts it from appendix C of SWARM parallelism (Ryabinin et al.).
    """

    code: ClassVar[int] = SWARM
    name: str = "swarm"
    initial_s: float = 0.05
    smoothing: float = 0.8

    def parameters(self) -> dict[str, float]:
        """Weight of the latest delay."""
        return {"smoothing": self.smoothing}


@compiled
def draw(p, IM):
    """A number in [0, 1): splitmix64 of a counter, so that nothing has to be drawn in advance."""
    IM[DRAWS] += 1
    z = p.seed + np.uint64(IM[DRAWS]) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 1.1102230246251565e-16


@compiled
def by_chance(p, V, L, IM, i, t, shortest):
    """An edge drawn among those free at ``t``, or of these to the shortest queues; -1: none."""
    first, stop = V[i].out_first, V[i].out_first + V[i].out_count
    limit = np.int64(2**62)
    if shortest:
        for e in range(first, stop):
            if L[e].up:
                j = L[e].target
                limit = min(limit, V[j].queued if j < p.nodes else np.int64(-1))
    count = 0
    for e in range(first, stop):
        if L[e].up and L[e].free_s <= t:
            j = L[e].target
            queued = V[j].queued if j < p.nodes else np.int64(-1)
            if not shortest or queued == limit:
                count += 1
    if count == 0:
        return np.int64(-1)
    left = min(int(draw(p, IM) * count), count - 1)
    for e in range(first, stop):
        if L[e].up and L[e].free_s <= t:
            j = L[e].target
            queued = V[j].queued if j < p.nodes else np.int64(-1)
            if not shortest or queued == limit:
                if left == 0:
                    return np.int64(e)
                left -= 1
    return np.int64(-1)


@dataclass(frozen=True)
class RandomRouter(PipelineRouter):
    """A prompt takes a random free edge; on a chain of single nodes, the only one there is.

    Source: Helix, section 6.7: random scheduling.
    """

    code: ClassVar[int] = RANDOM
    late: ClassVar[bool] = True
    name: str = "random"


@dataclass(frozen=True)
class ShortestQueueRouter(PipelineRouter):
    """A prompt takes a random free edge among those to the nodes with the shortest queue.

    Source: Helix, section 6.7: shortest-queue-first scheduling.
    """

    code: ClassVar[int] = SHORTEST_QUEUE
    late: ClassVar[bool] = True
    name: str = "shortest queue"


@compiled
def walk(p, V, L, IM, tokens, expected, path, code):
    """Settle a whole path into ``IM[path:]`` and return its edges; 0 where there is none.

    The decisions of routers that otherwise decide on the way are taken as of now.
    """
    i, count = p.nodes, 0
    while True:
        if code == SWARM:
            e = by_delay(V, L, i)
        elif code in (RANDOM, SHORTEST_QUEUE):
            e = by_chance(p, V, L, IM, i, np.inf, code == SHORTEST_QUEUE)
        else:
            e = by_weight(p, V, L, i, tokens, expected)
        if e < 0:
            break
        IM[path + count] = e
        count += 1
        i = L[e].target
        if i == p.nodes:
            return count
    if code == FLOW:
        for k in range(count):
            L[IM[path + k]].load -= tokens / L[IM[path + k]].weight
    return 0


class LivePipelineRouter:
    """A built-in router called request by request; it reads the state that it is given."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self._code = name, code

    def choose(self, request: Request, state: PipelineState) -> tuple[int, ...]:
        """Nodes of the pipeline in order; empty if none has room."""
        plan, nodes, edges, integers = state.records
        expected = int(request.input_tokens + float(plan["expected_output"]))
        path = int(plan["paths"]) + request.index * int(plan["depth"])
        count = walk(
            plan, nodes, edges, integers, float(request.input_tokens), expected, path, self._code
        )
        return tuple(int(edges[e]["target"]) for e in integers[path : path + count - 1])
