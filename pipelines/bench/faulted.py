"""``transformers serve`` with faults that a file turns on and off while it runs.

The file named by the environment variable ``HETERO_FAULT`` holds JSON: ``decode``, a factor on the
time of what each step decodes; ``prefill_s_per_token``, on top for each token of a prompt [s];
``cache``, the share of its KV blocks that it may use; and ``front_s``, a wait of each request
before the engine sees it [s]. What is left out is not disturbed.

On a machine that others use, steps can be paced: one of ``b`` decoding requests and ``n`` tokens of
prompts then takes at least ``step_s + decoding_s b + token_s n``, as on a device of that speed, and
what the processor takes for it hides in the wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from functools import wraps
from pathlib import Path
from typing import Any

VARIABLE = "HETERO_FAULT"


def fault() -> dict[str, float]:
    """What the file says at this moment."""
    found: dict[str, float] = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    return found


def _slow_steps(processor: Any) -> None:
    """Let steps take longer; what a batch takes to decode is the median of its last such steps."""
    plain = processor._generation_step
    alone: dict[int, list[float]] = {}

    @wraps(plain)
    def step(self: Any, model: Any) -> None:
        now = fault()
        lengths = [one.query_length for one in self.inputs_and_outputs.requests_in_batch]
        decoding = sum(one == 1 for one in lengths)
        prompt = sum(lengths) - decoding
        began = time.perf_counter()
        plain(self, model)
        paced = sum(
            now.get(name, 0.0) * count
            for name, count in (("step_s", 1), ("decoding_s", decoding), ("token_s", prompt))
        )
        time.sleep(max(paced - (time.perf_counter() - began), 0.0))
        spent = time.perf_counter() - began
        if not prompt:
            alone.setdefault(decoding, []).append(spent)
        known = sorted(alone.get(decoding, [])[-9:]) or [0.0 if prompt else spent]
        more = (now.get("decode", 1.0) - 1.0) * known[len(known) // 2] * (decoding > 0)
        time.sleep(more + now.get("prefill_s_per_token", 0.0) * prompt)

    processor._generation_step = step


def _less_cache(processor: Any) -> None:
    """Take free sectors out of the pool, or give them back, before each step."""
    plain = processor.prepare_next_batch
    taken: list[int] = []

    @wraps(plain)
    def prepare(self: Any) -> bool:
        cache = self.cache
        whole = cache.num_sectors + len(taken)
        wanted = whole - max(round(whole * fault().get("cache", 1.0)), 2)
        if len(taken) < wanted:  # blocks kept for prompts that come again are not free
            cache.evict_cached_blocks()
            cache.pool.try_to_free_sectors()
        while len(taken) < wanted and cache.pool.free_sectors:
            taken.append(cache.pool.free_sectors.pop())
        while len(taken) > wanted:
            cache.pool.free_sectors.append(taken.pop())
        cache.num_sectors = whole - len(taken)
        return bool(plain(self))

    processor.prepare_next_batch = prepare


def _slow_front(config: Any) -> None:
    plain = config.__init__

    @wraps(plain)
    def init(self: Any, app: Any, *others: Any, **named: Any) -> None:
        async def waiting(scope: Any, receive: Any, send: Any) -> None:
            if scope.get("method") == "POST":
                await asyncio.sleep(fault().get("front_s", 0.0))
            await app(scope, receive, send)

        plain(self, waiting, *others, **named)

    config.__init__ = init


def main() -> None:
    """Serve until stopped, with the arguments of ``transformers serve``."""
    import uvicorn
    from transformers.cli.transformers import main as serve
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    _slow_steps(ContinuousBatchProcessor)
    _less_cache(ContinuousBatchProcessor)
    _slow_front(uvicorn.Config)
    serve()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
