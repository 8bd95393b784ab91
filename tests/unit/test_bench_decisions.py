"""Dispatchers that hear of each other decide as one; those that never do are worse off."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.routers import LeastRequests
from hetero.simulator import simulate
from pipelines.bench.decisions import Dispatchers
from tests.unit.router_states import fleet, trace


def test_two_that_hear_of_each_other_at_once_are_one():
    deployment, served = fleet(), trace(count=600, rate_rps=12.0)
    one = simulate(deployment, served, LeastRequests())
    assert one.finished.all()

    def run(processes, delay_s):
        made = Dispatchers(deployment, served, "least-requests", processes, delay_s)
        found = simulate(deployment, served, made)
        assert len(made.log) == 3 * 600  # each sent, with its first token, ended
        return found

    for processes in (1, 2, 5):
        assert np.array_equal(run(processes, 0.0).requests["node"], one.requests["node"])
    late, never = run(2, 5.0), run(2, None)
    assert not np.array_equal(late.requests["node"], one.requests["node"])
    assert not np.array_equal(never.requests["node"], one.requests["node"])
