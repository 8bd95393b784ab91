"""The pages of the dispatcher."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.accounts import Account
from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.connections import Exchange
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.relay import RESPONSES, Relay
from hetero.apps.serving.settings import DeploymentFile, checked
from hetero.errors import HeteroError

#: Paths that engines answer, and what a request has to have one of.
ANSWERED = {
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": ("messages",),
    RESPONSES: ("input",),
    "/v1/embeddings": ("input",),
    "/tokenize": ("prompt", "messages"),
}
_ADMIN = "/admin/backends"
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
                exchange.account = account = known(dispatcher, exchange)
                account.arrive(dispatcher.now_s())
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
                await self._page(exchange)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._left(exchange, outcome)

    async def _page(self, exchange: Exchange) -> None:
        try:
            if exchange.refusal is not None:
                raise exchange.refusal
            page = self._pages.get(exchange.path)
            if exchange.path.startswith(_ADMIN):
                status, found = await self._admin(exchange)
            elif page is None and exchange.path not in self._relays:
                raise Refusal(404, "not_found", "Not Found; see /v1/models.")
            elif page is None or exchange.method not in ("GET", "HEAD"):
                raise Refusal(405, "method_not_allowed", "Method Not Allowed; see /v1/models.")
            else:
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
        known(self._dispatcher, exchange)
        common = {"object": "model", "created": self._created, "owned_by": "hetero"}
        found = [{"id": name} | common for name in self._dispatcher.models]
        return 200, {"object": "list", "data": found}

    def _health(self, exchange: Exchange) -> tuple[int, Any]:
        engines = {one.backend.name: one.open for one in self._dispatcher.engines}
        good = any(engines.values())
        said: dict[str, Any] = {"status": "ok" if good else "no engine is up"}
        with suppress(Refusal):  # balancers have no key and need none of this
            known(self._dispatcher, exchange)
            said |= {"router": self._dispatcher.router.name, "engines": engines}
        return (200 if good else 503), said

    def _ready(self, _: Exchange) -> tuple[int, Any]:
        good = any(one.open for one in self._dispatcher.engines)
        return (200 if good else 503), {"ready": good}

    def _plan(self, exchange: Exchange) -> tuple[int, Any]:
        known(self._dispatcher, exchange)
        return 200, self._dispatcher.plan.record()

    def _metrics(self, exchange: Exchange) -> tuple[int, Any]:
        known(self._dispatcher, exchange)
        return 200, self._dispatcher.meters.text()

    async def _admin(self, exchange: Exchange) -> tuple[int, Any]:
        """Show, add, drain and remove engines, until the file is read again."""
        dispatcher = self._dispatcher
        if dispatcher.admin_key is None:
            raise Refusal(404, "not_found", "Not Found; the file names no admin_key_env.")
        if _match(exchange, [dispatcher.admin_key]) is None:
            raise Refusal(401, "invalid_api_key", "The admin key is missing or wrong.")
        name, method = exchange.path.removeprefix(_ADMIN).lstrip("/"), exchange.method
        engines = {one.backend.name: one for one in dispatcher.engines}
        if name and name not in engines:
            raise Refusal(404, "not_found", f"There is no backend '{name}'.")
        if method not in (("PATCH", "DELETE") if name else ("GET", "POST")):
            raise Refusal(405, "method_not_allowed", "GET and POST all, PATCH and DELETE one.")
        if method != "GET":
            try:
                given = {} if method == "DELETE" else json.loads(exchange.body)
                if not isinstance(given, dict) or (method == "PATCH" and set(given) != {"drain"}):
                    raise ValueError
            except (ValueError, RecursionError):
                text = "Give a backend as an object of JSON, or for PATCH its 'drain' alone."
                raise Refusal(400, "invalid_request", text) from None

            def change(settings: DeploymentFile) -> DeploymentFile:
                left = [one.model_dump() for one in settings.backends if one.name != name]
                new = [one.model_dump() | given for one in settings.backends if one.name == name]
                new = [] if method == "DELETE" else new or [given]
                raw = settings.model_dump() | {"backends": [*left, *new]}
                return checked(raw | {"folder": settings.folder}, settings.folder)

            try:
                await dispatcher.change(change)
            except HeteroError as error:
                raise Refusal(400, "invalid_request", error.what) from None
        found = [
            {
                "name": one.backend.name,
                "url": one.backend.url,
                "models": [*one.names],
                "up": one.up,
                "drain": one.backend.drain,
                "requests": len(one.tickets),
            }
            for one in dispatcher.engines
        ]
        return 200, {"backends": found}


def known(dispatcher: Dispatcher, exchange: Exchange) -> Account:
    """Who asks.

    Raises
    ------
    Refusal
        If there are keys, and the request has none of them.
    """
    accounts = dispatcher.accounts
    if b"" in accounts:
        return accounts[b""]
    found = _match(exchange, accounts)
    if found is None:
        raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
    return accounts[found]


def _match(exchange: Exchange, keys: Iterable[bytes]) -> bytes | None:
    """The key of these that a request has; the time does not tell which one was near."""
    kind, _, given = exchange.field(b"authorization").partition(" ")
    mine = given.strip().encode()
    good = [key for key in keys if hmac.compare_digest(mine, key)]
    return good[0] if good and kind.lower() == "bearer" else None
