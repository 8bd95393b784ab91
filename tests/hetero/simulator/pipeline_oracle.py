"""A slow simulator of pipelines to compare with: one object per thing, every layer by itself.

Written from the rules in the docstrings of the library; it shares no code with its kernels. At one
instant: batches end (by node), edges become free, messages arrive (by request), requests come;
then batches form.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from hetero.placement import FlowNetwork
from hetero.routers import pipelines as routers
from hetero.simulator.pipelines import CONTEXT_TOKENS, PROMPT_TOKENS, Feed

END, FREE, MESSAGE, COMES = range(4)
MASK = 2**64 - 1


class Draws:
    """Splitmix64 of a counter, with Python's whole numbers."""

    def __init__(self, seed: int) -> None:
        self.seed, self.count = seed, 0

    def __call__(self) -> float:
        self.count += 1
        z = (self.seed + self.count * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return ((z ^ (z >> 31)) >> 11) / 2**53


@dataclass
class Request:
    index: int
    arrival: float
    inputs: int
    outputs: int
    done: int = 0
    prompt: bool = True
    tokens: int = 0
    path: list[Edge] = field(default_factory=list)
    hop: int = -1
    layer: int = 0
    sent: float = 0.0
    first: float = math.nan
    last: float = math.nan
    status: str = "none"
    gaps: list[float] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return self.inputs + self.done - 1


@dataclass(eq=False)
class Edge:
    number: int
    source: Node | None
    target: Node | None
    latency: float
    token_s: float
    weight: float
    free: float = 0.0
    load: float = 0.0
    delay: float = 0.0
    priority: float = 0.0


@dataclass(eq=False)
class Node:
    number: int
    start: int
    stop: int
    latency: object
    prompts: int
    decodes: int
    entries: int
    queues: dict[int, list[Request]] = field(default_factory=dict)
    batch: list[Request] = field(default_factory=list)
    layer: int = -1
    fresh: int = 0
    reserved: int = 0
    used: int = 0
    peak: int = 0
    edges: list[Edge] = field(default_factory=list)
    pending: list[Request] = field(default_factory=list)

    @property
    def layers(self) -> int:
        return self.stop - self.start


class Oracle:
    """Plays a trace, or a feed until a time."""

    def __init__(
        self,
        network: FlowNetwork,
        trace,
        router,
        *,
        feed: Feed | None = None,
        seed_word: int = 0,
        copy_bytes_s: float = math.inf,
    ) -> None:
        placement = network.placement
        self.problem, self.router, self.feed = placement.problem, router, feed
        self.depth = self.problem.llm.layers
        self.copy_s = self.problem.activation_bytes / copy_bytes_s
        n = len(placement.ranges)
        valid = network.valid() & (self.problem.links.bandwidth_bytes_s > 0)
        valid = self._useful(valid, n)
        used = [k for k in range(n) if valid[k].any()]
        self.nodes = {}
        for i, k in enumerate(used):
            start, stop = placement.ranges[k]
            kind = self.problem.nodes[k].kind
            prompts, decodes = kind.batch_limits(stop - start)
            entries = kind.kv_entries(stop - start)
            self.nodes[k] = Node(i, start, stop, kind.latency, prompts, decodes, entries)
            self.nodes[k].queues = {layer: [] for layer in range(start, stop)}
            self.nodes[k].layer = stop - 1
        self.coordinator = Node(len(used), 0, 0, None, 0, 0, 0)
        every = self.nodes | {n: self.coordinator}
        weight = router.weights(network, valid)
        both = self.problem.activation_bytes + self.problem.token_bytes
        size = {}
        for a in [*used, n]:
            for b in range(n + 1):
                if valid[a, b]:
                    size[a, b] = self.problem.token_bytes if n in (a, b) else both
        self.edges = []
        for (a, b), bytes_ in size.items():
            if isinstance(router, routers.FlowRouter):
                flow = weight[a, b] * bytes_
                out = sum(weight[x, y] * s for (x, y), s in size.items() if x == a)
                into = sum(weight[x, y] * s for (x, y), s in size.items() if y == b)
                share = flow / max(out, into) if flow > 0 else 1.0
            else:
                share = 1.0 / sum(1 for x, _ in size if x == a)
            speed = min(self.problem.links.bandwidth_bytes_s[a, b], 10e9 * share)
            edge = Edge(
                len(self.edges),
                None if a == n else every[a],
                None if b == n else every[b],
                self.problem.links.latency_s[a, b],
                bytes_ / speed,
                weight[a, b],
            )
            if isinstance(router, routers.SwarmRouter):
                edge.delay = edge.priority = router.initial_s
            self.edges.append(edge)
            every[a].edges.append(edge)
        self.requests = [
            Request(r, t, i, o)
            for r, (t, i, o) in enumerate(
                zip(
                    trace.arrival_s.tolist(),
                    trace.input_tokens.tolist(),
                    trace.output_tokens.tolist(),
                    strict=True,
                )
            )
        ]
        self.heap: list[tuple[float, int, int, object]] = []
        self.next, self.draw, self.waiting, self.flying = 0, Draws(seed_word), [], 0
        if feed is None:
            for request in self.requests:
                heapq.heappush(self.heap, (request.arrival, COMES, request.index, request))
        else:
            for k in range(feed.first):
                self.launch(k * feed.delay_s)

    @staticmethod
    def _useful(valid, n):
        """Drop dead ends until none is left."""
        valid = valid.copy()
        while True:
            keep = valid.copy()
            for k in range(n):
                if not valid[k].any() or not valid[:, k].any():
                    keep[k, :] = keep[:, k] = False
            if (keep == valid).all():
                return valid
            valid = keep

    # Events ----------------------------------------------------------------------------------

    def play(self, until: float = math.inf) -> None:
        while self.heap and self.heap[0][0] < until:
            now = self.heap[0][0]
            while self.heap and self.heap[0][0] == now:
                _, kind, _, what = heapq.heappop(self.heap)
                if kind == END:
                    self.batch_end(what, now)
                elif kind == FREE:
                    self.transmit(what.source or self.coordinator, now)
                elif kind == MESSAGE:
                    self.arrive(what, now)
                else:
                    self.comes(what, now)
            for node in self.nodes.values():
                if not node.batch:
                    self.form(node, now)

    def launch(self, t: float) -> None:
        if self.next < len(self.requests):
            request = self.requests[self.next]
            self.next += 1
            request.arrival = t
            heapq.heappush(self.heap, (t, COMES, request.index, request))

    def comes(self, request: Request, t: float) -> None:
        if not self.waiting and self.start(request, t):
            return
        if self.feed is not None:
            request.status = "turned away"
            return
        self.waiting.append(request)
        self.admit(t)

    def admit(self, t: float) -> None:
        while self.waiting:
            if not self.start(self.waiting[0], t):
                if self.flying:
                    return
                self.waiting[0].status = "too long"
            self.waiting.pop(0)

    def start(self, request: Request, t: float) -> bool:
        request.tokens, request.prompt, request.hop, request.path = request.inputs, True, -1, []
        if self.router.reserves:
            path = self.route(request)
            if path is None:
                return False
            request.path = path
            for edge, layers in self.stretches(path):
                edge.target.reserved += self.expected(request) * layers
        request.status = "running"
        self.flying += 1
        self.onward(request, self.coordinator, t)
        return True

    def expected(self, request: Request) -> int:
        return int(request.inputs + self.router.expected_output_tokens)

    def stretches(self, path):
        at = 0
        for edge in path:
            if edge.target is not None:
                yield edge, edge.target.stop - at
                at = edge.target.stop

    def route(self, request: Request):
        path, node = [], self.coordinator
        while True:
            total = 0.0
            for edge in node.edges:
                total += edge.weight
            best = None
            for edge in node.edges:
                if edge.weight <= 0 or edge.weight < 0.05 * total:
                    continue
                to = edge.target
                if to is not None:
                    left = to.entries - to.reserved - self.expected(request) * to.layers
                    if left < (1.0 - self.router.high_water) * to.entries:
                        continue
                after = edge.load + request.tokens / edge.weight
                if best is None or after < best[0]:
                    best = (after, edge)
            if best is None:
                for edge in path:
                    edge.load -= request.tokens / edge.weight
                return None
            best[1].load = best[0]
            path.append(best[1])
            if best[1].target is None:
                return path
            node = best[1].target

    def onward(self, request: Request, node: Node, t: float) -> None:
        request.hop += 1
        if self.router.late:
            node.pending.append(request)
            if node is self.coordinator:
                self.transmit(node, t)
            return
        if request.hop == len(request.path):
            edge = min(node.edges, key=lambda e: (e.priority, e.number))
            edge.priority += edge.delay
            request.path.append(edge)
        self.send(request, request.path[request.hop], t)

    def transmit(self, node: Node, t: float) -> None:
        for request in list(node.pending):
            if request.hop < len(request.path):
                edge = request.path[request.hop]
                if edge.free > t:
                    continue
            else:
                choices = node.edges
                if isinstance(self.router, routers.ShortestQueueRouter):
                    lengths = [
                        len(e.target.queues[e.target.start]) if e.target else -1 for e in choices
                    ]
                    choices = [
                        e for e, x in zip(choices, lengths, strict=True) if x == min(lengths)
                    ]
                choices = [e for e in choices if e.free <= t]
                if not choices:
                    continue
                edge = choices[min(int(self.draw() * len(choices)), len(choices) - 1)]
                request.path.append(edge)
            node.pending.remove(request)
            self.send(request, edge, t)

    def send(self, request: Request, edge: Edge, t: float) -> None:
        request.sent = max(t, edge.free)
        edge.free = request.sent + request.tokens * edge.token_s
        heapq.heappush(self.heap, (edge.free + edge.latency, MESSAGE, request.index, request))
        if self.router.late:
            heapq.heappush(self.heap, (edge.free, FREE, edge.number, edge))

    def arrive(self, request: Request, t: float) -> None:
        node = request.path[request.hop].target
        if node is None:
            self.token(request, t)
            return
        request.layer = 0 if request.hop == 0 else request.path[request.hop - 1].target.stop
        node.fresh += request.tokens
        node.queues[request.layer].append(request)

    def form(self, node: Node, t: float) -> None:
        for step in range(1, node.layers + 1):
            layer = node.start + (node.layer - node.start + step) % node.layers
            if node.queues[layer]:
                break
        else:
            return
        batch, prompts, tokens, decodes, context = [], 0, 0, 0, 0
        for request in node.queues[layer]:
            if request.prompt:
                fits = prompts == 0 or (
                    prompts < node.prompts
                    and tokens + request.tokens <= node.prompts * PROMPT_TOKENS
                )
                if fits:
                    prompts, tokens = prompts + 1, tokens + request.tokens
            else:
                fits = decodes == 0 or (
                    decodes < node.decodes
                    and context + request.cached <= node.decodes * CONTEXT_TOKENS
                )
                if fits:
                    decodes, context = decodes + 1, context + request.cached
            if fits:
                batch.append(request)
        node.queues[layer] = [request for request in node.queues[layer] if request not in batch]
        seconds = (
            float(node.latency.prompt_layer_ms(tokens))
            + float(node.latency.decode_layer_ms(decodes))
        ) / 1e3
        if layer == node.start:
            seconds += node.fresh * self.copy_s
            node.fresh = 0
        node.batch, node.layer = batch, layer
        heapq.heappush(self.heap, (t + seconds, END, node.number, node))

    def batch_end(self, node: Node, t: float) -> None:
        batch, node.batch = node.batch, []
        if node.layer < node.stop - 1:
            node.queues[node.layer + 1] += batch
            return
        for request in batch:
            node.used += request.tokens * (node.stop - request.layer)
            node.peak = max(node.peak, node.used)
            if isinstance(self.router, routers.SwarmRouter):
                edge, gamma = request.path[request.hop], self.router.smoothing
                edge.delay = gamma * (t - request.sent) + (1.0 - gamma) * edge.delay
            self.onward(request, node, t)
        self.transmit(node, t)

    def token(self, request: Request, t: float) -> None:
        if request.done == 0:
            request.first = t
        else:
            request.gaps.append(t - request.last)
        request.last = t
        request.done += 1
        was_prompt, ended = request.prompt, request.done >= request.outputs
        if ended:
            for edge, layers in self.stretches(request.path):
                edge.target.used -= (request.cached) * layers
                if self.router.reserves:
                    edge.target.reserved -= self.expected(request) * layers
            request.status = "finished"
            self.flying -= 1
            self.admit(t)
            if self.feed is not None and self.feed.by == "count":
                self.launch(t + self.feed.delay_s)
        else:
            request.prompt, request.tokens, request.hop = False, 1, -1
            if self.router.reserves:
                for edge in request.path:
                    edge.load += 1.0 / edge.weight
            self.onward(request, self.coordinator, t)
        if self.feed is not None and self.feed.by == "kv" and (was_prompt or ended):
            fullest = 0.0
            for layer in range(self.depth):
                holders = [v for v in self.nodes.values() if v.start <= layer < v.stop]
                free = sum((v.entries - v.reserved) / v.layers for v in holders)
                fullest = max(fullest, 1.0 - free / sum(v.entries / v.layers for v in holders))
            if fullest <= self.feed.high_water:
                self.launch(t + self.feed.delay_s)


def seed_word(seed: int) -> int:
    """What the library tells its kernel for a seed."""
    from hetero.streams import stream

    return int(stream(seed, "router").integers(2**63))


def small_problem(
    kinds: list[tuple[int, int]],
    depth: int,
    *,
    bandwidth: float = 2.0**20,
    latency: float = 2.0**-6,
    kv_blocks: int = 64,
):
    """A problem whose every time is an exact binary fraction, so that sums are exact.

    Parameters
    ----------
    kinds
        Per node (layers it may hold, time factor).
    """
    from dataclasses import replace

    from hetero.catalog import llm
    from hetero.latency.models.layers import LayerLatency
    from hetero.placement import Links, MachineKind, Problem
    from hetero.placement import Node as PlacementNode

    model = replace(llm("LLaMA-1-30B"), layers=depth)
    nodes = []
    for k, (most, factor) in enumerate(kinds):
        unit = 1000.0 * 2.0**-10 * factor  # ms
        table = LayerLatency(
            prompt_tokens=np.array([64.0, 320.0, 4416.0]),
            prompt_ms=np.array([4 * unit, 12 * unit, 268 * unit]),
            decode_requests=np.array([2.0, 4.0, 8.0, 64.0]),
            decode_ms=np.array([unit, unit, 2 * unit, 16 * unit]),
            gpu="L4",
            llm=model.name,
        )
        kind = MachineKind(
            gpu="L4",
            tensor_parallel=1,
            llm=model.name,
            latency=table,
            kv_blocks=np.full(most, kv_blocks),
            prompt_max_requests=np.full(most, 1 + k % 2),
            decode_max_requests=np.full(most, 3),
            typical_layers=1,
        )
        speed = np.array([0.0, *(1000.0 / (factor * held) for held in range(1, most + 1))])
        nodes.append(PlacementNode(f"n{k}", "here", kind, speed))
    shape = (len(kinds) + 1, len(kinds) + 1)
    links = Links(np.full(shape, bandwidth), np.full(shape, latency))
    return Problem("small", model, tuple(nodes), links, activation_bytes=2.0**10, token_bytes=2.0)
