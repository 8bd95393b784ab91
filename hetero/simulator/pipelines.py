"""Simulation of layers placed over a network, token by token.

Every request has its own pipeline. A node runs whatever has arrived while its last batch ran; a
layer takes the time of its prompts plus that of its decoding requests; messages take their turn on
a link and a latency after that. Compiled: 660 s of 24 busy nodes take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.engine import pipeline_state as state
from hetero.engine.state import NO_REPLICA, REJECTED, WAITING
from hetero.errors import require, require_not_negative
from hetero.placement.network import FlowNetwork
from hetero.placement.problem import NIC_BYTES_S
from hetero.routers.pipelines import FLOW, PipelineRouter, SwarmRouter
from hetero.simulator import pipeline_failure as failure
from hetero.simulator import pipeline_loop as loop
from hetero.simulator.pipeline_graph import Graph, complete
from hetero.simulator.pipeline_run import PipelineRun, kv_entries
from hetero.streams import stream
from hetero.workload import Trace

Window = tuple[float, float]

PROMPT_TOKENS = 2048
"""Tokens of a prompt that a batch limit in requests counts on (Helix's artifact)."""
CONTEXT_TOKENS = 1000
"""Cached tokens per decoding request that a batch limit counts on (Helix's artifact)."""
COPY_BYTES_S = 1.0 / (1.0 / 4e9 + 1.0 / 5e9)
"""Joining what has arrived into one batch and moving it to the GPU, 4 and 5 GB/s one after the
other (Helix's artifact)."""


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """A node or a link fails or comes back at a time, before anything else at that instant.

    Attributes
    ----------
    node
        Name of the node; for a link the pair of names it leads from and to, ``"coordinator"`` for
        the coordinator.

    Requests whose path leads over what has failed lose their KV cache; they start anew at once,
    the oldest first, with the tokens they have streamed as part of their prompt.
    """

    time_s: float
    node: str | tuple[str, str]
    what: Literal["fail", "recover"] = "fail"


@dataclass(frozen=True, slots=True)
class Feed:
    """Closed loop: requests come when the cluster has finished others, not when a trace says.

    Attributes
    ----------
    first
        Requests at the start, one every ``delay_s``.
    by
        ``"count"``: a request that ends is replaced, so ``first`` are in flight. ``"kv"``: with
        every prefill and every request that ends comes another one, as long as no layer's KV
        cache is counted on for more than ``high_water``.
    delay_s
        From the end of one to the start of another.

    Notes
    -----
    Source: Helix, section 6.2: offline serving, with 20 requests at the start as in the artifact.
    """

    first: int = 20
    by: Literal["kv", "count"] = "kv"
    high_water: float = 0.8
    delay_s: float = 0.1


def simulate_pipelines(
    network: FlowNetwork,
    trace: Trace,
    router: PipelineRouter,
    *,
    feed: Feed | None = None,
    events: Sequence[NetworkEvent] = (),
    window_s: Window | None = None,
    until_s: float = np.inf,
    copy_bytes_s: float = COPY_BYTES_S,
    prompt_tokens: float = PROMPT_TOKENS,
    context_tokens: float = CONTEXT_TOKENS,
    seed: int = 0,
) -> PipelineRun:
    r"""Serve a trace with layers placed over a network.

    A batch of prompts of ``n`` tokens together and ``b`` decoding requests takes a node

        layers (t_prompt(n) + t_decode(b)) + copied bytes / rate

    and a message of ``n`` tokens holds a link for ``n`` (activation + token bytes) / bandwidth, and
    arrives a latency later. To and from the coordinator only token ids travel. The bandwidth of a
    link is its own or its share of the network interfaces at both ends, by flow where the router
    follows one, else by number of links.

    Parameters
    ----------
    router
        One of :mod:`hetero.routers.pipelines`.
    feed
        Closed loop: lengths are those of the trace in order, arrivals follow from the feed.
    events
        Failures and recoveries.
    window_s
        Window of the decode throughput and latency; the whole run by default.
    until_s
        When the run stops; requests may then be in flight. Needed by a feed.
    copy_bytes_s
        Rate at which what has arrived at a node becomes a batch on its GPU [bytes/s].
    prompt_tokens, context_tokens
        Tokens of a prompt, and cached tokens of a decoding request, that the batch limits of a
        node count on: so many times its limit in requests is its limit in tokens.
    seed
        Of routers that draw.

    Raises
    ------
    InfeasibleError
        If no way leads through every layer.

    Notes
    -----
    Source: Helix, section 6.1: simulator, as the artifact has it.

    Examples
    --------
    >>> from hetero import workload
    >>> from pipelines.studies.helix_artifact import placement
    >>> from hetero.routers.pipelines import FlowRouter
    >>> trace = workload.load("azure2023_conv").filter(input_tokens=(4, 2048)).head(200)
    >>> run = simulate_pipelines(
    ...     FlowNetwork(placement("single-24 70B helix")), trace.rescale(rate_rps=0.5), FlowRouter()
    ... )
    >>> run.counts
    {'finished': 200, 'rejected': 0, 'in flight': 0}
    """
    require(
        feed is None or bool(np.isfinite(until_s)),
        "A feed goes on for ever, and the run has no end.",
        resolve="give until_s.",
    )
    require(
        not trace.clients,
        "Layers over a network are not served to the clients of a closed loop.",
        resolve="give the trace arrivals, or in Python a feed.",
    )
    require(
        trace.priorities is None,
        "Layers over a network serve requests in order of arrival, whatever their priority.",
        resolve="leave priorities out, or plan whole replicas.",
    )
    engine = Simulation(
        network,
        trace,
        router,
        feed=feed,
        window_s=window_s,
        copy_bytes_s=copy_bytes_s,
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
        seed=seed,
    )
    for event in _ordered(events, engine):
        if event.time_s >= until_s:
            break
        engine.play(event.time_s)
        engine.apply(event)
    engine.play(until_s)
    return engine.finish()


def _ordered(events: Sequence[NetworkEvent], engine: Simulation) -> list[NetworkEvent]:
    for event in events:
        engine.element(event)
        require_not_negative(time_s=event.time_s)
    return sorted(events, key=lambda event: event.time_s)


class Simulation:
    """A run in progress: the records, and what is done to them between compiled stretches."""

    def __init__(
        self,
        network: FlowNetwork,
        trace: Trace,
        router: PipelineRouter,
        *,
        feed: Feed | None = None,
        window_s: Window | None = None,
        copy_bytes_s: float = COPY_BYTES_S,
        prompt_tokens: float = PROMPT_TOKENS,
        context_tokens: float = CONTEXT_TOKENS,
        seed: int = 0,
    ) -> None:
        self.network, self.trace, self.router, self.seed = network, trace, router, seed
        self.copy_bytes_s = copy_bytes_s
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        self.graph = Graph(network)
        self.window_s = window_s or (0.0, np.inf)
        self.at = {k: i for i, k in enumerate(self.graph.nodes)} | {
            len(network.placement.ranges): len(self.graph.nodes)
        }
        arrivals = trace.arrival_s if feed is None else np.full(len(trace), np.inf)
        self.requests = state.requests(arrivals, trace.input_tokens, trace.output_tokens)
        self._build(feed)
        self.weigh()
        if feed is not None:
            loop.begin_feed(self.requests, self.plan, *self.memories, feed.first)

    def _build(self, feed: Feed | None) -> None:
        nodes, tables, segments, firsts = self._nodes()
        edges = self._edges(nodes, segments)
        self.nodes, self.edges = nodes, edges
        plan, floats, integers = state.build(
            nodes,
            edges,
            tables,
            [np.diff(cuts).tolist() for cuts in segments],
            firsts,
            model_layers=self.network.placement.problem.llm.layers,
            request_count=len(self.trace),
            depth=self.graph.depth,
        )
        self.plan, self.memories = plan[0], (floats, integers)
        settings: dict[str, Any] = {
            "router": self.router.code,
            "late": self.router.late,
            "reserves": self.router.reserves,
            "waits": feed is None,
            "feed": state.FEED_TRACE,
            "high_water": 1.0,
            "seed": int(stream(self.seed, "router").integers(2**63)),
            **self.router.parameters(),
        }
        if feed is not None:
            settings["feed"] = state.FEED_KV if feed.by == "kv" else state.FEED_COUNT
            settings["feed_delay_s"] = feed.delay_s
            settings["feed_high_water"] = feed.high_water
        for name, value in settings.items():
            self.plan[name] = value
        floats[state.WINDOW_FROM], floats[state.WINDOW_UNTIL] = self.window_s

    def _nodes(self) -> tuple[Any, list[tuple[Floats, Floats]], list[list[int]], list[int]]:
        placement = self.network.placement
        problem = placement.problem
        n = len(placement.ranges)
        records = np.zeros(len(self.graph.nodes) + 1, state.NODE)
        records["segment"] = -1
        kinds: dict[int, tuple[Floats, Floats]] = {}
        tables, segments, firsts = [], [], []
        for i, k in enumerate(self.graph.nodes):
            kind = problem.nodes[k].kind
            start, stop = placement.ranges[k] or (0, 0)
            if id(kind.latency) not in kinds:
                prompt = np.arange(int(kind.latency.prompt_tokens[-1]) + 1)
                decode = np.arange(int(kind.latency.decode_requests[-1]) + 1)
                kinds[id(kind.latency)] = (
                    kind.latency.prompt_layer_ms(prompt) / 1e3,
                    kind.latency.decode_layer_ms(decode) / 1e3,
                )
            tables.append(kinds[id(kind.latency)])
            prompts, decodes = kind.batch_limits(stop - start)
            record = records[i]
            record["layers"] = stop - start
            record["max_prompts"] = prompts
            record["max_prompt_tokens"] = int(prompts * self.prompt_tokens)
            record["max_decodes"] = decodes
            record["max_context"] = int(decodes * self.context_tokens)
            record["kv_entries"] = kv_entries(placement, k)
            record["entry_s"] = problem.activation_bytes / self.copy_bytes_s
            entered = {start}
            for source in np.flatnonzero(self.graph.connections[:n, k]):
                entered.add((placement.ranges[int(source)] or (0, start))[1])
            segments.append([*sorted(entered), stop])
            firsts.append(start)
        return records, tables, segments, firsts

    def _edges(self, nodes: Any, segments: list[list[int]]) -> Any:
        placement = self.network.placement
        problem = placement.problem
        n, m = len(placement.ranges), len(self.graph.nodes)
        records = np.zeros(len(self.graph.pairs), state.EDGE)
        for e, (a, b) in enumerate(self.graph.pairs.tolist()):
            record = records[e]
            record["source"], record["target"] = self.at[a], self.at[b]
            record["latency_s"] = problem.links.latency_s[a, b]
            if b < n:
                cuts = segments[self.at[b]]
                entry = 0 if a == n else (placement.ranges[a] or (0, 0))[1]
                record["segment"] = cuts.index(entry)
                record["layers"] = cuts[-1] - entry
        for i in range(m + 1):
            mine = np.flatnonzero(records["source"] == i)
            nodes["out_first"][i], nodes["out_count"][i] = mine[0], len(mine)
        if isinstance(self.router, SwarmRouter):
            records["delay_s"] = records["priority"] = self.router.initial_s
        return records

    def weigh(self) -> None:
        """Find which edges lead anywhere now, what they weigh, and how fast they are."""
        problem = self.network.placement.problem
        n = len(self.network.placement.ranges)
        working = self.graph.connections.copy()
        for i, k in enumerate(self.graph.nodes):
            if self.nodes["mode"][i] == state.DOWN:
                working[k, :] = working[:, k] = False
        a, b = self.graph.pairs.T
        working[a, b] &= self.edges["broken"] == 0
        working = complete(working)
        weight = self.router.weights(self.network, working)
        self.edges["up"] = working[a, b]
        self.edges["weight"] = weight[a, b]
        self.edges["load"] = 0.0
        whole = problem.activation_bytes + problem.token_bytes
        size = np.where((a == n) | (b == n), problem.token_bytes, whole)
        if self.router.code == FLOW:
            used = weight[a, b] * size
            out = np.bincount(a, used, n + 1)[a]
            into = np.bincount(b, used, n + 1)[b]
            share = np.divide(used, np.maximum(out, into), out=np.ones(len(a)), where=used > 0)
        else:
            share = 1.0 / np.bincount(a, minlength=n + 1)[a]
        speed = np.minimum(problem.links.bandwidth_bytes_s[a, b], NIC_BYTES_S * share)
        self.edges["token_s"] = size / speed
        self.plan["degraded"] = bool(
            (self.nodes["mode"] == state.DOWN).any() or self.edges["broken"].any()
        )

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the kernels work on."""
        return (self.requests, self.plan, self.nodes, self.edges, *self.memories)

    def play(self, until_s: float) -> None:
        """Play every event before a time."""
        loop.play(*self.arrays, until_s)

    def element(self, event: NetworkEvent) -> tuple[str, NDArray[np.int64]]:
        """What an event is about: a node by index, or edges by index."""
        problem = self.network.placement.problem
        names = {node.name: k for k, node in enumerate(problem.nodes)}
        names["coordinator"] = len(problem.nodes)
        ends = (event.node,) if isinstance(event.node, str) else event.node
        for name in ends:
            require(
                name in names and (len(ends) == 2 or name != "coordinator"),
                f"An event at {event.time_s} s names '{name}', which {problem.name} does not have.",
                resolve=f"use one of {', '.join(node.name for node in problem.nodes)}.",
            )
        if len(ends) == 1:
            k = names[ends[0]]
            return "node", np.array([self.at[k]] if k in self.at else [], np.int64)
        pair = np.array([names[ends[0]], names[ends[1]]])
        return "link", np.flatnonzero((self.graph.pairs == pair).all(axis=1))

    def apply(self, event: NetworkEvent) -> None:
        """Let a node or link fail or come back."""
        what, which = self.element(event)
        floats, integers = self.memories
        floats[state.CLOCK] = max(floats[state.CLOCK], event.time_s)
        if what == "node":
            down = event.what == "fail"
            for i in which.tolist():
                if (self.nodes["mode"][i] == state.DOWN) != down:
                    self.nodes["mode"][i] = state.DOWN if down else state.IDLE
                    self.nodes["fresh_tokens"][i] = 0
        else:
            self.edges["broken"][which] = int(event.what == "fail")
            self.edges["free_s"][which] = event.time_s
        self.weigh()
        held = np.empty(int(integers[state.NEXT]), np.int64)
        count = failure.take_out(*self.arrays, event.time_s, held)
        failure.resume(*self.arrays, event.time_s, held[:count])

    def finish(self) -> PipelineRun:
        """The run; requests that still wait because something is down are rejected."""
        come = int(self.memories[1][state.NEXT])
        requests = self.requests[:come]
        stuck = (requests["status"] == WAITING) & bool(self.plan["degraded"])
        requests["status"][stuck] = REJECTED
        requests["reason"][stuck] = NO_REPLICA
        return PipelineRun.of_simulation(self, requests)
