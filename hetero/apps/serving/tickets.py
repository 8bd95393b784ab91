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
    """One request, from its arrival to its last token.

    Attributes
    ----------
    row
        Its row in the records; -1 until it is let in.
    failed, guilty
        How they did, and which of them are to blame, once it has ended.
    deadline_s
        When its answer has to be whole, by the clock of the event loop; 0 before it was sent.
    stale
        Whether one of the attempts met a connection that the engine had closed.
    sent, answered
        Whether its client has got anything, and whether its engine has answered in full.
    sent_s, beside
        When it was sent to its engine, and what decoded there if no other request waited.
    mark
        What its engine had done by its first token.
    scope, lost
        The attempt in progress, and whether its engine has been given up.
    """

    asked: Asked
    client: str
    path: str
    arrival_s: float
    input_tokens: int = 0
    predicted_tokens: int = 0
    row: int = -1
    engine: Seen | None = None
    avoid: set[str] = field(default_factory=set)
    failed: dict[Seen, str] = field(default_factory=dict)
    guilty: list[Seen] = field(default_factory=list)
    attempts: int = 0
    deadline_s: float = 0.0
    stale: bool = False
    sent: bool = False
    answered: bool = False
    sent_s: float = 0.0
    beside: tuple[int, int] | None = None
    mark: Mark | None = None
    first_s: float | None = None
    last_s: float = 0.0
    pieces: int = 0
    waits: asyncio.Future[Seen] | None = None
    scope: asyncio.Timeout | None = None
    lost: bool = False

    def abort(self) -> None:
        """Give up the attempt in progress, if its client has got nothing of it."""
        if not self.sent and self.scope is not None and not self.scope.expired():
            self.lost = True
            self.scope.reschedule(0.0)
