"""What Prometheus reads of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hetero.apps.serving.dispatcher import Dispatcher
    from hetero.apps.serving.tickets import Ticket

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DECISION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
#: How requests end; with those in the house they are all that came in.
OUTCOMES = ("finished", "failed", "cancelled", "refused")


@cache  # each costs as much as all else that is counted of a request
def _of(counter: Any, *labels: str) -> Any:
    return counter.labels(*labels)


class Meters(Collector):
    """Counters and times of a dispatcher; what it holds is read when it is asked for."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.registry = CollectorRegistry()
        here = self.registry
        self.received = Counter("hetero_requests_received", "Requests that came in", registry=here)
        self._ended = Counter(
            "hetero_requests", "Requests by how they ended", ["outcome"], registry=here
        )
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        self._attempts = Counter(
            "hetero_attempts", "Requests sent to an engine", ["engine", "outcome"], registry=here
        )
        self._tokens = Counter("hetero_tokens", "Tokens served", ["engine", "kind"], registry=here)
        self._ttft = Histogram(
            "hetero_ttft_seconds", "Arrival to first token", registry=here, buckets=_SECONDS
        )
        self._tpot = Histogram(
            "hetero_tpot_seconds", "Time per later token", registry=here, buckets=_STEPS
        )
        self._e2e = Histogram(
            "hetero_e2e_seconds", "Arrival to end", registry=here, buckets=_SECONDS
        )
        self._decision = Histogram(
            "hetero_decision_seconds", "Time of a decision", registry=here, buckets=_DECISION
        )
        self._mends = Counter(
            "hetero_plan_mends", "Times that the plan followed", ["cause"], registry=here
        )
        for cause in ("engines", "lengths"):
            self._mends.labels(cause)
        here.register(self)

    def mended(self, cause: str) -> None:
        """The plan has followed engines that came or went, or requests of other lengths."""
        self._mends.labels(cause).inc()

    def decision(self, seconds: float) -> None:
        """A router has chosen."""
        self._decision.observe(seconds)

    def attempt(self, engine: str, outcome: str) -> None:
        """An engine has answered, or failed to."""
        _of(self._attempts, engine, outcome).inc()

    def ended(self, outcome: str) -> None:
        """A request has ended."""
        _of(self._ended, outcome).inc()

    def served(self, ticket: Ticket, engine: str, now_s: float, inputs: int, outputs: int) -> None:
        """A request was answered in full."""
        _of(self._tokens, engine, "input").inc(inputs)
        _of(self._tokens, engine, "output").inc(outputs)
        self._e2e.observe(now_s - ticket.arrival_s)
        if ticket.asked.stream and ticket.first_s is not None:
            self._ttft.observe(ticket.first_s - ticket.arrival_s)
            if outputs > 1:
                self._tpot.observe((ticket.last_s - ticket.first_s) / (outputs - 1))

    def collect(self) -> Iterable[Metric]:
        """What the dispatcher holds now."""
        dispatcher = self._dispatcher
        yield GaugeMetricFamily(
            "hetero_in_house", "Requests in the house", value=len(dispatcher.tickets)
        )
        yield GaugeMetricFamily(
            "hetero_held", "Requests held at the dispatcher", value=len(dispatcher.held)
        )
        up = GaugeMetricFamily("hetero_engine_up", "1 where requests may go", labels=["engine"])
        busy = GaugeMetricFamily("hetero_engine_requests", "Requests there", labels=["engine"])
        for seen in dispatcher.engines:
            up.add_metric([seen.backend.name], float(seen.open))
            busy.add_metric([seen.backend.name], len(seen.tickets))
        yield up
        yield busy
        plan = dispatcher.plan
        share = GaugeMetricFamily(
            "hetero_engine_share", "Planned share of the requests", labels=["engine"]
        )
        for name, value in zip(plan.names, plan.shares, strict=True):
            share.add_metric([name], value)
        yield share
        yield GaugeMetricFamily(
            "hetero_plan_capacity_rps", "Requests per second planned", value=plan.capacity_rps
        )

    def text(self) -> bytes:
        """All of it in the format of Prometheus."""
        return generate_latest(self.registry)
