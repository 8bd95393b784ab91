"""What is answered by path: requests for engines, pages, and what is refused at once."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.connections import Connection, too_large
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import RESPONSES, Relay, names_of

#: Paths that engines answer, and what a request has to have one of.
ANSWERED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    RESPONSES: ("input",),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
}
#: The pages that take no key: balancers have none.
OPEN = ("/health", "/live", "/ready")
_MODELS = "/v1/models"


class App:
    """All that is answered."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._created = dispatcher, int(time.time())
        self._relays = {path: Relay(dispatcher, path, needs) for path, needs in ANSWERED.items()}
        self._pages: dict[str, Callable[[str], tuple[int, Any]]] = {
            _MODELS: self._models,
            "/health": self._health,
            "/live": lambda _: (200, {"live": True}),
            "/ready": self._ready,
            "/plan": lambda _: (200, dispatcher.plan.record()),
            "/metrics": lambda _: (200, dispatcher.meters.text(dispatcher)),
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        try:
            if request.version not in (HttpVersion10, HttpVersion11):
                raise Refusal(505, "http_version", "Ask by HTTP/1.1.")
            most = self._dispatcher.settings.limits.head_bytes
            if len(request.path_qs) + sum(len(a) + len(b) for a, b in request.raw_headers) > most:
                raise too_large(most)
            if request.method == "POST" and (relay := self._relays.get(request.path)):
                return await self._relayed(request, relay)
            # Others have their turn: aiohttp begins what is pipelined without one.
            await asyncio.sleep(0)
            return self._page(request)
        except Refusal as refusal:
            return refusal.answer()

    async def _relayed(self, request: web.BaseRequest, relay: Relay) -> web.StreamResponse:
        dispatcher, names = self._dispatcher, names_of(request.headers)
        dispatcher.meters.received.inc()
        share, outcome = BodyShare(dispatcher.bodies), "cancelled"
        try:
            client = known(dispatcher.keys, _authorization(request))
            ticket = relay.ticket(await self._body(request, share), client, names)
            outcome = ""  # from here on the relay says how it ended
            return await relay.answer(ticket, request)
        except Refusal as refusal:
            outcome = outcome and "refused"
            answer = refusal.answer()
            answer.headers["x-request-id"] = names["x-request-id"]
            return answer
        except Exception:
            outcome = outcome and "failed"
            raise
        finally:
            share.leave()
            if outcome:
                dispatcher.meters.ended.labels(outcome).inc()

    async def _body(self, request: web.BaseRequest, share: BodyShare) -> bytearray:
        """The body of a request, within bounds."""
        limits, content = self._dispatcher.settings.limits, bytearray()
        share.check(request.content_length or 0, limits)
        expects = request.headers.get("expect", "").lower() == "100-continue"
        if expects and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # of the answer
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.content.iter_any():
                    content += part
                    share.grow(len(content), limits)
        except TimeoutError:
            raise Refusal(408, "too_slow", "The request took too long to come.") from None
        except (web.PayloadAccessError, web.RequestPayloadError, ConnectionError):
            raise Refusal(400, "invalid_http", "The body is no HTTP, or broke off.") from None
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.whole()
        return content

    def _page(self, request: web.BaseRequest) -> web.Response:
        """What is not answered by engines."""
        path, authorization = request.path, _authorization(request)
        name = path.removeprefix(f"{_MODELS}/")
        page = self._pages.get(path if name == path else _MODELS)
        if page is None and path not in self._relays:
            raise Refusal(404, "not_found", "Not Found; see /v1/models.")
        if page is None or request.method not in ("GET", "HEAD"):
            answer = Refusal(405, "method_not_allowed", "Method Not Allowed.").answer()
            answer.headers["allow"] = "GET, HEAD" if page else "POST"
            return answer
        if path not in OPEN:
            known(self._dispatcher.keys, authorization)
        status, found = page(authorization)
        if name != path:
            one = [model for model in found["data"] if model["id"] == name]
            if not one:
                raise Refusal(404, "model_not_found", f"There is no model '{name[:100]}' here.")
            found = one[0]
        if isinstance(found, bytes):
            return web.Response(body=found, headers={"content-type": CONTENT_TYPE_LATEST})
        text = json.dumps(found, separators=(",", ":"))
        return web.Response(status=status, text=text, content_type="application/json")

    def _models(self, _: str) -> tuple[int, Any]:
        common = {"object": "model", "created": self._created, "owned_by": "hetero"}
        found = [{"id": name} | common for name in self._dispatcher.models]
        return 200, {"object": "list", "data": found}

    def _health(self, authorization: str) -> tuple[int, Any]:
        engines = {one.backend.name: one.open for one in self._dispatcher.engines}
        status, _ = self._ready("")
        said: dict[str, Any] = {"status": "ok" if status == 200 else "no engine is up"}
        with suppress(Refusal):  # balancers need none of this
            known(self._dispatcher.keys, authorization)
            said |= {"router": self._dispatcher.router.name, "engines": engines}
        return status, said

    def _ready(self, _: str) -> tuple[int, Any]:
        good = any(one.open for one in self._dispatcher.engines)
        return (200 if good else 503), {"ready": good}


def _authorization(request: web.BaseRequest) -> str:
    return ", ".join(request.headers.getall("authorization", ()))  # two are no key


def known(keys: Mapping[bytes, str], authorization: str) -> str:
    """What logs call who asks; the time does not tell which key was near.

    Raises
    ------
    Refusal
        If there are keys, and the request has none of them.
    """
    if not keys:
        return "anyone"
    kind, _, given = authorization.partition(" ")
    mine = given.strip(" ").encode(errors="surrogateescape")
    good = [name for key, name in keys.items() if hmac.compare_digest(mine, key)]
    if not good or kind.lower() != "bearer":
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
    return good[0]
