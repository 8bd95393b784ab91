"""The pages of the dispatcher."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.connections import Exchange
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import Relay

#: Paths that engines answer, and what a request has to have one of.
ANSWERED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
}
Page = Callable[[Exchange], tuple[int, Any]]


class Pages:
    """All that a dispatcher answers, by path."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._created = dispatcher, int(time.time())
        self._relays = {path: Relay(dispatcher, path, needs) for path, needs in ANSWERED.items()}
        self._pages: dict[str, Page] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/live": lambda _: (200, {"live": True}),
            "/ready": self._ready,
            "/plan": self._plan,
            "/metrics": self._metrics,
        }

    def opened(self, exchange: Exchange) -> None:
        """The head of a request has come: it may be refused before the rest of it has."""
        dispatcher = self._dispatcher
        exchange.share = BodyShare(dispatcher.bodies)
        try:
            if exchange.method == "POST" and exchange.path in self._relays:
                exchange.context = self._relays[exchange.path]
                dispatcher.meters.received += 1
                check_key(dispatcher, exchange)
            if length := exchange.fields.get(b"content-length"):
                exchange.share.check(int(length), dispatcher.settings.limits)
        except Refusal as refusal:
            exchange.refusal = refusal

    def dropped(self, exchange: Exchange) -> None:
        """A client has left before all of its request had come."""
        self._left(exchange, "cancelled")

    def _left(self, exchange: Exchange, outcome: str) -> None:
        if exchange.share is not None:
            exchange.share.leave()
        if exchange.context is not None:
            self._dispatcher.meters.ended(outcome)

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request."""
        outcome = "failed"
        try:
            if exchange.context is not None:
                outcome = await exchange.context.answer(exchange)
            else:
                self._page(exchange)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._left(exchange, outcome)

    def _page(self, exchange: Exchange) -> None:
        try:
            if exchange.refusal is not None:
                raise exchange.refusal
            page = self._pages.get(exchange.path)
            if page is None and exchange.path not in self._relays:
                raise Refusal(404, "not_found", "Not Found; see /v1/models.")
            if page is None or exchange.method not in ("GET", "HEAD"):
                raise Refusal(405, "method_not_allowed", "Method Not Allowed; see /v1/models.")
            status, found = page(exchange)
        except Refusal as refusal:
            allowed = b"POST" if exchange.path in self._relays else b"GET, HEAD"
            exchange.refuse(refusal, [(b"allow", allowed)] if refusal.status == 405 else [])
            return
        plain = isinstance(found, bytes)
        kind = CONTENT_TYPE_LATEST.encode() if plain else b"application/json"
        content = found if plain else json.dumps(found, separators=(",", ":")).encode()
        exchange.reply(status, [(b"content-type", kind)], content)

    def _models(self, exchange: Exchange) -> tuple[int, Any]:
        check_key(self._dispatcher, exchange)
        name = self._dispatcher.settings.model
        one = {"id": name, "object": "model", "created": self._created, "owned_by": "hetero"}
        return 200, {"object": "list", "data": [one]}

    def _health(self, exchange: Exchange) -> tuple[int, Any]:
        engines = {one.backend.name: one.open for one in self._dispatcher.engines}
        good = any(engines.values())
        said: dict[str, Any] = {"status": "ok" if good else "no engine is up"}
        with suppress(Refusal):  # balancers have no key and need none of this
            check_key(self._dispatcher, exchange)
            said |= {"router": self._dispatcher.router.name, "engines": engines}
        return (200 if good else 503), said

    def _ready(self, _: Exchange) -> tuple[int, Any]:
        good = any(one.open for one in self._dispatcher.engines)
        return (200 if good else 503), {"ready": good}

    def _plan(self, exchange: Exchange) -> tuple[int, Any]:
        check_key(self._dispatcher, exchange)
        return 200, self._dispatcher.plan.record()

    def _metrics(self, exchange: Exchange) -> tuple[int, Any]:
        check_key(self._dispatcher, exchange)
        return 200, self._dispatcher.meters.text()


def check_key(dispatcher: Dispatcher, exchange: Exchange) -> None:
    """Refuse a request without one of the keys, where there are any."""
    keys = dispatcher.keys
    if not keys:
        return
    kind, _, given = exchange.field(b"authorization").partition(" ")
    # Every key is compared, so that the time does not tell which one was near.
    good = [hmac.compare_digest(given.strip().encode(), key) for key in keys]
    if kind.lower() != "bearer" or not any(good):
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
