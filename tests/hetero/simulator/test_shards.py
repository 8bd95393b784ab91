"""Sharded replay against the same replay as one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero import workload
from hetero.deployment import Deployment
from hetero.engine.gaps import gap_edges
from hetero.errors import DataError, ParameterError
from hetero.routers import LeastTokens, RoundRobin
from hetero.simulator import metrics, shards, simulate
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.simulator import fleet

TIMES = ("arrival_s", "first_token_s", "finish_s", "transfer_s")
COUNTS = ("input_tokens", "output_tokens", "preemptions", "retries", "status", "reason")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return workload.load("azure2023_conv").head(6000).poisson(40.0, stream(0, "arrivals"))


@pytest.fixture(scope="module")
def mixed() -> Deployment:
    return fleet(12)


@pytest.mark.parametrize("count", [2, 3, 12])
def test_round_robin_shards_serve_every_request_bit_for_bit_as_one_run(trace, mixed, count):
    whole = simulate(mixed, trace, RoundRobin()).requests
    for k in range(count):
        part = trace.take(np.arange(k, len(trace), count))
        mine = simulate(shards.group(mixed, k, count), part, RoundRobin()).requests
        for name in TIMES:
            assert mine[name].tobytes() == whole[name][k::count].tobytes()
        for name in COUNTS:
            np.testing.assert_array_equal(mine[name], whole[name][k::count])
        np.testing.assert_array_equal(mine["node"] * count + k, whole["node"][k::count])
    assert shards.replay(mixed, trace, shards=count).exact


def test_merged_totals_are_those_of_one_run(trace, mixed):
    run = simulate(mixed, trace, RoundRobin())
    one, many = shards.Totals.of(run), shards.replay(mixed, trace, shards=4, workers=2).totals
    assert many.counts == one.counts
    for key in shards.QUANTITIES:
        np.testing.assert_array_equal(many.histograms[key], one.histograms[key])
    assert (many.first_s, many.last_s) == (one.first_s, one.last_s)
    assert many.busy_s == pytest.approx(one.busy_s, rel=1e-12)


def test_percentiles_are_within_the_stated_resolution(trace, mixed):
    found = shards.replay(mixed, trace, shards=3)
    exact = metrics(simulate(mixed, trace, RoundRobin()))
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        for p, value in found.percentiles_s[key].items():
            # Bins give the order statistic; interpolation between two adds nothing at 6000.
            assert value == pytest.approx(exact.percentiles[key][p], rel=0.01 + shards.RESOLUTION)
    edges = gap_edges()
    assert np.max(np.diff(edges) / edges[:-1]) <= shards.RESOLUTION
    assert "exact" in str(found)


def test_a_parquet_file_in_chunks_is_the_trace(trace, mixed, tmp_path):
    path = tmp_path / "trace.parquet"
    trace.to_parquet(path)
    for k in range(4):
        part = shards.read_shard(path, k, 4, rows=1001)
        np.testing.assert_array_equal(part.arrival_s, trace.arrival_s[k::4])
        np.testing.assert_array_equal(part.input_tokens, trace.input_tokens[k::4])
        np.testing.assert_array_equal(part.output_tokens, trace.output_tokens[k::4])
    from_file = shards.replay(mixed, path, shards=4)
    assert from_file.totals.counts == shards.replay(mixed, trace, shards=4).totals.counts
    assert from_file.exact


def test_what_is_not_exact_is_said_so(trace, mixed):
    found = shards.replay(mixed, trace.head(500), LeastTokens(), shards=2)
    assert not found.exact
    assert "approximate" in str(found)
    # A request that skips a replica too small for it shifts the turns of all that follow.
    small = replace(mixed.replicas[0], kv_tokens=600)
    uneven = replace(mixed, replicas=(small, *mixed.replicas[1:]))
    assert not shards.replay(uneven, trace.head(500), shards=2).exact
    assert shards.replay(uneven, trace.head(500), LeastTokens(), shards=1).exact


def test_shards_that_do_not_divide_and_bad_files_are_refused(trace, mixed, tmp_path):
    with pytest.raises(ParameterError, match="5 shards do not divide 12 replicas"):
        shards.replay(mixed, trace, shards=5)
    with pytest.raises(ParameterError, match="3 requests cannot be dealt to 4 shards"):
        shards.replay(mixed, trace.head(3), shards=4)
    with pytest.raises(ParameterError, match="wait for answers of all replicas"):
        shards.replay(mixed, trace.closed_loop(8), shards=4)
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="cannot be read"):
        shards.replay(mixed, bad, shards=4)
    trace.to_frame().drop(columns="arrival_s").to_parquet(bad)
    with pytest.raises(DataError, match="no column arrival_s"):
        shards.replay(mixed, bad, shards=4)
    with pytest.raises(DataError, match="no such file"):
        shards.replay(mixed, Path(tmp_path / "none.parquet"), shards=4)
