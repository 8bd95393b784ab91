"""The two ways to route: a built-in router in compiled code, or one call into Python each."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.engine import dispatcher_queue, state
from hetero.engine.replica import advance_all
from hetero.errors import ParameterError
from hetero.routers.base import FleetState, Live, Request, Router
from hetero.simulator import loop
from hetero.simulator.loop import missed_for_certain
from hetero.simulator.metrics import Slo
from hetero.workload import Trace

CHECKS: Final = 16
"""Times that a run is looked at."""
_ROUNDED = 1.0 + 1e-9  # beyond its target a time has missed it, whatever is rounded later


class MissedError(Exception):
    """A run cannot meet its goal any more.

    Attributes
    ----------
    attained
        Share of the requests that may have met their targets: of all that count or, where a part
        of them decided, of those.
    """

    def __init__(self, attained: float) -> None:
        super().__init__(f"at most {attained:.4g} of the requests can meet their targets")
        self.attained = attained


@dataclass(frozen=True, slots=True)
class Watch:
    """Raises :class:`MissedError` when more requests have missed a target than may.

    What it counts has been missed for certain: a first token or a finish that was late, a rejected
    request, or one that is still held when its first token was due. So a run that goes on to its
    end is the same as without it.

    Attributes
    ----------
    first, last
        First request that counts, and the first after it that does not.
    needed
        Share of them that has to meet every target.
    early
        Shares of the run, and of the requests that counted by then that may have missed.
    """

    slo: Slo
    first: int
    last: int
    needed: float
    early: tuple[tuple[float, float], ...] = ()

    def look(self, requests: Any, engines: Any, come: int) -> None:
        """Count among the requests that have come, the last of them just now."""
        slo, stop = self.slo, min(come, self.last)
        targets = (slo.ttft_s, slo.tpot_s, slo.e2e_s)
        limits = [math.inf if one is None else one * _ROUNDED for one in targets]
        # Times here lack the way back, which may differ between two phases.
        ways_s = float(engines["way_s"].max())
        now_s = float(requests["arrival_s"][come - 1])
        missed = int(missed_for_certain(requests, self.first, stop, now_s, ways_s, *limits))
        count, so_far = self.last - self.first, stop - self.first
        if missed > (1.0 - self.needed) * count + 0.5:
            raise MissedError(1.0 - missed / count)
        if any(come >= at * len(requests) and missed > most * so_far for at, most in self.early):
            raise MissedError(1.0 - missed / so_far)


Progress: TypeAlias = Callable[[int], None]
"""Called with the number of requests just routed."""

_NONE = np.empty(0, np.int64)
_CHUNK = 65536  # requests between two reports of progress


class Driver(ABC):
    """What both ways share: which request comes next, and when.

    Requests come when the trace says or, in a closed loop, when its clients send them.

    Attributes
    ----------
    next
        The first request that has not come yet.
    watch
        What may end the run.
    """

    watch: Watch | None = None

    def __init__(self, arrays: tuple[Any, ...], trace: Trace, progress: Progress | None) -> None:
        self.arrays = arrays
        self.requests, self.engines, self.replicas, self.floats, self.integers = arrays
        self.next = 0
        self.arrival_s, self.progress = trace.arrival_s, progress
        self.closed = trace.clients > 0
        count = min(trace.clients, len(trace))
        # See loop.answered; all clients are ready at time 0.
        self.loop = (np.zeros(count), np.zeros(2 + count, np.int64), float(trace.think_s))
        self.loop[1][0] = count

    @property
    def at_rest(self) -> bool:
        """Whether nothing goes on, and nothing will before the next event."""
        come = self.next == len(self.requests) or (self.closed and self.loop[1][0] == 0)
        ends = self.floats[: len(self.replicas)]
        return bool(come and not np.isfinite(ends).any() and self.integers[state.TRANSFERS] == 0)

    def play(self, until: float, *, inclusive: bool = False) -> None:
        """Route all requests that come before ``until``, or at it where it is inclusive."""
        end = len(self.requests)
        if not self.closed:
            end = int(np.searchsorted(self.arrival_s, until, "right" if inclusive else "left"))
        step = _CHUNK if self.progress else len(self.requests)
        step = max(1, len(self.requests) // CHECKS) if self.watch else step
        while True:
            start, stop = self.next, min(self.next + step, end)
            if self.closed:
                self.next = self.send(start, stop, until, inclusive)
            else:
                self.route(start, stop)
                self.next = stop
            if self.progress and self.next > start:
                self.progress(self.next - start)
            if self.watch and self.next > start:
                self.watch.look(self.requests, self.engines, self.next)
            if self.next < stop or stop == end:
                break
        self.wait(until)

    def fail_over(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""
        self.requeue(lost, t)
        if self.closed:
            loop.answered(self.requests, self.engines, self.integers, *self.loop, t)

    def drain(self, now_s: float) -> None:
        """Play everything to its end; the last event was at ``now_s``."""
        while True:
            self.play(np.inf)
            self.advance(np.inf)
            loop.give_up(self.requests, self.engines, self.integers)
            if self.next == len(self.requests):
                break
            # All clients waited for requests that were held for good: they go on.
            last_s = float(self.requests["arrival_s"][self.next - 1])
            now_s = max(now_s, last_s, float(self.replicas["clock_s"].max()))
            loop.answered(self.requests, self.engines, self.integers, *self.loop, now_s)

    @abstractmethod
    def route(self, start: int, stop: int) -> None:
        """Route requests as they arrive."""

    @abstractmethod
    def send(self, start: int, stop: int, until: float, inclusive: bool) -> int:
        """Route requests of a closed loop, see :func:`hetero.simulator.loop.closed_loop`."""

    @abstractmethod
    def wait(self, until: float) -> None:
        """Offer deferred requests again at every change up to ``until``."""

    @abstractmethod
    def requeue(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""

    @abstractmethod
    def advance(self, t: float) -> None:
        """Play all replicas up to ``t``."""


class Compiled(Driver):
    """Drives a built-in router: everything in compiled code."""

    def __init__(
        self,
        arrays: tuple[Any, ...],
        trace: Trace,
        progress: Progress | None,
        router: tuple[Floats, Floats, int],
    ) -> None:
        super().__init__(arrays, trace, progress)
        self.all = (*arrays, *router)

    def _drive(
        self,
        what: int,
        start: int = 0,
        stop: int = 0,
        t: float = -np.inf,
        inclusive: bool = False,
        lost: Ints = _NONE,
    ) -> int:
        return int(loop.drive(*self.all, what, start, stop, float(t), inclusive, lost, *self.loop))

    def route(self, start: int, stop: int) -> None:
        """Route requests as they arrive."""
        self._drive(loop.ROUTE, start, stop)

    def send(self, start: int, stop: int, until: float, inclusive: bool) -> int:
        """Route requests of a closed loop."""
        return self._drive(loop.SEND, start, stop, until, inclusive)

    def wait(self, until: float) -> None:
        """Offer deferred requests again at every change up to ``until``."""
        self._drive(loop.WAIT, t=until)

    def requeue(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""
        self._drive(loop.REQUEUE, t=t, lost=lost)

    def advance(self, t: float) -> None:
        """Play all replicas up to ``t``."""
        self._drive(loop.ADVANCE, t=t)


def _seen(values: Any) -> Any:
    """A view that a router can not write to."""
    (view := values.view()).flags.writeable = False
    return view


class Plain(Driver):
    """Drives a router written in Python: compiled replicas, one Python call per request."""

    def __init__(
        self, arrays: tuple[Any, ...], trace: Trace, progress: Progress | None, router: Router
    ) -> None:
        super().__init__(arrays, trace, progress)
        self.router = router
        engines, replicas = self.engines, self.replicas
        self.count = len(engines)
        self.log = int(engines["log"][0])
        self.seen = 0
        self.hooks = (
            getattr(router, "on_first_token", None),
            getattr(router, "on_finish", None),
        )
        self.eligible = np.zeros(self.count, np.bool_)
        self.known = np.zeros(self.count, np.int64)
        self.fleet = FleetState(
            now_s=0.0,
            outstanding=_seen(replicas["outstanding"]),
            outstanding_tokens=_seen(replicas["outstanding_tokens"]),
            waiting=_seen(replicas["waiting"]),
            running=_seen(replicas["running"]),
            kv_tokens=np.where(engines["role"] == state.DECODE_ONLY, -1, engines["kv_tokens"]),
            eligible=_seen(self.eligible),
            known_tokens=_seen(self.known),
            records=arrays if getattr(router, "oracle", isinstance(router, Live)) else None,
        )

    def _ask(self, request: Request, t: float) -> tuple[int, int | None]:
        """Replica, and decode replica where the router names one."""
        r = request.index
        loop.look(*self.arrays, r, t, self.eligible, self.known)
        self._tell()
        # One view for all decisions: building one costs more than most decisions.
        object.__setattr__(self.fleet, "now_s", t)
        chosen = self.router.choose(request, self.fleet)
        if isinstance(chosen, tuple):
            return self._pair(chosen, r)
        try:
            i = operator.index(chosen)
        except TypeError:
            i = self.count
        if not state.DEFER <= i < self.count:
            raise self._unknown(chosen, r)
        return i, None

    def _send(self, r: int, i: int, j: int | None, t: float) -> None:
        if j is None:
            loop.send_from(*self.arrays, r, i, t)
        else:
            loop.send(*self.arrays, r, i, j, t)

    def _pair(self, chosen: tuple[int, int], r: int) -> tuple[int, int]:
        """A prefill and a decode replica, checked."""
        try:
            i, j = (operator.index(one) for one in chosen)
        except (TypeError, ValueError):
            raise self._unknown(chosen, r) from None
        roles = self.arrays[1]["role"]
        known = 0 <= i < self.count and 0 <= j < self.count
        if not known or (roles[i], roles[j]) != (state.PREFILL_ONLY, state.DECODE_ONLY):
            raise self._unknown(chosen, r)
        return i, j

    def _unknown(self, chosen: object, r: int) -> ParameterError:
        return ParameterError(
            f"Router '{self.router.name}' chose {chosen!r} for request {r}.",
            resolve=f"return an index of 0 to {self.count - 1}, a pair of a prefill and a decode "
            f"replica, {state.REJECT} to reject or {state.DEFER} to hold it.",
        )

    def _tell(self) -> None:
        """Call the hooks for what has happened since, in order of time."""
        end = int(self.integers[state.LOGGED])
        if end == self.seen:
            return
        entries = self.integers[self.log + self.seen : self.log + end]
        self.seen = end
        index = np.where(entries >= 0, entries, ~entries)
        told = self.requests["status"][index] != state.REJECTED
        entries, index = entries[told], index[told]
        times = np.where(
            entries >= 0,
            self.requests["finish_s"][index],
            self.requests["first_token_s"][index],
        )
        for k in np.argsort(times, kind="stable").tolist():
            hook = self.hooks[int(entries[k] >= 0)]
            if hook is not None:
                hook(int(index[k]), float(times[k]))

    def _request(self, r: int) -> Request:
        row = self.requests[r]
        return Request(
            r, float(row["arrival_s"]), int(row["input_tokens"]), int(row["predicted_tokens"])
        )

    def route(self, start: int, stop: int) -> None:
        """Route requests as they arrive."""
        part = self.requests[start:stop]
        columns = (
            part[name].tolist() for name in ("arrival_s", "input_tokens", "predicted_tokens")
        )
        for r, (t, inputs, predicted) in enumerate(zip(*columns, strict=True), start):
            self.wait(t)
            self._send(r, *self._ask(Request(r, t, inputs, predicted), t), t)

    def send(self, start: int, stop: int, until: float, inclusive: bool) -> int:
        """Route requests of a closed loop."""
        ready, clients, _ = self.loop
        r = start
        while r < stop or stop == len(self.requests):
            due = float(loop.due_s(self.requests, ready, clients, r))
            t = float(dispatcher_queue.next_change_s(*self.arrays, min(due, until)))
            if t < np.inf:
                if self.integers[state.DEFERRED] > 0:
                    self._offer(t)
            elif due < until or (inclusive and due == until):
                t = due
                loop.send_next(self.requests, ready, clients, r)
                self._send(r, *self._ask(self._request(r), t), t)
                r += 1
            else:
                break
            loop.answered(self.requests, self.engines, self.integers, *self.loop, t)
        return r

    def wait(self, until: float) -> None:
        """Offer deferred requests again at every change up to ``until``."""
        while self.integers[state.DEFERRED] > 0:
            t = dispatcher_queue.next_change_s(*self.arrays, until)
            if t == np.inf:
                return
            self._offer(float(t))

    def _offer(self, t: float) -> None:
        """Offer deferred requests at ``t``, the oldest first, until the router defers one."""
        r, before = dispatcher_queue.first_deferred(self.requests, self.integers)
        while r >= 0:
            i, j = self._ask(self._request(r), t)
            if i == state.DEFER:
                return
            dispatcher_queue.drop(self.requests, self.integers, r, before)
            self._send(r, i, j, t)
            r, before = dispatcher_queue.first_deferred(self.requests, self.integers)

    def requeue(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""
        dispatcher_queue.merge(self.requests, self.integers, lost)
        r = int(dispatcher_queue.take_all(self.integers))
        asks = True
        while r >= 0:
            following = int(self.requests["link"][r])
            if asks or self.requests["reason"][r] != state.DEFERRED_FOR_GOOD:
                self._send(r, *self._ask(self._request(r), t), t)
                asks = asks and not dispatcher_queue.is_deferred(self.requests, r)
            else:
                dispatcher_queue.keep(self.requests, self.integers, r)
            r = following

    def advance(self, t: float) -> None:
        """Play all replicas up to ``t``."""
        advance_all(*self.arrays, t)

    def drain(self, now_s: float) -> None:
        """Play everything to its end; the last event was at ``now_s``."""
        super().drain(now_s)
        self._tell()
