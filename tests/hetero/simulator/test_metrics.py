"""Metrics, and what replicas hold over time, on runs short enough to check by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero import workload
from hetero.deployment import Deployment, Engine, Replica
from hetero.engine.gaps import gap_edges
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import LeastTokens, PowerOfTwo, RoundRobin
from hetero.simulator import Event, Slo, metrics, simulate
from hetero.workload import Trace
from tests.hetero.routers.router_states import fleet, trace

# Every step takes 1 s.
STEP = StepModel.affine(floor_s=1.0, per_token_s=0.0, per_cached_token_s=0.0)


def run(outputs=(1, 3, 5), arrivals=(0.0, 10.0, 20.0), inputs=(10, 20, 30), events=(), **fields):
    replica = Replica("a", STEP, 1000, engine=Engine(), **fields)
    deployment = Deployment("one", (replica, replace(replica, name="b")))
    return simulate(deployment, Trace(arrivals, inputs, outputs), RoundRobin(), events=events)


def test_every_figure_by_hand() -> None:
    served = run(usd_per_h=1.8)
    m = metrics(served, Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=4.0))
    # Finishes at 1, 13 and 25 s.
    assert (m.arrived, m.finished, m.rejected) == (3, 3, 0)
    assert m.window_s == (0.0, 25.0)
    assert m.input_tps == 60 / 25
    assert m.output_tps == 9 / 25
    assert m.total_tps == 69 / 25
    assert m.requests_per_s == 3 / 25
    assert m.means == {"ttft_s": 1.0, "tpot_s": 1.0, "e2e_s": 3.0}
    assert m.percentiles["e2e_s"][50] == 3.0
    assert m.percentiles["e2e_s"][90] == np.percentile([1, 3, 5], 90)
    # One token has no TPOT and cannot miss it.
    assert m.attainment == {"ttft": 1.0, "tpot": 1 / 3, "e2e": 2 / 3, "joint": 1 / 3}
    assert m.within_targets_rps == 1 / 20  # the last 5 s are the drain
    assert m.imbalance == 25 / 13
    assert m.utilisation == pytest.approx((1 + 5 + 3) / 2 / 25)
    assert m.usd_per_mtok == pytest.approx(2 * 1.8 / 3600 / (69 / 25) * 1e6)
    text = str(m)
    for words in ("TTFT P50", "requests within targets", "cost", "SLO attainment, joint"):
        assert words in text


def test_a_window_counts_arrivals_and_finishes_inside_it() -> None:
    m = metrics(run(), Slo(ttft_s=2.0), warmup_s=5.0, until_s=20.0)
    assert (m.arrived, m.finished) == (2, 1)
    assert m.output_tps == 3 / 15
    assert m.within_targets_rps == 2 / 15
    m = metrics(run(arrivals=(0.0, 0.0, 0.0)), Slo(ttft_s=9.0))
    assert m.within_targets_rps == m.requests_per_s  # over the whole run, as no time passes
    with pytest.raises(ParameterError, match=r"from 30\.0 s to 25 s is empty"):
        metrics(run(), warmup_s=30.0)


def test_rejected_requests_miss_every_target() -> None:
    served = run(inputs=(10, 2000, 30))
    m = metrics(served, Slo(ttft_s=100.0, tpot_s=100.0))
    assert (m.finished, m.rejected) == (2, 1)
    assert m.attainment == {"ttft": 2 / 3, "tpot": 2 / 3, "joint": 2 / 3}


def test_nothing_finished() -> None:
    m = metrics(run(inputs=(2000, 2000, 2000)), Slo(ttft_s=1.0))
    assert m.attainment == {"ttft": 0.0, "joint": 0.0}
    assert m.requests_per_s == m.within_targets_rps == 0.0
    assert all(math.isnan(x) for p in m.percentiles.values() for x in p.values())
    assert m.usd_per_mtok is None
    assert math.isnan(m.imbalance)
    assert str(m)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_targets_are_positive(value) -> None:
    with pytest.raises(ParameterError, match="target ttft_s"):
        Slo(ttft_s=value)


def test_percentiles_of_inter_token_times_are_within_their_bins() -> None:
    step = StepModel.affine(floor_s=0.01, per_token_s=1e-4, per_cached_token_s=1e-6)
    fleet = Deployment("one", (Replica("a", step, 100_000),))
    trace = workload.load("azure2023_conv").head(300)
    served = simulate(fleet, trace, RoundRobin())
    found = metrics(served).percentiles["gap_s"]
    edges, counts = gap_edges(), served.gap_counts
    assert np.all(edges[1:] / edges[:-1] <= 1 + 1 / 32)
    for p, value in found.items():
        k = np.searchsorted(edges, value)
        assert counts[:k].sum() >= p / 100 * counts.sum() > counts[: k - 1].sum()


def test_replicas_and_timeline_add_up() -> None:
    trace = workload.load("azure2023_conv").head(500)
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    fleet = Deployment("two", tuple(Replica(n, step, 50_000) for n in "ab"))
    served = simulate(fleet, trace, LeastTokens(), events=[Event(20.0, "b")])
    assert np.bincount(served.requests["node"]).sum() == 500
    assert served.replicas["prefill_tokens"].sum() >= trace.input_tokens.sum()
    ends = served.completion_s()
    assert np.nanmax(ends) == served.span_s
    mine = served.requests[(served.requests["node"] == 1) & served.finished]
    assert ends[1] == (mine["finish_s"].max() if len(mine) else np.nan)
    frame = served.frame()
    assert frame.status.eq("finished").all()
    assert frame.retries.sum() > 0


SLOPED = StepModel.affine(floor_s=1.0, per_token_s=0.125, per_cached_token_s=0.0)


def test_one_request_by_hand() -> None:
    # A prefill of 8 tokens from 1 to 3, tokens at 4.125 and 5.25; 8 + 3 tokens reserved.
    server = Deployment("one", (Replica("a", SLOPED, 100),))
    run = simulate(server, Trace([1.0], [8], [3]), RoundRobin(), sample_s=1.0)
    line = run.timeline()
    assert line.time_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert line.waiting.tolist() == [1, 0, 0, 0, 0, 0]
    assert line.decoding.tolist() == [0, 0, 1, 1, 1, 0]
    assert line.kv_use.tolist() == [0.0, 0.11, 0.11, 0.11, 0.11, 0.0]
    assert line.busy_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 4.25]


def test_blocks_grow_as_tokens_come() -> None:
    engine = Engine(admission="paged", block_tokens=2)
    server = Deployment("one", (Replica("a", SLOPED, 20, engine=engine),))
    run = simulate(server, Trace([0.0], [8], [4]), RoundRobin(), sample_s=1.125)
    # Steps end at 2, 3.125, 4.25 and 5.375; each stores the token before: 8, 9, 10 of 20.
    line = run.timeline()
    assert line.time_s.tolist() == [0.0, 1.125, 2.25, 3.375, 4.5, 5.625]
    assert line.kv_use.tolist() == [0.0, 0.4, 0.4, 0.5, 0.5, 0.0]
    assert line.busy_s.tolist() == [0.0, 1.125, 2.25, 3.375, 4.5, 5.375]


@pytest.mark.parametrize("router", [LeastTokens(), PowerOfTwo()], ids=lambda r: r.name)
def test_sampling_changes_nothing(router) -> None:
    engine = Engine("chunked", "paged", max_batch=24, max_step_tokens=512)
    events = [Event(5.0, "0:H100-SXM"), Event(11.3, "0:H100-SXM", "recover")]
    plain = simulate(fleet(engine), trace(), router, events=events)
    sampled = simulate(fleet(engine), trace(), router, events=events, sample_s=0.1)
    assert plain.requests.tobytes() == sampled.requests.tobytes()
    assert plain.replicas.tobytes() == sampled.replicas.tobytes()
    samples = sampled.samples
    assert samples is not None
    assert ((samples.kv_use >= 0) & (samples.kv_use <= 1)).all()
    assert (np.diff(samples.busy_s, axis=0) >= 0).all()
    down = (samples.time_s > 5.0) & (samples.time_s < 11.0)
    assert (samples.kv_use[down, 0] == 0).all()
    assert (samples.kv_use[~down, 0] > 0).any()


def test_errors_are_clear() -> None:
    with pytest.raises(ParameterError, match=r"no samples.*sample_s"):
        simulate(fleet(), trace(20), RoundRobin()).timeline()
    with pytest.raises(ParameterError, match="sample_s is 0"):
        simulate(fleet(), trace(20), RoundRobin(), sample_s=0.0)
