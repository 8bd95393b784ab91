"""The compiled pipeline simulator against the slow one, and what must always hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.placement import FlowNetwork, Placement
from hetero.routers.pipelines import (
    FlowRouter,
    RandomRouter,
    ShortestQueueRouter,
    SwarmRouter,
)
from hetero.simulator.pipelines import Feed, NetworkEvent, simulate_pipelines
from hetero.workload import Trace
from tests.hetero.simulator.pipeline_oracle import Oracle, seed_word, small_problem

DEPTH = 6
ROUTERS = (
    FlowRouter(expected_output_tokens=8.0),
    FlowRouter(expected_output_tokens=300.0, high_water=0.5),
    SwarmRouter(initial_s=2.0**-5, smoothing=0.75),
    RandomRouter(),
    ShortestQueueRouter(),
)


@st.composite
def networks(draw) -> FlowNetwork:
    """Two chains through six layers, cut anywhere, and nodes of any range beside them."""
    cuts = [sorted(draw(st.sets(st.integers(1, DEPTH - 1), max_size=2))) for _ in range(2)]
    ranges = [pair for cut in cuts for pair in zip([0, *cut], [*cut, DEPTH], strict=True)]
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, DEPTH - 1))
        ranges.append((start, draw(st.integers(start + 1, DEPTH))))
    kinds = [(DEPTH, draw(st.sampled_from([1, 2, 3]))) for _ in ranges]
    latency = 2.0 ** -draw(st.integers(4, 8))
    problem = small_problem(
        kinds, DEPTH, bandwidth=2.0 ** draw(st.integers(17, 22)), latency=latency
    )
    placement = Placement(problem, tuple(ranges))
    return FlowNetwork(placement, partial_inference=draw(st.booleans()))


@st.composite
def traces(draw) -> Trace:
    """Up to 30 requests at binary times, some at once, some with a single token."""
    count = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    arrival = np.sort(rng.integers(0, 2 ** draw(st.integers(4, 12)), count)) * 2.0**-8
    return Trace(arrival, rng.integers(1, 500, count), rng.integers(1, 12, count))


def check_equal(oracle: Oracle, run) -> None:
    """Every time of every request, bit for bit, and the KV cache of every node."""
    order = np.argsort([r.arrival for r in oracle.requests[: len(run.requests)]], kind="stable")
    mine = [oracle.requests[k] for k in order]
    first = np.array([r.first for r in mine])
    last = np.array([r.last if r.status == "finished" else np.nan for r in mine])
    ended = run.finished
    np.testing.assert_array_equal(first, run.requests["first_token_s"])
    np.testing.assert_array_equal(last[ended], run.requests["finish_s"][ended])
    assert [r.status == "finished" for r in mine] == ended.tolist()
    assert [node.peak for node in oracle.nodes.values()] == run.replicas["kv_peak"].tolist()
    assert [node.used for node in oracle.nodes.values()] == run.replicas["kv_used"].tolist()


@settings(max_examples=60)
@given(networks(), traces(), st.sampled_from(ROUTERS), st.integers(0, 3))
def test_a_trace_is_simulated_as_the_rules_say(network, trace, router, seed) -> None:
    oracle = Oracle(network, trace, router, seed_word=seed_word(seed))
    oracle.play()
    run = simulate_pipelines(network, trace, router, copy_bytes_s=np.inf, seed=seed)
    check_equal(oracle, run)
    gaps = [gap for request in oracle.requests for gap in request.gaps]
    assert run.decode_count == len(gaps)
    np.testing.assert_allclose(run.decode_sum_s, sum(gaps), rtol=1e-12)


@settings(max_examples=40)
@given(
    networks(),
    traces(),
    st.sampled_from(ROUTERS),
    st.sampled_from(["kv", "count"]),
    st.integers(1, 8),
    st.floats(0.5, 40.0),
)
def test_a_feed_is_simulated_as_the_rules_say(network, trace, router, by, first, until) -> None:
    feed = Feed(first=first, by=by, high_water=0.6, delay_s=2.0**-4)
    if not router.reserves:
        feed = Feed(first=first, by="count", delay_s=2.0**-4)
    oracle = Oracle(network, trace, router, feed=feed, seed_word=seed_word(0))
    oracle.play(until)
    run = simulate_pipelines(network, trace, router, feed=feed, until_s=until, copy_bytes_s=np.inf)
    check_equal(oracle, run)
    if feed.by == "count":
        assert run.counts["in flight"] <= first


@settings(max_examples=30)
@given(networks(), traces(), st.sampled_from(ROUTERS), st.data())
def test_failures_keep_every_request_and_every_kv_entry(network, trace, router, data) -> None:
    names = [node.name for node in network.placement.problem.nodes]
    elements = st.sampled_from([*names, *((a, b) for a in names[:2] for b in names[2:4])])
    events = [
        NetworkEvent(time, data.draw(elements), what)
        for time, what in data.draw(
            st.lists(st.tuples(st.floats(0, 16), st.sampled_from(["fail", "recover"])), max_size=4)
        )
    ]
    run = simulate_pipelines(network, trace, router, events=events)
    assert sum(run.counts.values()) == len(trace)
    assert run.counts["in flight"] == 0
    r = run.requests[run.finished]
    assert (r["first_token_s"] > r["arrival_s"]).all()
    assert (r["finish_s"] >= r["first_token_s"]).all()
    # What has finished holds no KV cache, and nothing was counted on that is not.
    assert not run.replicas["kv_used"].any()
    assert not run.replicas["kv_reserved"].any()
    assert not run.replicas["outstanding"].any()
    tokens = run.requests["output_tokens"][run.finished].astype(int)
    lost = run.requests[~run.finished]
    assert run.decode_count >= (tokens - 1).sum()
    if not len(lost):
        assert run.decode_count == (tokens - 1).sum()


@pytest.mark.parametrize("back", [[], [NetworkEvent(2.0, "n0", "recover")]])
def test_what_waits_at_the_coordinator_is_told_when_no_way_leads_on(back) -> None:
    network = FlowNetwork(Placement(small_problem([(DEPTH, 1)], DEPTH), ((0, DEPTH),)))
    trace = Trace(np.zeros(3), np.full(3, 400), np.full(3, 2))
    events = [NetworkEvent(2.0**-12, "n0", "fail"), *back]
    run = simulate_pipelines(network, trace, RandomRouter(), events=events)
    assert run.counts["finished"] == (3 if back else 0)
    assert run.counts["in flight"] == 0


@settings(max_examples=30)
@given(networks(), traces())
def test_the_router_never_counts_on_more_than_the_high_water(network, trace) -> None:
    router = FlowRouter(expected_output_tokens=12.0, high_water=0.6)
    run = simulate_pipelines(network, trace, router)
    # Outputs are at most what is expected, so what is held stays below what was counted on.
    assert (run.replicas["kv_peak"] <= 0.6 * run.replicas["kv_entries"]).all()
    for reason in run.frame()["reason"][~run.finished]:
        assert reason == "longer than the KV cache of every replica"


@settings(max_examples=20)
@given(networks(), traces(), st.sampled_from(ROUTERS))
def test_a_run_depends_on_its_seed_only(network, trace, router) -> None:
    one = simulate_pipelines(network, trace, router, seed=3)
    two = simulate_pipelines(network, trace, router, seed=3)
    assert one.frame().equals(two.frame())
    assert one.edges.tolist() == two.edges.tolist()
