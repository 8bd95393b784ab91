"""What a simulation of pipelines leaves behind: requests, nodes, links, and serving figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.catalog import gpu
from hetero.deployment import Deployment, Replica
from hetero.display import Column, Shown, Table
from hetero.engine import pipeline_state as state
from hetero.engine.state import FINISHED, GAP_BINS, REJECTED
from hetero.errors import InfeasibleError
from hetero.placement.network import FlowNetwork
from hetero.placement.placement import Placement
from hetero.simulator.metrics import METRIC_COLUMNS, gap_percentiles
from hetero.simulator.run import Run
from hetero.workload import Trace

if TYPE_CHECKING:
    from hetero.simulator.pipelines import Simulation

PERCENTILES = (5, 25, 50, 75, 95)
"""Those that Helix reports."""
OFFLINE_S = (60.0, 660.0)
"""Warm-up of 1 minute, test of 10 minutes (Helix, section 6.2)."""

_NO_ROOM = "no node had KV cache left for it when it was offered"


@dataclass(frozen=True)
class Latency:
    """A latency over a window.

    Attributes
    ----------
    count, mean_s
        How many were measured, and their mean [s].
    percentiles_s
        By percentile, see :data:`PERCENTILES`.
    """

    count: int
    mean_s: float
    percentiles_s: dict[int, float]


@dataclass(frozen=True, repr=False)
class WindowFigures(Shown):
    """Decode throughput and latencies inside a window, as Helix reports them.

    Source: Helix, section 6.2: decode throughput, prompt latency and decode latency.

    Attributes
    ----------
    decode_tps
        Tokens after the first of every request, per second.
    prompt
        From arrival to the first token, of prompts that ended inside the window.
    decode
        From one token to the next, of tokens that came inside the window.
    """

    name: str
    window_s: tuple[float, float]
    decode_tps: float
    prompt: Latency
    decode: Latency

    def table(self) -> Table:
        """Throughput and latencies."""
        rows: list[tuple[object, ...]] = [("decode throughput", self.decode_tps, "tokens/s")]
        for label, latency in (("prompt latency", self.prompt), ("decode latency", self.decode)):
            rows.append((f"{label}, mean", latency.mean_s, "s"))
            rows += [(f"{label} P{p}", value, "s") for p, value in latency.percentiles_s.items()]
        return Table(self.name, METRIC_COLUMNS, tuple(rows))


@dataclass(frozen=True, kw_only=True)
class PipelineRun(Run):
    """A run of pipelines: the fields of :class:`Run`, whose replicas are nodes, and the links.

    Attributes
    ----------
    network
        What was simulated.
    edges
        Records of the links in use, see :data:`hetero.engine.pipeline_state.EDGE`.
    pairs
        Source and target of every link as indices of the nodes; the coordinator is the last.
    window_s, end_s
        Window of throughput and decode latency, and when the last event was handled.
    decode_sum_s, decode_count
        Sum and number of the decode latencies inside the window.
    """

    network: FlowNetwork
    edges: Any
    pairs: NDArray[np.int64]
    window_s: tuple[float, float]
    end_s: float
    decode_sum_s: float
    decode_count: int
    events: int

    @classmethod
    def of_simulation(cls, engine: Simulation, requests: Any) -> PipelineRun:
        """The run that a simulation leaves behind; requests in order of arrival."""
        floats, integers = engine.memories
        order = np.argsort(requests["arrival_s"], kind="stable")
        requests = requests[order]
        network = engine.network
        end = float(floats[state.CLOCK])
        begin, until = engine.window_s
        trace = Trace(
            requests["arrival_s"],
            requests["input_tokens"],
            requests["output_tokens"],
            name=engine.trace.name,
            source=engine.trace.source,
        )
        gaps = integers[:GAP_BINS].copy()
        nodes, edges = engine.nodes[:-1].copy(), engine.edges.copy()
        for records in (requests, nodes, edges, gaps):
            records.setflags(write=False)
        pairs = np.column_stack([edges["source"], edges["target"]])
        return cls(
            deployment=_deployment(network, engine.graph.nodes),
            trace=trace,
            router=engine.router.name,
            requests=requests,
            replicas=nodes,
            gap_counts=gaps,
            seed=engine.seed,
            network=network,
            edges=edges,
            pairs=pairs,
            window_s=(begin, min(until, end)),
            end_s=end,
            decode_sum_s=float(floats[state.DECODE_SUM_S]),
            decode_count=int(integers[state.WINDOW_DECODES]),
            events=int(integers[state.HANDLED]),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Requests by how they ended; together they are all that came."""
        status = self.requests["status"]
        found = {"finished": int(self.finished.sum()), "rejected": int((status == REJECTED).sum())}
        return found | {"in flight": len(status) - sum(found.values())}

    def serving(self) -> WindowFigures:
        """Decode throughput, prompt and decode latency inside the window."""
        return combine(f"{self.deployment.name}, {self.router}", (self,))

    @cached_property
    def node_use(self) -> Floats:
        """Share of the window that each node spent in batches; shape (M,)."""
        begin, until = self.window_s
        return np.asarray(self.replicas["window_busy_s"] / max(until - begin, 1e-300))

    @cached_property
    def kv_peak(self) -> Floats:
        """Most that each node held of its KV cache, as a share; above 1 it would have swapped.

        NaN where a node is so full of layers that its cache is not known.
        """
        held = np.asarray(self.replicas["kv_entries"], np.float64)
        share: Floats = np.full(len(held), np.nan)
        np.divide(self.replicas["kv_peak"], held, out=share, where=held > 0)
        return share

    def frame(self) -> pd.DataFrame:
        """One row per request; the replica is the first node of its pipeline."""
        frame = super().frame()
        status = self.requests["status"]
        frame["status"] = np.where(
            status == FINISHED, "finished", np.where(status == REJECTED, "rejected", "in flight")
        )
        frame["reason"] = frame["reason"].where(self.requests["reason"] != state.NO_ROOM, _NO_ROOM)
        return frame

    def links(self) -> Table:
        """One row per link: what it carried, and how long prompts waited for it in the window."""
        names = [*(replica.name for replica in self.deployment.replicas), "coordinator"]

        def waited_s(edge: Any) -> float | None:
            return float(edge["prompt_wait_s"] / edge["prompts"]) if edge["prompts"] else None

        columns = (
            Column("from", of=lambda edge: names[edge["source"]]),
            Column("to", of=lambda edge: names[edge["target"]]),
            Column("messages", of=lambda edge: int(edge["messages"])),
            Column(
                "busy", "share", 3, lambda edge: float(edge["busy_s"] / max(self.end_s, 1e-300))
            ),
            Column("prompts waited", "s", of=waited_s),
        )
        ordered = sorted(self.edges, key=lambda edge: -(waited_s(edge) or 0.0))
        return Table.of(f"Links of {self.deployment.name}, {self.router}", columns, ordered)


