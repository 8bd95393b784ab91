"""Whether an instance fits, and how much KV cache it has, in one call each."""

from __future__ import annotations

from typing import TypedDict, Unpack

from hetero.catalog import Gpu, KvFormula, Llm
from hetero.memory.budget import Budget, OverheadPer


class Settings(TypedDict, total=False):
    """Optional arguments of :class:`Budget` that the functions of this package pass on."""

    tensor_parallel: int
    pipeline_parallel: int
    memory_fraction: float
    overhead_gib: float
    overhead_per: OverheadPer
    weight_precision: str
    kv_precision: str
    kv_formula: KvFormula


def kv_capacity_bytes(
    llm: Llm,
    gpu: Gpu,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    memory_fraction: float = 0.9,
    overhead_gib: float = 2.0,
    overhead_per: OverheadPer = "gpu",
    weight_precision: str = "fp16",
) -> float:
    """Largest KV cache of an instance [bytes] (Xiong et al. eq. 1), see :class:`Budget`.

    Negative if the weights do not fit: how many bytes are missing.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> round(kv_capacity_bytes(llm("Llama-3-8B"), gpu("V100-SXM2-32GB")) / 2**30, 2)
    11.84
    """
    return Budget(
        llm,
        gpu,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        memory_fraction=memory_fraction,
        overhead_gib=overhead_gib,
        overhead_per=overhead_per,
        weight_precision=weight_precision,
    ).kv_capacity_bytes


def why_not(
    llm: Llm, gpu: Gpu, *, longest_tokens: int = 1, **settings: Unpack[Settings]
) -> str | None:
    """What keeps an instance from serving the longest request, or None (Xiong et al., eq. 1 and 2).

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> print(why_not(llm("Llama-2-13B"), gpu("A5000")))
    The weights of Llama-2-13B in fp16 take 24.24 GiB, but 1 x RTX-A5000 offer 19.60 GiB \
(0.9 of the memory less 2.00 GiB for the engine): 4.64 GiB short.
    """
    return Budget(llm, gpu, **settings).why_not(longest_tokens)


def fits(llm: Llm, gpu: Gpu, *, longest_tokens: int = 1, **settings: Unpack[Settings]) -> bool:
    """Whether an instance holds the weights and the longest request (Xiong et al. eq. 2).

    Source: Xiong et al., eq. 2: constraint that the longest request fits; I_max, O_max.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> [fits(llm("Llama-2-70B"), gpu("A100-80"), tensor_parallel=t) for t in (1, 2, 4)]
    [False, True, True]
    """
    return why_not(llm, gpu, longest_tokens=longest_tokens, **settings) is None
