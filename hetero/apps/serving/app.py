"""The address of a dispatcher, and its pages."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from hetero.apps.serving.connections import Connections
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.listener import Listener, known
from hetero.errors import ParameterError

#: The pages that take no key: balancers have none.
OPEN = ("/health", "/live", "/ready")
Page = Callable[[str], tuple[int, Any]]


class Pages:
    """What is not answered by engines, by path."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._created = dispatcher, int(time.time())
        self._pages: dict[str, Page] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/live": lambda _: (200, {"live": True}),
            "/ready": self._ready,
            "/plan": lambda _: (200, dispatcher.plan.record()),
            "/metrics": lambda _: (200, dispatcher.meters.text()),
        }

    def answer(self, method: str, path: str, authorization: str) -> tuple[int, str, bytes]:
        """A page: its status, its type and what is on it.

        Raises
        ------
        Refusal
            If there is no such page, or not for this client or method.
        """
        if path not in self._pages:
            raise Refusal(404, "not_found", "Not Found; see /v1/models.")
        if method not in ("GET", "HEAD"):
            raise Refusal(405, "method_not_allowed", "Method Not Allowed; see /v1/models.")
        if path not in OPEN:
            known(self._dispatcher.keys, authorization)
        status, found = self._pages[path](authorization)
        if isinstance(found, bytes):
            return status, CONTENT_TYPE_LATEST, found
        return status, "application/json", json.dumps(found, separators=(",", ":")).encode()

    def _models(self, _: str) -> tuple[int, Any]:
        common = {"object": "model", "created": self._created, "owned_by": "hetero"}
        found = [{"id": name} | common for name in self._dispatcher.models]
        return 200, {"object": "list", "data": found}

    def _health(self, authorization: str) -> tuple[int, Any]:
        engines = {one.backend.name: one.open for one in self._dispatcher.engines}
        good = any(engines.values())
        said: dict[str, Any] = {"status": "ok" if good else "no engine is up"}
        with suppress(Refusal):  # balancers need none of this
            known(self._dispatcher.keys, authorization)
            said |= {"router": self._dispatcher.router.name, "engines": engines}
        return (200 if good else 503), said

    def _ready(self, _: str) -> tuple[int, Any]:
        good = any(one.open for one in self._dispatcher.engines)
        return (200 if good else 503), {"ready": good}


class Door:
    """Where the dispatcher listens."""

    def __init__(
        self, dispatcher: Dispatcher, address: tuple[str, int], context: ssl.SSLContext | None
    ) -> None:
        listener = Listener(dispatcher, Pages(dispatcher).answer)
        self._connections = Connections(listener, lambda: dispatcher.settings.limits)
        dispatcher.room = self._connections.room
        self._address, self._context = address, context

    async def open(self) -> None:
        """Listen."""
        host, port = self._address
        try:
            self._server = await self._connections.listen(host, port, self._context)
        except OSError as error:
            raise ParameterError(
                f"The address {host}:{port} cannot be bound ({error.strerror}).",
                resolve="choose another with --port, or stop what listens there.",
            ) from None
        self._watching = asyncio.create_task(self._connections.watch())

    async def close(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Let requests under way end, so long or until ``hurry``, and then end all."""
        self._server.close()
        await self._connections.drain(limit_s, hurry)
        self._watching.cancel()
