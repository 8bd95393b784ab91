"""What holds for any run, against bounds and limits that are known in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hetero import workload
from hetero.deployment import Deployment, Engine, Replica
from hetero.engine import state
from hetero.engine.replica import advance_all
from hetero.latency.step import StepModel
from hetero.planners.xiong.estimate import Padded, throughput
from hetero.routers import LeastRequests, PowerOfTwo, Predictive, RoundRobin, SingleInstance
from hetero.simulator import Event, Slo, simulate
from hetero.simulator import replicas as simulation
from hetero.simulator.drivers import MissedError
from hetero.simulator.sustained import SustainedRule
from hetero.workload import Trace
from tests.hetero.routers.router_states import Wrong

REAL = workload.load("azure2023_conv")
STEP = StepModel.affine(floor_s=0.01, per_token_s=5e-5, per_cached_token_s=8e-8, per_pair_s=1e-9)
ENGINES = {
    "known": Engine(max_batch=64),
    "predicted": Engine(admission="predicted", max_batch=64),
    "recompute": Engine(admission="paged", max_batch=64),
    "swap": Engine(admission="paged", eviction="swap", max_batch=64),
    "chunked": Engine(batching="chunked", admission="paged", max_batch=64, max_step_tokens=512),
    "static": Engine(batching="static", max_batch=64),
}


def fleet(engine: Engine, kv_tokens=(60_000, 20_000, 8_000)) -> Deployment:
    return Deployment(
        "fleet",
        tuple(
            Replica(f"r{k}", STEP, size, kv_bytes_per_token=1e5, engine=engine)
            for k, size in enumerate(kv_tokens)
        ),
    )


def poisson(count: int, rate_rps: float, seed: int) -> Trace:
    """The lengths of the conversation trace, drawn anew, at a Poisson rate."""
    rng = np.random.default_rng(seed)
    k = rng.integers(len(REAL), size=count)
    gaps = rng.exponential(1 / rate_rps, count)
    return Trace(np.cumsum(gaps), REAL.input_tokens[k], REAL.output_tokens[k], name="poisson")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 5.0, 50.0]), st.booleans())
def test_nothing_is_lost_and_nothing_precedes_its_cause(
    engine: Engine, seed: int, rate_rps: float, failing: bool
) -> None:
    trace = poisson(400, rate_rps, seed)
    span = float(trace.arrival_s[-1])
    events = [Event(0.3 * span, "r0"), Event(0.5 * span, "r0", "recover")] if failing else []
    run = simulate(fleet(engine), trace, LeastRequests(), events=events, predictor=Wrong())
    r = run.requests
    assert run.counts["finished"] + run.counts["rejected"] == len(trace)
    done = r[run.finished]
    assert (done["arrival_s"] <= done["first_token_s"]).all()
    assert (done["first_token_s"] <= done["finish_s"]).all()
    assert (
        (done["finish_s"][done["output_tokens"] <= 1]).tolist()
        == (done["first_token_s"][done["output_tokens"] <= 1]).tolist()
    )
    # Every token after a first one has one inter-token time; rejected ones may have had some.
    later = np.maximum(done["output_tokens"] - 1, 0).sum()
    assert run.gap_counts.sum() == later if not failing else run.gap_counts.sum() >= later
    assert (run.replicas["outstanding"] == 0).all()
    assert (run.replicas["outstanding_tokens"] == 0).all()
    assert (run.replicas["used"] == 0).all()
    assert (run.utilisation() <= 1 + 1e-12).all()
    fits = trace.input_tokens + trace.output_tokens <= 60_000
    assert run.finished[fits].all() or failing


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
@pytest.mark.parametrize("router", [LeastRequests(), Predictive(target_s=0.5)])
@settings(max_examples=12)
@given(
    st.integers(0, 10**6),
    st.sampled_from([2.0, 8.0, 20.0]),
    st.sampled_from([Slo(ttft_s=0.5), Slo(tpot_s=0.03), Slo(e2e_s=8.0), Slo(0.5, 0.03)]),
    st.sampled_from([0.0, 0.05]),
)
def test_a_watched_run_ends_only_where_the_goal_is_missed_and_is_else_the_same(
    engine, router, seed, rate_rps, slo, way_s
) -> None:
    trace, one = poisson(400, rate_rps, seed), fleet(engine)
    ways = tuple(replace(r, network_s=k * way_s) for k, r in enumerate(one.replicas))
    one = replace(one, replicas=ways)
    rule = SustainedRule(slo, goal=0.8)
    whole = simulate(one, trace, router)
    seen = rule.judge(whole)
    try:
        watched = simulate(one, trace, router, watch=rule.watch(len(trace)))
    except MissedError as error:
        most = error.attained
    else:
        assert watched.requests.tobytes() == whole.requests.tobytes()
        return
    assert seen.attained <= most < seen.needed


def test_a_watch_ends_what_is_hopeless_and_nothing_else() -> None:
    rule, one = SustainedRule(Slo(ttft_s=0.5)), fleet(ENGINES["chunked"])
    assert simulate(
        one, poisson(400, 0.2, 0), LeastRequests(), watch=rule.watch(400)
    ).finished.all()
    with pytest.raises(MissedError):
        simulate(one, poisson(400, 50.0, 0), LeastRequests(), watch=rule.watch(400))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_memory_batch_and_clock_at_every_event(engine: Engine) -> None:
    """Stop at every event: the cache is never exceeded, no clock runs back, nobody idles."""
    trace = poisson(120, 20.0, 1)
    requests = state.requests(
        trace.arrival_s,
        trace.input_tokens,
        trace.output_tokens,
        Wrong().predict(trace, np.random.default_rng(0)),
    )
    deployment = fleet(engine)
    arrays = (requests, *simulation._build(deployment, trace, log=False))
    _, engines, replicas, floats, _ = arrays
    router = (np.zeros(1), np.zeros((1, 2)), RoundRobin.code)
    driver = simulation.Compiled(arrays, trace, None, router)
    capacity = engines["kv_tokens"] // np.where(
        engines["admission"] == state.PAGED, engines["block_tokens"], 1
    )
    clocks, busy, now, arrived = replicas["clock_s"].copy(), 0, 0.0, 0
    while True:
        due = min(floats[:3].min(), trace.arrival_s[arrived] if arrived < len(trace) else np.inf)
        if due == np.inf:
            break
        assert due >= now
        now = float(due)
        if arrived < len(trace) and trace.arrival_s[arrived] == now:
            driver.route(arrived, arrived + 1)
            arrived += 1
        else:
            # A moment later, so that batches due now are formed.
            now = float(np.nextafter(now, np.inf))
            advance_all(*arrays, now)
        assert (replicas["clock_s"] >= clocks).all()
        clocks = replicas["clock_s"].copy()
        assert (replicas["used"] <= capacity).all()
        assert (replicas["used"] >= 0).all()
        assert (replicas["running"] <= engines["max_batch"]).all()
        idle = replicas["mode"] == state.IDLE
        assert ((replicas["waiting"] == 0) & (replicas["running"] == 0))[idle].all()
        busy += int((~idle).any())
    assert arrived == len(trace)
    assert busy > 100
    assert (requests["status"] == state.FINISHED).all()


def test_littles_law() -> None:
    """Mean number in the system = rate x mean time there, over a run that starts and ends empty."""
    trace = poisson(3000, 4.0, 5)
    run = simulate(fleet(ENGINES["chunked"]), trace, PowerOfTwo(), sample_s=0.25)
    arrival, finish = run.requests["arrival_s"], run.requests["finish_s"]
    # Area under the number in the system, event by event.
    times = np.concatenate([arrival, finish])
    change = np.concatenate([np.ones(len(arrival)), -np.ones(len(finish))])
    order = np.argsort(times, kind="stable")
    area = (np.cumsum(change[order])[:-1] * np.diff(times[order])).sum()
    rate = len(run.requests) / run.span_s
    assert area / run.span_s == pytest.approx(rate * run.e2e_s.mean(), rel=1e-9)
    # Those that decode, by the samples and by their own times, but for mixed and first steps.
    line = run.timeline().groupby("time_s")[["waiting", "decoding"]].sum()
    decoding = (finish - run.requests["first_token_s"]).sum() / run.span_s
    assert line.decoding.mean() == pytest.approx(decoding, rel=0.02)
    assert decoding < (line.waiting + line.decoding).mean() < area / run.span_s


def queue(service_s: np.ndarray, rate_rps: float, seed: int) -> np.ndarray:
    """Times in the system of a queue of one server with Poisson arrivals.

    One request at a time, one output token: a step takes as long as its input says, 1 ms a token.
    """
    count = len(service_s)
    step = StepModel.affine(floor_s=0.0, per_token_s=1e-3, per_cached_token_s=0.0)
    engine = Engine(max_batch=1, max_step_tokens=1)
    server = Deployment("server", (Replica("s", step, 10**9, engine=engine),))
    arrival = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_rps, count))
    inputs = np.maximum(np.rint(service_s * 1e3), 1)
    return simulate(server, Trace(arrival, inputs, np.ones(count)), SingleInstance()).e2e_s


def interval(values: np.ndarray) -> tuple[float, float]:
    """99.9 % confidence interval of a mean, from 20 batches that are nearly independent."""
    means = values[: len(values) // 20 * 20].reshape(20, -1).mean(axis=1)
    half = stats.t.ppf(0.9995, 19) * means.std(ddof=1) / math.sqrt(20)
    return means.mean() - half, means.mean() + half


def test_m_m_1() -> None:
    """Mean time in the system 1 / (mu - lambda), and exponential: its 90th percentile."""
    service = np.random.default_rng(6).exponential(10.0, 400_000)
    mean = np.maximum(np.rint(service * 1e3), 1).mean() / 1e3
    times = queue(service, 0.7 / 10.0, 7)
    low, high = interval(times)
    # The drawn service times stand for the expected ones within their own error.
    expected = 10.0 / (1 - 0.7)
    assert abs(mean - 10.0) < 0.1
    assert low < expected < high
    assert (high - low) / expected < 0.2
    assert np.percentile(times, 90) == pytest.approx(math.log(10) * expected, rel=0.05)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_static_batches_at_infinite_rate_take_the_time_of_algorithm_1(size: int) -> None:
    """But for one decode step a batch: its prefill already gives the first token."""
    trace = poisson(size, 1.0, 9).all_at_once()
    one = fleet(Engine(batching="static", max_batch=10**6), (20_000,))
    run = simulate(one, trace, RoundRobin())
    estimate = throughput(
        trace,
        Padded(STEP),
        kv_capacity_bytes=20_000.0,
        kv_bytes_per_token=1.0,
        tensor_parallel=1,
        gpus=1,
    )
    last = sum(
        float(
            STEP.seconds(
                len(batch.requests),
                len(batch.requests),
                len(batch.requests) * (batch.longest_input_tokens + batch.longest_output_tokens),
            )
        )
        for batch in estimate.batches
    )
    assert run.span_s == pytest.approx(estimate.time_s - last, rel=1e-9)
