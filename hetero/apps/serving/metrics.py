"""What Prometheus reads of the dispatcher."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import prometheus_client as prometheus

from hetero.apps.serving.tickets import Ticket

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
