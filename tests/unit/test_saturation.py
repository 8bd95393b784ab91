"""Saturation found by bisection, against closed forms of replicas that serve one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import RoundRobin, WeightedRoundRobin
from hetero.simulator import simulate
from hetero.simulator.saturation import backlog_growth, saturation
from hetero.workload import Trace

GROWTH = 0.02


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
    assert backlog_growth(run) == pytest.approx(1.0 - 1.0 / over, abs=2e-3)


def test_a_server_that_keeps_up_does_not_grow() -> None:
    one = Deployment("one", (server("a", 0.1),))
    run = simulate(one, even().rescale(rate_rps=9.9), RoundRobin())
    assert backlog_growth(run) == pytest.approx(0.0, abs=1e-3)


def test_one_server_saturates_at_its_service_rate() -> None:
    one = Deployment("one", (server("a", 0.1),))
    found = saturation(one, even(), RoundRobin(), growth=GROWTH, precision=0.001)
    # Growth g = 1 - mu / lambda reaches its limit at mu / (1 - g).
    assert found.rate_rps == pytest.approx(10.0 / (1.0 - GROWTH), rel=0.003)


def test_the_slow_replica_limits_rotation_and_not_weighted_rotation() -> None:
    fleet = Deployment("two", (server("slow", 0.1), server("fast", 0.1 / 3.0)))
    rotation = saturation(fleet, even(), RoundRobin(), growth=GROWTH, precision=0.001)
    weighted = saturation(
        fleet, even(), WeightedRoundRobin((1.0, 3.0)), growth=GROWTH, precision=0.001
    )
    # Half of all requests meet a server of 10 per second: g = (1 - 20 / lambda) / 2.
    assert rotation.rate_rps == pytest.approx(20.0 / (1.0 - 2.0 * GROWTH), rel=0.005)
    assert weighted.rate_rps == pytest.approx(40.0 / (1.0 - GROWTH), rel=0.005)


def test_random_arrivals_saturate_at_the_same_rate() -> None:
    one = Deployment("one", (server("a", 0.1),))
    trace = even(20_000).poisson(1.0, np.random.default_rng(3))
    assert saturation(one, trace, RoundRobin()).rate_rps == pytest.approx(10.0, rel=0.05)


def test_the_bracket_is_as_narrow_as_asked_and_told_in_the_table() -> None:
    one = Deployment("one", (server("a", 0.1),))
    found = saturation(one, even(), RoundRobin(), growth=GROWTH, precision=0.004)
    above = min(rate for rate, growth in found.tried if growth > GROWTH)
    below = max(rate for rate, growth in found.tried if growth <= GROWTH)
    assert found.rate_rps == below < above <= below * 1.004
    assert [row[2] for row in found.table().rows].count("yes") == sum(
        growth <= GROWTH for _, growth in found.tried
    )


def test_rejected_requests_are_no_backlog() -> None:
    one = Deployment("one", (server("a", 0.1),))
    count = 2000
    tokens = np.where(np.arange(count) % 2, 100, 20_000)
    trace = Trace(np.arange(count, dtype=float), tokens, [1] * count)
    # Every other request fits nowhere, so twice the rate is the server's own.
    found = saturation(one, trace, RoundRobin(), growth=GROWTH, precision=0.001)
    assert found.rate_rps == pytest.approx(20.0 / (1.0 - GROWTH), rel=0.005)


def test_what_cannot_be_found_is_said() -> None:
    one = Deployment("one", (server("a", 0.1),))
    with pytest.raises(ParameterError, match="99 requests do not show"):
        saturation(one, even(99), RoundRobin())
    with pytest.raises(ParameterError, match="shares between 0 and 1"):
        saturation(one, even(), RoundRobin(), growth=0.0)
    too_long = Trace(np.arange(200.0), [20_000] * 200, [1] * 200)
    with pytest.raises(ParameterError, match="rejects every request"):
        saturation(one, too_long, RoundRobin())
