r"""Nodes for layer placement from the arena's step times, for any GPU, degree and model.

Helix plans and plays with measured times per layer over prompt tokens and over decoding requests.
Here both come from the rates of the equal ground, for the mean contexts of the workload:

.. math::
    t_p(n) = \max(p (n + n_{pad}), w) + x(n) + (r + a\,\kappa)\,n + f + \frac{o + e}{L}, \qquad
    t_d(b) = \max(p (b + n_{pad}), w) + x(b) + (r + k\,c)\,b + f + \frac{o + e}{L}

with products p, weights w, routed experts x, all-reduce r, attention a, KV cache k and fixed part f
of one layer, the step's own time o and its logits e spread over the L layers,
:math:`\kappa = \sum I^2 / 2 \sum I` pairs per prompt token and c the cached tokens of a request
that decodes. Memory follows the same rule as everywhere; a node that holds k layers holds k / L of
the embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.catalog.precision import bytes_of
from hetero.costs.cost import CostModel
from hetero.errors import CatalogError, InfeasibleError
from hetero.latency.models.layers import LayerLatency
from hetero.placement import Links, Problem
from hetero.placement.machines import BLOCK_TOKENS, MachineKind
from hetero.placement.throughput import OperatingPoint
from hetero.planners import ground
from hetero.planners.bound import amounts
from hetero.question import Question

_LONGEST = 8192.0  # prompt tokens that a node's table reaches to; beyond, its last slope goes on
_WEIGHTS = (0.5, 0.7, 0.85, 1.0)  # shares of memory for weights: Helix's, and more where needed
_SPARE = 1.2  # times the model's layers that the nodes should hold together


@dataclass(frozen=True, slots=True)
class Means:
    """What of a workload the times per layer depend on."""

    pairs_per_token: float
    context_tokens: float
    input_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, question: Question) -> Means:
        """Means of a case's requests."""
        inputs, pairs, decodes, cached, *_ = amounts(question.trace).sum(axis=1)
        return cls(
            pairs_per_token=float(pairs / inputs),
            context_tokens=float(cached / max(decodes, 1.0)),
            input_tokens=float(inputs / len(question.trace)),
            output_tokens=float(question.trace.output_tokens.mean()),
        )


def latency(costs: CostModel, machine: int, gpus: int, means: Means) -> LayerLatency:
    """Time of one layer on some GPUs of a machine, for contexts of the given means."""
    one, layers = costs.rates(machine, gpus), costs.llm.layers
    ends = (one.step_s + one.logits_s) / layers

    def times(n: Floats, per_token_s: float) -> Floats:
        rest = (one.reduce_s + per_token_s) * n
        return np.asarray(1e3 * (one.products_s(n) + rest + one.fixed_s + ends))

    prompts = np.unique([1.0, *np.clip(one.bends, 1.0, _LONGEST), _LONGEST])
    most = float(one.max_batch)
    decodes = np.unique([1.0, *np.clip(one.bends, 1.0, most), most])
    where = costs.machines[machine]
    return LayerLatency(
        prompt_tokens=prompts,
        prompt_ms=times(prompts, one.pair_s * means.pairs_per_token),
        decode_requests=decodes,
        decode_ms=times(decodes, one.cached_s * means.context_tokens),
        gpu=where.gpu.name,
        llm=costs.llm.name,
        tensor_parallel=gpus,
    )


