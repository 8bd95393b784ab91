"""Connections of clients: HTTP/1.1 by llhttp, bounded in number, in the size of heads, in dallying.

A request is answered once it is whole, and one at a time on each connection; what is refused
before it has come (no key, too large) is told so at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools

from hetero.apps.serving.bodies import BodyShare
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import DispatcherLimits

log = logging.getLogger("hetero.apps.serving")
_EVERY_S = 0.5
_KEEP_S = 75.0  # an idle connection; longer than clients keep theirs
_RESERVE = 64  # descriptors for what is neither a client nor an engine
_IDLE = 1024  # connections beyond the requests that the house takes
_LEAST_BPS = 1024  # bytes per second that a client has to read
_LARGE = 64 << 10  # bytes that are not copied once more to send them with others
Fields = Iterable[tuple[bytes, bytes]]


class Exchange:
    """One request and its answer.

    Attributes
    ----------
    refusal
        What it is refused for, before it is whole.
    keep
        Whether the connection may go on afterwards.
    context, client
        The application's own: what answers it, and who asks.
    """

    refusal: Refusal | None = None
    share: BodyShare | None = None
    context: Any = None
    client: str = ""
    keep, _head = True, b""
    whole = started = ended = _chunked = False

    def __init__(
        self, line: Guarded, method: str, path: str, fields: dict[bytes, bytes], *, old: bool
    ) -> None:
        self.line, self.method, self.path, self.fields = line, method, path, fields
        self.body = bytearray()
        self._old = old  # a client that knows no chunks

    def field(self, name: bytes) -> str:
        """The value of a header, the last one of several; empty where there is none."""
        return self.fields.get(name, b"").decode("latin-1")

    def start(self, status: int, fields: Fields, length: int | None = None) -> None:
        """Begin the answer; its head goes out with what comes next."""
        self.started = True
        parts = [_first(status), _date(int(time.time()))]
        parts += [b"%b: %b\r\n" % field for field in fields]
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif self._old:
            self.keep = False
        else:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keep:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._head = b"".join(parts)

    def write(self, data: bytes) -> None:
        """Send part of the body."""
        if self.line.gone:
            return
        head, self._head = self._head, b""
        if len(data) > _LARGE:
            parts = [b"%x\r\n" % len(data), data, b"\r\n"] if self._chunked else [data]
            self.line.transport.writelines([head, *parts])
        elif self._chunked:
            self.line.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self.line.transport.write(head + data)

    def end(self) -> None:
        """The answer is whole."""
        self.ended = True
        if self._chunked:
            self._head += b"0\r\n\r\n"
        if self._head and not self.line.gone:
            self.line.transport.write(self._head)
        self.line.answered(self)

    def reply(self, status: int, fields: Fields, content: bytes) -> None:
        """Send a whole answer."""
        self.start(status, fields, len(content))
        if self.method != "HEAD":
            self.write(content)
        self.end()

    def refuse(self, refusal: Refusal, fields: Fields = ()) -> None:
        """Send an error in the form that OpenAI clients read."""
        if not self.whole:  # what is left of it may never come
            self.keep = False
        self.reply(
            refusal.status, [*refusal.headers(), *fields], json.dumps(refusal.body()).encode()
        )


@lru_cache(maxsize=256)
def _path(url: bytes) -> str:
    """The path of an address."""
    if b"?" in url or b"%" in url or not url.startswith(b"/"):
        url = httptools.parse_url(url).path or b"/"
    return unquote(url.decode("ascii"))


@lru_cache(maxsize=64)
def _first(status: int) -> bytes:
    known = {one.value: one.phrase for one in HTTPStatus}
    return f"HTTP/1.1 {status} {known.get(status, '')}\r\n".encode()


@lru_cache(maxsize=1)
def _date(now_s: int) -> bytes:
    return f"date: {formatdate(now_s, usegmt=True)}\r\n".encode()


class Connections:
    """The connections that are open, and what becomes of those that dally.

    Parameters
    ----------
    application
        What answers: it is told what was ``opened``, asked to ``answer`` what is whole or refused,
        and told what was ``dropped`` before.
    limits
        Called for the present limits.
    """

    def __init__(self, application: Any, limits: Callable[[], DispatcherLimits]) -> None:
        self.application, self.limits = application, limits
        self._files = descriptors(limits()) - _RESERVE
        self.open: dict[Guarded, None] = {}
        self.idle: dict[Guarded, None] = {}  # without a request, the longest one first
        self.closing = False

    @property
    def most(self) -> int:
        """Clients that may be connected at once."""
        wanted = self.limits().max_requests + _IDLE
        return max(min(wanted, self._files * 7 // 8), 1)

    def room(self) -> int:
        """Requests that may be at engines at once."""
        return max(self._files - len(self.open), 1)

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> asyncio.Server:
        """Take connections at an address."""
        loop = asyncio.get_running_loop()
        make = partial(Guarded, self, loop)
        return await loop.create_server(make, host, port, ssl=context, backlog=2048)

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
        self.closing = True
        for one in list(self.open):
            one.last()
        end_s = time.monotonic() + limit_s
        while self.open and time.monotonic() < end_s and not hurry.is_set():
            await asyncio.sleep(0.05)
        left = [one.task for one in self.open if one.now is not None]
        for one in list(self.open):
            one.transport.abort()
        await asyncio.gather(*(task for task in left if task), return_exceptions=True)


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


class Guarded(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, house: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.house, self._loop = house, loop
        self.transport: Any = None
        self.gone = False
        self.paused = False  # the client does not read as fast as it is written to
        self.resumed: Callable[[], None] | None = None
        self.now: Exchange | None = None  # what is being answered
        self.task: asyncio.Task[None] | None = None  # which answers one after the other
        self._turn: asyncio.Future[None] | None = None  # what it waits for
        self._queue: deque[Exchange] = deque()  # what comes after it
        self._coming: Exchange | None = None  # whose body is being read
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._fields: dict[bytes, bytes] = {}
        self._held = 0  # bytes of the head
        self._until_s = 0.0  # until when the client is waited for; 0 when it is not
        self._loose = 0  # bytes since the last that belonged to a body
        self._whole = True  # nothing of a request is outstanding
        self._too_large = self._deaf = False  # nothing more is read
        self._most = house.limits().head_bytes
        self._stuck_s = 0.0  # since when it has not read what is sent
        self._stuck_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection; where there is no room, the one that is idle longest makes some."""
        self.transport = transport
        house = self.house
        # One without a word costs a descriptor, and goes when another needs it.
        self._until_s = time.monotonic() + _KEEP_S
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
        """Forget a connection, and what it has asked for."""
        self.gone = True
        self.house.open.pop(self, None)
        self.house.idle.pop(self, None)
        if self.task is not None:
            self._loop.call_soon(self.task.cancel)  # after its first step, which counts it
        for one in self._queue:
            self.house.application.dropped(one)
        self._queue.clear()

    def data_received(self, data: bytes) -> None:
        """Read on, within bounds."""
        if self._deaf:
            return
        self._loose += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is spoken: it is read no further
            self._deaf = True
            for one in (*self._queue, *([self.now] if self.now else [])):
                one.keep = False
        except httptools.HttpParserError:
            last = self._queue[-1] if self._queue else self.now
            self._deaf = True
            if last is None or last.keep or not self._whole:  # else it had said to be the last
                self._refuse_text()
        else:
            if self._loose > self._most and not self._whole:
                self._too_large = True
                self._refuse_text()

    # What the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url, self._fields, self._held = b"", {}, 0
        self._whole = False
        self._wait()

    def on_url(self, url: bytes) -> None:
        """Part of an address."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._fields[name.lower()] = value
        self._held += len(name) + len(value)

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self._held + len(self._url) > self._most:
            self._too_large = True
            raise ValueError("the head is too large")
        self._loose = 0
        self._until_s = 0.0
        self.house.idle.pop(self, None)
        path = _path(self._url)
        method = self._parser.get_method().decode("ascii")
        old = self._parser.get_http_version() != "1.1"
        exchange = Exchange(self, method, path, self._fields, old=old)
        exchange.keep = not (old or self.house.closing) and self._parser.should_keep_alive()
        self._coming = exchange
        self.house.application.opened(exchange)
        if self.now is not None:
            self.transport.pause_reading()
        self._queue.append(exchange)
        self._next()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._loose = 0
        exchange = self._coming
        if exchange is None or exchange.refusal is not None:
            return
        exchange.body += body
        if exchange.share is not None:
            try:
                exchange.share.grow(len(exchange.body), self.house.limits())
            except Refusal as refusal:
                exchange.refusal = refusal
                self._next()

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._loose = 0
        self._whole = True
        exchange, self._coming = self._coming, None
        if exchange is None:
            return
        exchange.whole = True
        if not exchange.ended:
            self._next()
        elif exchange.keep:
            self._rest()
        else:
            self.transport.close()

    # ------------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Go on to the next request, as soon as it can be answered."""
        if self.now is not None or not self._queue:
            return
        one = self._queue[0]
        if not one.whole and one.refusal is None:
            if not self._until_s:
                self._until_s = time.monotonic() + self.house.limits().body_s
                if one.field(b"expect").lower() == "100-continue":
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        self._until_s = 0.0
        self.now = self._queue.popleft()
        if self.task is None:
            self.task = self._loop.create_task(self._work())
        elif self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    async def _work(self) -> None:
        """Answer one request after the other; a task for each would cost more."""
        going = True
        while going:
            if (exchange := self.now) is None:
                self._turn = self._loop.create_future()
                await self._turn
            else:
                await self._answer(exchange)
                going = exchange.ended

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.house.application.answer(exchange)
        except Exception:
            log.exception("The dispatcher has failed.")
            if not exchange.started:
                text = "The dispatcher has failed; its log says how."
                exchange.refuse(Refusal(500, "internal_error", text))
        finally:
            if not exchange.ended and not self.gone:
                self.transport.abort()

    def answered(self, exchange: Exchange) -> None:
        """An answer is whole; what is left of its request may still come, but not for long."""
        self.now = None
        if self.gone or self.transport.is_closing():
            return
        if not exchange.keep and exchange.whole:
            self.transport.close()
            return
        if not self._deaf:
            self.transport.resume_reading()
        if self._queue:
            self._next()
        elif self._whole:
            self._rest()
        else:
            self._wait()

    def last(self) -> None:
        """No more requests after those that have come."""
        if self.now is None and not self._queue:
            self.transport.close()
        for one in (*self._queue, *([self.now] if self.now else [])):
            one.keep = False

    def _wait(self) -> None:
        self._until_s = time.monotonic() + self.house.limits().head_s

    def _rest(self) -> None:
        if self in self.house.open:
            self.house.idle[self] = None
            self._until_s = time.monotonic() + _KEEP_S

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        self.paused = True
        self._stuck_s = time.monotonic()
        self._stuck_bytes = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.paused = False
        self._stuck_s = 0.0
        if self.resumed is not None:
            self.resumed()

    def check(self, now_s: float, limits: DispatcherLimits) -> None:
        """End the connection if its client has been waited for too long."""
        if self._until_s and now_s > self._until_s:
            if self._queue and self.now is None:  # its body does not come
                text = "The request took too long to come."
                self._queue[0].refusal = Refusal(408, "too_slow", text)
                self._next()
            else:
                self.transport.abort()
        elif self._stuck_s and now_s - self._stuck_s > limits.send_s:
            left = self.transport.get_write_buffer_size()
            if self._stuck_bytes - left < limits.send_s * _LEAST_BPS:
                self.transport.abort()
            else:
                self._stuck_s, self._stuck_bytes = now_s, left

    def _refuse_text(self) -> None:
        """Refuse what is no HTTP, or too much of it."""
        if self._too_large:
            what = f"The head of a request may have {self._most:,} bytes."
            self._refuse(Refusal(431, "head_too_large", what))
        else:
            self._refuse(Refusal(400, "invalid_http", "Invalid HTTP request received."))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer outside the application, and end the connection."""
        self._deaf = True
        if self.transport.is_closing():
            return
        if self.now is not None and self.now.started:
            self.transport.abort()  # it would come amid an answer
            return
        one = Exchange(self, "GET", "", {}, old=False)
        one.keep = False
        content = json.dumps(refusal.body()).encode()
        one.start(refusal.status, refusal.headers(), len(content))
        one.write(content)
        self.transport.close()
