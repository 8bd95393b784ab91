"""What the dispatcher knows of its engines, in the records that routers read.

The simulator plays an engine from event to event; here an engine is only seen from outside: what
was sent to it, when a request got its first token, each later piece, and its end. Before a decision
the records are brought up to date from that, by the rules by which the simulator forms batches:
requests without a first token that fit a step and the free cache are taken to be in prefill, the
others wait. No step is foretold: none of a record ends before the engine has shown it.

Where kernels are interpreted (:func:`hetero.engine.compiled.interpret`), as in the process that
serves, the records are objects of Python and the memories lists: an attribute costs a tenth of an
element of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import numpy as np

from hetero.apps.serving.learning import EngineWork
from hetero.deployment import Deployment
from hetero.engine import state
from hetero.engine.candidates import may_take
from hetero.engine.compiled import interpreted
from hetero.engine.limits import limits_of
from hetero.engine.steps import step_s


class FleetRecords:
    """Records of the requests in flight and of the engines.

    Parameters
    ----------
    rows
        Requests kept at first; the oldest finished ones are dropped when they are used up.

    Examples
    --------
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> records = FleetRecords(Deployment("one", (Replica("a", step, kv_tokens=1000),)))
    >>> r = records.open(100, 10, 0.0)
    >>> records.send(r, 0, 0.0)
    >>> int(records.replicas["outstanding_tokens"][0])
    110
    >>> records.first_token(r, 0.1)
    >>> records.close(r, 0.2, 98, 12)
    >>> int(records.replicas["outstanding"][0])
    0
    """

    def __init__(self, deployment: Deployment, rows: int = 1024) -> None:
        count = len(deployment.replicas)
        self.deployment = deployment
        engines, replicas, floats, integers = state.build(
            [replica.step for replica in deployment.replicas],
            [limits_of(replica) for replica in deployment.replicas],
            link_latency_s=np.zeros((count, count)),
            link_s_per_token=np.zeros((count, count)),
            request_count=0,
        )
        self.longest = int(engines["kv_tokens"].max())
        self._plain = interpreted()
        # What kernels are given, and the same records with their fields as attributes.
        self.engines: Any = [make() for make in _makers(engines)] if self._plain else engines
        self.replicas: Any = [make() for make in _makers(replicas)] if self._plain else replicas
        self.floats: Any = floats.tolist() if self._plain else floats
        self.integers: Any = integers.tolist() if self._plain else integers
        self._e = self.engines if self._plain else engines.view(np.recarray)
        self._s = self.replicas if self._plain else replicas.view(np.recarray)
        none = np.zeros(1, np.int32)
        self._blank = state.requests(np.zeros(1), none, none, none)
        self._new = _makers(self._blank)[0]  # what it holds are numbers, so none is shared
        self.requests: Any = []
        self._r: Any = self.requests
        self._keep([], rows)
        self.next = 0
        # Requests without a first token, in the order they were sent, with their inputs.
        self._pending: list[dict[int, int]] = [{} for _ in range(count)]
        self._pending_tokens = [0] * count
        self._cached = [0] * count  # tokens of the requests that decode
        self._decoding = [0] * count
        self._since_s = [0.0] * count  # what is in prefill cannot have begun before
        self.loads = [EngineWork() for _ in range(count)]  # what each engine has done
        self._up = [False] * count  # as the records have it,
        self._moved = set(range(count))  # and where they are behind
        self._ends_s: dict[int, float] = {}  # of the steps that prefill

    def _keep(self, kept: Any, rows: int) -> None:
        """Go over to these requests, with room for so many."""
        self.rows = rows
        if self._plain:
            self.requests = self._r = kept
        else:
            self.requests = np.repeat(self._blank, rows)
            self.requests[: len(kept)] = kept
            self._r = self.requests.view(np.recarray)

    @property
    def state(self) -> Any:
        """What the kernels of routers read."""
        return self.requests, self.engines, self.replicas, self.floats, self.integers

    def open(self, input_tokens: int, predicted_tokens: int, now_s: float) -> int:
        """Enter a request and return its row; see :attr:`full`.

        The engine has the last word on lengths: here they are cut to the largest cache, so that an
        estimate never turns a request away.
        """
        r, self.next = self.next, self.next + 1
        inputs = max(1, min(input_tokens, self.longest - 1))
        outputs = max(1, min(predicted_tokens, self.longest - inputs))
        if self._plain:
            self.requests.append(self._new())
        row = self._r[r]
        row.arrival_s = now_s
        row.input_tokens = inputs
        # The true output is not known yet; routers judge what fits by the predicted one.
        row.output_tokens = row.predicted_tokens = outputs
        return r

    @property
    def full(self) -> bool:
        """Whether :meth:`compact` is due before the next request."""
        return self.next >= self.rows

    def compact(self) -> int:
        """Drop the oldest closed requests; by how much the rows of the others fall.

        What is in flight keeps its order. If that is more than half, the records grow.
        """
        by = 0
        while by < self.next and self._r[by].status in (state.FINISHED, state.REJECTED):
            by += 1
        kept = self.requests[by : self.next]
        self.next = len(kept)
        self._keep(kept, 2 * self.rows if 2 * len(kept) > self.rows else self.rows)
        self._pending = [{r - by: n for r, n in one.items()} for one in self._pending]
        return by

    def send(self, r: int, i: int, now_s: float) -> None:
        """A request goes to engine ``i``."""
        row = self._r[r]
        row.node = i
        row.status = state.WAITING
        row.reason = state.NO_REASON
        self._charge(i, row, 1)
        if not self._pending[i]:
            self._since_s[i] = now_s
        inputs = int(row.input_tokens)
        self._pending[i][r] = inputs
        self._pending_tokens[i] += inputs

    def beside(self, i: int) -> tuple[int, int] | None:
        """Requests that decode at an engine, and their tokens; None unless one waits there."""
        return (self._decoding[i], self._cached[i]) if len(self._pending[i]) == 1 else None

    def _charge(self, i: int, row: Any, sign: int) -> None:
        """Count a request for its engine, or no more."""
        self._moved.add(i)
        s = self._s[i]
        s.load += sign * row.credit
        s.outstanding += sign
        s.outstanding_tokens += sign * (int(row.input_tokens) + int(row.predicted_tokens))

    def first_token(self, r: int, now_s: float) -> None:
        """The engine has sent the first token of a request."""
        row = self._r[r]
        i = int(row.node)
        inputs = self._pending[i].pop(r, None)
        if inputs is None:
            return
        self._moved.add(i)
        load = self.loads[i]
        load.until(now_s, self._decoding[i], self._cached[i])
        load.prompt(inputs)
        self._pending_tokens[i] -= inputs
        self._since_s[i] = now_s
        row.first_token_s = now_s
        row.status = state.RUNNING
        row.done_tokens = 1
        self._cached[i] += inputs + 1
        self._decoding[i] += 1
        load.held = self._cached[i]
        self._s[i].decoding_load += row.credit

    def more_tokens(self, r: int, count: int) -> None:
        """The engine has sent so many tokens more."""
        row = self._r[r]
        i = int(row.node)
        row.done_tokens += count
        self._cached[i] += count
        self._moved.add(i)

    def close(
        self, r: int, now_s: float, input_tokens: int, output_tokens: int, *, finished: bool = True
    ) -> None:
        """A request has ended; its lengths as the engine counted them."""
        self.withdraw(r, now_s)
        row = self._r[r]
        row.finish_s = now_s
        row.status = state.FINISHED if finished else state.REJECTED
        row.input_tokens = max(input_tokens, 1)
        row.output_tokens = max(output_tokens, 0)

    def withdraw(self, r: int, now_s: float = 0.0) -> None:
        """Take a request back from its engine, or from those held."""
        row = self._r[r]
        self.let_go(r)
        i = int(row.node)
        if i < 0:
            return
        self._charge(i, row, -1)
        # Sums of parts do not come back to 0 by themselves.
        if not self._s[i].outstanding:
            self._s[i].load = 0.0
        inputs = self._pending[i].pop(r, None)
        if inputs is None:
            load = self.loads[i]
            load.until(now_s, self._decoding[i], self._cached[i])
            self._decoding[i] -= 1
            self._cached[i] -= int(row.input_tokens) + int(row.done_tokens)
            load.held = self._cached[i]
            left = self._s[i].decoding_load - row.credit if self._decoding[i] else 0.0
            self._s[i].decoding_load = left
        else:
            self._pending_tokens[i] -= inputs
        row.node = -1
        row.credit = 0.0
        row.done_tokens = 0
        row.status = state.NOT_ARRIVED

    def hold(self, r: int, *, deferred: bool) -> None:
        """A request waits at the dispatcher: its router deferred it, or no engine is up."""
        self.let_go(r)
        row = self._r[r]
        row.status = state.HELD
        row.reason = state.DEFERRED_FOR_GOOD if deferred else state.NO_REPLICA
        self.integers[state.DEFERRED] += deferred

    def let_go(self, r: int) -> None:
        """A request is held no more."""
        row = self._r[r]
        if row.status == state.HELD:
            self.integers[state.DEFERRED] -= row.reason == state.DEFERRED_FOR_GOOD
            row.status = state.NOT_ARRIVED

    def look(self, r: int, now_s: float, usable: list[bool]) -> bool:
        """Bring the records to ``now_s`` for a decision on ``r``; whether any engine can take it.

        ``usable`` tells whether each engine is up and this request may go there.
        """
        if usable != self._up:
            pairs = enumerate(zip(usable, self._up, strict=True))
            self._moved.update(i for i, (now, before) in pairs if now != before)
        for i in self._moved:
            self._observe(i, usable[i])
        self._moved.clear()
        soon = math.nextafter(now_s, math.inf)
        for i, end_s in self._ends_s.items():
            # An engine that is late ends its step any moment, but has not yet.
            self.floats[i] = max(end_s, soon)
        records = self.requests, self.engines, self.replicas, r
        return any(may_take(*records, i) for i in range(len(self._up)))

    def _observe(self, i: int, up: bool) -> None:
        e, s = self._e[i], self._s[i]
        running, cached = self._decoding[i], self._cached[i]
        chunked = e.batching == state.CHUNKED
        slots = int(e.max_batch) - running
        budget = int(e.max_step_tokens) - (running if chunked else 0)
        free = int(e.kv_tokens) - cached
        count = tokens = 0
        pairs = 0.0
        for inputs in self._pending[i].values():
            if count >= slots or tokens + inputs > free or (count and tokens >= budget):
                break
            count += 1
            tokens += inputs
            pairs += 0.5 * inputs * inputs
        s.running = running
        s.cached = cached
        s.waiting = len(self._pending[i]) - count
        s.waiting_tokens = self._pending_tokens[i] - tokens
        self._up[i], self.floats[i] = up, math.inf
        self._ends_s.pop(i, None)
        if not up:
            mode = state.DOWN
        elif count:
            mode = state.IN_PREFILL
            decoding = running if chunked else 0
            takes = step_s(self.engines[i], self.floats, tokens + decoding, decoding, cached, pairs)
            self._ends_s[i] = self._since_s[i] + takes
        else:
            mode = state.IN_DECODE if running else state.IDLE
        s.mode = mode


def _makers(records: Any) -> list[Callable[[], Any]]:
    """Functions that make an object of each record, with its fields as attributes."""
    kind: Callable[..., Any] = make_dataclass("Row", records.dtype.names, slots=True, eq=False)
    # What a record holds several of comes as an array, of which each element would be costly too.
    rows = [
        [x.tolist() if isinstance(x, np.ndarray) else x for x in row] for row in records.tolist()
    ]
    return [partial(kind, *row) for row in rows]
