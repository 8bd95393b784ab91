"""The pages of the dispatcher as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero.apps.serving.bodies import Asked, BodyShare, parsed
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import WITHOUT_OUTPUT, Relay, send_error

# What of the headers of a request is passed on, and how it has to look.
_NAMES = {
    "x-request-id": re.compile("[!-~]{1,128}"),
    "traceparent": re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile("[ -~]{1,512}"),
}


class Completions:
    """One path that engines answer."""

    def __init__(self, dispatcher: Dispatcher, path: str, needs: tuple[str, ...]) -> None:
        self._dispatcher, self._path, self._needs = dispatcher, path, needs
        self._relay = Relay(dispatcher, path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and give it up as soon as its client has gone."""
        meters = self._dispatcher.meters
        meters.received.inc()
        outcome = "failed"
        try:
            outcome = await self._answer(scope, receive, send)
        except ClientDisconnect:
            outcome = "cancelled"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            meters.ended(outcome)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        request = Request(scope, receive)
        load = BodyShare(self._dispatcher.bodies)
        names = _names(request)
        try:
            try:
                check_key(self._dispatcher, request)
                limits = self._dispatcher.settings.limits
                asked = self._read(await load.read(request, scope["headers"], limits))
                asked.headers = names
            except Refusal as refusal:
                await send_error(send, refusal, names)
                return "refused"
            answering = asyncio.create_task(self._relay.answer(asked, send))
            leaving = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    return answering.result()
                return "cancelled"
            finally:
                leaving.cancel()
                if not answering.done():
                    answering.cancel()
                    with suppress(asyncio.CancelledError):
                        await answering
        finally:
            load.leave()

    def _read(self, content: bytearray) -> Asked:
        body, long = parsed(content)
        if all(body.get(one) is None for one in self._needs):
            text = f"The body has no {' or '.join(map(repr, self._needs))}."
            raise Refusal(400, "invalid_request", text)
        model = self._dispatcher.settings.model
        if body.get("model") != model:
            text = f"There is no model '{str(body.get('model'))[:100]}' here; use '{model}'."
            raise Refusal(404, "model_not_found", text)
        asked = Asked.of(body, long)
        if self._path in WITHOUT_OUTPUT:
            asked.allowed, asked.stream = 1, False
        return asked


def _names(request: Request) -> dict[str, str]:
    """Headers by which a request is known elsewhere; it gets a name where it has none."""
    found = {}
    for name, rule in _NAMES.items():
        if rule.fullmatch(value := request.headers.get(name, "")):
            found[name] = value
    return {"x-request-id": uuid.uuid4().hex} | found


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


async def _refused(_: Request, error: Exception) -> Response:
    """Every error in the form that OpenAI clients read."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
        refusal = Refusal(error.status_code, code, f"{error.detail}; see /v1/models.")
        headers |= error.headers or {}
    elif isinstance(error, Refusal):
        refusal = error
    else:
        refusal = Refusal(500, "internal_error", "The dispatcher has failed; its log says how.")
    return JSONResponse(refusal.body(), refusal.status, refusal.headers() | headers)


def application(dispatcher: Dispatcher) -> ASGIApp:
    """The application of a dispatcher, which it starts and stops."""
    created = int(time.time())

    def known(request: Request) -> bool:
        """Whether a request has a key, where there are any."""
        with suppress(Refusal):
            check_key(dispatcher, request)
            return True
        return False

    async def models(request: Request) -> Response:
        check_key(dispatcher, request)
        name = dispatcher.settings.model
        one = {"id": name, "object": "model", "created": created, "owned_by": "hetero"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(request: Request) -> Response:
        engines = {one.backend.name: one.open for one in dispatcher.engines}
        good = any(engines.values())
        said: dict[str, Any] = {"status": "ok" if good else "no engine is up"}
        if known(request):  # balancers have no key and need none of this
            said |= {"router": dispatcher.router.name, "engines": engines}
        return JSONResponse(said, 200 if good else 503)

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        good = any(one.open for one in dispatcher.engines)
        return JSONResponse({"ready": good}, 200 if good else 503)

    async def plan(request: Request) -> Response:
        check_key(dispatcher, request)
        dispatcher.mend()  # an engine may have come or gone since the last decision
        return JSONResponse(dispatcher.plan.record())

    async def metrics(request: Request) -> Response:
        check_key(dispatcher, request)
        dispatcher.mend()
        return Response(dispatcher.meters.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await dispatcher.start()
        try:
            yield
        finally:
            await dispatcher.stop()

    answered = {
        "/v1/completions": ("prompt",),
        "/v1/chat/completions": ("messages",),
        "/v1/embeddings": ("input",),
        "/tokenize": ("prompt", "messages"),
    }
    app = Starlette(
        routes=[
            *(
                Route(path, Completions(dispatcher, path, needs), methods=["POST"])
                for path, needs in answered.items()
            ),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/live", live),
            Route("/ready", ready),
            Route("/plan", plan),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HTTPException, Refusal, Exception), _refused),
    )
    app.router.redirect_slashes = False  # it would lead to whatever host the client has named
    hot = {path: Completions(dispatcher, path, needs) for path, needs in answered.items()}

    async def first(scope: Scope, receive: Receive, send: Send) -> None:
        """Completions without the way through the framework, which costs as much as a decision."""
        answer = hot.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None or scope["method"] != "POST":
            await app(scope, receive, send)
        else:
            await answer(scope, receive, send)

    return ServerErrorMiddleware(first, _refused)
