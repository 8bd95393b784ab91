"""Saturation found by bisection, against closed forms of replicas that serve one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import RoundRobin, WeightedRoundRobin
from hetero.simulator import simulate
from hetero.simulator.sustained import SustainedRule, saturation
from hetero.workload import Trace

PRECISION = 0.01
RULE = SustainedRule(precision=PRECISION)


def server(name: str, service_s: float) -> Replica:
    """Serves prompts of 100 tokens one by one, each in ``service_s``."""
    step = StepModel.affine(floor_s=service_s, per_token_s=0.0, per_cached_token_s=0.0)
    return Replica(name, step, kv_tokens=10_000, engine=Engine(max_step_tokens=100))


def even(count: int = 4000) -> Trace:
    """One-token answers at even gaps."""
    return Trace(np.arange(count, dtype=float), [100] * count, [1] * count)


@pytest.mark.parametrize("over", [1.25, 2.0, 5.0])
def test_growth_of_an_overloaded_server(over: float) -> None:
    one = Deployment("one", (server("a", 0.1),))
    run = simulate(one, even().rescale(rate_rps=10.0 * over), RoundRobin())
    assert RULE.judge(run).growth == pytest.approx(1.0 - 1.0 / over, abs=2e-3)


def test_a_server_that_keeps_up_does_not_grow() -> None:
    one = Deployment("one", (server("a", 0.1),))
    run = simulate(one, even().rescale(rate_rps=9.9), RoundRobin())
    assert RULE.judge(run).growth == pytest.approx(0.0, abs=1e-3)


def test_one_server_saturates_at_its_service_rate() -> None:
    one = Deployment("one", (server("a", 0.1),))
    found = saturation(one, even(), RoundRobin(), precision=PRECISION)
    # Beyond its rate the backlog grows by more than noise, of which the rule allows for.
    assert 10.0 * (1.0 - PRECISION) < found.rate_rps < 10.0 * (1.0 + 3.0 * PRECISION)


def test_the_slow_replica_limits_rotation_and_not_weighted_rotation() -> None:
    fleet = Deployment("two", (server("slow", 0.1), server("fast", 0.1 / 3.0)))
    rotation = saturation(fleet, even(), RoundRobin(), precision=PRECISION)
    weighted = saturation(fleet, even(), WeightedRoundRobin((1.0, 3.0)), precision=PRECISION)
    assert 20.0 * (1.0 - PRECISION) < rotation.rate_rps < 20.0 * (1.0 + 5.0 * PRECISION)
    assert 40.0 * (1.0 - PRECISION) < weighted.rate_rps < 40.0 * (1.0 + 3.0 * PRECISION)


def test_the_order_and_the_rate_of_a_trace_do_not_matter() -> None:
    one = Deployment("one", (server("a", 0.1),))
    found = saturation(one, even(), RoundRobin())
    assert saturation(one, even().rescale(rate_rps=77.0), RoundRobin()).tried == found.tried


def test_the_bracket_is_as_narrow_as_asked_and_told_in_the_table() -> None:
    one = Deployment("one", (server("a", 0.1),))
    found = saturation(one, even(), RoundRobin(), precision=PRECISION)
    above = min(rate for rate, seen in found.tried if not seen.sustained)
    below = max(rate for rate, seen in found.tried if seen.sustained)
    assert found.rate_rps == below < above <= below * (1.0 + PRECISION)
    assert [row[2] for row in found.table().rows] == [one.sustained for _, one in found.tried]


def test_rejected_requests_take_no_place() -> None:
    one = Deployment("one", (server("a", 0.1),))
    count = 4000
    tokens = np.where(np.arange(count) % 2, 100, 20_000)
    trace = Trace(np.arange(count, dtype=float), tokens, [1] * count)
    # Every other request fits nowhere, so twice the rate is the server's own.
    found = saturation(one, trace, RoundRobin(), precision=PRECISION)
    assert 20.0 * (1.0 - 2.0 * PRECISION) < found.rate_rps < 20.0 * (1.0 + 5.0 * PRECISION)


def test_what_cannot_be_found_is_said() -> None:
    one = Deployment("one", (server("a", 0.1),))
    with pytest.raises(ParameterError, match="cannot be judged to 0"):
        saturation(one, even(), RoundRobin(), precision=0.0)
    too_long = Trace(np.arange(200.0), [20_000] * 200, [1] * 200)
    with pytest.raises(ParameterError, match="rejects every request"):
        saturation(one, too_long, RoundRobin())
