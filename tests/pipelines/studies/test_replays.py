"""Replays of real engines: what is read, what is derived, and how near the simulator comes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hetero.latency.sources import profiles, raggedness
from hetero.latency.step import StepModel
from hetero.workload import datasets
from pipelines.studies import replays
from tests import committed


@pytest.fixture
def real():
    if not replays.raw_available():
        pytest.skip(f"{replays.DATASET} is not here: set {datasets.MIRROR}")
    return replays.real_runs(raw=True)


@pytest.mark.parametrize(
    ("name", "make"), [("engine_runs", replays.summary_frame), ("engine_run_load", replays.load)]
)
def test_committed_summaries_are_what_the_files_give(real, name, make) -> None:
    committed.same(make(), "measured", f"{name}.csv")


def test_published_percentiles_of_the_run_come_out(real) -> None:
    """The summary that its authors print: vLLM's column, in ms."""
    for run in real:
        text = datasets.path(replays.DATASET, f"RTXPRO6000/{run.llm}/summary.txt").read_text()
        printed = {
            " ".join(line.split()[:-3]): float(line.split()[-3])
            for line in text.splitlines()[2:]
            if line.strip()
        }
        for label, quantity in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("Latency", "e2e_s")):
            assert printed[f"{label} Mean"] == pytest.approx(1e3 * run.means[quantity], abs=0.06)
            for name, p in (("Median", 50), ("P90", 90), ("P95", 95), ("P99", 99)):
                ours = run.percentiles[quantity][replays.PERCENTILES.index(p)]
                # Between two requests they take one where we interpolate.
                assert printed[f"{label} {name}"] == pytest.approx(1e3 * ours, rel=0.01)


def test_requests_of_the_run_are_those_of_the_file(real) -> None:
    run = real[0]
    path = datasets.path(replays.DATASET, f"RTXPRO6000/{run.llm}/requests.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(run.trace) == len(lines) == 300
    assert int(run.trace.input_tokens.sum()) == sum(line["input_toks"] for line in lines)
    assert run.engine.max_batch == 128
    assert run.engine.max_step_tokens == 2048


def test_derived_runs_hold_the_load_of_the_real_ones(real) -> None:
    for run, derived in zip(real, replays.real_runs(), strict=True):
        assert len(derived.trace) == len(run.trace)
        for tokens in ("input_tokens", "output_tokens"):
            ours, theirs = (int(getattr(t, tokens).sum()) for t in (derived.trace, run.trace))
            assert ours == pytest.approx(theirs, rel=1e-3)
        assert derived.trace.arrival_s[-1] == pytest.approx(run.trace.arrival_s[-1], abs=2.0)
        for quantity in replays.QUANTITIES:
            np.testing.assert_allclose(
                derived.percentiles[quantity], run.percentiles[quantity], atol=1e-6
            )
        assert derived.kv_tokens == run.kv_tokens
        assert not derived.requests


def test_one_gpu_is_replayed_within_a_few_percent(real) -> None:
    """What was reached is in the notebook; this notices when it is lost."""
    run = real[0]
    step = profiles.profiled_step(run.gpu, run.llm)
    ragged = step.ragged(raggedness.longest_over_mean(run.trace, 128))
    errors = replays.replay(run, ragged).errors().set_index(["quantity", "statistic"])
    for quantity in ("TPOT", "E2E"):
        for statistic in ("mean", "P50", "P90", "P99"):
            assert abs(errors.loc[(quantity, statistic), "error_percent"]) < 3
    assert abs(errors.loc[("TPOT", "P50"), "error_percent"]) < 2
    in_turn = replace(run.engine, schedule_ahead=False)
    before = replays.replay(run, ragged, engine=in_turn).errors()
    before = before.set_index(["quantity", "statistic"])["error_percent"]
    assert before["TTFT", "P5"] < -20 < -10 < errors.loc[("TTFT", "P5"), "error_percent"] < 10


def test_the_clients_clock_sees_the_wait_for_the_queue(real) -> None:
    """Requests that reached the engine in the middle of a step waited for its end."""
    for queued, sent in zip(real, replays.real_runs(raw=True, clock="client"), strict=True):
        later = sent.requests["e2e_s"].mean() - queued.requests["e2e_s"].mean()
        assert 0.01 < later < 0.2
        assert sent.trace.arrival_s[0] == 0
        np.testing.assert_array_equal(
            np.sort(sent.requests["tpot_s"]), np.sort(queued.requests["tpot_s"])
        )


def test_errors_are_simulated_over_measured() -> None:
    run = replays.real_runs()[0]
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-5, per_cached_token_s=1e-8)
    replayed = replays.replay(run, step)
    frame = replayed.errors()
    row = frame[(frame["quantity"] == "TPOT") & (frame["statistic"] == "P50")].iloc[0]
    assert row["simulated_s"] == pytest.approx(float(np.median(replayed.run.tpot_s)))
    assert row["error_percent"] == pytest.approx(100 * (row["simulated_s"] / row["measured_s"] - 1))
    assert replayed.request_errors().empty
    assert "TTFT" in str(replayed)


def test_committed_prototype_is_what_the_file_gives(need) -> None:
    need("helix_expected")
    committed.same(replays.helix_prototype_frame(), "measured", "helix_prototype.csv")


def test_helix_cluster_comes_near_on_the_whole() -> None:
    """Short runs: the size of the errors in the notebook is that of the published lengths."""
    found = replays.replay_helix("twin", offline_s=60.0, online_s=120.0)
    assert len(found) == 24 * 3
    error = found["simulated"] / found["measured"] - 1
    np.testing.assert_allclose(100 * error, found["error_percent"])
    assert abs(found.loc[found["quantity"] == "decode_s", "error_percent"].median()) < 25
