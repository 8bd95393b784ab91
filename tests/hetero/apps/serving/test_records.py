"""The records of the dispatcher against the simulator, which knows what engines really hold."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving.records import FleetRecords
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
from tests.hetero.routers.router_states import fleet, trace


class Mirror:
    """Decides in the simulator and on records that see only first tokens and finishes."""

    name, oracle = "mirror", True

    def __init__(self, router, deployment, served):
        self.true = router.live(deployment)
        self.seen = router.live(deployment)
        self.records = FleetRecords(deployment, rows=256)
        self.rows, self.outputs, self.inputs = {}, served.output_tokens, served.input_tokens
        self.agreed = []

    def choose(self, request, known):
        records = self.records
        if records.full:
            by = records.compact()
            self.seen.renumber(by)
            self.rows = {k: r - by for k, r in self.rows.items()}
        if request.index not in self.rows:
            self.rows[request.index] = records.open(
                request.input_tokens, request.predicted_tokens, known.now_s
            )
        r = self.rows[request.index]
        assert records.look(r, known.now_s, [True] * len(known.eligible))
        assert np.array_equal(records.replicas["outstanding"], known.outstanding)
        assert np.array_equal(records.replicas["outstanding_tokens"], known.outstanding_tokens)
        assert np.array_equal(records.replicas["running"], known.running)
        chosen = self.true.choose(request, known)
        guessed = self.seen.decide(records.state, r, known.now_s)
        self.agreed.append(chosen == guessed)
        if chosen >= 0:
            # Where they differ, the credit of the records belongs to another engine.
            records.requests["credit"][r] = known.records[0]["credit"][request.index]
            records.send(r, chosen, known.now_s)
        else:
            records.hold(r, deferred=True)
        return chosen

    def on_first_token(self, index, now_s):
        self.records.first_token(self.rows[index], now_s)

    def on_finish(self, index, now_s):
        r = self.rows.pop(index)
        self.records.first_token(r, now_s)  # replies of one token have both at once
        self.records.close(r, now_s, int(self.inputs[index]), int(self.outputs[index]))


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
    records = mirror.records
    for name in ("outstanding", "outstanding_tokens"):
        assert not records.replicas[name].any()
    assert not records.replicas["load"].any()
    assert records.integers[state.DEFERRED] == 0


def test_an_engine_that_is_late_is_not_run_ahead():
    records = FleetRecords(fleet())
    first = records.open(500, 50, 0.0)
    records.send(first, 0, 0.0)
    r = records.open(10, 10, 0.0)
    live = Predictive().live(records.deployment)
    for now_s in (0.1, 1e3, 1e6):
        records.look(r, now_s, [True] * 4)
        assert 0 <= live.decide(records.state, r, now_s) < 4
        assert records.requests["status"][first] == state.WAITING
        assert records.replicas["mode"][0] == state.IN_PREFILL
        assert records.replicas["outstanding"][0] == 1


def test_requests_that_move_or_end_early_leave_no_trace():
    records = FleetRecords(fleet())
    rows = [records.open(100, 10, 0.0) for _ in range(4)]
    records.send(rows[0], 0, 0.0)
    records.withdraw(rows[0])  # failed there
    records.send(rows[0], 1, 0.1)
    records.first_token(rows[0], 0.2)
    records.more_tokens(rows[0], 5)
    records.hold(rows[1], deferred=True)
    records.hold(rows[1], deferred=False)
    records.hold(rows[2], deferred=True)
    assert records.integers[state.DEFERRED] == 1
    records.close(rows[2], 0.3, 100, 0, finished=False)  # its client has gone
    records.close(rows[0], 0.3, 90, 7)
    records.let_go(rows[1])
    records.look(rows[1], 0.4, [True] * 4)
    assert records.integers[state.DEFERRED] == 0
    for name in (
        *("outstanding", "outstanding_tokens", "running", "cached", "waiting"),
        "decoding_load",
    ):
        assert not records.replicas[name].any(), name
    assert not records.look(rows[1], 0.5, [False] * 4)


def test_sums_of_parts_come_back_to_zero():
    records = FleetRecords(fleet())
    rows = [records.open(100, 10, 0.0) for _ in range(30)]
    for k, r in enumerate(rows):
        records.requests["credit"][r] = 0.1 + 0.01 * k
        records.send(r, 0, 0.0)
        records.first_token(r, 0.1)
    for r in rows:
        records.close(r, 1.0, 100, 10)
    assert records.replicas["load"][0] == records.replicas["decoding_load"][0] == 0.0
