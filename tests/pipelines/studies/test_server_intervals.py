"""Intervals against servers: statistics against fresh runs, parts of the error, and coverage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from hetero.catalog import gpu
from hetero.latency.calibration import expected
from hetero.latency.calibration.expected import error_of
from hetero.latency.scaled import scaled
from hetero.simulator.uncertainty import draw_factors
from pipelines.studies import server_intervals, servers


@pytest.fixture(scope="module")
def frame():
    return expected.servers_held_out_frame()


@pytest.fixture(scope="module")
def found():
    return server_intervals.runs_frame()


def nvidia(rows):
    """Other makers' GPUs are too few to be left out."""
    return rows[rows["gpu"].map(lambda name: gpu(name).vendor == "NVIDIA")]


def test_coverage_has_a_row_per_group(found) -> None:
    coverage = server_intervals.coverage_frame()
    wanted = ["test", "source", "gpu", "kind", "quantity", "runs", "covered", "width_percent"]
    assert list(coverage.columns) == wanted
    assert coverage["runs"].sum() == len(found)
    assert bool(coverage["covered"].between(0.0, 1.0).all())
    assert bool((coverage["width_percent"] > 0.0).all())
    both = (coverage["covered"] * coverage["runs"]).sum() / coverage["runs"].sum()
    assert both == pytest.approx(found["covered"].mean())


@pytest.mark.parametrize("test", ["gpu", "llm"])
def test_intervals_of_throughput_hold_what_they_say(found, test) -> None:
    every = found[(found["test"] == test) & (found["quantity"] == "throughput")]
    own = nvidia(every)
    assert len(own) > 300
    assert 0.84 <= every["covered"].mean() <= 0.95
    assert 0.85 <= own["covered"].mean() <= 0.97


def test_intervals_of_tpot_hold_what_they_say(found) -> None:
    """With each model left out; without a GPU nothing says how the links of RTX 4090 behave."""
    tpot = nvidia(found[found["quantity"] == "TPOT"])
    assert 0.85 <= tpot[tpot["test"] == "llm"]["covered"].mean() <= 0.95
    single = tpot[(tpot["test"] == "gpu") & ((tpot["gpu"] != "RTX-4090") | (tpot["degree"] == 1))]
    # Nor that a small model is bound by its launches there.
    assert single[single["llm"] != "DeepSeek-R1-Distill-Qwen-1.5B"]["covered"].mean() >= 0.85


def test_intervals_of_ttft_hold_what_they_say(found) -> None:
    """But for several RTX 4090, which stand still for seconds at their start, and for launches."""
    ttft = nvidia(found[found["quantity"] == "TTFT"])
    kept = ttft[(ttft["gpu"] != "RTX-4090") | (ttft["degree"] == 1)]
    kept = kept[kept["llm"] != "DeepSeek-R1-Distill-Qwen-1.5B"]
    assert kept.groupby("test")["covered"].mean().min() >= 0.85


def test_every_pair_of_mixtures_weighs_as_all_dense_models(monkeypatch) -> None:
    known, beyond = expected._of_tables("calibrated", None).decode_sd, 0.04

    def squared(pairs: int) -> float:
        own = pd.Series([known**2 + beyond] * pairs)
        monkeypatch.setattr(expected, "_mixtures", lambda *_: own)
        return expected._engine_part.__wrapped__("calibrated", "vllm", "NVIDIA", None, True)[0] ** 2

    assert 0.0 < squared(1) != pytest.approx(beyond)
    assert squared(3) == pytest.approx((squared(1) + beyond) / 2)


def test_few_chips_or_models_widen_a_quantile() -> None:
    rows = pd.DataFrame({"gpu": ["A40", "A40", "L4"], "llm": ["a", "b", "c"]})
    of = expected._few(rows, "carried", "NVIDIA", None), expected._few(rows, "measured", "", None)
    assert of == pytest.approx((student.ppf(0.95, 2) / 1.6449, student.ppf(0.95, 3) / 1.6449))
    assert expected._few(rows, "measured", "", ("gpu", "T4")) == of[0]
    many = pd.DataFrame({"gpu": "A40", "llm": range(10_000)})
    assert expected._few(many, "calibrated", "NVIDIA", None) == pytest.approx(1.0, abs=1e-3)


def test_what_is_known_less_has_wider_intervals(found) -> None:
    tpot = found[(found["quantity"] == "TPOT") & (found["test"] == "llm")]
    width = tpot.groupby("kind")["width"].median()
    # Layer profiles were seen on so few models that leaving one out costs what they are nearer by.
    assert max(width["layer profile"], width["calibrated"]) < width["assumed"]
    sd = [error_of(level).decode_sd for level in ("measured", "calibrated", "carried")]
    assert sd == sorted(sd)


