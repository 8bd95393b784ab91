"""What the dispatcher knows of its engines, in the records that routers read.

The simulator plays an engine from event to event; here an engine is only seen from outside: what
was sent to it, when a request got its first token, each later piece, and its end. Before a decision
the records are brought up to date from that, by the rules by which the simulator forms batches:
requests without a first token that fit a step and the free cache are taken to be in prefill, the
others wait. Nothing is played: no step of a record ends before the engine has shown it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetero.deployment import Deployment
from hetero.engine import state
from hetero.engine.batch import charge, release
from hetero.engine.candidates import candidates
from hetero.engine.ends import note
from hetero.engine.limits import limits_of
from hetero.engine.steps import step_s
from hetero.routers.base import FleetState, Request


class Books:
    """Records of the requests in the house and of the engines.

    Parameters
    ----------
    deployment
        Engines that serve both phases.
    rows
        Requests kept at first; the oldest finished ones are dropped when they are used up.

    Examples
    --------
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> books = Books(Deployment("one", (Replica("a", step, kv_tokens=1000),)))
    >>> r = books.open(100, 10, 0.0)
    >>> books.send(r, 0, 0.0)
    >>> int(books.fleet.outstanding_tokens[0])
    110
    >>> books.first_token(r, 0.1)
    >>> books.close(r, 0.2, 98, 12)
    >>> int(books.fleet.outstanding[0])
    0
    """

    def __init__(self, deployment: Deployment, rows: int = 1024) -> None:
        count = len(deployment.replicas)
        self.deployment = deployment
        self.engines, self.replicas, self.floats, self.integers = state.build(
            [replica.step for replica in deployment.replicas],
            [limits_of(replica) for replica in deployment.replicas],
            link_latency_s=np.zeros((count, count)),
            link_s_per_token=np.zeros((count, count)),
            request_count=0,
        )
        self.requests = _blank(rows)
        self.next = self.oldest = 0
        self.longest = int(self.engines["kv_tokens"].max())
        self._eligible = np.zeros(count, np.bool_)
        # Requests without a first token, in the order they were sent, with their inputs.
        self._pending: list[dict[int, int]] = [{} for _ in range(count)]
        self._pending_tokens = [0] * count
        self._cached = [0] * count  # tokens of the requests that decode
        self._decoding = [0] * count
        self._since_s = [0.0] * count  # what is in prefill cannot have begun before
        self._usable = [True] * count
        self._changed = set(range(count))  # engines whose records are behind
        self._view()

    def _view(self) -> None:
        self.fleet = FleetState(
            now_s=0.0,
            outstanding=self.replicas["outstanding"],
            outstanding_tokens=self.replicas["outstanding_tokens"],
            waiting=self.replicas["waiting"],
            running=self.replicas["running"],
            kv_tokens=self.engines["kv_tokens"],
            eligible=self._eligible,
            known_tokens=np.zeros(len(self.engines), np.int64),
            records=(self.requests, self.engines, self.replicas, self.floats, self.integers),
        )

    # Requests -------------------------------------------------------------------------------

    def open(self, input_tokens: int, predicted_tokens: int, now_s: float) -> int:
        """Enter a request and return its row; see :attr:`full`.

        The engine has the last word on lengths: here they are cut to the largest cache, so that an
        estimate never turns a request away.
        """
        r, self.next = self.next, self.next + 1
        inputs = max(1, min(input_tokens, self.longest - 1))
        outputs = max(1, min(predicted_tokens, self.longest - inputs))
        row = self.requests[r]
        row["arrival_s"] = now_s
        row["input_tokens"] = inputs
        # The true output is not known yet; routers judge what fits by the predicted one.
        row["output_tokens"] = row["predicted_tokens"] = outputs
        return r

    @property
    def full(self) -> bool:
        """Whether :meth:`compact` is due before the next request."""
        return self.next >= len(self.requests)

    def compact(self) -> int:
        """Drop the oldest closed requests; by how much the rows of the others fall.

        What is in the house keeps its order. If that is more than half, the records grow.
        """
        status = self.requests["status"][: self.next]
        live = np.flatnonzero((status != state.FINISHED) & (status != state.REJECTED))
        by = int(live[0]) if len(live) else self.next
        kept = self.requests[by : self.next]
        grown = 2 * len(kept) > len(self.requests)
        fresh = _blank(2 * len(self.requests) if grown else len(self.requests))
        fresh[: len(kept)] = kept
        self.requests, self.next = fresh, len(kept)
        self._pending = [{r - by: n for r, n in one.items()} for one in self._pending]
        self._view()
        return by

    def send(self, r: int, i: int, now_s: float) -> None:
        """A request goes to engine ``i``."""
        row = self.requests[r]
        row["node"] = i
        row["status"] = state.WAITING
        row["reason"] = state.NO_REASON
        charge(self.requests, self.replicas[i], r)
        self._changed.add(i)
        if not self._pending[i]:
            self._since_s[i] = now_s
        inputs = int(row["input_tokens"])
        self._pending[i][r] = inputs
        self._pending_tokens[i] += inputs

    def first_token(self, r: int, now_s: float) -> None:
        """The engine has sent the first token of a request."""
        row = self.requests[r]
        i = int(row["node"])
        inputs = self._pending[i].pop(r, None)
        if inputs is None:
            return
        self._pending_tokens[i] -= inputs
        self._changed.add(i)
        self._since_s[i] = now_s
        row["first_token_s"] = now_s
        row["status"] = state.RUNNING
        row["done_tokens"] = 1
        self._cached[i] += inputs + 1
        self._decoding[i] += 1
        self.replicas["decoding_load"][i] += row["credit"]

    def more_tokens(self, r: int, count: int) -> None:
        """The engine has sent so many tokens more."""
        row = self.requests[r]
        row["done_tokens"] += count
        self._cached[row["node"]] += count
        self._changed.add(int(row["node"]))

    def close(
        self, r: int, now_s: float, input_tokens: int, output_tokens: int, *, finished: bool = True
    ) -> None:
        """A request has ended; its lengths as the engine counted them."""
        self.withdraw(r)
        row = self.requests[r]
        row["finish_s"] = now_s
        row["status"] = state.FINISHED if finished else state.REJECTED
        row["input_tokens"] = max(input_tokens, 1)
        row["output_tokens"] = max(output_tokens, 0)

    def withdraw(self, r: int) -> None:
        """Take a request back from its engine, or from those held."""
        row = self.requests[r]
        self.let_go(r)
        i = int(row["node"])
        if i < 0:
            return
        release(self.requests, self.replicas[i], r)
        self._changed.add(i)
        # Sums of parts do not come back to 0 by themselves.
        if not self.replicas["outstanding"][i]:
            self.replicas["load"][i] = 0.0
        inputs = self._pending[i].pop(r, None)
        if inputs is None:
            self._decoding[i] -= 1
            self._cached[i] -= int(row["input_tokens"]) + int(row["done_tokens"])
            left = self.replicas["decoding_load"][i] - row["credit"] if self._decoding[i] else 0.0
            self.replicas["decoding_load"][i] = left
        else:
            self._pending_tokens[i] -= inputs
        row["node"] = -1
        row["credit"] = 0.0
        row["done_tokens"] = 0
        row["status"] = state.NOT_ARRIVED

    def hold(self, r: int, *, deferred: bool) -> None:
        """A request waits at the dispatcher: its router deferred it, or no engine is up."""
        self.let_go(r)
        row = self.requests[r]
        row["status"] = state.HELD
        row["reason"] = state.DEFERRED_FOR_GOOD if deferred else state.NO_REPLICA
        self.integers[state.DEFERRED] += deferred

    def let_go(self, r: int) -> None:
        """A request is held no more."""
        row = self.requests[r]
        if row["status"] == state.HELD:
            self.integers[state.DEFERRED] -= row["reason"] == state.DEFERRED_FOR_GOOD
            row["status"] = state.NOT_ARRIVED

    # Engines --------------------------------------------------------------------------------

    def look(self, r: int, now_s: float, usable: list[bool]) -> bool:
        """Bring the records to ``now_s`` for a decision on ``r``; whether any engine can take it.

        Parameters
        ----------
        usable
            Whether each engine is up and this request may go there.
        """
        for i, up in enumerate(usable):
            if up != self._usable[i]:
                self._changed.add(i)
        self._usable = usable
        # What is in prefill and late ends its step any moment.
        self._changed.update(np.flatnonzero(self.floats[: len(usable)] <= now_s).tolist())
        for i in self._changed:
            self._observe(i, now_s, usable[i])
            note(self.engines[i], self.integers)
        self._changed.clear()
        candidates(self.requests, self.engines, self.replicas, r, self._eligible)
        object.__setattr__(self.fleet, "now_s", now_s)
        return bool(self._eligible.any())

    def request(self, r: int) -> Request:
        """What a router is told of a request."""
        row = self.requests[r]
        return Request(
            r, float(row["arrival_s"]), int(row["input_tokens"]), int(row["predicted_tokens"])
        )

    def _observe(self, i: int, now_s: float, up: bool) -> None:
        e, s = self.engines[i], self.replicas[i]
        running, cached = self._decoding[i], self._cached[i]
        chunked = e["batching"] == state.CHUNKED
        slots = int(e["max_batch"]) - running
        budget = int(e["max_step_tokens"]) - (running if chunked else 0)
        free = int(e["kv_tokens"]) - cached
        count = tokens = 0
        pairs = 0.0
        for inputs in self._pending[i].values():
            if count >= slots or tokens + inputs > free or (count and tokens >= budget):
                break
            count += 1
            tokens += inputs
            pairs += 0.5 * inputs * inputs
        s["running"] = running
        s["cached"] = cached
        s["waiting"] = len(self._pending[i]) - count
        s["waiting_tokens"] = self._pending_tokens[i] - tokens
        end = np.inf
        if not up:
            mode = state.DOWN
        elif count:
            mode = state.IN_PREFILL
            decoding = running if chunked else 0
            takes = step_s(e, self.floats, tokens + decoding, decoding, cached, pairs)
            # An engine that is late ends its step any moment, but has not yet.
            end = max(self._since_s[i] + takes, np.nextafter(now_s, np.inf))
        else:
            mode = state.IN_DECODE if running else state.IDLE
        s["mode"] = mode
        self.floats[i] = end


def _blank(rows: int) -> Any:
    nothing = np.zeros(rows)
    whole = np.zeros(rows, np.int32)
    return state.requests(nothing, whole, whole, whole)
