"""Connections of clients, bounded in number, in the size of heads, and in how long they dally.

uvicorn reads a head of any size for any time and waits for ever for a client that does not read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import DispatcherLimits

log = logging.getLogger("hetero.apps.serving")
_EVERY_S = 0.5
_RESERVE = 64  # descriptors for what is neither a client nor an engine
_IDLE = 1024  # connections beyond the requests that the house takes
_LEAST_BPS = 1024  # bytes per second that a client has to read


class Connections:
    """The connections that are open, and what becomes of those that dally.

    Parameters
    ----------
    limits
        Called for the present limits.
    files
        Descriptors that the process may have.
    """

    def __init__(self, limits: Callable[[], DispatcherLimits], files: int) -> None:
        self.limits = limits
        self._files = files - _RESERVE
        self.open: dict[Guarded, None] = {}
        self.idle: dict[Guarded, None] = {}  # without a request, the longest one first

    @property
    def most(self) -> int:
        """Clients that may be connected at once."""
        wanted = self.limits().max_requests + _IDLE
        return max(min(wanted, self._files * 7 // 8), 1)

    def room(self) -> int:
        """Requests that may be at engines at once."""
        return max(self._files - len(self.open), 1)

    def protocol(self) -> type[Guarded]:
        """The protocol for a server."""
        return type("Guarded", (Guarded,), {"house": self})

    async def watch(self) -> None:
        """End connections that dally, until cancelled."""
        now_s = time.monotonic()
        while True:
            before_s = now_s
            await asyncio.sleep(_EVERY_S)
            limits, now_s = self.limits(), time.monotonic()
            if now_s - before_s > 2 * _EVERY_S:
                continue  # the dispatcher is late itself: what they sent may lie unread
            for one in list(self.open):
                one.check(now_s, limits)


def descriptors(limits: DispatcherLimits) -> int:
    """Descriptors that this process may have, after it has asked for as many as it could use.

    A streamed answer takes two: that of the client and that of the engine.
    """
    if sys.platform == "win32":  # no such limit
        return 1 << 20
    import resource

    wanted = 2 * limits.max_requests + _IDLE + _RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        log.warning(
            "only %d files may be open, but %d requests at once need %d: some will wait. "
            "Resolve: raise the limit with `ulimit -n %d`, or lower limits.max_requests.",
            soft,
            limits.max_requests,
            wanted,
            wanted,
        )
    return soft


class Guarded(HttpToolsProtocol):
    """A connection of a client."""

    house: Connections
    _until_s = 0.0  # until when the client is waited for; 0 when it is not
    _loose = 0  # bytes since the last that belonged to a body
    _whole = True  # nothing of a request is outstanding
    _too_large = False
    _most = 0
    _stuck_s = 0.0  # since when it has not read what is sent
    _stuck_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; where there is no room, the one that is idle longest makes some."""
        super().connection_made(transport)
        house = self.house
        self._most = house.limits().head_bytes
        # One without a word costs a descriptor, and goes when another needs it.
        self._until_s = time.monotonic() + self.timeout_keep_alive
        full = len(house.open) >= house.most
        house.open[self] = None
        if full and not house.idle:
            self._refuse(Refusal(503, "overloaded", "Too many connections.", retry_after_s=1.0))
            return
        if full:
            oldest = next(iter(house.idle))
            del house.idle[oldest]
            oldest.transport.abort()
        house.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self.house.open.pop(self, None)
        self.house.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within bounds."""
        self._loose += len(data)
        super().data_received(data)
        if self._loose > self._most and not self._whole:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._whole = False
        self._wait()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self._loose > self._most:  # or much of a body came with it
            held = sum(len(name) + len(value) for name, value in self.headers)
            if held + len(self.url) > self._most:
                self._too_large = True
                raise ValueError("the head is too large")
        self._loose = 0
        self._until_s = 0.0
        self.house.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._loose = 0
        self._whole = True
        super().on_message_complete()
        if self.cycle.response_complete:
            self._rest()

    def on_response_complete(self) -> None:
        """An answer is whole; what is left of its request may still come, but not for long."""
        super().on_response_complete()
        if not self.cycle.response_complete:  # that of the next request, which had come already
            return
        if self._whole:
            self._rest()
        else:
            self._wait()

    def _wait(self) -> None:
        self._until_s = time.monotonic() + self.house.limits().head_s

    def _rest(self) -> None:
        if self in self.house.open:
            self.house.idle[self] = None
            self._until_s = time.monotonic() + self.timeout_keep_alive + _EVERY_S

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._stuck_s = time.monotonic()
        self._stuck_bytes = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._stuck_s = 0.0

    def check(self, now_s: float, limits: DispatcherLimits) -> None:
        """End the connection if its client has been waited for too long."""
        if self._until_s and now_s > self._until_s:
            self.transport.abort()
        elif self._stuck_s and now_s - self._stuck_s > limits.send_s:
            left = self.transport.get_write_buffer_size()
            if self._stuck_bytes - left < limits.send_s * _LEAST_BPS:
                self.transport.abort()
            else:
                self._stuck_s, self._stuck_bytes = now_s, left

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        if self._too_large:
            self._refuse_head()
        else:
            self._refuse(Refusal(400, "invalid_http", msg))

    def _refuse_head(self) -> None:
        what = f"The head of a request may have {self._most:,} bytes."
        self._too_large = True
        self._refuse(Refusal(431, "head_too_large", what))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer outside the application, and end the connection."""
        if self.transport.is_closing():
            return
        content = json.dumps(refusal.body()).encode()
        head: dict[str, Any] = {"content-length": len(content), "connection": "close"}
        lines = [f"HTTP/1.1 {refusal.status} Refused"]
        lines += [f"{name}: {value}" for name, value in (refusal.headers() | head).items()]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        self.transport.close()
