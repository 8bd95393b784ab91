"""The dispatcher: which engine gets which request, by the routers that the simulator runs."""

from __future__ import annotations

import asyncio
import bisect
import logging
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from aiohttp import ClientSession

from hetero.apps.serving.bodies import LengthEstimates, Usage
from hetero.apps.serving.engines import WITHOUT_OUTPUT, Seen, Ticket, client, probe
from hetero.apps.serving.faults import Fault, Refusal
from hetero.apps.serving.learning import LEAST, First, StepLearner
from hetero.apps.serving.metrics import Meters, RequestLog
from hetero.apps.serving.records import FleetRecords
from hetero.apps.serving.settings import DeploymentFile
from hetero.deployment import Deployment
from hetero.routers.base import DEFER, Live

log = logging.getLogger("hetero.apps.serving")
_ROWS = 16384  # requests remembered


@dataclass(slots=True)
class Prepared:
    """All that takes time or may fail on the way to a deployment."""

    settings: DeploymentFile
    told: Deployment
    learners: tuple[StepLearner, ...]
    keys: dict[bytes, str]
    request_log: RequestLog | None
    deployment: Deployment = field(init=False)  # with what has been learnt
    router: Live = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.told.replicas, self.learners, strict=True)
        replicas = tuple(replace(one, step=learner.step) for one, learner in pairs)
        self.deployment = replace(self.told, replicas=replicas)
        rng = np.random.default_rng(self.settings.seed)
        self.router = self.settings.chosen().live(self.deployment, rng)

    @classmethod
    def of(cls, settings: DeploymentFile, engines: Iterable[Seen] = ()) -> Prepared:
        """Fit what the router fits.

        What was learnt of ``engines``, those before, stays where the file tells the same of them.
        """
        told = settings.deployment()
        known = {(one.backend.name, one.backend.url): one.learner for one in engines}
        learners = tuple(
            StepLearner.of(replica.step, known.get((backend.name, backend.url)))
            for backend, replica in zip(settings.backends, told.replicas, strict=True)
        )
        file = settings.request_log
        log = RequestLog(settings.folder / file) if file is not None else None
        return cls(settings, told, learners, settings.keys(), log)


