"""The values that DVC's commands compare: few, named, drawn from the tables of the notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from pipelines import metrics
from pipelines.studies import claims
from pipelines.studies.published import PAPERS


def write(folder: Path, traces: str = "twin") -> dict[str, dict[str, float]]:
    folder.mkdir(exist_ok=True)
    metrics.write(folder, traces, claims.verdicts(folder))
    found = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def table(folder: Path, name: str, **columns: list[object]) -> None:
    path = folder / "twin" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_csv(path, index=False)


def test_without_results_only_claims_are_counted(tmp_path: Path) -> None:
    found = write(tmp_path)
    assert list(found) == ["claims", "reproduced"]
    assert sum(found["claims"].values()) == len(claims.ledger())
    assert found["reproduced"] == dict.fromkeys(PAPERS, 0)
    counted = pd.read_csv(tmp_path / "claims.csv")
    assert counted["claims"].sum() == len(claims.ledger())
    assert set(counted["paper"]) == set(PAPERS)


def test_best_theta_is_that_of_the_paper_s_link_and_predictor_all_at_once(tmp_path: Path) -> None:
    table(
        tmp_path,
        "04_request_scheduling/theta",
        **{
            "link": ["printed"] * 4 + ["other"],
            "predictor": ["normal"] * 3 + ["oracle"] * 2,
            "rate [req/s]": [8, "inf", "inf", "inf", "inf"],
            "theta": [0.0, 1.0, 2.0, 3.0, 4.0],
            "throughput [tokens/s]": [900.0, 500.0, 600.5, 700.0, 800.0],
        },
    )
    assert write(tmp_path)["theta"] == {"best": 2.0, "throughput [tokens/s]": 600.5}
    assert "theta" not in write(tmp_path, "real")


def test_best_skew_is_that_after_the_last_iteration_over_seeds(tmp_path: Path) -> None:
    table(
        tmp_path,
        "07_island_outer_loop/skew",
        **{
            "skew up to": [1.0, 1.0, 1.0, 5.0, 5.0],
            "seed": [0, 0, 1, 0, 1],
            "iteration": [1, 2, 2, 2, 2],
            "best throughput [requests/s]": [999.0, 10.0, 20.0, 14.0, 18.0],
        },
    )
    assert write(tmp_path)["skew"] == {"best": 5.0, "best throughput [requests/s]": 16.0}


def test_best_number_of_bins_is_that_where_it_matters(tmp_path: Path) -> None:
    table(
        tmp_path,
        "05_heteroserve/sweeps",
        **{
            "decode": ["calibrated"] * 4 + ["weights only"],
            "load": ["own saturation"] * 5,
            "swept": ["delta", "K", "K, long to H100", "K, long to H100", "K, long to H100"],
            "value": [0.1, 2.0, 4.0, 6.0, 8.0],
            "throughput [tokens/s], mean": [9.0, 9.0, 5.0, 6.0, 7.0],
        },
    )
    assert write(tmp_path)["bins"] == {"best": 6.0, "throughput [tokens/s]": 6.0}


def test_errors_and_goodput_are_means(tmp_path: Path) -> None:
    table(
        tmp_path,
        "12_fidelity/engine_errors",
        quantity=["TTFT", "TTFT", "TTFT", "TPOT"],
        statistic=["mean", "mean", "P5", "mean"],
        error_percent=[-4.0, 2.0, 80.0, 1.0],
    )
    table(
        tmp_path,
        "13_arena/league",
        **{"planner": ["b", "a"], "mean over all cases [% of best]": [50.0, 70.123456789]},
    )
    found = write(tmp_path)
    assert found["error [%]"] == {"TTFT": 3.0, "TPOT": 1.0}
    assert found["goodput [% of best]"] == {"a": 70.1235, "b": 50.0}
