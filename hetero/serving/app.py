"""The pages of the dispatcher as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hetero.serving.dispatcher import Dispatcher
from hetero.serving.faults import Refusal
from hetero.serving.relay import Relay, send_error

log = logging.getLogger("hetero.serving")


class Completions:
    """One path that engines answer."""

    def __init__(self, dispatcher: Dispatcher, path: str, needs: str) -> None:
        self._dispatcher, self._needs = dispatcher, needs
        self._relay = Relay(dispatcher, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and give it up as soon as its client has gone."""
        meters = self._dispatcher.meters
        meters.received.inc()
        outcome = "failed"
        try:
            outcome = await self._answer(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            meters.ended(outcome)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        request = Request(scope, receive)
        try:
            check_key(self._dispatcher, request)
            body = await self._body(request)
        except Refusal as refusal:
            await send_error(send, refusal)
            return "refused"
        answering = asyncio.create_task(self._relay.answer(body, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            return "cancelled"
        finally:
            for task in (answering, leaving):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    async def _body(self, request: Request) -> dict[str, Any]:
        limits = self._dispatcher.settings.limits
        content = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    content += part
                    if len(content) > limits.max_body_bytes:
                        text = f"A request may have {limits.max_body_bytes:,} bytes."
                        raise Refusal(413, "too_large", text)
        except TimeoutError:
            raise Refusal(408, "too_slow", "The request took too long to come.") from None
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise Refusal(400, "invalid_json", "The body is no JSON.") from None
        if not isinstance(body, dict) or not body.get(self._needs):
            raise Refusal(400, "invalid_request", f"The body has no '{self._needs}'.")
        model = self._dispatcher.settings.model
        if body.get("model") != model:
            text = f"There is no model '{str(body.get('model'))[:100]}' here; use '{model}'."
            raise Refusal(404, "model_not_found", text)
        return body


def check_key(dispatcher: Dispatcher, request: Request) -> None:
    """Refuse a request without one of the keys, where there are any."""
    keys = dispatcher.keys
    if not keys:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Every key is compared, so that the time does not tell which one was near.
    good = [hmac.compare_digest(given.strip().encode(), key) for key in keys]
    if kind.lower() != "bearer" or not any(good):
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def application(dispatcher: Dispatcher) -> Starlette:
    """The application of a dispatcher, which it starts and stops."""
    created = int(time.time())

    async def models(request: Request) -> Response:
        try:
            check_key(dispatcher, request)
        except Refusal as refusal:
            return JSONResponse(refusal.body(), refusal.status)
        name = dispatcher.settings.model
        one = {"id": name, "object": "model", "created": created, "owned_by": "hetero"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(request: Request) -> Response:
        engines = {one.backend.name: one.open for one in dispatcher.engines}
        good = any(engines.values())
        state = "ok" if good else "no engine is up"
        said = {"status": state, "router": dispatcher.router.name, "engines": engines}
        return JSONResponse(said, 200 if good else 503)

    async def plan(request: Request) -> Response:
        try:
            check_key(dispatcher, request)
        except Refusal as refusal:
            return JSONResponse(refusal.body(), refusal.status)
        return JSONResponse(dispatcher.plan.record())

    async def metrics(request: Request) -> Response:
        return Response(dispatcher.meters.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await dispatcher.start()
        try:
            yield
        finally:
            await dispatcher.stop()

    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                Completions(dispatcher, "/v1/completions", "prompt"),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                Completions(dispatcher, "/v1/chat/completions", "messages"),
                methods=["POST"],
            ),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/plan", plan),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )
