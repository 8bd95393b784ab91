"""What is told of the dispatcher: what Prometheus reads, and the log of requests."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import prometheus_client as prometheus

from hetero.apps.serving.engines import Ticket
from hetero.errors import ParameterError

if TYPE_CHECKING:
    from hetero.apps.serving.dispatcher import Dispatcher

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DECISION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
#: How requests end; with those in flight they are all that came in.
OUTCOMES = ("finished", "failed", "cancelled", "refused")


class Meters:
    """Counters and times of a dispatcher; what it holds is read when it is asked for."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self._registry)
        gauge = partial(prometheus.Gauge, registry=self._registry)
        times = partial(prometheus.Histogram, registry=self._registry)
        self.received = counter("hetero_requests_received", "Requests that came in")
        self.ended = counter("hetero_requests", "Requests by how they ended", ["outcome"])
        self.attempts = counter("hetero_attempts", "Requests sent", ["engine", "outcome"])
        self._tokens = counter("hetero_tokens", "Tokens served", ["engine", "kind"])
        self.decision = times("hetero_decision_seconds", "Time of a decision", buckets=_DECISION)
        times = partial(times, labelnames=["engine"])
        self._ttft = times("hetero_ttft_seconds", "Arrival to first token", buckets=_SECONDS)
        self._tpot = times("hetero_tpot_seconds", "Time per later token", buckets=_STEPS)
        self._e2e = times("hetero_e2e_seconds", "Arrival to end", buckets=_SECONDS)
        self._flight = gauge("hetero_in_flight", "Requests in flight")
        self._held = gauge("hetero_held", "Requests held at the dispatcher")
        self.refits = counter("hetero_engine_refits", "Refits of its step model", ["engine"])
        self._engines = {
            name: gauge(f"hetero_engine_{name}", what, ["engine"])
            for name, what in (
                ("up", "1 where requests may go"),
                ("requests", "Requests there"),
                ("step_ratio", "Times of answers over those expected"),
                ("step_error", "Median share by which they differ"),
            )
        }
        for outcome in OUTCOMES:
            self.ended.labels(outcome)

    def served(self, ticket: Ticket, engine: str, now_s: float, inputs: int, outputs: int) -> None:
        """A request was answered in full."""
        self._tokens.labels(engine, "input").inc(inputs)
        self._tokens.labels(engine, "output").inc(outputs)
        self._e2e.labels(engine).observe(now_s - ticket.arrival_s)
        if ticket.asked.stream and ticket.first_s is not None:
            self._ttft.labels(engine).observe(ticket.first_s - ticket.arrival_s)
            if outputs > 1:
                self._tpot.labels(engine).observe((ticket.last_s - ticket.first_s) / (outputs - 1))

    def text(self, dispatcher: Dispatcher) -> bytes:
        """All of it in the format of Prometheus."""
        self._flight.set(len(dispatcher.tickets))
        self._held.set(len(dispatcher.held))
        for family in self._engines.values():
            family.clear()
        for seen in dispatcher.engines:
            name, learner = seen.backend.name, seen.learner
            found = (seen.open, len(seen.tickets), learner.ratio, learner.error)
            for family, value in zip(self._engines.values(), found, strict=True):
                family.labels(name).set(value)
            self.refits.labels(name)
        return prometheus.generate_latest(self._registry)


class RequestLog:
    """What became of each request, without any of its text: lines of JSON at the end of a file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ParameterError(
                f"The request log {path} cannot be written ({error.strerror}).",
                resolve="name another file as request_log, or leave it out.",
            ) from None
        self.close = self._file.close

    def write(self, ticket: Ticket, outcome: str, outputs: int, now_s: float) -> None:
        """A request has ended."""
        first_s, headers = ticket.first_s, ticket.asked.headers
        line = {
            "time": round(time.time(), 3),
            "id": headers.get("x-request-id", ""),
            "trace_id": headers.get("traceparent", "")[3:35] or None,
            "path": ticket.path,
            "client": ticket.client,
            "model": ticket.asked.model,
            "engine": ticket.engine.backend.name if ticket.engine else None,
            "outcome": outcome,
            "attempts": ticket.attempts,
            "input_tokens": ticket.input_tokens,
            "output_tokens": outputs,
            "ttft_s": None if first_s is None else round(first_s - ticket.arrival_s, 6),
            "e2e_s": round(now_s - ticket.arrival_s, 6),
        }
        with suppress(OSError):  # a full disk is no reason to answer nobody
            self._file.write(json.dumps(line) + "\n")
