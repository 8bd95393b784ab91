"""Saturation found by bisection, against closed forms of replicas that serve one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.plans import Plan
from hetero.question import Load, judged, sustained_rps
from hetero.routers import RoundRobin, WeightedRoundRobin
from hetero.simulator import Slo, simulate
from hetero.simulator.sustained import STRETCH, SustainedRule, arrivals, saturation
from hetero.workload import Trace

PRECISION = 0.01
RULE = SustainedRule(precision=PRECISION)


def server(name: str, service_s: float) -> Replica:
    """Serves prompts of 100 tokens one by one, each in ``service_s``."""
    step = StepModel.affine(floor_s=service_s, per_token_s=0.0, per_cached_token_s=0.0)
    return Replica(name, step, kv_tokens=10_000, engine=Engine(max_step_tokens=100))


ONE = Deployment("one", (server("a", 0.1),))


def even(count: int = 4000) -> Trace:
    """One-token answers at even gaps."""
    return Trace(np.arange(count, dtype=float), [100] * count, [1] * count)


@pytest.mark.parametrize("over", [0.99, 1.25, 2.0, 5.0])
def test_only_an_overloaded_server_grows(over: float) -> None:
    run = simulate(ONE, even().rescale(rate_rps=10.0 * over), RoundRobin())
    assert RULE.judge(run).growth == pytest.approx(max(1.0 - 1.0 / over, 0.0), abs=2e-3)


def test_one_server_saturates_at_its_rate_in_a_bracket_as_narrow_as_asked() -> None:
    found = saturation(ONE, even(), RoundRobin(), precision=PRECISION)
    # Beyond its rate the backlog grows by more than noise, of which the rule allows for.
    assert 10.0 * (1.0 - PRECISION) < found < 10.0 * (1.0 + 3.0 * PRECISION)


def test_the_slow_replica_limits_rotation_and_not_weighted_rotation() -> None:
    fleet = Deployment("two", (server("slow", 0.1), server("fast", 0.1 / 3.0)))
    rotation = saturation(fleet, even(), RoundRobin(), precision=PRECISION)
    weighted = saturation(fleet, even(), WeightedRoundRobin((1.0, 3.0)), precision=PRECISION)
    assert 20.0 * (1.0 - PRECISION) < rotation < 20.0 * (1.0 + 5.0 * PRECISION)
    assert 40.0 * (1.0 - PRECISION) < weighted < 40.0 * (1.0 + 3.0 * PRECISION)


def test_the_order_and_the_rate_of_a_trace_do_not_matter() -> None:
    found = saturation(ONE, even(), RoundRobin())
    assert saturation(ONE, even().rescale(rate_rps=77.0), RoundRobin()) == found


def test_rejected_requests_take_no_place() -> None:
    count = 4000
    tokens = np.where(np.arange(count) % 2, 100, 20_000)
    trace = Trace(np.arange(count, dtype=float), tokens, [1] * count)
    # Every other request fits nowhere, so twice the rate is the server's own.
    found = saturation(ONE, trace, RoundRobin(), precision=PRECISION)
    assert 20.0 * (1.0 - 2.0 * PRECISION) < found < 20.0 * (1.0 + 5.0 * PRECISION)


def test_what_cannot_be_found_is_said() -> None:
    with pytest.raises(ParameterError, match="cannot be judged to 0"):
        saturation(ONE, even(), RoundRobin(), precision=0.0)
    too_long = Trace(np.arange(200.0), [20_000] * 200, [1] * 200)
    with pytest.raises(ParameterError, match="rejects every request"):
        saturation(ONE, too_long, RoundRobin())


@pytest.mark.parametrize("target_s", [10.0, 60.0])
def test_loose_targets_hide_no_queue(target_s: float) -> None:
    plan = Plan("by hand", (), ONE, RoundRobin(), "rotation", None)
    load = Load(even(), 12.0, Slo(ttft_s=target_s), precision=0.05)
    run, seen = judged(plan, load.at(10.8), 0)
    assert run.trace.arrival_s[-1] > 0.95 * target_s / load.precision
    assert not seen.sustained
    assert 9.0 < sustained_rps(plan, load, 0) < 10.8
    bounded = Load(even(), 12.0, load.slo, precision=0.05, most_rps=10.0)
    assert 9.0 < sustained_rps(plan, bounded, 0) <= 10.0


def test_a_share_that_falls_within_a_run_is_no_sustained_one() -> None:
    rule = SustainedRule(Slo(ttft_s=5.0), goal=0.5)
    over, under = (
        rule.judge(simulate(ONE, even().rescale(rate_rps=rate), RoundRobin()))
        for rate in (10.2, 9.9)
    )
    assert over.attained > over.needed
    assert over.drifts
    assert not over.sustained
    assert under.sustained


def test_requests_keep_their_order_unless_they_are_to_be_shuffled() -> None:
    numbered = Trace(np.zeros(4000), np.arange(1, 4001), [1] * 4000)
    for count in (1200, 4000, 9000):
        steps = np.diff(arrivals(numbered, count, 5.0, seed=1).input_tokens)
        jumps = np.flatnonzero((steps != 1) & (steps != -3999))
        assert set(jumps % STRETCH) <= {STRETCH - 1}
        assert len(jumps) == (2 if count == 1200 else 0)
    mixed = np.diff(arrivals(numbered, 4000, 5.0, seed=1, kind="shuffled").input_tokens)
    assert (mixed == 1).mean() < 0.01