class Dispatcher:
    """Places requests at engines, keeps the records, and watches the engines.

    All of it runs in one thread of one event loop, so that a decision sees a consistent state.
    """

    session: ClientSession
    _watch: asyncio.Task[None]

    def __init__(self, first: Prepared) -> None:
        settings = self.settings = first.settings
        self.meters = Meters()
        self.request_log: RequestLog | None = None
        self.lengths = LengthEstimates(settings.outputs)
        self.engines: list[Seen] = []
        self.tickets: set[Ticket] = set()
        self.held: list[Ticket] = []
        self.bodies: Counter[str] = Counter()  # of the large ones, by their share
        self.away = 0  # requests at engines, and how many may be: there are descriptors for so many
        self.room: Callable[[], int] = lambda: sys.maxsize
        self._changing = asyncio.Lock()
        self._checks: dict[Seen, asyncio.Task[None]] = {}
        self._start_s = time.monotonic()
        self._install(first)

    def now_s(self) -> float:
        """Time since the dispatcher was made [s]."""
        return time.monotonic() - self._start_s

    def _install(self, new: Prepared) -> None:
        settings = new.settings
        records = FleetRecords(new.deployment, rows=max(_ROWS, 4 * len(self.tickets)))
        known = {(seen.backend.name, seen.backend.url): seen for seen in self.engines}
        engines = []
        for k, backend in enumerate(settings.backends):
            old = known.pop((backend.name, backend.url), None)
            seen = old or Seen(backend, settings.limits, k)
            seen.learner = new.learners[k]
            seen.use(backend, settings.limits, k, settings.model)
            engines.append(seen)
        for gone in known.values():
            gone.position = -1
        self._prepared, self.settings, self.records, self.engines = new, settings, records, engines
        self.router, self.keys, self.models = new.router, new.keys, settings.models
        if self.request_log not in (None, new.request_log):  # or it may have been moved away
            self.request_log.close()
        self.request_log = new.request_log
        for ticket in sorted(self.tickets, key=lambda one: one.row):
            ticket.row = records.open(
                ticket.input_tokens, ticket.predicted_tokens, ticket.arrival_s
            )
            if ticket.engine is not None and ticket.engine.position >= 0:
                records.send(ticket.row, ticket.engine.position, ticket.arrival_s)
                if ticket.first_s is not None:
                    records.first_token(ticket.row, ticket.first_s)
                    records.more_tokens(ticket.row, max(ticket.pieces - 1, 0))
        for ticket in self.held:
            records.hold(ticket.row, deferred=False)
        records.loads = [seen.load for seen in engines]  # what was entered again is in them

    async def change(self, read: Callable[[], DeploymentFile]) -> None:
        """Go over to the settings that ``read`` gives, in a thread: streams flow on.

        Nothing changes if they cannot be served.
        """
        async with self._changing:
            engines = list(self.engines)
            new = await asyncio.to_thread(lambda: Prepared.of(read(), engines))
            if new.settings.outputs != self.settings.outputs:
                self.lengths = LengthEstimates(new.settings.outputs)
            self._install(new)
            log.warning("serving with %d engines, %s", len(self.engines), self.router.name)
            self.offer()

    async def learn(self) -> None:
        """Go over to the step times that answers tell, where these are expected better."""
        found = False
        for seen in list(self.engines):
            if seen.learner.due and seen.learner.refit(keep=self.settings.learn):
                found = True
                self.meters.refits.labels(seen.backend.name).inc()
                log.warning("%s: %s", seen.backend.name, seen.learner.line())
            await asyncio.sleep(0)  # each fit takes a millisecond
        if found:
            async with self._changing:
                self._install(await asyncio.to_thread(replace, self._prepared))
            self.offer()

    async def start(self) -> None:
        """Begin to watch the engines."""
        self.session = client()
        await self._check()
        self._watch = asyncio.create_task(self._watching())

    async def stop(self) -> None:
        """Close everything."""
        self._watch.cancel()
        await asyncio.wait((self._watch,))
        await self.session.close()

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(self.settings.limits.health_s)
            try:
                await self._check()
            except Exception:
                log.exception("a round of health checks failed")

    async def _check(self) -> None:
        await asyncio.gather(*(self._check_one(seen) for seen in list(self.engines)))
        await self.learn()
        self.offer()

    async def _check_one(self, seen: Seen) -> None:
        """Check an engine's health now, once for all who ask."""

        async def check() -> None:
            try:
                seen.probed(self.now_s(), await probe(self.session, seen))
            finally:
                del self._checks[seen]

        if seen not in self._checks:
            self._checks[seen] = asyncio.create_task(check())
        await asyncio.shield(self._checks[seen])

    def _admit(self, ticket: Ticket) -> None:
        """Admit a request, or refuse it if there are as many as may be."""
        asked = ticket.asked
        ticket.input_tokens = self.lengths.prompt(asked.prompt)
        ticket.predicted_tokens = self.lengths.output(
            asked.allowed, asked.copies, endless=asked.endless
        )
        if len(self.tickets) >= self.settings.limits.max_requests:
            raise self._crowded("requests", len(self.tickets))
        if self.records.full:
            by = self.records.compact()
            self.router.renumber(by)
            for other in self.tickets:
                other.row -= by
        ticket.row = self.records.open(
            ticket.input_tokens, ticket.predicted_tokens, ticket.arrival_s
        )
        self.tickets.add(ticket)

    def _crowded(self, what: str, count: int) -> Refusal:
        return Refusal(429, "overloaded", f"{count} {what} are the limit.", retry_after_s=1.0)

    async def place(self, ticket: Ticket) -> Seen:
        """The engine that a request goes to; it may have to wait for one."""
        if ticket.row < 0:
            self._admit(ticket)
        chosen, deferred = self._choose(ticket)
        return chosen or await self._wait(ticket, deferred=deferred)

    async def _wait(self, ticket: Ticket, *, deferred: bool) -> Seen:
        """The engine for a request, once there is one."""
        if len(self.held) >= self.settings.limits.max_queue:
            raise self._crowded("held requests", len(self.held))
        if not deferred:  # an engine that failed it may be the first that comes back
            ticket.avoid.clear()
        self.records.hold(ticket.row, deferred=deferred)
        bisect.insort(self.held, ticket, key=turn)
        ticket.waits = asyncio.get_running_loop().create_future()
        limits = self.settings.limits
        limit_s = limits.queue_s
        if limits.down_s is not None and not self._serving(ticket.asked.model):
            limit_s = min(limits.down_s, limit_s)
        try:
            async with asyncio.timeout(limit_s):
                return await ticket.waits
        except TimeoutError:
            text = f"No engine could take the request within {limit_s:g} s."
            text = text if limit_s > 0.0 else "No engine is up."
            raise Refusal(503, "no_engine", text, retry_after_s=1.0) from None
        finally:
            self._stop_waiting(ticket)

    def _stop_waiting(self, ticket: Ticket) -> None:
        ticket.waits = None
        if ticket in self.held:
            self.held.remove(ticket)
            self.records.let_go(ticket.row)

    def _choose(self, ticket: Ticket) -> tuple[Seen | None, bool]:
        """An engine, or None and whether the router deferred the request."""
        began = time.perf_counter()
        now_s = self.now_s()
        if self.away >= self.room():
            return None, False
        model, avoid = ticket.asked.model, ticket.avoid
        usable = [x.serves(model) and x.backend.name not in avoid for x in self.engines]
        if not self.records.look(ticket.row, now_s, usable):
            if avoid and not any(usable) and self._serving(model):
                raise Refusal(503, "all_failed", "Every engine that is up has failed this request.")
            return None, False
        choice = self.router.decide(self.records.state, ticket.row, now_s)
        self.meters.decision.observe(time.perf_counter() - began)
        if choice == DEFER:
            return None, True
        # Numpy's integers as well; a pair is for engines that are split by phase.
        choice = -1 if isinstance(choice, tuple) else operator.index(choice)
        if not 0 <= choice < len(self.engines):
            raise Refusal(503, "refused_by_router", f"The router '{self.router.name}' refused.")
        seen = self.engines[choice]
        if not usable[choice]:
            return None, False
        self.records.let_go(ticket.row)
        self.records.send(ticket.row, choice, now_s)
        ticket.engine, ticket.sent_s = seen, now_s
        ticket.beside = self.records.beside(choice)
        seen.tickets.add(ticket)
        self.away += 1
        return seen, False

    def _serving(self, model: str) -> set[str]:
        """The engines that are up and serve a model."""
        return {one.backend.name for one in self.engines if one.serves(model)}

    def offer(self) -> None:
        """Offer held requests to the router until it defers one of each model."""
        stuck: set[str] = set()  # models for which there is no place
        while (ticket := self._first(stuck)) is not None:
            waits = ticket.waits
            if waits is None or waits.done():
                self.held.remove(ticket)
                continue
            try:
                seen, deferred = self._choose(ticket)
                if seen is None:
                    self.records.hold(ticket.row, deferred=deferred)
                    stuck.add(ticket.asked.model)
                    continue
                waits.set_result(seen)
            except Refusal as refusal:
                self.records.let_go(ticket.row)
                waits.set_exception(refusal)
            self.held.remove(ticket)

    def _first(self, stuck: set[str]) -> Ticket | None:
        """The held request whose turn it is: of the smallest priority, the oldest."""
        if len(stuck) >= len(self.models):
            return None
        return next((one for one in self.held if one.asked.model not in stuck), None)

    def piece(self, ticket: Ticket, pieces: int) -> None:
        """So many pieces of an answer have come by now."""
        more, now_s, seen = pieces - ticket.pieces, self.now_s(), ticket.engine
        if more <= 0:
            return
        first, ticket.pieces, ticket.last_s = ticket.pieces == 0, pieces, now_s
        if first:
            ticket.first_s = now_s
        if seen is not None and seen.position >= 0:
            if first:
                self.records.first_token(ticket.row, now_s)
                ticket.mark = seen.load.mark()
            self.records.more_tokens(ticket.row, more - first)
        if first:
            self.offer()

    async def failed(self, ticket: Ticket, fault: Fault, *, again: bool) -> None:
        """An attempt failed before its client got anything: the request may go elsewhere.

        It may go to the same engine ``again``, or if the dispatcher failed it at all of them.
        """
        seen = ticket.engine
        assert seen is not None
        self.meters.attempts.labels(seen.backend.name, "failed").inc()
        self._back(ticket)
        if not again:
            ticket.avoid.add(seen.backend.name)
        ticket.pieces, ticket.first_s, ticket.mark = 0, None, None
        self.records.withdraw(ticket.row, self.now_s())
        if fault is Fault.GONE and seen.up:
            await self._check_one(seen)  # no request brings it about, so none decides it
            if seen.up:
                ticket.avoid.discard(seen.backend.name)
        if fault is Fault.OWN and self._serving(ticket.asked.model) <= ticket.avoid:
            ticket.avoid.clear()
        self.offer()

    def _back(self, ticket: Ticket) -> None:
        if ticket.engine is not None:
            ticket.engine.tickets.discard(ticket)
            ticket.engine = None
            self.away -= 1

    def leave(self, ticket: Ticket, outcome: str, usage: Usage | None = None) -> None:
        """A request has ended, see :data:`hetero.apps.serving.metrics.OUTCOMES`.

        ``usage`` is what its engine has counted, if it was finished.
        """
        self.meters.ended.labels(outcome).inc()
        seen, now_s = ticket.engine, self.now_s()
        outputs = 0
        if seen is not None and ticket.answered:
            how = "refused" if usage is None else "finished"
            self.meters.attempts.labels(seen.backend.name, how).inc()
            seen.well()
            outputs = 0 if usage is None else self._served(ticket, seen, usage, now_s)
        elif seen is not None and outcome == "failed":
            self.meters.attempts.labels(seen.backend.name, "broken").inc()
        for guilty in ticket.guilty:  # failed it by their own fault
            last = not any(one.open for one in self.engines if one is not guilty)
            guilty.ill(now_s, hash(ticket.asked.rest), last=last)
        if self.request_log is not None:
            self.request_log.write(ticket, outcome, outputs, now_s)
        if ticket not in self.tickets:
            return
        self._stop_waiting(ticket)
        self.tickets.discard(ticket)
        self._back(ticket)
        finished = usage is not None
        self.records.close(ticket.row, now_s, ticket.input_tokens, outputs, finished=finished)
        if usage is not None and seen is not None and ticket.asked.stream:
            self._teach(ticket, seen, outputs)
        self.offer()

    def _served(self, ticket: Ticket, seen: Seen, usage: Usage, now_s: float) -> int:
        """Count a request that was answered in full; returns its output tokens."""
        ticket.input_tokens = usage.input_tokens or ticket.input_tokens
        if usage.input_tokens and ticket.path not in WITHOUT_OUTPUT:
            self.lengths.learn(ticket.asked.prompt, usage.input_tokens, usage.output_tokens)
        outputs = usage.output_tokens or ticket.pieces
        self.meters.served(ticket, seen.backend.name, now_s, ticket.input_tokens, outputs)
        return outputs

    def _teach(self, ticket: Ticket, seen: Seen, outputs: int) -> None:
        """Let an engine be known better by an answer."""
        begin, first_s = ticket.mark, ticket.first_s
        if begin is None or first_s is None or seen.position < 0 or ticket.asked.copies > 1:
            return
        if ticket.beside is not None:
            first = First(first_s - ticket.sent_s, ticket.input_tokens, *ticket.beside)
            seen.learner.first.append(first)
        if outputs > LEAST:
            later_s = (ticket.last_s - first_s) / (outputs - 1)
            seen.learner.answer(later_s, outputs - 1, begin, seen.load.mark())


def turn(ticket: Ticket) -> tuple[int, int]:
    """By what requests that are held stand in order."""
    return ticket.asked.priority, ticket.row
