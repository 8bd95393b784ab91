"""Row errors: the same as the fits and tables say one by one."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero import latency, paths, workload
from hetero.catalog import gpu, llm
from hetero.cluster import Cluster, Machine
from hetero.engines import replicated
from hetero.latency import for_gpu
from hetero.latency.sources import measured
from hetero.routers import RoundRobin
from hetero.simulator import metrics, simulate
from pipelines.studies import fidelity


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
