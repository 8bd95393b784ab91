"""The two ways to route: a built-in router in compiled code, or one call into Python each."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.engine import held, state
from hetero.engine.replica import advance_all
from hetero.errors import ParameterError
from hetero.routers.base import FleetState, Request, Router
from hetero.simulator import loop

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Compiled:
    """Drives a built-in router: everything in compiled code."""

    def __init__(self, arrays: tuple[Any, ...], code: int, memory: Floats, draws: Floats) -> None:
        self.arrays = (*arrays, memory, draws, code)

    def route(self, start: int, stop: int) -> None:
        """Route requests as they arrive."""
        loop.arrivals(*self.arrays, start, stop)

    def wait(self, until: float) -> None:
        """Offer deferred requests again at every change up to ``until``."""
        loop.offer_until(*self.arrays, until)

    def requeue(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""
        loop.requeue(*self.arrays, lost, t)

    def drain(self) -> None:
        """Play everything to its end."""
        self.wait(np.inf)
        advance_all(*self.arrays[:5], np.inf)
        loop.give_up(self.arrays[0], self.arrays[4])


class Plain:
    """Drives a router written in Python: compiled replicas, one Python call per request."""

    def __init__(self, arrays: tuple[Any, ...], router: Router) -> None:
        self.arrays, self.router = arrays, router
        self.requests, engines, replicas, _, self.integers = arrays
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
            outstanding=replicas["outstanding"],
            outstanding_tokens=replicas["outstanding_tokens"],
            waiting=replicas["waiting"],
            running=replicas["running"],
            kv_tokens=np.where(engines["role"] == state.DECODE_ONLY, -1, engines["kv_tokens"]),
            eligible=self.eligible,
            known_tokens=self.known,
            records=arrays,
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

    def wait(self, until: float) -> None:
        """Offer deferred requests again at every change up to ``until``."""
        while self.integers[state.DEFERRED] > 0:
            t = held.next_change_s(*self.arrays, until)
            if t == np.inf:
                return
            self._offer(float(t))

    def _offer(self, t: float) -> None:
        """Offer deferred requests at ``t``, the oldest first, until the router defers one."""
        r, before = held.first_deferred(self.requests, self.integers)
        while r >= 0:
            i, j = self._ask(self._request(r), t)
            if i == state.DEFER:
                return
            held.drop(self.requests, self.integers, r, before)
            self._send(r, i, j, t)
            r, before = held.first_deferred(self.requests, self.integers)

    def requeue(self, lost: Ints, t: float) -> None:
        """Route requests that lost their replica at ``t``, and those that are held."""
        held.merge(self.requests, self.integers, lost)
        r = int(held.take_all(self.integers))
        asks = True
        while r >= 0:
            following = int(self.requests["link"][r])
            if asks or self.requests["reason"][r] != state.DEFERRED_FOR_GOOD:
                self._send(r, *self._ask(self._request(r), t), t)
                asks = asks and not held.is_deferred(self.requests, r)
            else:
                held.keep(self.requests, self.integers, r)
            r = following

    def drain(self) -> None:
        """Play everything to its end."""
        self.wait(np.inf)
        advance_all(*self.arrays, np.inf)
        loop.give_up(self.requests, self.integers)
        self._tell()
