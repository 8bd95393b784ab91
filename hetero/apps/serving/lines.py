"""Connections to engines: HTTP/1.1 by llhttp, kept for the next request.

What an engine sends is handed on in the callback in which it was read: a chunk of a stream costs
one call, and no task wakes for it.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import math
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httptools

_KEEP_S = 3.0  # shorter than engines keep idle connections: uvicorn has 5 s
_LARGE = 64 << 10  # bytes that are not copied once more to send them with others
_MOST_HEAD = 64 << 10  # bytes without any of a body
_BOUNDS = (b"content-length", b"transfer-encoding")  # headers that say where a body ends


class UnreachedError(OSError):
    """No connection came about; its number says why."""


class ConnectTimeoutError(UnreachedError):
    """No connection came about in time."""


class SilentError(TimeoutError):
    """An engine has sent nothing for too long."""


class BrokenError(ConnectionError):
    """An engine broke off its answer, or sent what is none.

    Parameters
    ----------
    early
        Whether the connection was lost before the head of an answer had come.
    """

    def __init__(self, what: str, *, early: bool = False) -> None:
        super().__init__(what)
        self.early = early


class Address(NamedTuple):
    """Where an engine listens, and what every request to it begins with.

    Examples
    --------
    >>> address = Address.of("http://127.0.0.1:8001/one", key="secret")
    >>> address.host, address.port, address.tls
    ('127.0.0.1', 8001, False)
    >>> address.head("GET", "/health").splitlines()[:2]
    [b'GET /one/health HTTP/1.1', b'Host: 127.0.0.1:8001']
    """

    host: str
    port: int
    tls: bool
    prefix: str
    fields: bytes

    @classmethod
    def of(cls, url: str, key: str = "") -> Address:
        """Read an address; one with a name and a password asks with those where there is no key."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        kind = f"Bearer {key}" if key else ""
        if parts.username is not None and not key:
            both = f"{parts.username}:{parts.password or ''}".encode()
            kind = f"Basic {base64.b64encode(both).decode()}"
        fields = [
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: */*",
            "Accept-Encoding: identity",
            *([f"Authorization: {kind}"] if kind else []),
        ]
        text = "".join(f"{one}\r\n" for one in fields).encode()
        port = parts.port or (443 if tls else 80)
        return cls(
            parts.hostname or "", port, tls, quote(parts.path, safe="/%:@!$&'()*+,;=~"), text
        )

    def head(self, method: str, path: str) -> bytes:
        """The head of a request but for its last fields and the empty line."""
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n".encode() + self.fields


class EngineLine(asyncio.Protocol):
    """One connection to an engine, for one request at a time."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        self.address, self._loop = address, loop
        self.idle_s = self._since_s = 0.0
        self.complete = True  # nothing is asked for
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._error: Exception | None = None
        self._keep = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine has ended it, or this side has."""
        if self._timer is not None:
            self._timer.cancel()
        self._keep = False
        if self.complete:
            return
        if exc is None and self._to_end:
            self.complete = True
            self._pass_on()
        else:
            self._fail(BrokenError("the connection was lost", early=not self.status))

    @property
    def usable(self) -> bool:
        """Whether it can be asked again."""
        fine = self.complete and self._keep and self._error is None
        busy = self._transport.is_closing() or self._transport.get_write_buffer_size()
        return fine and not busy

    def ask(
        self,
        parts: list[bytes],
        limit_s: float,
        until_s: float = math.inf,
        most: int | None = None,
    ) -> None:
        """Send a request.

        Parameters
        ----------
        limit_s
            Longest wait for the next piece of its answer [s].
        until_s
            When the answer has to be whole, by the clock of the event loop.
        most
            Largest body that is waited for as a whole, where no part of a good answer is of use.
        """
        self.status, self.complete = 0, False
        self._until_s, self._most = until_s, most
        self.headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = self._loose = 0
        self._interim = self._bounded = self._to_end = self._paused = self._ended = False
        self._keep, self._limit_s = False, limit_s
        self._take: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        if sum(map(len, parts)) > _LARGE:
            self._transport.writelines(parts)
        else:
            self._transport.write(b"".join(parts))

    async def head(self) -> None:
        """Wait for the status and the headers."""
        while not self.status:
            await self._wait()

    def give_up(self) -> None:
        """Let who waits for the answer wait no longer."""
        self._fail(TimeoutError())

    async def whole(self, most: int) -> bytes | None:
        """The body, None if it is longer than ``most`` bytes."""
        while not self.complete:
            if self._size > most:
                return None
            await self._wait()
        return b"".join(self._parts) if self._size <= most else None

    async def relay(self, take: Callable[[bytes], None], client: Any) -> None:
        """Hand what comes to ``take``, empty at the end, no faster than a client reads it.

        The client says that it is ``paused``, and calls ``resumed`` when it has caught up.
        """
        self._take, self._client = take, client
        self._pass_on()
        while not self._ended:
            await self._wait()

    async def _wait(self) -> None:
        if self._error is None:
            self._since_s = self._loop.time()
            due_s = min(self._since_s + self._limit_s, self._until_s)
            if self._timer is not None and self._timer.when() > due_s:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = self._loop.call_at(due_s, self._look)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    def _look(self) -> None:
        """Whether the engine has been waited for too long; one timer serves many pieces."""
        self._timer = None
        if self.complete or self._waiter is None:
            return
        now_s = self._loop.time()
        if self._paused:
            self._since_s = now_s
        due_s = self._since_s + self._limit_s
        if now_s >= min(due_s, self._until_s):
            self._fail(SilentError() if now_s >= due_s else TimeoutError())
        else:
            self._timer = self._loop.call_at(min(due_s, self._until_s), self._look)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self.complete:  # nobody has asked for it
            self._keep = False
            self.close()
            return
        self._since_s = self._loop.time()
        self._loose += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BrokenError("what came is no HTTP"))
            return
        if self._loose > _MOST_HEAD and not self.complete:
            self._fail(BrokenError("the head is too large"))
        elif self._take is not None:
            self._pass_on()
        elif self.status and (
            self.complete or self._most is None or self.status >= 300 or self._size > self._most
        ):
            self._wake()

    def _pass_on(self) -> None:
        take = self._take
        if take is None or self._error is not None:
            self._wake()
            return
        try:
            if self._parts:
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts, self._size = [], 0
                take(data)
            if self.complete:
                take(b"")
                self._ended = True
                self._wake()
        except Exception as error:
            self._error = error
            self._wake()
            return
        if self._client.paused and not self.complete:
            self._paused = True
            self._client.resumed = self._resume
            self._transport.pause_reading()

    def _resume(self) -> None:
        self._client.resumed = None
        self._since_s, self._paused = self._loop.time(), False
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # What the parser calls --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A message begins; one too many says that the engine is not to be trusted."""
        if self.complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if not self.complete:
            name = name.lower()
            self.headers.append((name, value))
            self._bounded |= name in _BOUNDS

    def on_headers_complete(self) -> None:
        """A head is whole; those before the answer proper say nothing."""
        if self.complete:
            return
        status = self._parser.get_status_code()
        self._interim = status < 200
        if self._interim:
            self.headers, self._bounded = [], False
            return
        self.status, self._loose = status, 0
        self._to_end = not (self._bounded or status in (204, 304))

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        if not self.complete:
            self._loose = 0
            self._parts.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        """A message is whole."""
        if self._interim or self.complete:
            self._interim = False
            return
        self.complete = True
        self._keep = self._parser.should_keep_alive() and not self._to_end


class EnginePool:
    """Connections to all engines, as many as are needed at once."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[EngineLine]] = {}  # the one used last at the end
        self._tls: ssl.SSLContext | None = None

    def idle(self, address: Address) -> EngineLine | None:
        """A connection that is free, if there is one."""
        idle = self._idle.get(address)
        while idle:
            line = idle.pop()
            if line.usable and time.monotonic() - line.idle_s < _KEEP_S:
                return line
            line.close()
        return None

    async def line(self, address: Address, limit_s: float | None = None) -> EngineLine:
        """A connection that is free, or a new one.

        Raises
        ------
        UnreachedError
            If none comes about, in ``limit_s`` where that is given.
        """
        if (line := self.idle(address)) is not None:
            return line
        loop = asyncio.get_running_loop()
        connecting = asyncio.timeout(limit_s)
        try:
            async with connecting:
                return await self._connected(address, loop)
        except TimeoutError as error:
            if connecting.expired():
                raise ConnectTimeoutError(errno.ETIMEDOUT, "no connection in time") from error
            raise UnreachedError(errno.ETIMEDOUT, "no connection") from error
        except OSError as error:
            raise UnreachedError(error.errno, str(error)) from error

    async def _connected(self, address: Address, loop: asyncio.AbstractEventLoop) -> EngineLine:
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        options: dict[str, Any] = (
            {"ssl": self._tls, "server_hostname": address.host} if address.tls else {}
        )
        failed: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
        # One by one, for the error of several together has no number.
        for *_, place in await loop.getaddrinfo(address.host, address.port, type=1):
            try:
                _, line = await loop.create_connection(
                    lambda: EngineLine(address, loop), str(place[0]), int(place[1]), **options
                )
            except OSError as error:
                failed = error
            else:
                return line
        raise failed

    def back(self, line: EngineLine) -> None:
        """Give a connection back; one that is amid an answer is ended."""
        if line.usable:
            line.idle_s = time.monotonic()  # a loop that is asked for is found by a system call
            self._idle.setdefault(line.address, []).append(line)
        else:
            line.close()

    def sweep(self, *, all_of_them: bool = False) -> None:
        """End connections that were idle for long."""
        now_s = time.monotonic()
        for address, lines in list(self._idle.items()):
            kept = [] if all_of_them else [x for x in lines if now_s - x.idle_s < _KEEP_S]
            for line in set(lines) - set(kept):
                line.close()
            self._idle[address] = kept
            if not kept:
                del self._idle[address]
