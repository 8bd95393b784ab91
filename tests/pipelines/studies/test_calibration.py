"""Errors on servers as they are kept, and what is read off them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero.errors import ParameterError
from pipelines.studies import calibration, server_fit, servers
from tests import committed

ROWS = pd.DataFrame(
    {
        "test": ["gpu", "gpu", "gpu", "llm", "none"],
        **{key: ["a", "a", "b", "a", "a"] for key in calibration.KEYS},
        "kind": "layer profile",
        "TPOT": [-30.0, 10.0, 4.0, 5.0, 50.0],
        "E2E": [7.0, -7.0, 7.0, np.nan, 60.0],
        "TTFT": [1.0, 2.0, 3.0, 4.0, 70.0],
        "throughput": [1.0, 2.0, 3.0, 4.0, 80.0],
    }
)


@pytest.fixture
def raw(need) -> None:
    need(servers.DATASET)


def test_verdicts_are_of_left_out_runs_alone() -> None:
    found = calibration.verdicts_frame(ROWS, {"TPOT": 10.0, "E2E": 6.0}).to_dict("records")
    got = [(row["test"], row["quantity"], row["runs"], row["holds"]) for row in found]
    assert got == [
        ("gpu left out", "TPOT", 3, True),
        ("gpu left out", "E2E", 3, False),
        ("llm left out", "TPOT", 1, True),
        ("llm left out", "E2E", 0, False),  # nothing measured proves nothing
    ]


def test_a_summary_ends_with_all_runs_of_a_test() -> None:
    found = calibration.summarise(ROWS, ("test", "source"))
    last = found[(found["test"] == "gpu") & (found["source"] == "all")].iloc[0]
    assert (last["runs"], last["TPOT"], last["TPOT bias"]) == (3, 10.0, 4.0)


def test_runs_of_one_name_are_paired_in_their_order() -> None:
    here = ROWS[ROWS["test"] == "gpu"]
    there = here.assign(TPOT=here["TPOT"] + 1.0).sample(frac=1, random_state=0).sort_index()
    both = calibration.pair(here, there)
    assert (both["TPOT there"] - both["TPOT"]).tolist() == [1.0, 1.0, 1.0]


def test_differences_are_the_largest_of_a_test_and_name_what_is_lost() -> None:
    moved = ROWS.assign(TTFT=ROWS["TTFT"] - [0.0, 0.5, 0.0, 0.25, 0.0])
    found = calibration.differences_frame(moved, ROWS).set_index("test")
    assert found["TTFT"].to_dict() == {"gpu": 0.5, "llm": 0.25, "none": 0.0}
    with pytest.raises(ParameterError, match="1 of 5 errors are not kept"):
        calibration.differences_frame(ROWS, ROWS.iloc[1:])


def test_every_fitted_run_is_kept_in_every_test() -> None:
    kept = calibration.read()
    assert set(kept["test"]) == set(calibration.TESTS)
    fitted = kept[kept["test"] != "default"]
    counts = fitted.groupby(["source", "test"]).size().unstack()
    assert (counts.nunique(axis=1) == 1).all()
    none, sample = (kept.loc[kept["test"] == t, "E2E"].abs() for t in ("none", "in sample"))
    assert sample.median() < none.median()


@pytest.mark.slow
@pytest.mark.usefixtures("raw")
def test_kept_errors_of_the_first_generation_come_out() -> None:
    made, kept = calibration.generation_frame("first"), calibration.read()
    assert set(made["test"]) == set(calibration.TESTS) - {"default"}
    first = {run.source for run in server_fit.GENERATIONS["first"].runs()}
    assert len(made) == len(kept[(kept["test"] != "default") & kept["source"].isin(first)])
    assert calibration.differences_frame(made, kept)[[*calibration.LABELS]].max(axis=None) < 0.1


@pytest.mark.usefixtures("raw")
def test_kept_spreads_of_repeats_come_out() -> None:
    made = calibration.repeats_frame()
    committed.same(made, "measured", "server_repeats.csv")
    assert made["repeats"].min() >= 3


@pytest.mark.usefixtures("raw")
def test_kept_chips_are_those_of_mlperf() -> None:
    kept, found = calibration.read("server_chips"), servers.offline_frame()
    assert kept["gpu"].tolist() == found["gpu"].tolist()
    np.testing.assert_allclose(kept["tokens_per_s"], found["tokens_per_s"], atol=0.01)
    errors = 100.0 * (kept["simulated"] / kept["tokens_per_s"] - 1.0)
    np.testing.assert_allclose(kept["error"], errors, atol=0.02)


def test_the_public_comparison_has_every_run_once() -> None:
    found = calibration.published_frame()
    kept = [calibration.read(name) for name in ("servers", "expert_servers")]
    assert found["runs"].sum() == sum((rows["test"] == "default").sum() for rows in kept)
    assert not found.duplicated(["gpu", "llm", "engine"]).any()
    rows = found.set_index(["gpu", "llm", "engine"])
    (own,) = [rows.loc[("H200-SXM", "gpt-oss-120b", "vllm")]]
    experts = kept[1]
    runs = experts[(experts["gpu"] == "H200-SXM") & (experts["server"] == "vllm 0.13.0")]
    for test, label in (("default", "TPOT"), ("gpu", "TPOT without GPU")):
        assert own[label] == runs.loc[runs["test"] == test, "TPOT"].abs().median()


def test_four_bit_weights_on_ampere_err_by_what_is_said() -> None:
    rows = calibration.read("servers")
    rows = rows[(rows["test"] == "default") & (rows["source"] == "nm_vllm 4-bit")]
    assert len(rows) == 8
    saturated = rows["load"].str.startswith("5 req/s")
    assert rows.loc[~saturated, "TPOT"].abs().max() < 22
    assert rows.loc[~saturated, "E2E"].abs().max() < 15
    assert rows.loc[saturated, "TPOT"].abs().max() < 45


def test_the_public_comparison_says_what_was_fitted_and_its_floor() -> None:
    rows = calibration.published_frame().set_index(["gpu", "llm", "engine"])
    fitted = {
        ("H100-SXM", "Llama-3-8B", "vllm"): "overheads",
        ("H100-SXM", "gpt-oss-120b", "vllm"): "nothing",
        ("MI300X", "DeepSeek-V3-R1-671B", "sglang"): "experts",
        ("MI355X", "Llama-2-70B", "mlperf"): "compute",
    }
    assert rows.loc[list(fitted), "fitted"].tolist() == list(fitted.values())
    nights = calibration.read("server_repeats")
    nights = nights.loc[nights["source"] == "nm_vllm", "TPOT"].median()
    assert rows.loc[("A10G", "Llama-2-7B", "vllm"), "floor"] == nights
    assert rows["aiconfigurator"].notna().any()
    # Where something was fitted to the runs, they are no farther off than without their GPU.
    both = rows.loc[rows["fitted"] == "experts", ["TPOT", "TPOT without GPU"]].dropna()
    assert both["TPOT"].median() <= both["TPOT without GPU"].median()
