"""Processes that relay on one port, and the one that decides for all of them.

The owner keeps the books, the router, the health checks, the accounts and the meters, and listens
nowhere. Its workers (:mod:`hetero.apps.serving.worker`) listen on the address, each on a socket of
its own among which the system divides the connections, or where it does not on one together. They
are programs of their own: a process whose event loop and threads run cannot be forked safely, and
so one that died is started as the first one was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from hetero.apps.serving.accounts import Account
from hetero.apps.serving.app import Pages
from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.channel import Channel
from hetero.apps.serving.dispatcher import Dispatcher
from hetero.apps.serving.events import Usage
from hetero.apps.serving.faults import Fault, Refusal
from hetero.apps.serving.lengths import PromptSize
from hetero.apps.serving.settings import ANYONE
from hetero.apps.serving.tickets import Desk, Ticket
from hetero.errors import ParameterError

log = logging.getLogger("hetero.apps.serving")
_PROGRAM = "from hetero.engine.compiled import interpret; interpret()\n"
_PROGRAM += "from hetero.apps.serving.worker import main; main()"
_APART: Final = sys.platform == "linux"  # whether sockets of one address share its connections
_READY_S = 60.0
_SHORT_S = 10.0  # a worker that lives less is started again later each time
_LATER_S = (0.1, 30.0)
_PING_S = 1.0
_SILENT = 10  # pings without an answer, after which a worker hangs
_BEYOND_S = 5.0  # that a worker may take to end after its last request


@dataclass(eq=False, slots=True)
class _Distant(Ticket):
    """A request in another process."""

    number: int = 0
    worker: _Worker | None = None
    task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Have the attempt in progress given up."""
        assert self.worker is not None
        self.worker.channel.say("abort", self.number)


