"""A request on its way through the dispatcher."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.learning import Mark

#: Paths that engines answer without generating anything.
WITHOUT_OUTPUT = ("/v1/embeddings", "/tokenize")


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
