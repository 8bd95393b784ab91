"""GPUs and layers when weights take a given share of the memory (Helix)."""

from __future__ import annotations

import math
from typing import Literal

from hetero.catalog import Gpu, Llm
from hetero.errors import require, require_share

_UNITS = {"GB": 10**9, "GiB": 2**30}


def minimum_gpus(
    llm: Llm,
    gpu: Gpu,
    *,
    weight_share: float = 0.5,
    weight_precision: str = "fp16",
    unit: Literal["GB", "GiB"] = "GB",
) -> int:
    r"""Fewest GPUs whose memory holds the weights in a given share of it (Helix, Table 1).

    .. math:: N = \lceil \Phi\, b^{bytes} / (share \cdot d) \rceil

    The table of the paper comes out with d in decimal gigabytes (an L4 has 24e9 bytes), the
    default; with GiB only three of its twelve entries do. Parameters counted from the shape and the
    nominal ones (70, 175, 314, 405 billion) give the same numbers.

    Source: Helix, Table 1: fewest GPUs that hold a model.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> [minimum_gpus(llm("Llama-2-70B"), gpu(g)) for g in ("L4", "A100-40", "H100-SXM")]
    [12, 7, 4]
    """
    held = _share_bytes(gpu, weight_share, unit)
    return math.ceil(llm.weight_bytes(weight_precision) / held)


def max_layers(
    llm: Llm,
    gpu: Gpu,
    *,
    gpus: int = 1,
    weight_share: float = 0.5,
    weight_precision: str = "fp16",
    unit: Literal["GB", "GiB"] = "GB",
) -> int:
    """Most layers whose weights fit into a given share of a node's memory (Helix, section 6.2).

    The limits in Helix's artifact follow no rule that is stated. With decimal gigabytes this one
    gives the same for 11 of its 14 combinations of model and node, and one layer less for the
    other three (70B on A100; 30B on two and on four T4).

    Source: Helix, section 6.2: layers of a node that leave half of its memory to the KV cache.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> [max_layers(llm("LLaMA-1-30B"), gpu(g)) for g in ("A100-40", "V100-16", "L4", "T4")]
    [18, 7, 11, 7]
    """
    held = gpus * _share_bytes(gpu, weight_share, unit)
    return min(llm.layers, math.floor(held / llm.layer_weight_bytes(weight_precision)))


def _share_bytes(gpu: Gpu, weight_share: float, unit: str) -> float:
    require_share(weight_share=weight_share)
    require(unit in _UNITS, f"unit is '{unit}'.", resolve="use 'GB' or 'GiB'.")
    return weight_share * gpu.mem_gib * _UNITS[unit]
