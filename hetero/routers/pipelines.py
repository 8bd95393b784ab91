"""Routers of pipelines: which nodes, one after another, serve a request.

A router settles the whole path of a request when it comes (flow), or decides hop by hop (Swarm),
or when an edge is free (random, shortest queue). Decoding follows the path of the prefill, where
the KV cache is. Each is one compiled kernel, see :mod:`hetero.routers.pipeline_kernels`;
:meth:`PipelineRouter.live` calls it for one dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hetero.errors import InfeasibleError, ParameterError
from hetero.placement.network import FlowNetwork
from hetero.routers import pipeline_kernels as kernels
from hetero.routers.base import Request

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


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
        The books behind these figures, which the built-in routers read.
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
        """What the kernel is told."""
        return {}

    def live(self) -> LivePipelineRouter:
        """The router for one dispatcher that decides for whole paths."""
        return LivePipelineRouter(self.name, self.code)


class LivePipelineRouter:
    """A built-in router called request by request; its books are those of the state it is given."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self._code = name, code

    def choose(self, request: Request, state: PipelineState) -> tuple[int, ...]:
        """Nodes of the pipeline in order; empty if none has room."""
        plan, nodes, edges, integers = state.records
        expected = int(request.input_tokens + float(plan["expected_output"]))
        path = int(plan["paths"]) + request.index * int(plan["depth"])
        count = kernels.walk(
            plan, nodes, edges, integers, float(request.input_tokens), expected, path, self._code
        )
        return tuple(int(edges[e]["target"]) for e in integers[path : path + count - 1])


@dataclass(frozen=True)
class FlowRouter(PipelineRouter):
    """Helix: interleaved weighted round robin at every vertex, with KV cache masked by expectation.

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

    code: ClassVar[int] = kernels.FLOW
    reserves: ClassVar[bool] = True
    name: str = "flow"
    high_water: float = 0.9
    expected_output_tokens: float = 144.0
    flow: Floats | None = None

    def __post_init__(self) -> None:
        if not (0 < self.high_water <= 1 and self.expected_output_tokens >= 0):
            raise ParameterError(
                f"high_water is {self.high_water} and expected_output_tokens "
                f"{self.expected_output_tokens}.",
                resolve="give a share above 0 and up to 1, and 0 tokens or more.",
            )

    def parameters(self) -> dict[str, float]:
        """Share of the cache and expected output."""
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

    code: ClassVar[int] = kernels.SWARM
    name: str = "swarm"
    initial_s: float = 0.05
    smoothing: float = 0.8

    def parameters(self) -> dict[str, float]:
        """Weight of the latest delay."""
        return {"smoothing": self.smoothing}


@dataclass(frozen=True)
class RandomRouter(PipelineRouter):
    """A prompt takes a random free edge; on a chain of single nodes, the only one there is.

    Source: Helix, section 6.7: random scheduling.
    """

    code: ClassVar[int] = kernels.RANDOM
    late: ClassVar[bool] = True
    name: str = "random"


@dataclass(frozen=True)
class ShortestQueueRouter(PipelineRouter):
    """A prompt takes a random free edge among those to the nodes with the shortest queue.

    Source: Helix, section 6.7: shortest-queue-first scheduling.
    """

    code: ClassVar[int] = kernels.SHORTEST_QUEUE
    late: ClassVar[bool] = True
    name: str = "shortest queue"
