r"""Tokens per second of a node over the number of layers it holds (Helix's T_j(k)).

Helix reads it from tables of time per layer at an operating point: 30 % of the KV cache holds
requests of 750 + 240 tokens, of which a node works at any time on the share that its own layers
have in a round trip through the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.errors import InfeasibleError, require_positive, require_share
from hetero.placement.machines import MachineKind

_ROUNDS = 10  # rounds of the fixed point, as Helix runs it


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Requests that a node is assumed to work on.

    Attributes
    ----------
    input_tokens, output_tokens
        Length of a request.
    kv_share
        Share of the KV cache that is in use.
    """

    input_tokens: int = 750
    output_tokens: int = 240
    kv_share: float = 0.3

    def __post_init__(self) -> None:
        require_positive(input_tokens=self.input_tokens, output_tokens=self.output_tokens)
        require_share(kv_share=self.kv_share)


HELIX_POINT = OperatingPoint()

# Speed [layers per second of one token] that the fixed point starts from.
_START = {
    "Llama-2-70B": {
        ("A100-SXM-40GB", 1): 80.0,
        ("V100-16GB", 1): 40.0,
        ("L4", 1): 20.0,
        ("L4", 2): 30.0,
        ("T4", 1): 12.5,
        ("T4", 2): 20.0,
        ("T4", 4): 30.0,
    },
    "LLaMA-1-30B": {
        ("A100-SXM-40GB", 1): 48.0,
        ("V100-16GB", 1): 25.0,
        ("L4", 1): 9.0,
        ("L4", 2): 15.0,
        ("T4", 1): 8.0,
        ("T4", 2): 15.0,
        ("T4", 4): 23.0,
    },
}


def throughput(
    kinds: Sequence[MachineKind],
    model_layers: int,
    *,
    point: OperatingPoint = HELIX_POINT,
) -> dict[str, Floats]:
    r"""Tokens per second T(k) of every kind of node in a cluster, by its name.

    .. math::

        r(k) = \frac{k t}{(L - k)\,\bar t + k t}, \qquad
        p = \frac{\lfloor h B(k) \rfloor}{n_i + n_o} \frac{r(k)}{n_o}, \qquad
        T(k) = \frac{[n_i p] + [n_o p]}
                    {k\,(p\, t_p([n_i p]/p) + t_d([n_o p]))}

    with t the time per layer and token of the kind, its mean over all layers of the cluster, B(k)
    the KV cache per layer [tokens], h the share of it in use, n_i and n_o the tokens in and out of
    a request, t_p and t_d the measured times per layer and [x] the nearest integer. At p > 1
    it is taken as 1. The time per layer is 1 / (k T(k)) at a typical k, found in ten rounds.

    Parameters
    ----------
    kinds
        Kind of every node: T depends on the composition of the cluster.
    model_layers
        Layers of the model, L.

    Returns
    -------
    dict
        Arrays of length ``max_layers + 1``; entry k is T(k) in tokens/s, entry 0 is 0.

    Notes
    -----
    Source: Helix, section 4.3: throughput of a node with j layers, profiled once; T_j(k).
    Read as in its artifact.

    Examples
    --------
    >>> from hetero.placement.machines import machine_kind
    >>> a100, l4, t4 = (machine_kind(gpu, "Llama-2-70B") for gpu in ("A100-SXM-40GB", "L4", "T4"))
    >>> table = throughput([a100] * 4 + [l4] * 8 + [t4] * 12, 80)
    >>> round(float(table["A100-SXM-40GB"][8]), 2)
    2045.64
    """
    distinct = {kind.name: kind for kind in kinds}
    counts = {name: sum(kind.name == name for kind in kinds) for name in distinct}
    typical = {name: kind.typical_layers for name, kind in distinct.items()}
    if sum(counts[name] * typical[name] for name in distinct) < 1.2 * model_layers:
        typical = {name: kind.max_layers for name, kind in distinct.items()}
    held = sum(counts[name] * typical[name] for name in distinct)
    times = {name: 1.0 / _start(kind) for name, kind in distinct.items()}

    def rate(name: str, layers: int) -> float:
        """T(k) at the times of the latest round."""
        mean = sum(counts[each] * typical[each] * times[each] for each in distinct) / held
        return _tokens_per_s(distinct[name], layers, model_layers, times[name], mean, point)

    for _ in range(_ROUNDS):
        times = {name: 1.0 / (typical[name] * rate(name, typical[name])) for name in distinct}
    return {
        name: np.array(
            [0.0, *(rate(name, k) for k in range(1, min(kind.max_layers, model_layers) + 1))]
        )
        for name, kind in distinct.items()
    }


def _start(kind: MachineKind) -> float:
    table: Mapping[tuple[str, int], float] = _START.get(kind.llm, {})
    # Ten rounds forget where they started; a kind that Helix does not know starts from its
    # time for one prompt.
    known = table.get((kind.gpu, kind.tensor_parallel))
    return known if known is not None else 1e3 / float(kind.latency.prompt_layer_ms(750))


def _tokens_per_s(
    kind: MachineKind,
    layers: int,
    model_layers: int,
    layer_s: float,
    mean_layer_s: float,
    point: OperatingPoint,
) -> float:
    own = layers * layer_s
    ratio = own / ((model_layers - layers) * mean_layer_s + own)
    available = int(point.kv_share * kind.kv_entries(layers) / layers)
    working = available / (point.input_tokens + point.output_tokens) * ratio
    prompts = working / point.output_tokens
    prompt_tokens, decoding = round(prompts * point.input_tokens), round(working)
    if prompts > 1:
        prompts, prompt_tokens, decoding = 1.0, point.input_tokens, point.output_tokens
    if prompt_tokens + decoding == 0:
        raise InfeasibleError(
            f"{layers} layers leave {kind.name} no room for a KV cache.",
            resolve="give it fewer layers, or use larger GPUs.",
        )
    # Per prompt that passes, 1 / p steps of the decoding requests pass as well.
    steps = 1.0 / prompts
    prompt_ms = float(kind.latency.prompt_layer_ms(int(prompt_tokens * steps)))
    step_ms = layers * (prompt_ms + steps * _decode_ms(kind, decoding))
    return 1e3 * steps * (prompt_tokens + decoding) / step_ms


def _decode_ms(kind: MachineKind, requests: float) -> float:
    """Time per layer, on the line to 0 below the first entry of the table as Helix reads it."""
    first = float(kind.latency.decode_requests[0])
    time_ms = float(kind.latency.decode_layer_ms(max(requests, first)))
    return time_ms * min(requests / first, 1.0)