def kv_entries(placement: Placement, node: int) -> int:
    """KV cache of a node [tokens times layers]; 0 where it is overfull and the cache unknown."""
    try:
        return placement.problem.nodes[node].kind.kv_entries(placement.layers(node))
    except InfeasibleError:
        if not placement.allow_overfull:
            raise
        return 0


def combine(name: str, runs: tuple[PipelineRun, ...]) -> WindowFigures:
    """What several clusters serve together: throughput added up, latencies pooled."""
    prompts, decode_tps = [], 0.0
    for run in runs:
        begin, until = run.window_s
        first = run.requests["first_token_s"]
        prompts.append(run.ttft_s[(first >= begin) & (first <= until)])
        decode_tps += run.decode_count / max(until - begin, 1e-300)
    prompt_s = np.concatenate(prompts)
    count = sum(run.decode_count for run in runs)
    sum_s = sum(run.decode_sum_s for run in runs)
    prompt, found = Latency(0, np.nan, dict.fromkeys(PERCENTILES, np.nan)), len(prompt_s)
    if found:
        values = np.percentile(prompt_s, PERCENTILES).tolist()
        by_share = dict(zip(PERCENTILES, values, strict=True))
        prompt = Latency(found, float(prompt_s.mean()), by_share)
    gaps_s = gap_percentiles(np.sum([run.gap_counts for run in runs], axis=0), PERCENTILES)
    decode = Latency(count, sum_s / count if count else np.nan, gaps_s)
    return WindowFigures(name, runs[0].window_s, decode_tps, prompt, decode)


def _deployment(network: FlowNetwork, nodes: tuple[int, ...]) -> Deployment:
    """The nodes as replicas of their layers, for names, GPUs and tables."""
    problem = network.placement.problem
    replicas = []
    for k in nodes:
        node, layers = problem.nodes[k], network.placement.layers(k)
        replicas.append(
            Replica(
                node.name,
                node.kind.latency.step_model(layers),
                kv_tokens=max(kv_entries(network.placement, k) // layers, 1),
                gpu=node.kind.spec or gpu(node.kind.gpu),
                gpus=node.kind.tensor_parallel,
            )
        )
    name = network.placement.name or f"{problem.llm.name} on {problem.name}"
    return Deployment(name, tuple(replicas))
