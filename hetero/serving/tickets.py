"""A request on its way through the dispatcher."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hetero.serving.engines import Seen


@dataclass(eq=False, slots=True)
class Ticket:
    """One request, from its arrival to its last token.

    Attributes
    ----------
    row
        Its row in the books.
    engine
        Where it is now; None while it is held.
    avoid
        Names of the engines that failed it.
    stale
        Whether one of the attempts met a connection that the engine had closed.
    sent
        Whether its client has got anything.
    """

    body: dict[str, Any]
    input_tokens: int
    predicted_tokens: int
    arrival_s: float
    row: int = -1
    engine: Seen | None = None
    avoid: set[str] = field(default_factory=set)
    attempts: int = 0
    stale: bool = False
    sent: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    pieces: int = 0
    waits: asyncio.Future[Seen] | None = None
    scope: asyncio.Timeout | None = None
    lost: bool = False

    @property
    def stream(self) -> bool:
        """Whether the client wants the answer piece by piece."""
        return self.body.get("stream") is True

    def abort(self) -> None:
        """Give up the attempt in progress, if its client has got nothing of it."""
        if not self.sent and self.scope is not None and not self.scope.expired():
            self.lost = True
            self.scope.reschedule(0.0)
