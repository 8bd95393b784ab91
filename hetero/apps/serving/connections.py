"""Connections of clients: aiohttp's server, bounded where it leaves something open.

aiohttp bounds a line and a field (8,190 bytes) and their number (128), ends idle connections,
writes one answer after the other, queues 32 requests at most, and cancels those of a client that
has left. Here connections are bounded in number, heads in size and time, and clients that do not
read, or send so far ahead that their leaving is not seen, are hung up on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import DispatcherLimits

log = logging.getLogger("hetero.apps.serving")
_KEEP_S = 75.0  # an idle connection; longer than clients keep theirs
_LINGER_S = 2.0  # for what comes of a request that was refused, so that its client reads why
_RESERVE = 64  # descriptors for what is neither a client nor an engine
_IDLE = 1024  # connections beyond the requests that may be in flight
_READ = 64 << 10  # bytes of a body that wait to be read
HEAD_BYTES = 64 << 10
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """A connection of a client."""

    __slots__ = ("_head", "_reading", "_server", "_timer")

    def __init__(self, server: Connections) -> None:
        super().__init__(
            server,
            loop=server.loop,
            keepalive_timeout=_KEEP_S,
            lingering_time=_LINGER_S,
            read_bufsize=_READ,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # which its own code takes
            logger=log,
        )
        self._server = server
        self._reading = False  # whether a request is still to come of which there is the head
        self._head = 0  # bytes of a head that is not whole
        self._timer: asyncio.TimerHandle | None = None

    def hang_up(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def _limit(self, seconds: float | None) -> None:
        """Hang up after so long, or wait on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.hang_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget a connection, and what it has asked for."""
        self._limit(None)
        self._server.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        super().data_received(data)
        if self._reading or self.transport is None:
            return
        if self not in self._server.idle:
            if not self.transport.is_reading():
                self.hang_up()  # it sends more ahead than aiohttp takes, and could leave unseen
            return
        self._reading = bool(self._messages)  # it is begun with in a turn to come
        if self._reading:
            return
        self._head += len(data)
        if self._head > HEAD_BYTES:
            self.hang_up()
        elif self._head and self._timer is None:
            self._limit(self._server.limits().head_s)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        self._limit(self._server.limits().send_s)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._limit(None)

    def begin(self) -> None:
        """A request is being answered."""
        self._server.idle.pop(self, None)
        self._limit(None)
        self._head, self._reading = 0, True

    def whole(self) -> None:
        """It has come whole."""
        self._reading = False
        if self.transport is not None and not self.transport.is_reading():
            self.hang_up()  # as above
            raise asyncio.CancelledError

    def rest(self) -> None:
        """It has been answered."""
        self._reading = self._reading or bool(self._messages)
        if self.transport is not None:
            self._server.idle[self] = None

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
            refusal = too_large()
        elif isinstance(exc, BadHttpMessage):
            refusal = Refusal(400, "invalid_http", "Invalid HTTP request received.")
        else:
            log.error("The dispatcher has failed.", exc_info=exc)
            text = "The dispatcher has failed; its log says how."
            refusal = Refusal(500, "internal_error", text)
        answer = refusal.answer()
        answer.force_close()
        return answer


def too_large() -> Refusal:
    """What is said of a head of more bytes."""
    return Refusal(431, "head_too_large", f"The head of a request may have {HEAD_BYTES:,} bytes.")


class Connections(web.Server):
    """The connections that are open, within what ``limits`` are at present."""

    def __init__(self, handler: _Handler, limits: Callable[[], DispatcherLimits]) -> None:
        super().__init__(self._answer, handler_cancellation=True)
        self.loop, self._handler, self.limits = self._loop, handler, limits
        self._files = descriptors(limits()) - _RESERVE
        self.idle: dict[Connection, None] = {}  # without a request, the longest one first

    def __call__(self) -> Connection:
        """A connection that comes."""
        return Connection(self)

    def room(self) -> int:
        """Requests that may be at engines at once."""
        return max(self._files - len(self._connections), 1)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Take a connection; where there is no room, the one that is idle longest makes some."""
        super().connection_made(handler, transport)
        most = min(self.limits().max_requests + _IDLE, self._files * 7 // 8)
        if len(self._connections) > max(most, 1):
            if not self.idle:
                transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
                transport.write(b"Content-Length: 0\r\nConnection: close\r\n\r\n")
                transport.close()
                return
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.hang_up()
        self.idle[handler] = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection: Any = request.protocol
        connection.begin()
        try:
            answer = await self._handler(request)
            if request.content.is_eof():
                connection.whole()
            else:
                answer.force_close()
            answer.headers["server"] = "hetero"
            await answer.prepare(request)
            await answer.write_eof()
            return answer
        finally:
            connection.rest()

    async def drain(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Let requests under way end, so long or until ``hurry``, and then end all."""
        self.pre_shutdown()
        ending = self.loop.create_task(self.shutdown(None))
        early = self.loop.create_task(hurry.wait())
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait((ending, early), timeout=limit_s, return_when=first)
        one: Any
        for one in self.connections:
            one.hang_up()
        await ending
        early.cancel()


def descriptors(limits: DispatcherLimits) -> int:
    """Descriptors that this process may have, after it has asked for as many as it could use."""
    # A streamed answer takes two: that of the client and that of the engine.
    wanted = 2 * limits.max_requests + _IDLE + _RESERVE
    if sys.platform == "win32":  # no such limit
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        needed = f"{limits.max_requests} requests at once need {wanted}: some will wait"
        how = "raise it by `ulimit -n`, or lower limits.max_requests"
        log.warning(f"only {soft} files may be open, but {needed}. Resolve: {how}.")
    return wanted if soft == resource.RLIM_INFINITY else soft
