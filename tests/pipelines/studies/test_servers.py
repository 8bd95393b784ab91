"""Runs of real servers beside their simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hetero.apps.answers.simulation import simulation
from hetero.catalog import gpu, llm
from hetero.cluster import Cluster, Machine
from hetero.errors import DownloadError, ParameterError
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from hetero.workload import Trace, datasets
from pipelines.studies import calibration, expert_runs, servers

STEP = StepModel.affine(floor_s=0.01, per_token_s=1e-4, per_cached_token_s=0.0)
BATCH = servers.ServerRun(
    "made up",
    "none",
    "H100-SXM",
    llm("Llama-3-8B"),
    1,
    "batch 4 of 100",
    Trace(np.zeros(4), [100] * 4, [11] * 4),
    # One step of 400 tokens and ten of four.
    {"e2e_s": 0.05 + 10 * 0.0104, "output_tps": 44 / (0.05 + 10 * 0.0104)},
    statistic="last",
)


@pytest.fixture
def raw(need):
    need(servers.DATASET)


def test_a_batch_takes_its_steps() -> None:
    (row,) = servers.errors_frame([BATCH], lambda _: STEP).to_dict("records")
    assert row["E2E"] == pytest.approx(0.0, abs=1e-9)
    assert row["throughput"] == pytest.approx(0.0, abs=1e-9)
    assert np.isnan(row["TPOT"])


def test_steps_that_take_twice_as_long_err_by_so_much() -> None:
    (row,) = servers.errors_frame([BATCH], lambda _: scaled(STEP, 2.0, 2.0)).to_dict("records")
    assert row["E2E"] == pytest.approx(100.0, rel=1e-6)
    assert row["throughput"] == pytest.approx(-50.0, rel=1e-6)


def test_mean_and_median_are_of_the_requests() -> None:
    trace = Trace([0.0, 100.0, 200.0], [100, 100, 400], [11, 11, 21])
    measured = dict.fromkeys(servers.QUANTITIES, 1.0)
    run = replace(BATCH, trace=trace, measured=measured, statistic="median")
    result = servers.served(run, lambda _: STEP)
    # Alone: a prefill of 0.01 + 1e-4 n and decode steps of 0.0101 s.
    assert servers.simulated(run, result)["ttft_s"] == pytest.approx(0.02)
    assert servers.simulated(run, result)["tpot_s"] == pytest.approx(0.0101)
    mean = servers.simulated(replace(run, statistic="mean"), result)
    assert mean["ttft_s"] == pytest.approx((0.02 + 0.02 + 0.05) / 3)
    assert mean["e2e_s"] == pytest.approx(mean["ttft_s"] + 40 * 0.0101 / 3)
    together = replace(run, labels={"e2e": "derived"})
    assert servers.simulated(together, result)["e2e_s"] == pytest.approx(0.02 + 40 * 0.0101 / 3)


def test_a_model_that_does_not_fit_is_left_out_with_the_reason() -> None:
    run = replace(BATCH, llm=llm("Llama-3-70B"))
    frame = servers.errors_frame([run, BATCH], lambda _: STEP)
    assert "short" in frame["left_out"][0]
    assert frame["left_out"][1] == ""


def test_medians_are_of_sizes_and_of_errors() -> None:
    frame = pd.DataFrame({"source": ["a"] * 3, "TPOT": [-30.0, 10.0, 20.0], "left_out": ""})
    frame = frame.reindex(columns=[*frame.columns, "E2E", "TTFT", "throughput"])
    row = servers.medians_frame(frame, ("source",)).iloc[0]
    assert (row["TPOT"], row["TPOT bias"]) == (20.0, 10.0)


def test_lengths_have_the_means_of_the_run() -> None:
    inputs, outputs = servers.share_gpt(200, 205.8, 213.7)
    assert inputs.mean() == pytest.approx(205.8, abs=0.5)
    assert outputs.mean() == pytest.approx(213.7, abs=0.5)
    assert min(inputs.min(), outputs.min()) >= 4
    assert max(inputs.max(), outputs.max()) <= 1024
    assert outputs.max() > 4 * outputs.mean()


def test_without_the_tables_it_says_how_to_get_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(datasets.MIRROR, str(tmp_path))
    if servers.available():
        pytest.skip("the tables were fetched")
    with pytest.raises(DownloadError, match=datasets.MIRROR):
        servers.runs("iog")


def test_an_unknown_table_is_told() -> None:
    with pytest.raises(ParameterError, match="blis"):
        servers.runs("nowhere")


@pytest.mark.usefixtures("raw")
def test_every_row_that_can_be_simulated_becomes_a_run() -> None:
    counts = {name: len(servers.runs(name)) for name in servers.SOURCES if name != "mlperf"}
    assert counts == {
        "iog": 60,
        "nm_vllm": 16,
        "blis": 9,
        "argonne": 1171,
        "dstack": 12,
        "dstack batches": 93,
        "argonne other": 1034,
    }


@pytest.mark.usefixtures("raw")
def test_arrivals_end_with_those_of_the_run() -> None:
    for run in servers.runs("iog"):
        rate = float(run.load.split()[0])
        assert run.trace.arrival_s[-1] == pytest.approx(189.5 / rate)
        tokens = run.trace.output_tokens.sum() / run.measured["output_tps"]
        assert run.trace.arrival_s[-1] < tokens * 1.02


@pytest.mark.usefixtures("raw")
def test_fixed_prompts_are_found_in_the_cache() -> None:
    """After the first hundred only the last block of a prompt is computed."""
    run = servers.runs("blis")[0]
    ttft = servers.served(run, lambda _: STEP).ttft_s
    assert ttft[:100].min() > 0.06
    # A step, and what is left of the one before it: the next is scheduled ahead.
    assert ttft[150:].max() < 0.04


@pytest.mark.usefixtures("raw")
def test_offline_runs_are_of_one_chip_each() -> None:
    rows = servers.offline_frame().set_index(["list", "gpu"])
    assert len(rows) == 13
    assert len(rows.loc["llama2-70b"]) == 7
    assert (rows["low"] <= rows["tokens_per_s"]).all()
    assert (rows["tokens_per_s"] <= rows["high"]).all()
    # Open runs of pruned models beside closed ones do not count: 11,189 tokens/s on an H200.
    assert rows["high"]["llama2-70b", "H200-SXM"] < 5000
    assert rows["output"]["llama2-70b", "MI300X"] == pytest.approx(294, abs=10)


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize(
    ("fewer", "error_percent"), [(4, 16), pytest.param(1, 12, marks=pytest.mark.slow)]
)
def test_chips_are_in_order_without_their_own_measurements(
    fewer: int, error_percent: float, monkeypatch
) -> None:
    llm, inputs, prompts = servers._MLPERF_LISTS["llama2-70b"]
    monkeypatch.setitem(servers._MLPERF_LISTS, "llama2-70b", (llm, inputs, prompts // fewer))
    frame, order = servers.ranked(benchmarks=("llama2-70b",))
    assert len(frame) == 7
    assert order["llama2-70b"] >= 0.95
    assert frame["error_percent"].abs().median() < error_percent
    monkeypatch.setattr(servers, "_best", lambda row, _: (BATCH, 1.0 / row["tokens_per_s"]))
    assert servers.ranked(benchmarks=("llama2-70b",))[1]["llama2-70b"] == pytest.approx(-1.0)


@pytest.mark.usefixtures("raw")
def test_an_end_is_not_put_together_where_tokens_came_in_bundles() -> None:
    several = [run for run in servers.runs("iog") if run.labels["bundled"]]
    assert all(run.tensor_parallel > 1 and "e2e_s" not in run.measured for run in several)
    assert len(several) == 18


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize("source", ["iog", "nm_vllm", "inferencemax"])
def test_the_command_gives_what_the_tables_say(source: str) -> None:
    """With the true release, and what the run's record says of its engine."""
    mixtures = source == "inferencemax"
    run = next(iter(expert_runs.inferencemax() if mixtures else servers.runs(source)))
    machine = Machine("m", gpu(run.gpu), run.tensor_parallel)
    found = simulation(
        Cluster("c", (machine,)),
        model=run.llm.name,
        trace=run.trace,
        engine=f"{run.family}@{run.release}",
        degree=str(run.tensor_parallel),
        batching={"prefill first": "prefill-first"}.get(run.engine.batching),
        max_batch=run.engine.max_batch,
        chunk=run.engine.max_step_tokens,
        schedule_ahead=run.engine.schedule_ahead,
        prefix_cache=run.engine.prefix_cache,
        kv_precision=run.kv_precision,
        router="round-robin",
    )
    ((_, result),) = found.runs
    said = servers.simulated(run, result)
    kept = calibration.read("expert_servers" if mixtures else "servers")
    kept = kept[(kept["test"] == "default") & (kept["source"] == source)].iloc[0]
    assert (kept["llm"], kept["load"]) == (run.llm.name, run.load)
    for quantity, label in (("tpot_s", "TPOT"), ("ttft_s", "TTFT")):
        error = 100.0 * (said[quantity] / run.measured[quantity] - 1.0)
        assert error == pytest.approx(kept[label], abs=0.1)