class _Worker:
    """A worker, as its owner has it."""

    def __init__(self, dispatcher: Dispatcher, pages: Pages) -> None:
        self._dispatcher, self._pages = dispatcher, pages
        self._room = 1
        self._desk = Desk(lambda: self._room)
        self._tickets: dict[int, _Distant] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those that answer pages
        self.ready, self.lost = asyncio.Event(), asyncio.Event()
        self._unanswered = 0
        self.channel = Channel(
            {
                "ready": self.ready.set,
                "enter": self._enter,
                "place": self._place,
                "piece": self._piece,
                "failed": self._failed,
                "left": self._left,
                "ended": self._ended,
                "page": self._page,
                "pong": self._heard,
            },
            self._gone,
        )

    def tell(self, workers: int) -> None:
        """Tell it the deployment."""
        settings, start_s = self._dispatcher.settings, time.monotonic() - self._dispatcher.now_s()
        text = settings.model_dump_json(exclude={"router"})
        self.channel.say("table", text, str(settings.folder), workers, start_s)

    def _heard(self) -> None:
        self._unanswered = 0

    async def silent(self) -> None:
        """Ask whether it lives, and return once it does not say so.

        Pings are counted and not time, of which an owner that was stopped itself may have lost any.
        """
        await self.ready.wait()
        while self._unanswered < _SILENT:
            self._unanswered += 1
            self.channel.say("ping")
            await asyncio.sleep(_PING_S)

    def _gone(self) -> None:
        """It has ended: to its clients and engines that is as if the clients had left."""
        for ticket in list(self._tickets.values()):
            self._end(ticket, "cancelled")
        for task in self._tasks:
            task.cancel()
        self.lost.set()

    # Requests ---------------------------------------------------------------------------------

    def _enter(
        self,
        number: int,
        key: str,
        path: str,
        model: str,
        numbers: int,
        characters: int,
        allowed: int,
        copies: int,
        stream: bool,
        room: int,
        endless: bool,
        priority: int,
        name: str,
        span: str,
        parent: str,
        arrival_s: float,
    ) -> None:
        dispatcher, self._room = self._dispatcher, room
        headers = {"x-request-id": name, "traceparent": span}
        size, most = PromptSize(numbers, characters), None if allowed < 0 else allowed
        asked = Asked(model, stream, size, most, copies, endless, None, b"", priority, headers)
        known = dispatcher.accounts.get(key.encode("latin-1"))
        account = known or Account(ANYONE)
        ticket = _Distant(
            asked, account, self._desk, path, arrival_s, parent, number=number, worker=self
        )
        self._tickets[number] = ticket
        dispatcher.arrived()
        with self._refusing(number):
            if known is None:  # the file was read again meanwhile
                raise Refusal(401, "invalid_api_key", "The API key is missing or wrong.")
            account.arrive(dispatcher.now_s())
            self._seek(ticket, anew=False)

    def _place(self, number: int, anew: bool, room: int) -> None:
        self._room = room
        with self._refusing(number):
            self._seek(self._tickets[number], anew=anew)

    def _seek(self, ticket: _Distant, *, anew: bool) -> None:
        chosen, deferred = self._dispatcher.placed(ticket, anew=anew)
        if chosen is None:
            ticket.task = asyncio.create_task(self._wait(ticket, deferred))
        else:
            self.channel.say("placed", ticket.number, chosen.backend.name)

    async def _wait(self, ticket: _Distant, deferred: bool) -> None:
        with self._refusing(ticket.number):
            chosen = await self._dispatcher.wait(ticket, deferred=deferred)
            self.channel.say("placed", ticket.number, chosen.backend.name)

    @contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """Tell the worker of a refusal."""
        try:
            yield
        except Refusal as one:
            told = one.status, one.code, one.message, one.retry_after_s
            self.channel.say("refused", number, *told)

    def _piece(self, number: int, pieces: int, at_s: float) -> None:
        self._dispatcher.piece(self._tickets[number], pieces, at_s)

    def _failed(self, number: int, fault: str, again: bool) -> None:
        ticket = self._tickets[number]

        async def fail() -> None:
            await self._dispatcher.failed(ticket, Fault[fault], again=again)
            self.channel.say("answered", number)

        ticket.task = asyncio.create_task(fail())

    def _left(
        self,
        number: int,
        outcome: str,
        inputs: int,
        outputs: int,
        answered: bool,
        attempts: int,
        pieces: int,
        first_s: float,
        last_s: float,
        guilty: str,
        body: str,
        room: int,
    ) -> None:
        ticket, self._room = self._tickets[number], room
        if ticket.engine is not None:
            self._dispatcher.piece(ticket, pieces, last_s)
            ticket.first_s = first_s if first_s >= 0.0 else None
        ticket.answered, ticket.attempts = answered, attempts
        if guilty:
            ticket.asked.rest = bytes.fromhex(body)
            names = guilty.split("\n")
            ticket.guilty = [x for x in self._dispatcher.engines if x.backend.name in names]
        usage = Usage(input_tokens=inputs, output_tokens=outputs) if inputs >= 0 else None
        self._end(ticket, outcome, usage)

    def _end(self, ticket: _Distant, outcome: str, usage: Usage | None = None) -> None:
        del self._tickets[ticket.number]
        if ticket.task is not None:
            ticket.task.cancel()
        self._dispatcher.leave(ticket, outcome, usage)

    def _ended(self, outcome: str) -> None:
        self._dispatcher.arrived()
        self._dispatcher.ended(outcome)

    def _page(self, number: int, method: str, path: str, authorization: str, body: str) -> None:
        async def answer() -> None:
            asked = method, path, authorization, body.encode("latin-1")
            with self._refusing(number):
                status, kind, content = await self._pages.answer(*asked)
                self.channel.say("answered", number, status, kind, content.decode())

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Owner:
    """Starts workers, and again those that have died or hang.

    Parameters
    ----------
    address
        Where they listen.
    count
        How many there are.
    """

    def __init__(self, dispatcher: Dispatcher, address: tuple[str, int], count: int) -> None:
        if sys.platform == "win32":
            raise ParameterError(
                "Windows hands no sockets to other processes.", resolve="leave workers at 1."
            )
        self._dispatcher, self._pages = dispatcher, Pages(dispatcher)
        self._address, self._count = address, count
        for free in _bound(address, apart=False):  # nobody else may listen there
            free.close()
        # Held so that nobody comes between; where it is shared, it is what all listen on.
        self._sockets = _bound(address, apart=_APART)
        self._workers: list[_Worker] = []
        self._begun: list[asyncio.Future[None]] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        dispatcher.reloaded = self._tell

    def _tell(self) -> None:
        for one in self._workers:
            one.tell(self._count)

    async def open(self) -> None:
        """Start all workers, and return once they listen."""
        self._begun = [asyncio.get_running_loop().create_future() for _ in range(self._count)]
        self._keepers = [asyncio.create_task(self._keep(one)) for one in self._begun]
        try:
            async with asyncio.timeout(_READY_S):
                await asyncio.gather(*self._begun)
        except (TimeoutError, ChildProcessError) as error:
            raise ParameterError(
                f"A worker does not listen ({error or 'yet'}).", resolve="see the lines above."
            ) from None

    async def _keep(self, begun: asyncio.Future[None]) -> None:
        """Run one worker after the other."""
        later_s = _LATER_S[0]
        while not self._closing.is_set():
            start_s = time.monotonic()
            code = await self._run(begun)
            if not begun.done():
                begun.set_exception(ChildProcessError(f"it ended with code {code}"))
                return
            if self._closing.is_set():
                return
            lived_s = time.monotonic() - start_s
            self._dispatcher.meters.restarted += 1
            later_s = min(2.0 * later_s, _LATER_S[1]) if lived_s < _SHORT_S else _LATER_S[0]
            log.error("a worker ended with code %s: another in %g s", code, later_s)
            await asyncio.sleep(later_s)

    async def _run(self, begun: asyncio.Future[None]) -> int:
        """One worker, from its start to its end; its exit code."""
        worker = _Worker(self._dispatcher, self._pages)
        mine, theirs = socket.socketpair()
        sockets = _bound(self._address, apart=True) if _APART else self._sockets
        given = [one.fileno() for one in (theirs, *sockets)]
        program = [sys.executable, "-P", "-c", _PROGRAM, *map(str, given)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(program, pass_fds=given, env=environment)
        for one in (theirs, *(sockets if _APART else ())):
            one.close()
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: worker.channel, sock=mine)
            worker.tell(self._count)
            self._workers.append(worker)
            await _first(worker.ready.wait(), worker.lost.wait())
            if worker.ready.is_set() and not begun.done():
                begun.set_result(None)
            await _first(worker.silent(), worker.lost.wait())
            if not worker.lost.is_set():
                log.error("a worker has been silent for %g s, and is killed", _SILENT * _PING_S)
                process.kill()
                await worker.lost.wait()
            self._workers.remove(worker)
            return await asyncio.to_thread(process.wait)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    async def close(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Let requests under way end, so long or until ``hurry``, and then end all."""
        self._closing.set()
        for one in self._workers:
            one.channel.say("drain", limit_s)

        async def press() -> None:
            await hurry.wait()
            for one in self._workers:
                one.channel.say("hurry")

        pressing = asyncio.create_task(press())
        await asyncio.wait(self._keepers, timeout=limit_s + _BEYOND_S)
        for task in (pressing, *self._keepers):
            task.cancel()
        await asyncio.gather(pressing, *self._keepers, return_exceptions=True)
        for held in self._sockets:
            held.close()


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these is over."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _bound(address: tuple[str, int], *, apart: bool) -> list[socket.socket]:
    """A socket for each address that a name stands for, at which nobody listens yet."""
    found: list[socket.socket] = []
    try:
        places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(places):
            one = socket.socket(family, kind, protocol)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if apart:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(place)
    except OSError as error:
        for one in found:
            with suppress(OSError):
                one.close()
        raise ParameterError(
            f"The address {address[0]}:{address[1]} cannot be bound ({error.strerror}).",
            resolve="choose another with --port, or stop what listens there.",
        ) from None
    return found
