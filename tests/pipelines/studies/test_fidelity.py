"""Row errors: the same as the fits and tables say one by one."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from hetero import latency, paths, workload
from hetero.catalog import gpu, llm
from hetero.cluster import Cluster, Machine, cluster
from hetero.engines import replicated
from hetero.latency import for_gpu
from hetero.latency.sources import measured, profiles
from hetero.routers import RoundRobin
from hetero.simulator import metrics, simulate
from hetero.simulator.uncertainty import Outcomes
from pipelines.studies import fidelity, replays
from pipelines.studies import fidelity_figures as study


def test_errors_are_those_of_the_models() -> None:
    found = fidelity.row_errors_frame("splitwise", most_batch=16, most_tokens=2048)
    table = next(t for t in measured.splitwise() if t.label == "Llama-2-70B on H100-SXM x4")
    rows = found[(found["gpu"] == "H100-SXM") & (found["llm"] == "Llama-2-70B")]
    rows = rows[rows["degree"] == 4]
    model = for_gpu(gpu("H100-SXM"), llm("Llama-2-70B"), 4, source="splitwise")
    own = 100 * (model.seconds(*table.step_arguments) / table.seconds - 1)
    of = rows[rows["model"] == "roofline"]
    np.testing.assert_allclose(of["error_percent"], own)
    inner = table.where((table.batch <= 16) & (table.length_tokens <= 2048))
    _, decode = latency.fit(inner, form="cross")
    at = rows[(rows["model"] == "affine") & (rows["phase"] == "decode")]
    steps = table.phase("decode")
    expected = 100 * (decode.predict(steps.batch, steps.length_tokens).seconds / steps.seconds - 1)
    np.testing.assert_allclose(at["error_percent"], expected)
    assert at["inside"].sum() == len(inner.phase("decode").batch)


def test_affine_fits_err_more_beyond_their_range() -> None:
    found = fidelity.row_errors_frame("aiconfigurator")
    size = fidelity.summarise(found, ["model", "phase", "inside"]).set_index(
        ["model", "phase", "inside"]
    )["mape"]
    for phase in ("prefill", "decode"):
        assert size["affine", phase, False] > size["affine", phase, True]


def test_helix_has_one_length_and_no_affine_fit() -> None:
    assert set(fidelity.row_errors_frame("helix")["model"]) == {"roofline"}


def test_groups_are_summarised() -> None:
    found = fidelity.row_errors_frame("helix")
    table = fidelity.summarise(found, ["gpu", "phase"])
    assert table["rows"].sum() == len(found)
    one = found[(found["gpu"] == "T4") & (found["phase"] == "decode")]["error_percent"]
    row = table[(table["gpu"] == "T4") & (table["phase"] == "decode")].iloc[0]
    assert row["mape"] == pytest.approx(one.abs().mean())
    assert row["largest"] == pytest.approx(one.abs().max())


@pytest.mark.parametrize(
    ("name", "run", "rate_rps", "tpot_off", "e2e_off"),
    [
        ("Llama-3.1-8B", "poisson_4", 4.0, 0.30, 0.24),
        ("Llama-3.1-8B", "poisson_11", 11.0, 0.28, 0.21),
        ("Qwen3-30B-A3B", "poisson_4", 4.0, -0.28, -0.28),
    ],
)
def test_own_runs_of_vllm_come_out_as_far_off_as_their_page_says(
    name, run, rate_rps, tpot_off, e2e_off
) -> None:
    """Rows of ``own_vllm.csv``, to which nothing is fitted: the errors are at most those found."""
    rows = pd.read_csv(paths.data("measured", "own_vllm.csv"), index_col=["model", "run"])
    one = replicated(Cluster("one", (Machine("m", gpu("H200-SXM"), 1),)), llm(name), {"m": 1})
    assert one.replicas[0].kv_tokens == pytest.approx(rows.kv_tokens[name, "start"], rel=0.02)
    lengths = workload.load("azure2023_conv").sample(600, np.random.default_rng(11))
    trace = lengths.poisson(rate_rps, np.random.default_rng(12)).window(0.0, 25.0)
    said = metrics(simulate(one, trace, RoundRobin())).percentiles
    for quantity, off in (("tpot", tpot_off), ("e2e", e2e_off)):
        ratio = 1e3 * said[f"{quantity}_s"][50] / rows[f"{quantity}_p50_ms"][name, run]
        assert abs(ratio - 1.0) < abs(off) + 0.01


def test_a_deployment_is_judged_by_what_it_does():
    found = replicated(cluster("xiong-8xv100"), llm("Llama-3-8B"), {"v100": 4})
    trace = workload.load("sharegpt", source="twin").head(20).all_at_once()
    measures = study.judge(trace, RoundRobin(), 0)(found)
    assert list(measures) == ["throughput [tokens/s]", "P95 TTFT [s]", "cost [$/Mtok]"]
    assert measures["throughput [tokens/s]"] > 0
    assert measures == study.judge(trace, RoundRobin(), 0)(found)


def test_a_real_run_is_drawn_beside_its_simulation():
    real = replays.real_runs()[0]
    profiled = profiles.profiled_step(real.gpu, real.llm, real.tensor_parallel)
    found = replays.replay(real, profiled.model)
    figure = study.engine_figure({("a run", "ragged"): found, ("a run", "in turn"): found})
    assert [axis.get_xlabel() for axis in figure.axes] == ["TTFT [s]", "TPOT [ms]", "E2E [s]"]
    points = figure.axes[1].lines[0].get_xdata()
    assert points == pytest.approx(1e3 * np.asarray(real.percentiles["tpot_s"]))
    assert all(len(axis.lines) == 2 for axis in figure.axes)
    with_other = {("a run", "ragged"): found, ("a run", "ragged, other host"): found}
    other = study.engine_figure(with_other)
    assert all(len(axis.lines) == 3 for axis in other.axes)
    plt.close(figure)
    plt.close(other)


def test_errors_are_drawn_by_batch_and_length():
    ranges = pd.Categorical(["to 4", "to 4", "above"], ["1", "to 4", "above"], ordered=True)
    errors = pd.DataFrame(
        {"model": ["affine", "roofline", "affine"], "error_percent": [-10.0, 4.0, 30.0]}
    ).assign(batches=ranges, lengths=ranges)
    both = pd.concat([errors.assign(phase=phase) for phase in ("prefill", "decode")])
    figure = study.ranges_figure(both)
    assert [axis.get_title() or axis.get_title(loc="left") for axis in figure.axes] == [
        "prefill",
        "decode",
    ] * 2
    affine = figure.axes[0].containers[0]
    assert [bar.get_height() for bar in affine] == [10.0, 30.0]
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert ticks == ["to 4", "above"]
    plt.close(figure)


def test_the_prototype_has_a_panel_per_quantity():
    errors = pd.DataFrame(
        [
            (quantity, part, mode, 10.0, 12.0)
            for quantity in ("decode_tps", "prompt_s", "decode_s")
            for part in ("all", "cluster_a100")
            for mode in ("online", "offline")
        ],
        columns=["quantity", "part", "mode", "measured", "simulated"],
    )
    figure = study.prototype_figure(errors)
    assert figure.axes[0].get_xlabel() == "measured decode throughput [tokens/s]"
    points = figure.axes[0].collections[0].get_offsets()
    assert np.asarray(points).tolist() == [[10.0, 12.0]] * 4
    plt.close(figure)


def test_intervals_of_plans_have_a_row_per_question():
    values = np.array([[[1.0], [2.0], [3.0]], [[100.0], [200.0], [300.0]]])
    wide = Outcomes(("a", "b"), ("cost",), np.array([[2.0], [200.0]]), values)
    narrow = Outcomes(("a", "b"), ("cost",), np.array([[2.0], [3.0]]), values[:1].repeat(2, 0))
    figure = study.intervals_figure([wide, narrow], {"a": "#0072B2"})
    assert [axis.get_xscale() for axis in figure.axes] == ["log", "linear"]
    line, mark = figure.axes[0].lines[:2]
    assert line.get_color() == "#0072B2"
    assert figure.axes[0].lines[2].get_color() == "#555555"
    assert tuple(line.get_xdata()) == pytest.approx(wide.interval("a", "cost"))
    assert list(mark.get_xdata()) == [2.0]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["nominal step times", "90 % interval"]
    plt.close(figure)


def test_rows_of_one_gpu_and_engine_count_as_often_as_they_have_runs():
    nothing = {"fitted": "nothing", "floor": float("nan"), "TTFT": float("nan")}
    rows = [
        {"gpu": "G", "llm": "a", "engine": "vllm", "throughput": 2.0, "TPOT": 4.0, "runs": 1},
        {"gpu": "G", "llm": "b", "engine": "vllm", "throughput": 6.0, "TPOT": None, "runs": 9},
        {"gpu": "H", "llm": "a", "engine": "vllm", "throughput": 3.0, "TPOT": 1.0, "runs": 2},
    ]
    frame = pd.DataFrame([row | nothing for row in rows])
    frame.loc[2, "fitted"] = "overheads"
    figure = study.public_figure(frame)
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["G, vllm (10)", "H, vllm (2)"]
    full, hollow = axis.lines[:2]
    assert full.get_xdata()[0] == pytest.approx(6.0)
    assert hollow.get_fillstyle() == "none"
    assert hollow.get_xdata()[0] == pytest.approx(3.0)
    plt.close(figure)
