"""An engine without a model: it streams words at a set pace, and fails when told to.

It is the other side of what is measured of the dispatcher, where a real engine would be the slowest
part by far. Run it with ``python -m pipelines.bench.paced --port 8001``. The environment variable
``HETERO_PACED_STATUS`` makes it answer every request with that status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


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
            stream = self._stream(words, step_s, chat, usage if counted else None)
            return StreamingResponse(stream, media_type="text/event-stream")
        await asyncio.sleep(self._first_s + step_s * (words - 1))
        self.counts["finished"] += 1
        text = " word" * words
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return JSONResponse(_head(chat, whole=True) | {"choices": [choice], "usage": usage})

    async def _stream(
        self, words: int, step_s: float, chat: bool, usage: dict[str, int] | None
    ) -> Any:
        head = _head(chat, whole=False)

        def event(text: str, reason: str | None) -> bytes:
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            return b"data: " + json.dumps(head | {"choices": [choice]}).encode() + b"\n\n"

        clock = asyncio.get_running_loop()
        due = clock.time() + self._first_s
        for k in range(words):
            await asyncio.sleep(max(due - clock.time(), 0.0))
            due += step_s
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
    chosen = parser.parse_args()
    engine = Paced(
        chosen.first_ms / 1e3,
        chosen.step_ms / 1e3,
        int(os.environ.get("HETERO_PACED_STATUS", "0")),
    )
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
