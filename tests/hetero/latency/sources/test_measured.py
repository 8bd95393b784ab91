from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from hetero import paths
from hetero.errors import DownloadError
from hetero.latency import frames
from hetero.latency.frames import raw_frame, replicas
from hetero.latency.models import affine
from hetero.latency.models.floor import fit_floor
from hetero.latency.models.layers import LayerLatency, layer_latencies
from hetero.latency.sources import measured
from hetero.workload import datasets
from pipelines.studies import measured_tables, roofline_calibration
from pipelines.studies.measured_tables import KNOT_ERROR
from pipelines.studies.table_reduction import reduce_table
from tests import committed

RAW = {
    "splitwise_medians": "splitwise_perf_model",
    "helix_layer_knots": "helix_layer_latency",
    "aiconfigurator_steps": "aiconfigurator_grid",
    "profile_steps": "llmservingsim_profile",
}


@pytest.mark.parametrize("name", RAW)
def test_committed_reductions_are_what_the_raw_files_give(name, need):
    need(RAW[name])
    committed.same(measured_tables.FILES[name](), "measured", f"{name}.csv")


def test_committed_efficiencies_are_what_the_raw_files_give(need):
    for name in RAW.values():
        need(name)
    made = roofline_calibration.calibrate_all(raw=True)
    text = io.StringIO(made.to_csv(index=False))
    read = pd.read_csv(text)
    kept = pd.read_csv(paths.data("measured", "efficiencies.csv"))
    kept = kept[kept.pop("grid") == "published"]
    # The least-squares solver may differ in the last digits from one machine to the next.
    pd.testing.assert_frame_equal(read, kept, rtol=2e-2, atol=2e-2)


def test_raw_data_that_is_not_here_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv(datasets.MIRROR, str(tmp_path))
    monkeypatch.setattr(paths, "raw", lambda: tmp_path)
    with pytest.raises(DownloadError, match="hetero data fetch splitwise_perf_model"):
        measured.splitwise(raw=True)


# Splitwise: the table that measured it first, per group (medians, no batch-64 overflow).
# Prefill: weighted MAPE and R2, OLS MAPE, T0, s1, s2 [ms]; decode: MAPE, t0, u1, u2 [ms].
LLAMA, BLOOM, A100, H100 = "Llama-2-70B", "BLOOM-176B", "A100-SXM-80GB", "H100-SXM"
NOTES = {
    (BLOOM, A100, 8): (9.3, 0.976, 20.1, 174.8, 0.2786, 162.7, 1.63, 48.71, 4.09e-4, 0.672),
    (BLOOM, H100, 8): (11.4, 0.980, 18.8, 80.0, 0.1201, 71.8, 1.78, 35.98, 1.56e-4, 0.394),
    (LLAMA, A100, 2): (3.4, 0.998, 4.5, 200.6, 0.3299, 206.0, 3.76, 57.24, 1.38e-4, 0.512),
    (LLAMA, A100, 4): (6.9, 0.992, 19.0, 130.7, 0.2009, 160.4, 2.36, 43.71, 3.72e-4, 0.397),
    (LLAMA, A100, 8): (11.7, 0.958, 25.8, 96.6, 0.1283, 96.8, 1.76, 44.45, 3.35e-4, 0.383),
    (LLAMA, H100, 2): (6.0, 0.992, 5.8, 88.4, 0.1352, 73.0, 0.94, 37.25, 6.2e-5, 0.446),
    (LLAMA, H100, 4): (10.4, 0.991, 11.1, 64.6, 0.0855, 51.5, 1.82, 29.15, 1.01e-4, 0.322),
    (LLAMA, H100, 8): (15.7, 0.967, 17.5, 56.2, 0.0618, 40.3, 1.88, 30.19, 1.79e-4, 0.302),
}  # fmt: skip


def all_settings(rows, decode):
    """Prefills of every setting, outputs other than 128 tokens included, as the table counts."""
    frame = measured.derived_frame("splitwise_medians")
    frame = frame[(frame["gpu"] == rows.gpu) & (frame["llm"] == rows.llm)]
    frame = frame[frame["tensor_parallel"] == rows.tensor_parallel]
    frame = frame[~((frame["tensor_parallel"] == 2) & (frame["batch"] == 64))]
    length = frame["input_tokens"] + (frame["output_tokens"] / 2 if decode else 0)
    return frame["batch"], length, frame["decode_ms" if decode else "prefill_ms"] / 1e3


