"""Engines as the dispatcher sees them, whether they are up, and the requests on their way there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import ClientSession

from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.faults import Fault, unreached
from hetero.apps.serving.learning import EngineWork, Mark, StepLearner
from hetero.apps.serving.settings import Backend, DispatcherLimits

#: Paths that engines answer without generating anything.
WITHOUT_OUTPUT = ("/v1/embeddings", "/tokenize")
log = logging.getLogger("hetero.apps.serving")
_MOST = 16  # times the first cooldown
_REMEMBERED = 64  # requests that an engine is blamed for
_READ = 64 << 10  # bytes of an answer that wait for its client
_LATE_S = 0.5  # by which a timer may be late before the dispatcher itself is the slow one


@dataclass(eq=False, slots=True)
class Seen:
    """An engine and its circuit breaker.

    ``limits.failures`` failures in a row of different requests, or health checks that fail, take it
    out for a cooldown that doubles each time; after that a health check brings it back on
    probation, where one failure takes it out again. Requests never take the last engine out.
    """

    backend: Backend
    limits: DispatcherLimits
    position: int  # among the replicas of the present deployment; -1 once it has left
    model: str = ""
    up: bool = True
    failures: int = 0
    misses: int = 0
    until_s: float = 0.0
    cooldown_s: float = 0.0
    tickets: set[Ticket] = field(default_factory=set)
    blamed: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # hashes
    load: EngineWork = field(default_factory=EngineWork)
    learner: StepLearner = field(init=False)
    url: str = field(init=False)
    headers: dict[str, str] = field(init=False)
    names: dict[str, str] = field(init=False)  # that clients may ask it for, and its own

    def __post_init__(self) -> None:
        self.use(self.backend, self.limits, self.position, self.model)

    def use(self, backend: Backend, limits: DispatcherLimits, position: int, model: str) -> None:
        """Go over to these settings."""
        self.backend, self.limits, self.position = backend, limits, position
        self.url, key = backend.url, backend.key()
        self.headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if key:  # instead of a name and a password in its address
            parts = urlsplit(self.url)
            self.url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            self.headers["Authorization"] = f"Bearer {key}"
        self.names = backend.served(model)

    def serves(self, model: str) -> bool:
        """Whether requests for a model may go there."""
        return self.open and model in self.names

    @property
    def open(self) -> bool:
        """Whether new requests may go there."""
        return self.up and not self.backend.drain and self.position >= 0

    def well(self) -> None:
        """A request was answered."""
        self.failures, self.cooldown_s = 0, 0.0
        self.blamed.clear()

    def ill(self, now_s: float, request: int, *, last: bool) -> None:
        """A request of this hash failed by this engine's fault; ``last`` if no other is up."""
        if request in self.blamed:  # a client that repeats it says nothing new
            return
        self.blamed.append(request)
        self.failures = min(self.failures + 1, self.limits.failures - last)
        if self.failures >= self.limits.failures:
            self._out(now_s, "it failed too often")

    def probed(self, now_s: float, fault: Fault | None) -> None:
        """Take over a health check."""
        if fault is Fault.OWN:
            return
        if fault is not None:
            self.misses += 1
            gone = fault is Fault.GONE
            if gone or self.misses >= self.limits.failures:
                why = "its connection was refused" if gone else "it does not answer health checks"
                self._out(now_s, why)
                for ticket in list(self.tickets):
                    ticket.abort()
            return
        self.misses = 0
        if not self.up and now_s >= self.until_s:
            self.up = True
            self.failures = self.limits.failures - 1
            log.warning("%s is back", self.backend.name)

    def _out(self, now_s: float, why: str) -> None:
        if not self.up and now_s < self.until_s:
            return
        first = self.limits.cooldown_s
        self.cooldown_s = min(2 * self.cooldown_s, _MOST * first) if self.cooldown_s else first
        self.until_s = now_s + self.cooldown_s
        if self.up:
            log.warning("%s is out for %g s: %s", self.backend.name, self.cooldown_s, why)
        self.up = False


@dataclass(eq=False, slots=True)
class Ticket:
    """One request, from its arrival to its last token."""

    asked: Asked
    client: str
    path: str
    arrival_s: float
    input_tokens: int = 0
    predicted_tokens: int = 0
    row: int = -1  # in the records, once it is let in
    engine: Seen | None = None
    avoid: set[str] = field(default_factory=set)
    failed: dict[Seen, str] = field(default_factory=dict)  # how engines did,
    guilty: list[Seen] = field(default_factory=list)  # and which are to blame, once it has ended
    attempts: int = 0
    deadline_s: float = 0.0  # by the clock of the event loop
    stale: bool = False  # whether a connection was met that its engine had closed
    sent: bool = False  # whether its client has got anything
    answered: bool = False  # whether its engine has answered in full
    sent_s: float = 0.0
    beside: tuple[int, int] | None = None  # what decoded at its engine if no other waited there
    mark: Mark | None = None  # what its engine had done by its first token
    first_s: float | None = None
    last_s: float = 0.0
    pieces: int = 0
    waits: asyncio.Future[Seen] | None = None
    scope: asyncio.Timeout | None = None  # of the attempt in progress
    lost: bool = False  # whether health checks have given its engine up

    def abort(self) -> None:
        """Give up the attempt in progress, if its client has got nothing of it."""
        if not self.sent and self.scope is not None and not self.scope.expired():
            self.lost = True
            self.scope.reschedule(0.0)


async def probe(session: ClientSession, seen: Seen) -> Fault | None:
    """Check an engine's health; None if it is well.

    An engine without the page of its health is alive all the same. A check that this process was
    too busy or too short of descriptors for is its own fault. No redirection is followed.
    """
    limit_s = seen.limits.health_timeout_s
    began = time.monotonic()
    try:
        async with (
            asyncio.timeout(limit_s),
            session.get(
                f"{seen.url}{seen.backend.health}", headers=seen.headers, allow_redirects=False
            ) as answer,
        ):
            return None if answer.status < 500 else Fault.ENGINE
    except aiohttp.ClientConnectorError as error:
        return unreached(error)
    except TimeoutError:
        late = time.monotonic() - began > limit_s + _LATE_S
        return Fault.OWN if late else Fault.ENGINE
    except (OSError, aiohttp.ClientError):
        return Fault.ENGINE


class _Connector(aiohttp.TCPConnector):
    async def connect(self, *asked: Any, **more: Any) -> Any:
        while True:
            found = await super().connect(*asked, **more)
            if found.protocol is None or not found.protocol.should_close:
                return found
            found.close()  # something came that nobody had asked for


def client() -> ClientSession:
    """What asks engines: as many connections as are needed, kept for the next request."""
    # Shorter than engines keep idle connections: uvicorn has 5 s.
    connector = _Connector(limit=0, keepalive_timeout=3.0)
    return ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        read_bufsize=_READ,
    )
