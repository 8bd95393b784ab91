"""What is answered by path: requests for engines, pages, and what is refused at once."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.connections import HEAD_BYTES, too_large
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import ANSWERED, Relay, names_of, ticket_of

#: The pages that take no key: balancers have none.
OPEN = ("/health", "/live", "/ready")
_MODELS, _METRICS = "/v1/models", "/metrics"


class App:
    """All that is answered."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._created = dispatcher, int(time.time())

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request."""
        try:
            if request.version not in (HttpVersion10, HttpVersion11):
                raise Refusal(505, "http_version", "Ask by HTTP/1.1.")
            head = len(request.path_qs) + sum(len(a) + len(b) for a, b in request.raw_headers)
            if head > HEAD_BYTES:
                raise too_large()
            if request.method == "POST" and request.path in ANSWERED:
                return await self._relayed(request)
            # Others have their turn: aiohttp begins what is pipelined without one.
            await asyncio.sleep(0)
            return self._page(request)
        except Refusal as refusal:
            return refusal.answer()

    async def _relayed(self, request: web.BaseRequest) -> web.StreamResponse:
        dispatcher, names = self._dispatcher, names_of(request.headers)
        dispatcher.meters.received.inc()
        share, outcome = BodyShare(dispatcher.bodies), "cancelled"
        try:
            client = known(dispatcher.keys, _authorization(request))
            content = await self._body(request, share)
            ticket = ticket_of(dispatcher, request.path, content, client, names)
            outcome = ""  # from here on the relay says how it ended
            return await Relay(dispatcher, ticket, request).answer()
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
        """The body of a request."""
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
        connection: Any = request.protocol
        connection.whole()
        return content

    def _page(self, request: web.BaseRequest) -> web.Response:
        """What is not answered by engines."""
        dispatcher, path, authorization = self._dispatcher, request.path, _authorization(request)
        name, status = path.removeprefix(f"{_MODELS}/"), 200
        if path == name and path not in (*OPEN, *ANSWERED, _MODELS, _METRICS):
            raise Refusal(404, "not_found", "Not Found; see /v1/models.")
        if path in ANSWERED or request.method not in ("GET", "HEAD"):
            answer = Refusal(405, "method_not_allowed", "Method Not Allowed.").answer()
            answer.headers["allow"] = "POST" if path in ANSWERED else "GET, HEAD"
            return answer
        if path not in OPEN:
            known(dispatcher.keys, authorization)
        if path == _METRICS:
            text = dispatcher.meters.text(dispatcher)
            return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})
        found: dict[str, Any] = {"live": True}
        if path in ("/ready", "/health"):
            ready = any(one.open for one in dispatcher.engines)
            found, status = {"ready": ready}, 200 if ready else 503
        if path == "/health":
            found = {"status": "ok" if ready else "no engine is up"}
            with suppress(Refusal):  # balancers need none of this
                known(dispatcher.keys, authorization)
                found["router"] = dispatcher.router.name
                found["engines"] = {one.backend.name: one.open for one in dispatcher.engines}
        elif path not in OPEN:
            common = {"object": "model", "created": self._created, "owned_by": "hetero"}
            models = {one: {"id": one} | common for one in dispatcher.models}
            if path != name and name not in models:
                raise Refusal(404, "model_not_found", f"There is no model '{name[:100]}' here.")
            every = {"object": "list", "data": [*models.values()]}
            found = every if path == name else models[name]
        return web.json_response(found, status=status)


def _authorization(request: web.BaseRequest) -> str:
    return ", ".join(request.headers.getall("authorization", ()))  # two are no key


def known(keys: Mapping[bytes, str], authorization: str) -> str:
    """What logs call who asks; the time does not tell which key was near."""
    if not keys:
        return "anyone"
    kind, _, given = authorization.partition(" ")
    mine = given.strip(" ").encode(errors="surrogateescape")
    good = [name for key, name in keys.items() if hmac.compare_digest(mine, key)]
    if not good or kind.lower() != "bearer":
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
    return good[0]
