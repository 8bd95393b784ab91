"""The rule of a sustained rate, on replicas whose capacity is known."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from hetero import question
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.plans import Plan
from hetero.question import Load, sustained_rps
from hetero.routers import LeastRequests, RoundRobin
from hetero.simulator import Run, Slo, simulate
from hetero.simulator.metrics import attainment, largest_rate
from hetero.simulator.sustained import SustainedRule, life_s, needed_share, window
from hetero.simulator.sustained import arrivals as arriving
from hetero.streams import stream
from hetero.workload import Trace, statistics

# One request at a time, a prompt of 100 tokens in 0.1 s and its only token with it: 10 requests/s.
STEP = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
ONE = Deployment("one", (Replica("a", STEP, 10_000, engine=Engine(max_step_tokens=100)),))


def arrivals(rate_rps: float, count: int, seed: int = 0) -> Trace:
    trace = Trace([0.0] * count, [100] * count, [1] * count)
    return trace.poisson(rate_rps, np.random.default_rng(seed))


def judged(rule: SustainedRule, rate_rps: float, seed: int = 0):
    count = rule.requests(rate_rps, life_s(ONE, 100, 1))
    return rule.judge(simulate(ONE, arrivals(rate_rps, count, seed), RoundRobin()))


@pytest.mark.parametrize("seed", range(3))
def test_below_capacity_it_goes_on_and_above_it_does_not(seed) -> None:
    rule = SustainedRule(precision=0.02)
    assert judged(rule, 9.0, seed).sustained
    assert not judged(rule, 10.8, seed).sustained
    found = largest_rate(lambda rate: judged(rule, rate, seed).sustained, 5.0, precision=0.02)
    assert 9.5 < found < 10.6


def test_a_burst_that_meets_its_targets_is_no_sustained_rate() -> None:
    rule = SustainedRule(Slo(ttft_s=5.0))
    burst = simulate(ONE, arrivals(24.0, 90), RoundRobin())
    assert attainment(burst, rule.slo) >= 0.9  # 90 requests in 4 s: all wait, none for 5 s
    shown = judged(rule, 24.0)
    assert not shown.sustained
    assert shown.attained < 0.1
    assert shown.growth == pytest.approx(1 - 10 / 24, abs=0.05)


def test_few_long_requests_that_are_left_behind_are_a_backlog() -> None:
    step = StepModel.affine(floor_s=0.01, per_token_s=0.001, per_cached_token_s=0.0)
    engine = Engine(max_step_tokens=2048)
    two = tuple(
        Replica(name, step, kv_tokens, engine=engine)
        for name, kv_tokens in (("small", 10_000), ("large", 30_000))
    )
    arrival_s = np.arange(20_000) / 10.0
    prompts = np.where(np.arange(20_000) % 64, 10, 20_000)  # one in 64, of 20 s, every 6.4 s
    run = simulate(Deployment("two", two), Trace(arrival_s, prompts, [1] * 20_000), LeastRequests())
    left = np.asarray(run.requests["finish_s"]) > arrival_s[-1]
    assert 0 < left.mean() < 0.02  # of the requests
    shown = SustainedRule(precision=0.02).judge(run)
    assert shown.attained == 1.0
    assert not shown.steady
    assert shown.growth == pytest.approx(1 - 6.4 / 20, abs=0.05)


def test_what_is_missed_at_the_ends_does_not_count() -> None:
    count = 1000
    trace = arrivals(5.0, count)
    first, last = window(count)
    assert (first, last) == (200, 950)
    gap = np.zeros(count)
    gap[50:] = 30.0  # nothing comes for half a minute, and what came before waits for nobody
    late = Trace(trace.arrival_s + gap, trace.input_tokens, trace.output_tokens)
    shown = SustainedRule(Slo(ttft_s=2.0)).judge(simulate(ONE, late, RoundRobin()))
    assert shown.requests == 750
    assert shown.seconds == pytest.approx(late.arrival_s[949] - late.arrival_s[200])
    assert shown.sustained


def test_a_life_is_a_prefill_and_the_steps_of_a_full_batch() -> None:
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    whole = Replica("a", step, 6_000, engine=Engine(max_batch=64))
    # 6,000 tokens hold five requests of 1,000 + 200 tokens.
    decode_s = float(step.seconds(5, 5, 5 * 1100.0))
    prefill_s = float(step.seconds(1000, 0, 0.0, 1000 * 1000 / 2))
    made = Deployment("one", (whole,))
    assert life_s(made, 1000, 200) == pytest.approx(prefill_s + 200 * decode_s)
    split = Deployment(
        "split",
        (
            Replica("p", STEP, 6_000, role="prefill"),
            Replica("d", step, 6_000, role="decode", engine=Engine(max_batch=64)),
        ),
        default_link=KvLink(10.0),
    )
    assert life_s(split, 1000, 200) == pytest.approx(0.1 + 200 * decode_s)


def test_runs_are_long_enough_for_the_precision_and_for_lives() -> None:
    assert SustainedRule(precision=0.01).requests(1.0, 0.1) == 13_334
    assert SustainedRule(precision=0.02).requests(1.0, 0.1) == 3334
    assert SustainedRule(precision=0.02).requests(50.0, 30.0) == 30_000


@given(st.integers(1, 100_000), st.floats(0.01, 0.999))
def test_a_plan_that_just_meets_the_goal_passes_one_run_in_twenty(requests, goal) -> None:
    needed = round(needed_share(requests, goal) * requests)
    assert needed <= requests
    if needed < requests or binom.sf(requests - 1, requests, goal) <= 0.05:
        assert binom.sf(needed - 1, requests, goal) <= 0.05 < binom.sf(needed - 2, requests, goal)
    assert needed_share(requests, 1.0) == 1.0


def test_without_targets_no_share_is_asked_for_beyond_the_goal() -> None:
    assert judged(SustainedRule(goal=0.9), 5.0).needed == 0.9
    assert judged(SustainedRule(Slo(ttft_s=1.0), goal=0.9), 5.0).needed > 0.9


class WaitsForLoad(Plan):
    """Ten times as slow below 4 requests/s."""

    __slots__ = ()

    def simulate(self, trace: Trace, seed: int = 0, **given: Any) -> Run:
        step = StepModel.affine(floor_s=0.9, per_token_s=0.0, per_cached_token_s=0.0)
        slow = Deployment("slow", tuple(replace(one, step=step) for one in ONE.replicas))
        rate_rps = statistics.rate_rps(trace.arrival_s)
        return simulate(ONE if rate_rps > 4.0 else slow, trace, RoundRobin(), seed=seed)


def test_what_is_missed_at_a_lower_rate_is_no_sustained_rate() -> None:
    even = Load(Trace([0.0, 1.0], [100, 100], [1, 1]), 6.0, Slo(ttft_s=1.0))
    always = Plan("by hand", (), ONE, RoundRobin(), "in rotation", None)
    kept = {one.name: getattr(always, one.name) for one in fields(always)}
    waits = WaitsForLoad(**kept)
    assert sustained_rps(always, even, 0) > 8.0
    assert question.judged(waits, even.at(8.0), 0)[1].sustained
    found = sustained_rps(waits, even, 0)
    assert 0.0 < found < 0.4  # what the slow one serves within a second
    assert question.judged(waits, even.at(found), 0)[1].sustained


@pytest.mark.parametrize(("goal", "precision"), [(0.0, 0.1), (1.2, 0.1), (0.9, 0.0), (0.9, 1.0)])
def test_what_cannot_be_judged_is_refused(goal, precision) -> None:
    with pytest.raises(ParameterError, match="cannot be judged"):
        SustainedRule(goal=goal, precision=precision)


@given(
    gaps=st.lists(st.floats(0.0, 100.0), min_size=2, max_size=40).filter(lambda one: sum(one) > 1),
    count=st.integers(60, 200),
    rate_rps=st.floats(0.1, 100.0),
    seed=st.integers(0, 5),
)
def test_scaled_arrivals_have_the_rate_and_the_gaps_of_the_trace(gaps, count, rate_rps, seed):
    own = np.cumsum([0.0, *gaps])
    trace = Trace(own, np.arange(1, len(own) + 1), np.ones(len(own)))
    found = arriving(trace, count, rate_rps, seed, "scaled")
    assert len(found) == count
    assert statistics.rate_rps(found.arrival_s) == pytest.approx(rate_rps)
    # Each request comes after the gap that stands before it in the trace, the first after a mean.
    before = np.array([np.mean(gaps), *gaps])[found.input_tokens - 1][1:]
    made = np.diff(found.arrival_s)
    factor = before.sum() / made.sum()
    np.testing.assert_allclose(made * factor, before, rtol=1e-6, atol=1e-9 * before.sum())
    np.testing.assert_array_equal(np.diff(found.input_tokens) % len(own), 1)


def test_a_burst_at_the_end_is_no_growth_where_bursts_are_the_traces_own() -> None:
    # 100 requests in a second every 25 seconds, which are served in ten.
    count = 4066
    at_s = 25.0 * (np.arange(count) // 100) + 0.01 * (np.arange(count) % 100)
    trace = Trace(at_s, [100] * count, [1] * count)
    rule = SustainedRule(Slo(ttft_s=12.0), precision=0.005)
    told = []
    for seed in range(40):  # each begins elsewhere in a burst
        run = simulate(ONE, arriving(trace, count, 4.0, seed, "scaled"), RoundRobin())
        told.append([rule.judge(run, bursts_s).steady for bursts_s in (0.0, 10.0)])
    assert all(with_bursts for _, with_bursts in told)
    assert not all(without for without, _ in told)
    # Twice what it serves grows all the same.
    much = simulate(ONE, arriving(trace, count, 20.0, 1, "scaled"), RoundRobin())
    assert not rule.judge(much, 10.0).steady


def test_poisson_arrivals_are_what_is_taken_where_nothing_else_is_asked() -> None:
    trace = Trace([0.0, 1.0, 9.0], [1, 2, 3], [4, 5, 6])
    found = arriving(trace, 10, 3.0, 7)
    assert sorted(found.input_tokens[:3]) == [1, 2, 3]
    taken = trace.all_at_once().take(found.input_tokens - 1)
    expected = taken.poisson(3.0, stream(7, "arrivals"))
    np.testing.assert_array_equal(found.arrival_s, expected.arrival_s)


def test_without_moments_of_their_own_arrivals_cannot_be_scaled() -> None:
    with pytest.raises(ParameterError, match="arrive at once"):
        arriving(Trace([0.0] * 9, [1] * 9, [1] * 9), 20, 1.0, 0, "scaled")
