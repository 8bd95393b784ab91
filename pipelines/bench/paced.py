"""An engine without a model: it streams words at a set pace, and fails when told to.

It is the other side of what is measured of the dispatcher, where a real engine would be the slowest
part by far. Run it with ``python -m pipelines.bench.paced --port 8001``; with ``--steps FILE`` its
steps take what that step model says of their prompts and answers. The environment variable
``HETERO_PACED_STATUS`` makes it answer every request with that status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hetero.latency import storage
from hetero.latency.step import StepModel


class Paced:
    """Counts what it gets, and answers one word per ``step_s``.

    Parameters
    ----------
    first_s, step_s
        Time to the first word, and from word to word unless a request sets ``step_s`` [s].
    status
        Answer every request with this status instead; 0 for none.
    """

    def __init__(self, first_s: float, step_s: float, status: int = 0) -> None:
        self._first_s, self._step_s, self._status = first_s, step_s, status
        self.counts = {"begun": 0, "finished": 0}

    async def answer(self, request: Request) -> Response:
        """One completion."""
        body = json.loads(await request.body())
        self.counts["begun"] += 1
        if self._status:
            error = {"error": {"message": "told to fail", "type": "server_error"}}
            return JSONResponse(error, self._status)
        words = int(body.get("max_tokens") or 16)
        step_s = float(body.get("step_s") or self._step_s)
        chat = request.url.path.endswith("chat/completions")
        prompt = json.dumps(body.get("prompt") or body.get("messages"))
        usage = {
            "prompt_tokens": max(1, len(prompt) // 4),
            "completion_tokens": words,
            "total_tokens": max(1, len(prompt) // 4) + words,
        }
        if body.get("stream"):
            counted = bool((body.get("stream_options") or {}).get("include_usage"))
            pace = self._pace(usage["prompt_tokens"], words, step_s)
            stream = self._stream(pace, words, chat, usage if counted else None)
            return StreamingResponse(stream, media_type="text/event-stream")
        async for _ in self._pace(usage["prompt_tokens"], words, step_s):
            pass
        self.counts["finished"] += 1
        text = " word" * words
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return JSONResponse(_head(chat, whole=True) | {"choices": [choice], "usage": usage})

    async def _pace(self, prompt: int, words: int, step_s: float) -> AsyncIterator[int]:
        """Every word when it is due."""
        clock = asyncio.get_running_loop()
        due = clock.time() + self._first_s
        for k in range(words):
            await asyncio.sleep(max(due - clock.time(), 0.0))
            due += step_s
            yield k

    async def _stream(
        self, pace: AsyncIterator[int], words: int, chat: bool, usage: dict[str, int] | None
    ) -> Any:
        head = _head(chat, whole=False)

        def event(text: str, reason: str | None) -> bytes:
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            return b"data: " + json.dumps(head | {"choices": [choice]}).encode() + b"\n\n"

        async for k in pace:
            yield event(" word", "length" if k == words - 1 else None)
        if usage is not None:
            yield b"data: " + json.dumps(head | {"choices": [], "usage": usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
        self.counts["finished"] += 1

    def application(self) -> Starlette:
        """The pages of an OpenAI-compatible engine, and ``/counts``."""

        async def health(_: Request) -> Response:
            return Response()

        async def counts(_: Request) -> Response:
            return JSONResponse(self.counts)

        return Starlette(
            routes=[
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/health", health),
                Route("/counts", counts),
            ]
        )


class Stepped(Paced):
    """One that batches: what waits is prefilled beside what decodes, up to 2,048 tokens a step."""

    def __init__(self, step: StepModel) -> None:
        super().__init__(0.0, 0.0)
        self._step = step
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._loop: asyncio.Task[None] | None = None

    async def _pace(self, prompt: int, words: int, step_s: float) -> AsyncIterator[int]:
        job = _Job(prompt, words)
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._steps())
        for _ in range(words):
            yield await job.words.get()

    async def _steps(self) -> None:
        clock = asyncio.get_running_loop()
        end_s = clock.time()
        while self._waiting or self._running:
            prompts, tokens = 0, 0
            while prompts < len(self._waiting) and tokens < 2048:
                tokens += self._waiting[prompts].prompt
                prompts += 1
            joined, self._waiting = self._waiting[:prompts], self._waiting[prompts:]
            b, cached = len(self._running), sum(one.prompt + one.done for one in self._running)
            pairs = 0.5 * sum(one.prompt**2 for one in joined)
            end_s = max(end_s, clock.time()) + float(
                self._step.seconds(tokens + b, b, cached, pairs)
            )
            await asyncio.sleep(max(end_s - clock.time(), 0.0))
            for one in (batch := [*self._running, *joined]):
                one.words.put_nowait(one.done)
                one.done += 1
            self._running = [one for one in batch if one.done < one.count]


@dataclass(eq=False)
class _Job:
    prompt: int
    count: int
    done: int = 0
    words: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


def _head(chat: bool, *, whole: bool) -> dict[str, Any]:
    kind = "text_completion"
    if chat:
        kind = "chat.completion" if whole else "chat.completion.chunk"
    return {"id": "cmpl-0", "object": kind, "created": 0, "model": "paced"}


def main() -> None:
    """Serve until stopped."""
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first-ms", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--steps", type=Path)
    chosen = parser.parse_args()
    status = int(os.environ.get("HETERO_PACED_STATUS", "0"))
    if chosen.steps is None:
        engine = Paced(chosen.first_ms / 1e3, chosen.step_ms / 1e3, status)
    else:
        engine = Stepped(storage.load(chosen.steps))
    uvicorn.run(
        engine.application(),
        host="127.0.0.1",
        port=chosen.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
