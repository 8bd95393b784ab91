from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero import catalog
from hetero.intervals import interval
from hetero.workload import synthetic
from pipelines.studies import heteroserve as hs
from pipelines.studies.heteroserve import MAIN, RATED, SLO, TPS, WEIGHTS_ONLY, Study
from tests import committed

WEIGHTS_AT_PUBLISHED = (WEIGHTS_ONLY[0], hs.PUBLISHED)
PAPER = committed.told("05_heteroserve", "paper")["paper"]


@pytest.fixture(scope="module")
def study() -> Study:
    return Study((0, 1), 100)


def test_verdicts_need_a_difference_that_is_clear_and_not_small() -> None:
    for gain, found in (
        ([0.05, 0.06, 0.055], "win"),
        ([-0.05, -0.06, -0.055], "loss"),
        ([0.005, 0.006, 0.0055], "tie"),
        ([0.5, -0.4, 0.05], "tie"),
    ):
        assert hs.verdict(np.array(gain), 0.01) == found


def test_printed_steps_prefill_at_table_4_and_decode_at_the_speed_of_memory():
    a100 = catalog.gpu("A100-SXM-80GB")
    free, paid = (hs.printed_steps(reads_kv=reads)(a100, hs.MODEL, 1) for reads in (False, True))
    # 312 TFLOPS over 31.2 GFLOP per token.
    assert float(free.prefill_seconds([10_000])) == pytest.approx(1.0)
    weights_s = hs.MODEL.weight_bytes() / (a100.mem_bw_gbs * 1e9)
    assert float(free.prefill_seconds([1])) == pytest.approx(weights_s)
    assert float(paid.decode_seconds([1000])) > float(free.decode_seconds([1000]))


def test_limits_of_the_schedulers():
    fleet = hs.fleet("calibrated")
    limits = [replica.engine.max_batch for replica in fleet.replicas]
    # Eq. 6 with what section 4.1 prints: ((1 - 0.1) M - 26 GB) over 1,166 tokens of 0.8192 MB.
    assert limits == [int((0.9 * gb - 26) / (1166 * 0.0008192)) for gb in [80] * 6 + [48] * 2]
    assert limits == [48] * 6 + [18] * 2
    assert hs.system(RATED, fleet) == (fleet, RATED)
    scaled, _ = hs.system(PAPER["Capacity-prop."], fleet)
    memory = [replica.gpu.mem_gib for replica in fleet.replicas]
    for replica, gib in zip(scaled.replicas, memory, strict=True):
        assert replica.engine.max_batch == int(max(limits) * gib / max(memory))
    last = hs.LongToFastest().admissions(fleet)[-1]
    h100 = [replica.gpu.name.startswith("H100") for replica in fleet.replicas]
    assert last.tolist() == h100


def test_rows_are_selected_by_column_and_setting():
    rows = pd.DataFrame({"setting": ["a, b", "a, b", "c, d"], "k": [2, 1, 2], "x": [1.0, 2.0, 3.0]})
    assert hs.values(rows, "x", k=2).tolist() == [1.0, 3.0]
    assert hs.grid(hs.at(rows, ("a", "b")), "k", "x").tolist() == [[1.0], [2.0]]
    both = hs.joined_frame({0.5: rows, 1.0: rows}, "factor")
    assert both["factor"].tolist() == [0.5] * 3 + [1.0] * 3


def test_runs_have_a_row_per_setting_scheduler_and_seed(study):
    rows = study.runs(PAPER, 2.0, settings=[WEIGHTS_AT_PUBLISHED])
    assert rows["scheduler"].tolist() == [name for name in PAPER for _ in study.seeds]
    assert set(rows["setting"]) == {"weights only, 49.8 requests/s"}
    assert rows[SLO].between(0, 100).all()
    assert (rows[TPS] > 0).all()
    means = hs.with_intervals(rows)
    low, high = interval(hs.values(rows, TPS, scheduler="Uniform"))
    assert means[f"{TPS}, +-"][0] == pytest.approx((high - low) / 2)
    assert means[TPS][0] == pytest.approx((high + low) / 2)


def test_schedulers_serve_the_workload_they_are_told(study):
    runs, long = [], (synthetic.Bimodal(long_share=1.0), hs.HETEROSERVE_OUTPUT)
    rows = study.compared(
        ("calibrated", hs.OWN), {"HeteroServe": RATED}, 20.0,
        lambda run: runs.append(run) or hs.measured(run), workload=long, count=30,
    )  # fmt: skip
    run = runs[0]
    assert [len(one.requests) for one in runs] == [30, 30]
    assert (study.trace(long, 20.0, 0, 30).input_tokens > 2048).all()
    assert rows[SLO][0] == pytest.approx(100 * np.mean(run.ttft_s < 0.5))
    assert hs.load_cov(run) > 0
    served = np.bincount(run.requests["node"], minlength=8)
    h100 = [replica.gpu.name.startswith("H100") for replica in run.deployment.replicas]
    assert hs.passed_best(run) == pytest.approx(100 * (1 - served[h100].sum() / 30))


def test_load_factor_1_is_the_saturation_or_what_is_published(study):
    assert study.nominal_rps(WEIGHTS_AT_PUBLISHED) == 49.8
    assert study.nominal_rps(MAIN) == study.saturated_rps(MAIN[0], PAPER["HeteroServe"]) > 0


def test_scaling_efficiency_is_per_device_and_seed(study):
    sizes = hs.at(study.by_size({"Uniform": PAPER["Uniform"]}, (4, 8)), MAIN)
    assert sizes["size"].tolist() == [4, 4, 8, 8]
    small, large = hs.grid(sizes, "size", TPS)
    expected = [[100, 100], (100 * large / (2 * small)).tolist()]
    assert hs.grid(sizes, "size", hs.EFFICIENCY).tolist() == [pytest.approx(x) for x in expected]


def test_contest_is_against_the_best_other_of_each_metric(study):
    rivals = study.runs(PAPER, 1.0, settings=[WEIGHTS_AT_PUBLISHED])
    modes = committed.told("05_heteroserve", "modes")["modes"]
    rows = study.contest(WEIGHTS_AT_PUBLISHED, modes, rivals, "here", 1.0)
    assert len(rows) == 6
    assert {row["verdict"] for row in rows} <= {"win", "tie", "loss"}
    best = rivals.groupby("scheduler")[TPS].mean()
    assert (rows[0]["best other"], rows[0]["its"]) == (best.idxmax(), pytest.approx(best.max()))


def test_prefill_rates_are_those_of_table_4():
    rates = hs.prefill_rates_frame().set_index(["GPU", "batch"])
    assert rates["Table 4 [tokens/s]"]["A100-SXM-80GB", 1] == pytest.approx(10_000)
    assert len(rates) == 6