def test_splitwise_fits_reach_the_published_analysis():
    tables = {(t.llm, t.gpu, t.tensor_parallel): t for t in measured.splitwise()}
    assert tables.keys() == NOTES.keys()
    decode_errors = []
    for key, (mape, r2, ols, *slopes, step_mape, t0, u1, u2) in NOTES.items():
        prefill = affine.fit_phase(*all_settings(tables[key], False), decode=False, form="cross")
        assert prefill.linear.accuracy.mape_percent == pytest.approx(mape, abs=0.11)
        assert prefill.linear.accuracy.r2 == pytest.approx(r2, abs=1e-3)
        assert 1e3 * prefill.linear.coefficients == pytest.approx(slopes, rel=2e-3)
        plain = affine.fit_phase(
            *all_settings(tables[key], False), decode=False, form="cross", weights="none"
        )
        assert plain.linear.accuracy.mape_percent == pytest.approx(ols, abs=0.06)
        decode = affine.fit_phase(*all_settings(tables[key], True), decode=True, form="cross")
        assert decode.linear.accuracy.mape_percent == pytest.approx(step_mape, abs=0.011)
        assert 1e3 * decode.linear.coefficients == pytest.approx([t0, u1, u2], rel=6e-3)
        decode_errors.append(decode.linear.accuracy.mape_percent)
    assert np.mean(decode_errors) <= 2.5


@pytest.mark.parametrize(
    ("gpu", "llm", "degree", "mape"),
    [
        ("H100-SXM", "Llama-2-70B", 4, 4.1),
        ("H100-SXM", "Llama-2-70B", 8, 6.6),
        ("H100-SXM", "BLOOM-176B", 8, 8.2),
    ],
)
def test_a_floor_halves_the_prefill_error_on_h100(gpu, llm, degree, mape):
    for table in measured.splitwise():
        if (table.gpu, table.llm, table.tensor_parallel) == (gpu, llm, degree):
            fitted = fit_floor(*all_settings(table, False))
            assert fitted.accuracy.mape_percent == pytest.approx(mape, abs=0.06)


@pytest.mark.parametrize(
    ("weights", "prefill", "decode"), [("none", 43.6, 2.33), ("relative", 14.3, 2.26)]
)
def test_raw_splitwise_fits_reach_the_published_means(need, weights, prefill, decode):
    # Published over 12 groups of 105 repeats, 4 of them scaled copies of the H100 groups, which
    # have the same relative errors: H100 counts twice. Overflowing rows are kept there.
    need("splitwise_perf_model")
    first, second = [], []
    for gpu, _, _, _, rows in replicas(raw_frame("splitwise")):
        b, i = rows["batch"], rows["input_tokens"]
        context = i + rows["output_tokens"] / 2
        fits = (
            affine.fit_phase(
                b, i, rows["prefill_ms"] / 1e3, decode=False, form="cross", weights=weights
            ),
            affine.fit_phase(
                b, context, rows["decode_ms"] / 1e3, decode=True, form="cross", weights=weights
            ),
        )
        for found, fitted in zip((first, second), fits, strict=True):
            found += [fitted.linear.accuracy.mape_percent] * (2 if gpu == H100 else 1)
    assert len(first) == 12
    assert np.mean(first) == pytest.approx(prefill, abs=0.05)
    assert np.mean(second) == pytest.approx(decode, abs=0.005)


def test_splitwise_leaves_out_copies_and_overflow():
    assert {t.gpu for t in measured.splitwise()} == {"A100-SXM-80GB", "H100-SXM"}
    kept = sum(len(t.batch) for t in measured.splitwise(overflow=True))
    assert kept - sum(len(t.batch) for t in measured.splitwise()) == 2 * 2


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_splitwise_step_models_carry_decode_within_5_percent(every):
    for table in list(measured.splitwise())[::every]:
        accuracy = reduce_table(table).accuracy
        assert accuracy["decode"].mape_percent < 5.0
        assert accuracy["prefill"].mape_percent < 10.0


# Helix ------------------------------------------------------------------------------------------


def test_helix_knots_hold_known_points():
    # 30B decode of 2 requests: 0.9, 4.7 and 4.5 ms per layer; 70B prompt of 7,500 tokens on L4.
    nodes = {(n.gpu, n.llm, n.tensor_parallel): n for n in layer_latencies()}
    times = [
        float(nodes[gpu, "LLaMA-1-30B", 1].decode_layer_ms(2))
        for gpu in ("A100-SXM-40GB", "T4", "L4")
    ]
    assert times == pytest.approx([0.9, 4.7, 4.5])
    for gpu, count, ms in (("L4", 1, 246), ("T4", 4, 226)):
        one = nodes[gpu, "Llama-2-70B", count]
        assert float(one.prompt_layer_ms(7500)) == pytest.approx(ms)


def test_helix_knots_carry_every_row_within_three_percent(need):
    need("helix_layer_latency")
    raw = {(n.gpu, n.llm, n.tensor_parallel): n for n in layer_latencies(raw=True)}
    kept = {(n.gpu, n.llm, n.tensor_parallel): n for n in layer_latencies()}
    assert raw.keys() == kept.keys()
    assert len(raw) == 14
    for key, node in raw.items():
        prompt = kept[key].prompt_layer_ms(node.prompt_tokens)
        decode = kept[key].decode_layer_ms(node.decode_requests)
        np.testing.assert_allclose(prompt, node.prompt_ms, rtol=KNOT_ERROR + 1e-9)
        np.testing.assert_allclose(decode, node.decode_ms, rtol=KNOT_ERROR + 1e-9)