def kind(
    costs: CostModel, machine: int, gpus: int, means: Means, *, weights: float = _WEIGHTS[0]
) -> MachineKind | None:
    """A node of some GPUs of a machine; None if it cannot hold one layer.

    Parameters
    ----------
    weights
        Largest share of its memory that weights may take; the rest is KV cache.
    """
    one, llm = costs.rates(machine, gpus), costs.llm
    ends = bytes_of(llm.embedding_params + llm.output_params, costs.settings.engine.precision)
    layer_bytes = one.layer_bytes + ends / llm.layers
    held = np.arange(1, llm.layers + 1)
    tokens = (one.usable_bytes - held * layer_bytes) / (held * one.kv_layer_bytes)
    good = (held * layer_bytes <= weights * one.usable_bytes) & (tokens >= BLOCK_TOKENS)
    if not good[0]:
        return None
    held, blocks = held[good], (tokens[good] // BLOCK_TOKENS).astype(np.int64)
    batch = np.full(len(held), one.max_batch, np.int64)
    return MachineKind(
        gpu=costs.machines[machine].gpu.name,
        tensor_parallel=gpus,
        llm=llm.name,
        latency=latency(costs, machine, gpus, means),
        kv_blocks=blocks,
        prompt_max_requests=batch,
        decode_max_requests=batch,
        typical_layers=max(1, len(held) // 2),
        spec=costs.machines[machine].gpu,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """Nodes of a case: the problem, and the machine and GPUs of each node."""

    problem: Problem
    machines: tuple[int, ...]
    gpus: tuple[int, ...]
    means: Means


def degrees(question: Question) -> tuple[int, ...]:
    """Largest degrees that nodes may have so that some machine is divided otherwise, largest first.

    Examples
    --------
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv").head(100)
    >>> degrees(Question(cluster("current-small-12"), catalog.llm("Llama-3.1-70B"), chats, 1.0))
    (4, 2, 1)
    """
    costs = ground.costs(question)
    found = {
        _degree(costs, machine, cap)
        for machine in range(len(costs.machines))
        for cap in range(1, costs.machines[machine].count + 1)
    }
    return tuple(sorted(found, reverse=True))


def _degree(costs: CostModel, machine: int, cap: int) -> int:
    """Largest degree up to a cap into which a machine can be divided."""
    count = costs.machines[machine].count
    return max(t for t in range(1, count + 1) if t <= cap and count % t == 0 and costs.divides(t))


def nodes(question: Question, cap: int) -> Nodes:
    """Nodes of a case: every machine divided into equal nodes of the largest degree up to a cap.

    Machines whose nodes cannot hold one layer are left out.

    Raises
    ------
    InfeasibleError
        If the nodes together hold too few layers.
    """
    costs, means = ground.costs(question), Means.of(question)
    point = OperatingPoint(
        max(1, round(means.input_tokens)), max(1, round(means.output_tokens)), 0.3
    )
    layers = question.llm.layers
    for share in _WEIGHTS:
        found: list[tuple[int, int, int, MachineKind]] = []
        known: dict[tuple[object, ...], MachineKind | None] = {}
        for m, machine in enumerate(costs.machines):
            key = (machine.gpu, machine.link, machine.count)
            if key not in known:
                known[key] = kind(costs, m, _degree(costs, m, cap), means, weights=share)
            one = known[key]
            if one is not None:
                parts = machine.count // one.tensor_parallel
                found += [(m, one.tensor_parallel, k, one) for k in range(parts)]
        together = sum(one.max_layers for *_, one in found)
        if together >= _SPARE * layers:
            break
    if together < layers:
        raise InfeasibleError(
            f"The GPUs of {question.cluster.name} hold {together} of the {layers} layers of "
            f"{question.llm.name} together.",
            resolve="add GPUs, or take a smaller model or precision.",
        )
    problem = Problem.of_kinds(
        question.cluster.name,
        question.llm,
        [(_label(costs, m, t, k), costs.machines[m].region) for m, t, k, _ in found],
        [one for *_, one in found],
        _links(costs, [m for m, *_ in found]),
        point=point,
    )
    return Nodes(problem, tuple(m for m, *_ in found), tuple(t for _, t, *_ in found), means)


def _label(costs: CostModel, machine: int, gpus: int, part: int) -> str:
    where = costs.machines[machine]
    return where.name if where.count == gpus else f"{where.name}/{part}"


def _links(costs: CostModel, machines: Sequence[int]) -> Links:
    """Links between nodes at the shares of their line rates that transfers reach."""
    n = len(machines)
    bandwidth, latency_s = np.zeros((n + 1, n + 1)), np.zeros((n + 1, n + 1))
    at = np.ix_(machines, machines)
    bandwidth[:n, :n] = 1e9 * costs.bandwidth_gbs[at]
    latency_s[:n, :n] = costs.latency_s[at]
    np.fill_diagonal(bandwidth, 0.0)
    np.fill_diagonal(latency_s, 0.0)
    for i, m in enumerate(machines):
        machine = costs.machines[m]
        try:
            link = costs.cluster.coordinator_link(machine.name)
        except CatalogError:
            # One machine without a network: the coordinator stands beside it.
            link = machine.gpu_link
        bandwidth[i, n] = bandwidth[n, i] = 1e9 * link.bandwidth_gbs * costs.settings.network_share
        latency_s[i, n] = latency_s[n, i] = link.latency_s
    return Links(bandwidth, latency_s)
