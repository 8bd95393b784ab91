"""What the engine record of a replica says of its batches and its KV cache."""

from __future__ import annotations

from typing import Any

from hetero.deployment import Replica
from hetero.engine import state

_BATCHING = {"prefill first": state.PREFILL_FIRST, "chunked": state.CHUNKED, "static": state.STATIC}
_EXPECTS = {
    "known": state.EXPECT_KNOWN,
    "predicted": state.EXPECT_PREDICTED,
    "maximum": state.EXPECT_MAXIMUM,
    "paged": state.EXPECT_KNOWN,
}
_ROLE = {"both": state.BOTH, "prefill": state.PREFILL_ONLY, "decode": state.DECODE_ONLY}


def limits_of(replica: Replica, prefix_tokens: int = 0) -> dict[str, Any]:
    """Fields of the engine record of a replica, but for its step model.

    Parameters
    ----------
    prefix_tokens
        Tokens of a prefix block of the trace, 0 where it names none.
    """
    engine = replica.engine
    paged = engine.admission == "paged"
    # What only decodes gets its caches from elsewhere, each its own.
    caches = engine.prefix_cache and replica.role != "decode"
    # A paged engine only has whole blocks.
    spare = replica.kv_tokens % engine.block_tokens if paged else 0
    return {
        "role": _ROLE[replica.role],
        "batching": _BATCHING[engine.batching],
        "admission": state.PAGED if paged else state.RESERVE,
        "eviction": state.SWAP if engine.eviction == "swap" else state.RECOMPUTE,
        "expects": _EXPECTS[engine.admission],
        "max_output": engine.max_output_tokens,
        "max_batch": engine.max_batch,
        "max_step_tokens": engine.max_step_tokens,
        "ahead": int(engine.schedule_ahead),
        "prefix_tokens": prefix_tokens if caches else 0,
        "kv_tokens": replica.kv_tokens - spare,
        "block_tokens": engine.block_tokens,
        "poll_steps": engine.poll_steps,
        "free_share": engine.free_share,
        "swap_s_per_token": engine.swap_s_per_gb * replica.kv_bytes_per_token / 1e9,
        "way_s": replica.way_s,
        "way_s_per_token": replica.step.prompt_token_s,
        "lag_s": replica.lag_s,
        "lag_s_per_token": replica.lag_s_per_token,
    }
