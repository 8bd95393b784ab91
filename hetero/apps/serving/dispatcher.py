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
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from aiohttp import ClientSession

from hetero.apps.serving.engines import Seen, client, probe
from hetero.apps.serving.events import Usage
from hetero.apps.serving.faults import Fault, Refusal
from hetero.apps.serving.learning import LEAST, First, StepLearner
from hetero.apps.serving.lengths import LengthEstimates
from hetero.apps.serving.metrics import Meters
from hetero.apps.serving.plan import FleetPlan
from hetero.apps.serving.records import FleetRecords
from hetero.apps.serving.request_log import RequestLog
from hetero.apps.serving.settings import DeploymentFile
from hetero.apps.serving.tickets import WITHOUT_OUTPUT, Ticket
from hetero.deployment import Deployment
from hetero.routers.base import DEFER, Live

log = logging.getLogger("hetero.apps.serving")
_ROWS = 16384  # requests remembered
_DRIFT = 1.25  # of mean lengths, that the plan follows


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that takes time or may fail on the way to a deployment."""

    settings: DeploymentFile
    learners: tuple[StepLearner, ...]
    deployment: Deployment
    router: Live
    keys: dict[bytes, str]
    request_log: RequestLog | None

    @classmethod
    def of(cls, settings: DeploymentFile, engines: Iterable[Seen] = ()) -> Prepared:
        """Fit what the router fits, and compile what its decisions need.

        Parameters
        ----------
        engines
            Those of the deployment before: what was learnt of them stays, where the file tells the
            same of them.
        """
        told = settings.deployment()
        known = {(one.backend.name, one.backend.url): one.learner for one in engines}
        learners = tuple(
            StepLearner.of(replica.step, known.get((backend.name, backend.url)))
            for backend, replica in zip(settings.backends, told.replicas, strict=True)
        )
        file = settings.request_log
        log = RequestLog(settings.folder / file) if file is not None else None
        deployment, router = _learnt(settings, told, learners)
        return cls(settings, learners, deployment, router, settings.keys(), log)

    def learnt(self) -> Prepared:
        """The same with what has been learnt of its engines since."""
        deployment, router = _learnt(self.settings, self.deployment, self.learners)
        return replace(self, deployment=deployment, router=router)


def _learnt(
    settings: DeploymentFile, told: Deployment, learners: tuple[StepLearner, ...]
) -> tuple[Deployment, Live]:
    pairs = zip(told.replicas, learners, strict=True)
    found = replace(told, replicas=tuple(replace(one, step=x.step) for one, x in pairs))
    router = settings.chosen()
    return found, router.live(found, np.random.default_rng(settings.seed))


class Dispatcher:
    """Places requests at engines, keeps the records, and watches the engines.

    All of it runs in one thread of one event loop, so that a decision sees a consistent state.

    Parameters
    ----------
    first
        The deployment to begin with.

    Attributes
    ----------
    away, room
        Requests at engines, and how many may be: there are descriptors for so many.
    """

    plan: FleetPlan
    session: ClientSession

    def __init__(self, first: Prepared) -> None:
        settings = self.settings = first.settings
        self.meters = Meters()
        self.request_log: RequestLog | None = None
        self.lengths = LengthEstimates(settings.outputs)
        self.engines: list[Seen] = []
        self.tickets: set[Ticket] = set()
        self.held: list[Ticket] = []
        self.bodies: Counter[str] = Counter()  # of the large ones, by their share
        self.away = 0
        self.room: Callable[[], int] = lambda: sys.maxsize
        self._changing = asyncio.Lock()
        self._checks: dict[Seen, asyncio.Task[None]] = {}
        self._start_s = time.monotonic()
        self._watch: asyncio.Task[None] | None = None
        self._install(first)

    def now_s(self) -> float:
        """Time since the dispatcher was made [s]."""
        return time.monotonic() - self._start_s

    # Deployments ----------------------------------------------------------------------------

    def _install(self, new: Prepared, why: str = "this deployment") -> None:
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
        self._plan(why)
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

        Raises
        ------
        HeteroError
            If that cannot be served; nothing changes then.
        """
        async with self._changing:
            engines = list(self.engines)
            make = lambda: Prepared.of(read(), engines)  # noqa: E731
            new = await asyncio.to_thread(make)
            if new.settings.outputs != self.settings.outputs:
                self.lengths = LengthEstimates(new.settings.outputs)
            self._install(new)
            log.warning("serving with %d engines, %s", len(self.engines), self.router.name)
            self.offer()

    def _plan(self, why: str) -> None:
        up = tuple(one.open for one in self.engines)
        self.plan = FleetPlan.of(self.records.deployment, *self.lengths.mean, up=up, why=why)
        if self.settings.follows_plan:
            rng = np.random.default_rng(self.settings.seed)
            chosen = self.settings.chosen(self.plan)
            self.router = chosen.live(self.records.deployment, rng)

    def mend(self) -> None:
        """Plan anew if engines have come or gone since; requests in flight stay."""
        names = zip(self.engines, self.plan.up, strict=True)
        if changed := [
            f"{seen.backend.name} is {'back' if seen.open else 'out'}"
            for seen, before in names
            if seen.open != before
        ]:
            self._plan(" and ".join(changed))
            self.meters.mends.labels("engines").inc()
            log.warning("plan mended, %s", self.plan.line())

    def follow_lengths(self) -> None:
        """Plan anew if requests have become much longer or shorter than those planned for."""
        planned = self.plan.input_tokens, self.plan.output_tokens
        now = self.lengths.mean
        if any(not 1 / _DRIFT < new / old < _DRIFT for new, old in zip(now, planned, strict=True)):
            self._plan(f"requests of {now[0]:.0f} + {now[1]:.0f} tokens")
            self.meters.mends.labels("lengths").inc()

    async def learn(self) -> None:
        """Go over to the step times that answers tell, where these are expected better."""
        found = []
        for seen in list(self.engines):
            if seen.learner.due and seen.learner.refit(keep=self.settings.learn):
                found.append(seen.backend.name)
                self.meters.refits.labels(seen.backend.name).inc()
                log.warning("%s: %s", seen.backend.name, seen.learner.line())
            await asyncio.sleep(0)  # each fit takes a millisecond
        if found:
            async with self._changing:
                new = await asyncio.to_thread(self._prepared.learnt)
                self._install(new, f"what was learnt of {', '.join(found)}")
            self.meters.mends.labels("steps").inc()
            self.offer()

    async def start(self) -> None:
        """Begin to watch the engines."""
        self.session = client()
        await self._check()
        self._watch = asyncio.create_task(self._watching())

    async def stop(self) -> None:
        """Close everything."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
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
        self.mend()  # first, so that what is said of engines is said of them
        self.follow_lengths()
        await self.learn()
        self.offer()

    async def _check_one(self, seen: Seen) -> None:
        """Check an engine's health now, once for all who ask."""

        async def check() -> None:
            try:
                seen.probed(self.now_s(), await probe(self.session, seen))
                self.mend()
            finally:
                del self._checks[seen]

        if seen not in self._checks:
            self._checks[seen] = asyncio.create_task(check())
        await asyncio.shield(self._checks[seen])

    # Requests -------------------------------------------------------------------------------

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
        # A tenth of what is in flight has left by then, as planned.
        pace = self.plan.capacity_rps
        after_s = min(max(0.1 * len(self.tickets) / pace, 1.0), 60.0) if pace > 0 else 60.0
        return Refusal(429, "overloaded", f"{count} {what} are the limit.", retry_after_s=after_s)

    async def place(self, ticket: Ticket, *, anew: bool = False) -> Seen:
        """The engine that a request goes to; it may have to wait for one.

        Parameters
        ----------
        anew
            Whether engines that have failed it may have it again.

        Raises
        ------
        Refusal
            If too many are in flight or held, no engine takes it in time, or all that could have
            failed it.
        """
        if anew:
            ticket.avoid.clear()
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
        if limits.down_s is not None and not any(self._serving(ticket.asked.model)):
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
        if ticket.waits is not None:
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
        model = ticket.asked.model
        usable = self._serving(model)
        if avoid := ticket.avoid:
            pairs = zip(usable, self.engines, strict=True)
            usable = [good and x.backend.name not in avoid for good, x in pairs]
        if not self.records.look(ticket.row, now_s, usable):
            if avoid and not any(usable) and any(self._serving(model)):
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

    def _serving(self, model: str) -> list[bool]:
        """Whether each engine is up and serves a model."""
        return [one.serves(model) for one in self.engines]

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
            except Refusal as refusal:
                self.held.remove(ticket)
                self.records.let_go(ticket.row)
                waits.set_exception(refusal)
                continue
            if seen is None:
                self.records.hold(ticket.row, deferred=deferred)
                stuck.add(ticket.asked.model)
            else:
                self.held.remove(ticket)
                waits.set_result(seen)

    def _first(self, stuck: set[str]) -> Ticket | None:
        """The held request whose turn it is: of the smallest priority, the oldest."""
        if len(stuck) >= len(self.models):
            return None
        return next((one for one in self.held if one.asked.model not in stuck), None)

    def piece(self, ticket: Ticket, pieces: int) -> None:
        """So many pieces of an answer have come by now."""
        more = pieces - ticket.pieces
        if more <= 0:
            return
        now_s = time.monotonic() - self._start_s
        seen = ticket.engine
        if ticket.pieces == 0:
            ticket.first_s = now_s
            if seen is not None and seen.position >= 0:
                self.records.first_token(ticket.row, now_s)
                self.records.more_tokens(ticket.row, more - 1)
                ticket.mark = seen.load.mark()
            ticket.pieces = pieces
            self.offer()
        elif seen is not None and seen.position >= 0:
            self.records.more_tokens(ticket.row, more)
        ticket.pieces = pieces
        ticket.last_s = now_s

    async def failed(self, ticket: Ticket, fault: Fault, *, again: bool) -> None:
        """An attempt failed before its client got anything: the request may go elsewhere.

        Parameters
        ----------
        again
            Whether it may go to the same engine as well.
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
        self.offer()

    def _back(self, ticket: Ticket) -> None:
        if ticket.engine is not None:
            ticket.engine.tickets.discard(ticket)
            ticket.engine = None
            self.away -= 1

    def leave(self, ticket: Ticket, outcome: str, usage: Usage | None = None) -> None:
        """A request that has asked for a place has ended.

        Parameters
        ----------
        outcome
            How, see :data:`hetero.apps.serving.metrics.OUTCOMES`.
        usage
            What its engine has counted, if it was finished.
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
        if ticket.guilty:
            self.mend()
        if self.request_log is not None:
            self.request_log.write(ticket, outcome, outputs, now_s)
        if ticket not in self.tickets:
            return
        self._stop_waiting(ticket)
        self.tickets.discard(ticket)
        self._back(ticket)
        self.records.close(
            ticket.row, now_s, ticket.input_tokens, outputs, finished=usage is not None
        )
        if usage is not None and seen is not None and ticket.asked.stream:
            self._teach(ticket, seen, outputs)
        self.offer()

    def _served(self, ticket: Ticket, seen: Seen, usage: Usage, now_s: float) -> int:
        """Count a request that was answered in full; returns its output tokens."""
        if usage.input_tokens:
            ticket.input_tokens = usage.input_tokens
            if ticket.path not in WITHOUT_OUTPUT:
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
