"""Connections of clients: aiohttp's server, bounded where it leaves something open.

aiohttp bounds a line and a field (8,190 bytes) and their number (128), ends idle connections,
writes an answer before it begins with the next, queues 32 requests at most, and cancels what
answers a client that has left. Here connections are bounded in number, heads in size and time, and
clients that do not read, or send so far ahead that their leaving is not seen, are hung up on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import DispatcherLimits

log = logging.getLogger("hetero.apps.serving")
_EVERY_S = 0.5
_KEEP_S = 75.0  # an idle connection; longer than clients keep theirs
_LINGER_S = 2.0  # for what comes of a request that was refused, so that its client reads why
_RESERVE = 64  # descriptors for what is neither a client nor an engine
_IDLE = 1024  # connections beyond the requests that may be in flight
_LEAST_BPS = 1024  # bytes per second that a client has to read
_READ = 64 << 10  # bytes of a body that wait to be read
#: What answers a request, all of it.
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """A connection of a client.

    Attributes
    ----------
    reading
        Whether the body of the request that is answered is still to come.
    """

    __slots__ = ("_ahead", "_server", "_since_s", "_stuck_bytes", "_stuck_s", "reading")

    def __init__(self, server: Connections, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self.reading = False
        self._ahead = 0  # bytes since the last request began or ended
        self._since_s = self._stuck_s = 0.0  # of the first of them; since when it does not read
        self._stuck_bytes = 0

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget a connection, and what it has asked for."""
        self._server.open.discard(self)
        self._server.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if not self._ahead:
            self._since_s = time.monotonic()
        self._ahead += len(data)
        super().data_received(data)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._stuck_s, self._stuck_bytes = time.monotonic(), self._unsent

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._stuck_s = 0.0

    @property
    def _unsent(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def begin(self) -> None:
        """A request is being answered."""
        self._server.idle.pop(self, None)
        self._ahead, self.reading = 0, True

    def rest(self) -> None:
        """It has been answered."""
        if self in self._server.open:
            self._server.idle[self] = None
        self._ahead = 0

    def check(self, now_s: float, limits: DispatcherLimits) -> None:
        """End the connection if its client has been waited for too long."""
        transport = self.transport
        if transport is None:
            return
        if self in self._server.idle:
            # What has just come may be a whole head, and is begun with in the next turn.
            large = self._ahead > limits.head_bytes and not self.reading
            if self._ahead and now_s - self._since_s > (_EVERY_S if large else limits.head_s):
                transport.abort()
        elif not self.reading and not transport.is_reading():
            transport.abort()  # it sends more ahead than aiohttp takes, and could leave unseen
        elif self._stuck_s and now_s - self._stuck_s > limits.send_s:
            if self._stuck_bytes - self._unsent < limits.send_s * _LEAST_BPS:
                transport.abort()
            else:
                self._stuck_s, self._stuck_bytes = now_s, self._unsent

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What a client is told that sends no HTTP, or when the dispatcher has failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("it would come amid an answer")
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            refusal = too_large(self._server.limits().head_bytes)
        elif isinstance(exc, BadHttpMessage):
            refusal = Refusal(400, "invalid_http", "Invalid HTTP request received.")
        else:
            log.error("The dispatcher has failed.", exc_info=exc)
            text = "The dispatcher has failed; its log says how."
            refusal = Refusal(500, "internal_error", text)
        answer = refusal.answer()
        answer.force_close()
        return answer


def too_large(most: int) -> Refusal:
    """What is said of a head of more bytes."""
    return Refusal(431, "head_too_large", f"The head of a request may have {most:,} bytes.")


class Connections(web.Server):
    """The connections that are open, and what becomes of those that dally.

    Parameters
    ----------
    limits
        Called for the present limits.
    """

    def __init__(self, handler: Handler, limits: Callable[[], DispatcherLimits]) -> None:
        options: dict[str, Any] = {
            "keepalive_timeout": _KEEP_S,
            "lingering_time": _LINGER_S,
            "read_bufsize": _READ,
            "auto_decompress": False,
            "access_log": None,
            "logger": log,
        }
        super().__init__(self._answer, handler_cancellation=True)
        self._options, self._handler, self.limits = options, handler, limits
        self._files = descriptors(limits()) - _RESERVE
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}  # without a request, the longest one first
        self._closing = False
        self._answering = 0

    def __call__(self) -> Connection:
        """A connection that comes."""
        return Connection(self, loop=self._loop, **self._options)

    @property
    def most(self) -> int:
        """Clients that may be connected at once."""
        wanted = self.limits().max_requests + _IDLE
        return max(min(wanted, self._files * 7 // 8), 1)

    def room(self) -> int:
        """Requests that may be at engines at once."""
        return max(self._files - len(self.open), 1)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Take a connection; where there is no room, the one that is idle longest makes some."""
        super().connection_made(handler, transport)
        full = len(self.open) >= self.most
        self.open.add(handler)
        if full and not self.idle:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
            transport.write(b"Content-Length: 0\r\nConnection: close\r\n\r\n")
            transport.close()
            return
        if full:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            if oldest.transport is not None:
                oldest.transport.abort()
        self.idle[handler] = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection: Any = request.protocol
        connection.begin()
        self._answering += 1
        try:
            answer = await self._handler(request)
            connection.reading = not request.content.is_eof()
            if self._closing or connection.reading:
                answer.force_close()
            answer.headers["server"] = "hetero"
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        finally:
            self._answering -= 1
            connection.rest()

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

    async def drain(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Let requests under way end, so long or until ``hurry``, and then end all."""
        self._closing = True
        for one in list(self.idle):
            one.force_close()
        end_s = time.monotonic() + limit_s
        while self.open and time.monotonic() < end_s and not hurry.is_set():
            await asyncio.sleep(0.05)
        for one in list(self.open):
            if one.transport is not None:
                one.transport.abort()
        while self._answering:
            await asyncio.sleep(0.01)


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