@pytest.fixture
def node():
    return LayerLatency(
        np.array([100.0, 200.0]), np.array([2.0, 3.0]), np.array([2.0, 10.0]), np.array([1.0, 1.8]),
        gpu="L4", llm="Llama-2-70B",
    )  # fmt: skip


def test_layer_times_at_and_beyond_the_knots(node):
    assert node.prompt_layer_ms([0, 50, 100, 150, 300]).tolist() == [0.0, 1.0, 2.0, 2.5, 4.0]
    assert node.decode_layer_ms([0, 1, 2, 6]) == pytest.approx([0.0, 1.0, 1.0, 1.4])
    assert "Layer of Llama-2-70B on L4" in str(node)


def test_step_model_of_layers_gives_prompts_and_decodes_back(node):
    reduction = node.reduce(layers=4, context_tokens=500)
    model = reduction.model
    assert float(model.seconds(150)) == pytest.approx(4 * 2.5e-3)
    assert float(model.decode_seconds([500] * 6)) == pytest.approx(4 * 1.4e-3)
    # The smallest decode, 1.0 ms, is 1.02 ms on the line from it to the prompts.
    assert reduction.accuracy["decode"].max_percent == pytest.approx(2.0)
    assert reduction.accuracy["prefill"].max_percent < 1e-9
    # Longer contexts cost more, shorter ones less.
    assert float(model.decode_seconds([1000] * 6)) > 4 * 1.4e-3


def test_helix_step_models_state_a_small_error():
    for node in layer_latencies():
        accuracy = node.reduce(10).accuracy
        assert accuracy["prefill"].max_percent < 1e-6
        assert accuracy["decode"].mape_percent < 5.0


# aiconfigurator ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "prefill_ms", "decode_1_ms", "decode_128_ms"),
    [
        ("A100-SXM-80GB", 64.7, 11.86, 24.8),
        ("H100-SXM", 22.1, 6.18, 12.8),
        ("H200-SXM", 21.2, 4.86, 9.9),
        ("L40S", 70.3, 21.98, 53.3),
        ("B200-SXM", 11.6, 3.48, 6.2),
        ("RTX-PRO-6000-Server", 44.9, 11.23, 24.4),
    ],
)
def test_derived_step_models_hold_published_points(gpu, prefill_ms, decode_1_ms, decode_128_ms):
    # vLLM, Llama-3.1-8B on one GPU, 1,024 tokens.
    (model,) = (
        m for m in measured.aiconfigurator_step_models().values()
        if m.source.startswith(f"Llama-3.1-8B on {gpu}, vllm")
    )  # fmt: skip
    assert 1e3 * float(model.prefill_seconds([1024])) == pytest.approx(prefill_ms, rel=0.02)
    assert 1e3 * float(model.decode_seconds([1024])) == pytest.approx(decode_1_ms, rel=0.02)
    # A decode step that bends in its cached tokens is carried by a line.
    assert 1e3 * float(model.decode_seconds([1024] * 128)) == pytest.approx(decode_128_ms, rel=0.04)


def test_derived_grids_match_the_raw_ones(need):
    need("aiconfigurator_grid")

    def key(t):
        return t.gpu, t.engine, t.llm, t.tensor_parallel

    raw = {key(t): t for t in measured.aiconfigurator(raw=True)}
    kept = {key(t): t for t in measured.aiconfigurator()}
    assert raw.keys() == kept.keys()
    assert len(raw) == 105
    for name, table in raw.items():
        ours = kept[name]
        order, own = (np.lexsort((t.length_tokens, t.batch, t.decode)) for t in (table, ours))
        assert table.length_tokens[order].tolist() == ours.length_tokens[own].tolist()
        error = np.abs(ours.seconds[own] / table.seconds[order] - 1)
        assert error.mean() < 0.02
        assert error.max() < 0.25


def test_grid_reductions_stay_within_5_and_1_percent_of_every_decode_step(need):
    """Read off the committed models, against the published times."""
    need("aiconfigurator_grid")
    models = measured.aiconfigurator_step_models().values()
    for raw, model in zip(measured.aiconfigurator(raw=True), models, strict=True):
        decode = raw.phase("decode")
        error = np.abs(model.seconds(*decode.step_arguments) / decode.seconds - 1.0)
        assert error.max() <= 0.05, raw.label
        assert error.mean() <= 0.01, raw.label


def test_engines_of_the_sources_are_different_generations():
    engines = [{t.engine for t in roofline_calibration.tables(s)} for s in frames.SOURCES]
    assert set.intersection(*engines) == set()
