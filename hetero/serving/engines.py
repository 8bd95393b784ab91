"""Engines as the dispatcher sees them: whether they are up, and who says so."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from hetero.serving.settings import Backend, Limits

if TYPE_CHECKING:
    from hetero.serving.tickets import Ticket

log = logging.getLogger("hetero.serving")
_MOST = 16  # times the first cooldown


@dataclass(eq=False, slots=True)
class Seen:
    """An engine and its circuit breaker.

    ``limits.failures`` failures in a row, or a refused connection, take it out for a cooldown that
    doubles each time; after that a health check brings it back on probation, where one failure
    takes it out again.

    Attributes
    ----------
    position
        Its place among the replicas of the present deployment, -1 once it has left.
    """

    backend: Backend
    limits: Limits
    position: int
    up: bool = True
    failures: int = 0
    misses: int = 0
    until_s: float = 0.0
    cooldown_s: float = 0.0
    tickets: set[Ticket] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether new requests may go there."""
        return self.up and not self.backend.drain and self.position >= 0

    def well(self) -> None:
        """A request was answered."""
        self.failures = 0
        self.cooldown_s = 0.0

    def ill(self, now_s: float, *, hard: bool = False) -> None:
        """A request failed."""
        self.failures += 1
        if hard or self.failures >= self.limits.failures:
            self._out(now_s, "its connection was refused" if hard else "it failed too often")

    def probed(self, now_s: float, *, healthy: bool, refused: bool) -> bool:
        """Take over a health check; whether the engine has just come back."""
        if not healthy:
            self.misses += 1
            if refused or self.misses >= self.limits.failures:
                self._out(now_s, "it does not answer health checks")
                for ticket in list(self.tickets):
                    ticket.abort()
            return False
        self.misses = 0
        if self.up or now_s < self.until_s:
            return False
        self.up = True
        self.failures = self.limits.failures - 1
        log.warning("%s is back", self.backend.name)
        return True

    def _out(self, now_s: float, why: str) -> None:
        if not self.up and now_s < self.until_s:
            return
        first = self.limits.cooldown_s
        self.cooldown_s = min(2 * self.cooldown_s, _MOST * first) if self.cooldown_s else first
        self.until_s = now_s + self.cooldown_s
        if self.up:
            log.warning("%s is out for %g s: %s", self.backend.name, self.cooldown_s, why)
        self.up = False

    def headers(self) -> dict[str, str]:
        """What a request to it carries."""
        found = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self.backend.key():
            found["Authorization"] = f"Bearer {key}"
        return found


async def probe(session: aiohttp.ClientSession, seen: Seen) -> tuple[bool, bool]:
    """Whether an engine is healthy, and if not, whether it refused the connection.

    An engine without the page of its health is alive all the same.
    """
    wait = aiohttp.ClientTimeout(total=seen.limits.health_timeout_s)
    try:
        async with session.get(
            seen.backend.url + seen.backend.health, timeout=wait, headers=seen.headers()
        ) as answer:
            return answer.status < 500, False
    except aiohttp.ClientConnectorError:
        return False, True
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False, False