def test_no_interval_knows_its_run(frame) -> None:
    for name in ("H100-SXM", "RTX-4090"):
        rows, _ = expected._runs_of("vllm", "NVIDIA", ("gpu", name))
        assert name not in set(rows["gpu"])
        assert len(rows) > 0
        assert set(rows["test"]) <= {"gpu", "unfitted"}
    rows, _ = expected._runs_of("vllm", "NVIDIA", ("gpu", "H100-SXM"))
    assert "GH200-96GB" not in set(rows["gpu"])  # of one chip
    rows, _ = expected._runs_of("vllm", "NVIDIA", ("llm", "Llama-2-7B"))
    assert "Llama-2-7B" not in set(rows["llm"])
    assert set(rows["test"]) <= {"llm", "unfitted"}


def test_an_interval_changes_with_the_runs_of_others_alone(frame, monkeypatch) -> None:
    """Runs that err by ten times as much widen the intervals of all others, not their own."""
    before = {g: error_of("calibrated", without=("gpu", g)) for g in ("A100-SXM-40GB", "RTX-4090")}
    worse = frame.copy()
    worse.loc[worse["gpu"] == "A100-SXM-40GB", "step"] *= 10.0
    monkeypatch.setattr(expected, "servers_held_out_frame", lambda: worse)
    parts = (expected.error_of, expected._engine_part, expected._front_part)
    try:
        for part in parts:
            part.cache_clear()
        assert error_of("calibrated", without=("gpu", "A100-SXM-40GB")) == before["A100-SXM-40GB"]
        other = error_of("calibrated", without=("gpu", "RTX-4090"))
        assert other.engine_sd > 2.0 * before["RTX-4090"].engine_sd
    finally:
        for part in parts:
            part.cache_clear()


def test_engines_with_few_runs_share_those_of_others() -> None:
    ours, sglang = error_of("calibrated"), error_of("calibrated", "sglang")
    assert ours.servers == "vllm on NVIDIA's GPUs, calibrated"
    assert sglang.servers == "all engines on NVIDIA's GPUs"
    assert error_of("calibrated", "any") == ours
    assert sglang.engine_sd > ours.engine_sd
    other = error_of("carried", vendor="AMD")
    assert other.servers == "all engines on other makers' GPUs, carried"
    assert error_of("calibrated", vendor="AMD").decode_sd < other.decode_sd / 2.0
    assert other.decode_sd > error_of("carried").decode_sd
    assert expected.expected_error("MI300X") == other


def test_the_parts_make_the_whole() -> None:
    tables = expected._of_tables("carried")
    error = error_of("carried")
    assert error.decode_sd == pytest.approx(np.hypot(tables.decode_sd, error.engine_sd))
    most = max(error_of(level).engine_sd for level in expected.LEVELS)
    assert error.prefill_sd == pytest.approx(np.hypot(tables.prefill_sd, most))
    # Beside nearer sources the engine is seen better.
    calibrated, measured = error_of("calibrated"), error_of("measured")
    own = expected._of_tables("calibrated").prefill_sd
    seen = max(calibrated.engine_sd, measured.engine_sd)
    assert calibrated.prefill_sd == pytest.approx(np.hypot(own, seen))
    # What belongs to the engine, prefill and decode share.
    apart = tables.correlation * tables.prefill_sd * tables.decode_sd
    both = apart + most * error.engine_sd
    assert error.correlation == pytest.approx(both / (error.prefill_sd * error.decode_sd))
    logs = np.log(draw_factors({"x": error}, 40_000)["x"])
    assert logs.std(axis=0) == pytest.approx(
        [error.prefill_sd, error.decode_sd, error.front_sd], rel=0.02
    )
    assert np.corrcoef(logs.T)[0] == pytest.approx([1.0, error.correlation, 0.0], abs=0.02)


def test_responses_are_those_of_simulations(frame, need) -> None:
    """The draws of an error, simulated one by one, make the interval that the grid makes."""
    need(servers.DATASET)
    name = "general, 8 req/s"
    run = next(one for one in servers.runs("blis") if one.load == name and one.tensor_parallel == 1)
    (row,) = frame[
        (frame["test"] == "gpu") & (frame["load"] == name) & (frame["llm"] == run.llm.name)
    ].to_dict("records")
    error = replace(error_of(row["level"], without=("gpu", run.gpu)), front_sd=0.0)
    step = servers.known_best(run)
    factors = draw_factors({"": error}, 12)[""]
    made = [
        servers.simulated(run, servers.served(run, lambda _, own=own: scaled(step, *own)))["tpot_s"]
        for own in [np.ones(3), *factors]
    ]
    response = np.array(row["TPOT response"].split(), dtype=float)
    near = server_intervals._on_grid(response, *np.log(factors[:, :2]).T)
    assert np.log(np.array(made[1:]) / made[0]) == pytest.approx(near, abs=0.06, rel=0.1)


def test_rows_hold_what_they_say(frame) -> None:
    rows = frame[frame["test"] != "repeats"]
    assert set(rows["test"]) == {"gpu", "llm", "unfitted"}
    assert all(gpu(name) for name in rows["gpu"].unique())
    # A batch errs by what its steps err by, but for what requests take beside them.
    batches = rows[rows["TPOT"].isna()]
    assert batches["step"].to_numpy() == pytest.approx(-batches["E2E"].to_numpy(), abs=0.03)
    assert batches["throughput"].to_numpy() == pytest.approx(-batches["E2E"].to_numpy(), abs=2e-3)
