"""What Prometheus reads of the dispatcher."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hetero.apps.serving.dispatcher import Dispatcher
    from hetero.apps.serving.tickets import Ticket

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DECISION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
#: How requests end; with those in flight they are all that came in.
OUTCOMES = ("finished", "failed", "cancelled", "refused")


class _Times:
    """A histogram; a lock and a label for each value would cost as much as a decision."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def into(self, family: HistogramMetricFamily, *labels: str) -> None:
        names = [*map(str, self._bounds), "+Inf"]
        family.add_metric(labels, [*zip(names, accumulate(self._counts), strict=True)], self._sum)


class Meters(Collector):
    """Counters and times of a dispatcher; what it holds is read when it is asked for."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.received = 0
        self._ended = dict.fromkeys(OUTCOMES, 0)
        self._mends = dict.fromkeys(("engines", "lengths", "steps"), 0)
        self._attempts: dict[tuple[str, str], int] = {}
        self._tokens: dict[tuple[str, str], int] = {}
        self._decision = _Times(_DECISION)
        # By engine: to the first token, per later token, and to the end.
        self._times: dict[str, tuple[_Times, _Times, _Times]] = {}

    def mended(self, cause: str) -> None:
        """The plan has followed engines that came or went, or requests of other lengths."""
        self._mends[cause] += 1

    def decision(self, seconds: float) -> None:
        """A router has chosen."""
        self._decision.add(seconds)

    def attempt(self, engine: str, outcome: str) -> None:
        """An engine has answered, or failed to."""
        self._attempts[engine, outcome] = self._attempts.get((engine, outcome), 0) + 1

    def ended(self, outcome: str) -> None:
        """A request has ended."""
        self._ended[outcome] += 1

    def served(self, ticket: Ticket, engine: str, now_s: float, inputs: int, outputs: int) -> None:
        """A request was answered in full."""
        for kind, count in (("input", inputs), ("output", outputs)):
            self._tokens[engine, kind] = self._tokens.get((engine, kind), 0) + count
        times = self._times.get(engine)
        if times is None:
            times = self._times[engine] = _Times(_SECONDS), _Times(_STEPS), _Times(_SECONDS)
        times[2].add(now_s - ticket.arrival_s)
        if ticket.asked.stream and ticket.first_s is not None:
            times[0].add(ticket.first_s - ticket.arrival_s)
            if outputs > 1:
                times[1].add((ticket.last_s - ticket.first_s) / (outputs - 1))

    def collect(self) -> Iterable[Metric]:
        """What has been counted, and what the dispatcher holds now."""
        dispatcher, plan = self._dispatcher, self._dispatcher.plan
        yield _counter("hetero_requests_received", "Requests that came in", {(): self.received})
        yield _counter("hetero_requests", "Requests by how they ended", self._ended, "outcome")
        yield _counter("hetero_attempts", "Requests sent", self._attempts, "engine", "outcome")
        yield _counter("hetero_tokens", "Tokens served", self._tokens, "engine", "kind")
        yield _counter("hetero_plan_mends", "Times that the plan followed", self._mends, "cause")
        for k, (name, what) in enumerate(
            (
                ("hetero_ttft_seconds", "Arrival to first token"),
                ("hetero_tpot_seconds", "Time per later token"),
                ("hetero_e2e_seconds", "Arrival to end"),
            )
        ):
            family = HistogramMetricFamily(name, what, labels=["engine"])
            for engine, times in self._times.items():
                times[k].into(family, engine)
            yield family
        decisions = HistogramMetricFamily("hetero_decision_seconds", "Time of a decision")
        self._decision.into(decisions)
        yield decisions
        flight, held = len(dispatcher.tickets), len(dispatcher.held)
        yield _gauge("hetero_in_flight", "Requests in flight", {(): flight})
        yield _gauge("hetero_held", "Requests held at the dispatcher", {(): held})
        engines = {seen.backend.name: seen for seen in dispatcher.engines}
        up = {name: float(one.open) for name, one in engines.items()}
        yield _gauge("hetero_engine_up", "1 where requests may go", up, "engine")
        busy = {name: len(one.tickets) for name, one in engines.items()}
        yield _gauge("hetero_engine_requests", "Requests there", busy, "engine")
        learners = {name: one.learner for name, one in engines.items()}
        fitted = {name: one for name, one in learners.items() if one.ratio > 0.0}
        ratios = {name: one.ratio for name, one in fitted.items()}
        what = "Times of answers over those expected"
        yield _gauge("hetero_engine_step_ratio", what, ratios, "engine")
        errors = {name: one.error for name, one in fitted.items()}
        yield _gauge(
            "hetero_engine_step_error", "Median share by which they differ", errors, "engine"
        )
        refits = {name: one.refits for name, one in learners.items()}
        what = "Times that its step model was refitted"
        yield _counter("hetero_engine_refits", what, refits, "engine")
        shares = dict(zip(plan.names, plan.shares, strict=True))
        yield _gauge("hetero_engine_share", "Planned share of the requests", shares, "engine")
        capacity = {(): plan.capacity_rps}
        yield _gauge("hetero_plan_capacity_rps", "Requests per second planned", capacity)

    def text(self) -> bytes:
        """All of it in the format of Prometheus."""
        return generate_latest(self)


def _family(
    kind: Callable[..., Any], name: str, what: str, values: Mapping[Any, float], *labels: str
) -> Any:
    """Values by their label, by several, or one without any."""
    family = kind(name, what, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


_counter = partial(_family, CounterMetricFamily)
_gauge = partial(_family, GaugeMetricFamily)
