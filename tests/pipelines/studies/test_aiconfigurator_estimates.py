"""aiconfigurator's estimates of runs of servers."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from hetero.catalog import llm
from hetero.errors import ParameterError
from hetero.workload import Trace
from pipelines.studies import aiconfigurator_estimates as beside
from pipelines.studies import calibration, servers

BATCH = servers.ServerRun(
    "argonne", "vLLM 0.6", "H100-SXM", llm("Llama-3-8B"), 2, "batch 4 of 100",
    Trace(np.zeros(4), [100] * 4, [11] * 4), {"e2e_s": 1.0}, statistic="last",
)  # fmt: skip


def test_a_batch_is_asked_as_a_batch_and_a_rate_as_a_rate() -> None:
    told = beside.question(BATCH)
    assert (told["batch"], told["rate"], told["prefix"]) == (4, 0.0, 0)
    assert (told["system"], told["degree"], told["gemm"]) == ("h100_sxm", 2, "bfloat16")
    assert json.loads(told["config"])["num_hidden_layers"] == 32
    steady = Trace(
        np.arange(5) / 2.0, [100] * 5, [11] * 5, prefix_offsets=np.arange(6) * 6,
        prefix_ids=np.tile(np.arange(6), 5), block_tokens=16,
    )  # fmt: skip
    run = servers.ServerRun(
        "blis", "vLLM 0.15.1", "H100-SXM", llm("Llama-3-8B"), 2, "2 req/s", steady,
        {"e2e_s": 1.0}, precision="fp8",
    )  # fmt: skip
    told = beside.question(run)
    assert (told["batch"], told["rate"], told["prefix"], told["gemm"]) == (0, 2.0, 96, "fp8")


def test_whose_error_is_smaller_is_counted_on_the_same_runs() -> None:
    keys = {key: ["a", "b", "c"] for key in calibration.KEYS} | {"gpu": "H100-SXM"}
    ours = pd.DataFrame(
        {**keys, "test": "gpu", "TPOT": [-1.0, 2.0, 3.0], "E2E": [np.nan, 9.0, 9.0]}
    )
    theirs = pd.DataFrame(
        {**keys, "estimate": "IFB", "TPOT": [2.0, 1.0, -9.0], "E2E": [1.0, 8.0, np.nan]}
    )
    missing = {"TTFT": np.nan}
    rows = beside.comparison_frame(ours.assign(**missing), theirs.assign(**missing)).to_dict(
        "records"
    )
    assert [(row["quantity"], row["runs"], row["ours"], row["theirs"]) for row in rows] == [
        ("TPOT", 3, 2.0, 2.0),
        ("E2E", 1, 9.0, 8.0),
    ]
    assert [row["holds"] for row in rows] == [False, False]
    assert rows[0]["nearer"] == pytest.approx(200 / 3)


def test_requests_in_flight_are_those_of_littles_law() -> None:
    kept = calibration.read("aiconfigurator_servers")
    steady = kept[kept["load"].str.contains("req/s")]
    rates = steady["load"].str.extract(r"([\d.]+) req/s")[0].astype(float)
    assert len(steady) >= 18
    expected = (rates * steady["e2e_ms"] / 1e3).to_numpy()
    np.testing.assert_allclose(steady["in_flight"], expected, rtol=0.01)


def test_without_its_python_it_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(beside.PYTHON, str(tmp_path / "python"))
    with pytest.raises(ParameterError, match="pip install aiconfigurator"):
        beside.python()


def test_a_kept_estimate_comes_out(monkeypatch, need) -> None:
    need(servers.DATASET)
    try:
        beside.python()
    except ParameterError as error:
        pytest.skip(str(error))
    run = next(run for run in beside.asked() if run.gpu == "H100-SXM" and run.source == "argonne")
    monkeypatch.setattr(beside, "asked", lambda: (run,))
    made = beside.estimates_frame().rename(columns=lambda name: name.removesuffix("_percent"))
    both = calibration.pair(made, calibration.read("aiconfigurator_servers"))
    assert both["e2e_ms"].tolist() == pytest.approx(both["e2e_ms there"].tolist(), rel=1e-3)
