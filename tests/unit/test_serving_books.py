"""The books of the dispatcher against the simulator, which knows what engines really hold."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving.books import Books
from hetero.engine import state
from hetero.routers import (
    HeteroServe,
    LeastRequests,
    LeastTokens,
    Predictive,
    RoundRobin,
    Workload,
)
from hetero.simulator import simulate
from tests.unit.router_states import fleet, trace


class Mirror:
    """Decides in the simulator and on books that see only first tokens and finishes."""

    name = "mirror"

    def __init__(self, router, deployment, served):
        self.true = router.live(deployment)
        self.seen = router.live(deployment)
        self.books = Books(deployment, rows=256)
        self.rows, self.outputs, self.inputs = {}, served.output_tokens, served.input_tokens
        self.agreed = []

    def choose(self, request, known):
        books = self.books
        if books.full:
            by = books.compact()
            self.seen.renumber(by)
            self.rows = {k: r - by for k, r in self.rows.items()}
        if request.index not in self.rows:
            self.rows[request.index] = books.open(
                request.input_tokens, request.predicted_tokens, known.now_s
            )
        r = self.rows[request.index]
        assert books.look(r, known.now_s, [True] * len(known.eligible))
        assert np.array_equal(books.fleet.outstanding, known.outstanding)
        assert np.array_equal(books.fleet.outstanding_tokens, known.outstanding_tokens)
        assert np.array_equal(books.fleet.running, known.running)
        chosen = self.true.choose(request, known)
        guessed = self.seen.choose(books.request(r), books.fleet)
        self.agreed.append(chosen == guessed)
        if chosen >= 0:
            # Where they differ, the credit of the books belongs to another engine.
            books.requests["credit"][r] = known.records[0]["credit"][request.index]
            books.send(r, chosen, known.now_s)
        else:
            books.hold(r, deferred=True)
        return chosen

    def on_first_token(self, index, now_s):
        self.books.first_token(self.rows[index], now_s)

    def on_finish(self, index, now_s):
        r = self.rows.pop(index)
        self.books.first_token(r, now_s)  # replies of one token have both at once
        self.books.close(r, now_s, int(self.inputs[index]), int(self.outputs[index]))


@pytest.mark.parametrize(
    ("router", "least"),
    [
        (RoundRobin(), 1.0),
        (LeastRequests(), 1.0),
        (LeastTokens(), 1.0),
        (Workload(), 1.0),
        # These two look at queues and prefills, which can only be inferred from outside.
        (HeteroServe(), 0.95),
        (Predictive(), 0.75),
    ],
)
def test_routers_decide_as_in_the_simulator_from_what_a_dispatcher_sees(router, least):
    deployment, served = fleet(), trace(count=1200, rate_rps=12.0)
    mirror = Mirror(router, deployment, served)
    run = simulate(deployment, served, mirror)
    assert run.finished.all()
    assert len(mirror.agreed) >= 1200
    assert np.mean(mirror.agreed) >= least
    assert not mirror.rows
    books = mirror.books
    for name in ("outstanding", "outstanding_tokens"):
        assert not books.replicas[name].any()
    assert not books.replicas["load"].any()
    assert books.integers[state.DEFERRED] == 0


def test_an_engine_that_is_late_is_never_played_on():
    books = Books(fleet())
    first = books.open(500, 50, 0.0)
    books.send(first, 0, 0.0)
    r = books.open(10, 10, 0.0)
    live = Predictive().live(books.deployment)
    for now_s in (0.1, 1e3, 1e6):
        books.look(r, now_s, [True] * 4)
        assert 0 <= live.choose(books.request(r), books.fleet) < 4
        assert books.requests["status"][first] == state.WAITING
        assert books.replicas["mode"][0] == state.IN_PREFILL
        assert books.replicas["outstanding"][0] == 1


def test_requests_that_move_or_end_early_leave_no_trace():
    books = Books(fleet())
    rows = [books.open(100, 10, 0.0) for _ in range(4)]
    books.send(rows[0], 0, 0.0)
    books.withdraw(rows[0])  # failed there
    books.send(rows[0], 1, 0.1)
    books.first_token(rows[0], 0.2)
    books.more_tokens(rows[0], 5)
    books.hold(rows[1], deferred=True)
    books.hold(rows[1], deferred=False)
    books.hold(rows[2], deferred=True)
    assert books.integers[state.DEFERRED] == 1
    books.close(rows[2], 0.3, 100, 0, finished=False)  # its client has gone
    books.close(rows[0], 0.3, 90, 7)
    books.let_go(rows[1])
    books.look(rows[1], 0.4, [True] * 4)
    assert books.integers[state.DEFERRED] == 0
    for name in (
        *("outstanding", "outstanding_tokens", "running", "cached", "waiting"),
        "decoding_load",
    ):
        assert not books.replicas[name].any(), name
    assert not books.look(rows[1], 0.5, [False] * 4)


def test_sums_of_parts_come_back_to_zero():
    books = Books(fleet())
    rows = [books.open(100, 10, 0.0) for _ in range(30)]
    for k, r in enumerate(rows):
        books.requests["credit"][r] = 0.1 + 0.01 * k
        books.send(r, 0, 0.0)
        books.first_token(r, 0.1)
    for r in rows:
        books.close(r, 1.0, 100, 10)
    assert books.replicas["load"][0] == books.replicas["decoding_load"][0] == 0.0
