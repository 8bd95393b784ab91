"""A process that listens, holds bodies and relays answers, and asks its owner where they go.

It keeps no books. What its requests do is told to the owner (:mod:`hetero.apps.serving.owner`): who
asks for a place waits for the word; first tokens and ends are told at once, how many later pieces
have come every :data:`GATHER_S`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import signal
import socket
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from hetero.apps.serving.accounts import Account
from hetero.apps.serving.bodies import Held
from hetero.apps.serving.channel import Channel
from hetero.apps.serving.connections import Connections
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.events import Usage
from hetero.apps.serving.faults import Fault, Refusal
from hetero.apps.serving.lines import EnginePool
from hetero.apps.serving.listener import Listener
from hetero.apps.serving.server import fastest_loop, tls
from hetero.apps.serving.settings import ANYONE, DeploymentFile
from hetero.apps.serving.tickets import Desk, Ticket

#: How old the owner's counts of later pieces may be [s].
GATHER_S: Final = 0.01
_SWEEP_S = 1.0
_MOST_PAGE = 64 << 10  # bytes of what is sent to a page


class Worker:
    """The dispatcher as a relay in another process sees it."""

    settings: DeploymentFile

    def __init__(self) -> None:
        self.models: dict[str, None] = {}
        self.accounts: dict[bytes, Account] = {}
        self.bodies, self.pool, self.desk = Held(), EnginePool(), Desk()
        self.known, self.ending, self.hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.limit_s = 0.0  # for the requests under way at the end
        self.lost = asyncio.Event()
        self._engines: dict[str, Seen] = {}
        self._gone: dict[str, Seen] = {}  # since the last deployment; one may just be chosen
        self._keys: dict[Account, str] = {}
        self._numbers = count()
        self._tickets: dict[int, Ticket] = {}
        self._waits: dict[int, asyncio.Future[Any]] = {}
        self._behind: set[Ticket] = set()
        self._start_s = 0.0
        self.channel = Channel(
            {
                "table": self._table,
                "placed": self._answered,
                "answered": self._answered,
                "refused": self._refused,
                "abort": self._abort,
                "drain": self._drain,
                "hurry": self.hurry.set,
                "ping": lambda: self.channel.say("pong"),
            },
            self.lost.set,
        )

    def now_s(self) -> float:
        """Time since the dispatcher was made [s]: the owner's clock is that of the machine."""
        return time.monotonic() - self._start_s

    # What the owner says ----------------------------------------------------------------------

    def _table(self, text: str, folder: str, workers: int, start_s: float) -> None:
        settings = DeploymentFile.model_validate_json(text)
        limits = settings.limits
        share = limits.model_copy(update={"bodies_bytes": max(limits.bodies_bytes // workers, 1)})
        settings = settings.model_copy(update={"limits": share, "folder": Path(folder)})
        self._gone, self._engines = self._engines, {}
        for k, backend in enumerate(settings.backends):
            seen = self._gone.pop(backend.name, None) or Seen(backend, limits, k)
            seen.use(backend, limits, k, settings.model)
            self._engines[backend.name] = seen
        before, self.accounts = self.accounts, {}
        for key, client in (settings.keys() or {b"": ANYONE}).items():
            account = self.accounts[key] = before.get(key) or Account(client)
            account.client = client.model_copy(update={"rps": None})  # the owner counts
        self._keys = {account: key.decode("latin-1") for key, account in self.accounts.items()}
        self.settings, self.models, self._start_s = settings, settings.models, start_s
        self.known.set()

    def _abort(self, number: int) -> None:
        if number in self._tickets:
            self._tickets[number].abort()

    def _drain(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.ending.set()

    def _answered(self, number: int, *answer: Any) -> None:
        waits = self._waits.pop(number, None)
        if waits is not None and not waits.done():
            waits.set_result(answer)

    def _refused(
        self, number: int, status: int, code: str, text: str, after_s: float | None
    ) -> None:
        waits = self._waits.pop(number, None)
        if waits is not None and not waits.done():
            waits.set_exception(Refusal(status, code, text, retry_after_s=after_s))

    async def _ask(self, kind: str, number: int, *rest: Any) -> Any:
        self.channel.say(kind, number, *rest)
        waits = self._waits[number] = asyncio.get_running_loop().create_future()
        return await waits

    async def page(
        self, method: str, path: str, authorization: str, body: bytes
    ) -> tuple[int, str, bytes]:
        """What stands on a page of the owner; that this process lives, it says itself."""
        if path == "/live" and method in ("GET", "HEAD"):
            return 200, "application/json", b'{"live":true}'
        if len(body) > _MOST_PAGE:
            raise Refusal(413, "too_large", f"A page takes {_MOST_PAGE:,} bytes.")
        asked = method, path, authorization, body.decode("latin-1")
        status, kind, content = await self._ask("page", next(self._numbers), *asked)
        return status, kind, content.encode()

    # What relays ask --------------------------------------------------------------------------

    def arrived(self) -> None:
        """A request is coming; it counts once it asks for a place or has ended."""

    def ended(self, outcome: str) -> None:
        """A request has ended before it could ask for a place."""
        self.channel.say("ended", outcome)

    async def place(self, ticket: Ticket, *, anew: bool) -> Seen:
        """The engine that a request goes to."""
        if ticket.row < 0:
            asked, allowed = ticket.asked, ticket.asked.allowed
            ticket.row = next(self._numbers)
            self._tickets[ticket.row] = ticket
            found = await self._ask(
                "enter",
                ticket.row,
                # A key has no blanks at its ends: with this one nobody is known.
                self._keys.get(ticket.account, " "),
                ticket.path,
                asked.model,
                *asked.prompt,
                -1 if allowed is None else allowed,
                asked.copies,
                asked.stream,
                self.desk.room(),
                asked.endless,
                asked.priority,
                asked.headers["x-request-id"],
                asked.headers.get("traceparent", ""),
                ticket.parent,
                ticket.arrival_s,
            )
        else:
            found = await self._ask("place", ticket.row, anew, self.desk.room())
        name = found[0]
        ticket.engine = self._engines.get(name) or self._gone[name]
        return ticket.engine

    def piece(self, ticket: Ticket, pieces: int) -> None:
        """So many pieces of an answer have come by now."""
        if pieces <= ticket.pieces or ticket.row not in self._tickets:
            return  # a line may end after the client has left
        ticket.last_s = self.now_s()
        if ticket.pieces:
            if not self._behind:
                asyncio.get_running_loop().call_later(GATHER_S, self._gather)
            self._behind.add(ticket)
        else:
            ticket.first_s = ticket.last_s
            if ticket.asked.stream:  # else its end comes with it
                self.channel.say("piece", ticket.row, pieces, ticket.first_s)
        ticket.pieces = pieces

    def _gather(self) -> None:
        behind, self._behind = self._behind, set()
        for ticket in behind:
            self.channel.say("piece", ticket.row, ticket.pieces, ticket.last_s)

    async def failed(self, ticket: Ticket, fault: Fault, *, again: bool) -> None:
        """An attempt failed before its client got anything."""
        ticket.engine, ticket.pieces, ticket.first_s = None, 0, None
        self._behind.discard(ticket)
        await self._ask("failed", ticket.row, fault.name, again)

    def leave(self, ticket: Ticket, outcome: str, usage: Usage | None = None) -> None:
        """A request that has asked for a place has ended."""
        self._behind.discard(ticket)
        self._tickets.pop(ticket.row, None)
        self._waits.pop(ticket.row, None)
        guilty = "\n".join(seen.backend.name for seen in ticket.guilty)
        told = (-1, -1) if usage is None else (usage.input_tokens, usage.output_tokens)
        self.channel.say(
            "left",
            ticket.row,
            outcome,
            *told,
            ticket.answered,
            ticket.attempts,
            ticket.pieces,
            -1.0 if ticket.first_s is None else ticket.first_s,
            ticket.last_s,
            guilty,
            # A request by which engines are blamed is the same one in every process.
            hashlib.blake2b(ticket.asked.rest, digest_size=16).hexdigest() if guilty else "",
            self.desk.room(),
        )


async def _run(own: int, sockets: list[int]) -> None:
    loop, worker = asyncio.get_running_loop(), Worker()
    await loop.create_unix_connection(lambda: worker.channel, sock=socket.socket(fileno=own))
    await worker.known.wait()
    listener = Listener(worker, worker.page)
    connections = Connections(listener, lambda: worker.settings.limits)
    worker.desk.room = connections.room
    context = tls(worker.settings)
    servers = [
        await connections.listen(sock=socket.socket(fileno=one), ssl=context) for one in sockets
    ]
    worker.channel.say("ready")
    gc.collect()
    gc.freeze()

    async def sweep() -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            worker.pool.sweep()

    async def end() -> None:
        await worker.ending.wait()
        for server in servers:
            server.close()
        await connections.drain(worker.limit_s, worker.hurry)
        worker.pool.sweep(all_of_them=True)
        worker.channel.close()

    beside = [asyncio.create_task(one) for one in (connections.watch(), sweep(), end())]
    await worker.lost.wait()  # without its owner it ends at once
    for one in beside:
        one.cancel()


def main() -> None:
    """Relay for the owner at the other end of the first descriptor, on the sockets after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the owner gets them too, and says what to do
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    own, *sockets = map(int, sys.argv[1:])
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(_run(own, sockets))
