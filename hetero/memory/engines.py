"""Memory that an engine leaves to weights and KV cache, as its profiling run finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from hetero.catalog import Gpu, Llm
from hetero.catalog.engines import EngineMemory, Sampler
from hetero.errors import require_share

_GIB = 2**30


class Room(NamedTuple):
    """Share of each GPU's nominal memory that an engine takes, and what it holds of it [GiB]."""

    memory_fraction: float
    overhead_gib: float


RoomSource: TypeAlias = Callable[[Gpu, Llm, int], Room]
"""Room on some GPUs of one type: ``(gpu, llm, degree)``."""


def engine_room(
    rule: EngineMemory,
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    max_batch: int,
    max_step_tokens: int,
    share: float | None = None,
    sampler: Sampler = "",
) -> Room:
    r"""What an engine takes of the memory of a GPU, and holds beside weights and KV cache.

    Of the visible memory V it takes the share u. It runs a step of the most tokens n and samples
    for the most requests b, and what that holds at its peak is not given to the KV cache:

    .. math::
        held = \max\big(n\,\phi\,(6 i / t + 4 h),\; b\,v\,s\big) + o + o_t [t > 1] + g\,l

    with the feed-forward width i (of the experts that a token visits), hidden size h, degree t and
    vocabulary v; \phi is the live factor, s the bytes per logit, o and o_t what it holds besides,
    and g the CUDA graphs of each of the l layers [bytes]. Two bytes each: gate and up with their
    product are 6 i, the hidden states and the residual 4 h.

    Parameters
    ----------
    rule
        Of the engine's release, see :class:`hetero.catalog.engines.EngineMemory`.
    max_batch, max_step_tokens
        Limits that the engine runs with.
    share
        Share of the visible memory; by default the engine's own.
    sampler
        That is installed, see :class:`hetero.engines.EngineSpec`.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm, serving_engine
    >>> from hetero.memory import Budget
    >>> rule = serving_engine("vllm").memory_of("0.19")
    >>> limits = {"max_batch": 128, "max_step_tokens": 2048}
    >>> model, card = llm("Llama-3.1-8B"), gpu("RTX-PRO-6000-Server")
    >>> room = engine_room(rule, card, model, **limits)
    >>> Budget(model, card, **room._asdict()).max_tokens
    574025
    """
    taken = rule.share if share is None else share
    require_share(memory_fraction=taken)
    width = max(llm.intermediate, llm.moe_intermediate * (llm.experts_active + llm.shared_experts))
    live = rule.live_factor * (6.0 * width / tensor_parallel + 4.0 * llm.hidden)
    own = rule.flashinfer_bytes if sampler else None
    logit_bytes = rule.logit_bytes if own is None else own
    peak = max(max_step_tokens * live, max_batch * llm.vocab * logit_bytes)
    several = rule.several_gib if tensor_parallel > 1 else 0.0
    return Room(
        taken * gpu.visible_bytes / gpu.mem_bytes,
        peak / _GIB + rule.engine_gib + several + rule.layer_graphs_gib * llm.layers,
    )
