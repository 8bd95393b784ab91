"""KV cache of tokens, copies of tensor parallelism included."""

from __future__ import annotations

from hetero.catalog import KvFormula, Llm


def kv_bytes_per_token(
    llm: Llm,
    *,
    tensor_parallel: int = 1,
    precision: str = "fp16",
    formula: KvFormula = "model",
) -> int:
    """KV cache of one token on all GPUs of an instance [bytes].

    As :meth:`Llm.kv_bytes_per_token`, plus the copies that tensor parallelism makes: each GPU
    holds at least one KV head, and with latent attention the whole latent vector. Formula
    ``"full"`` is divided evenly. A request holds so much for each of its tokens.

    Source: HeteroServe, eq. 1: KV cache of a request; KV(r_j).

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> [kv_bytes_per_token(llm("Qwen3-30B-A3B"), tensor_parallel=t) for t in (1, 4, 8)]
    [98304, 98304, 196608]
    >>> 1024 * kv_bytes_per_token(llm("LLaMA-1-30B")) / 1e9  # ThunderServe, Table 8: 1.64 GB
    1.63577856
    """
    return llm.kv_bytes_per_token(precision, formula, tensor_parallel)
