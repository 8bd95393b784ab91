"""A request on its way through the dispatcher."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hetero.apps.serving.accounts import Account
from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.faults import Blame
from hetero.apps.serving.learning import Mark


@dataclass(eq=False, slots=True)
class Ticket:
    """One request, from its arrival to its last token.

    Attributes
    ----------
    account
        Who asks.
    row
        Its row in the books.
    engine
        Where it is now; None while it is held.
    avoid
        Names of the engines that failed it.
    case
        What they did to it.
    deadline_s
        When its answer has to be whole, by the clock of the event loop; 0 before it was sent.
    stale
        Whether one of the attempts met a connection that the engine had closed.
    sent
        Whether its client has got anything.
    sent_s, beside
        When it was sent to its engine, and what decoded there if no other request waited.
    mark
        What its engine had done by its first token.
    """

    asked: Asked
    account: Account
    input_tokens: int
    predicted_tokens: int
    arrival_s: float
    row: int = -1
    engine: Seen | None = None
    avoid: set[str] = field(default_factory=set)
    case: Blame = field(default_factory=Blame)
    attempts: int = 0
    deadline_s: float = 0.0
    stale: bool = False
    sent: bool = False
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
