from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hetero import workload
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.inner import Deviations
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import READINGS
from hetero.planners.rignall.search import Objective, Search, Trials
from pipelines import schema
from pipelines.studies import island_outer_loop as study
from pipelines.studies.island_outer_loop import INVENTORIES, Fleets, ends

SPACE = Divider({"H200-SXM": 16, "H20": 16}, minimum=8)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], IslandModel]:
    trace = workload.load("azure2023_code", "twin")
    return {
        ("code", reading): IslandModel.of_trace(trace, 3200, reading=READINGS[reading])
        for reading in ("thesis", "fitting")
    }


PRINTED = Deviations(tau=0.5, weight=1000.0)


def test_trials_are_one_search_per_seed_and_resumed_from_their_files(models, tmp_path):
    objective = study.tabulated(models["code", "thesis"], ("H200", "H20"), 16, PRINTED)
    trials = Trials((0, 3), tmp_path)
    searches = trials(SPACE, objective, "random", 2, 2)
    assert [each.seed for each in searches] == [0, 3]
    in_processes = Trials((0, 3), jobs=2)(SPACE, replace(objective), "random", 2, 2)
    assert ends(in_processes).tolist() == ends(searches).tolist()
    solved = objective.solved
    trials(SPACE, objective, "random", 2, 2)
    assert objective.solved == solved
    assert len(list(tmp_path.iterdir())) == 2
    again = trials(SPACE, objective, "random", 2, 2)
    assert ends(again).tolist() == ends(searches).tolist()
    fig = study.progress_figure({2: searches, 4: searches}, "batch")
    assert [axis.get_title().split("\n")[0] for axis in fig.axes] == ["batch 2", "batch 4"]
    mean, best = fig.axes[1].lines
    assert mean.get_ydata()[-1] == pytest.approx(ends(searches).mean())
    assert best.get_ydata()[0] == ends(searches).max()


def test_trials_of_other_values_of_a_space_have_other_files(models, tmp_path):
    rates = study.tabulated(models["code", "thesis"], ("H200", "H20"), 16).rates
    flat = np.full(len(rates.share), 1 / len(rates.share))
    other = replace(rates, ranges=replace(rates.ranges, share=flat))
    trials = Trials((0,), tmp_path)
    for objective in (Objective(rates), Objective(other), Objective(rates, "aggregated", PRINTED)):
        trials(SPACE, objective, "random", 2, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_searches_are_kept_by_code_and_release(monkeypatch, tmp_path):
    monkeypatch.setattr(study.paths, "root", lambda: tmp_path)
    monkeypatch.setattr(study.os, "environ", {})
    proposes, reads = "hetero/planners/rignall/search.py", "hetero/workload/readers.py"
    codes = ({proposes: "1"}, {proposes: "1", reads: "1"}, {proposes: "2"})
    one, same, edited = (study.folder("build", code) for code in codes)
    monkeypatch.setattr(study.kept, "version", "{} 99".format)
    assert one == same
    assert len({one, edited, study.folder("build", codes[0])}) == 3
    assert study.folder("", {}) is None


def test_the_paper_profile_says_how_long_its_searches_take(monkeypatch):
    monkeypatch.setattr(study, "LAYOUT_CPU_S", (0.36, 3.6, 36.0))
    section = schema.load(profile="paper").of("island_outer_loop")
    # 800, 9,600 and 10,400 by the divider at 4, 8 and 16; 1,400 and 2,000 in slots.
    assert "24,200 layouts, about 23.5 CPU hours" in study.forecast(section)


def test_claims_are_means_over_trials_with_their_interval():
    told = study.claim("12a", [1.0, 2.0, 3.0], "fig57_skew", "why")
    assert (told["claim"], told["value"]) == ("rignall-12a", 2.0)
    assert told["interval"] == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert "interval" not in study.claim(11, 1.0, "fig56_fig511_time", "why")


def test_deviations_are_compared_by_the_law_of_their_ratio():
    narrow, wide = (trials_that_end(10 + s * np.arange(5.0)) for s in (1, 20))
    told = study.spreads(10, [(narrow, wide)], "fig55_batch", "why")
    assert told["value"] == pytest.approx(20)
    # The 97.5 % quantile of F(4, 4) is 9.6045.
    assert told["interval"] == pytest.approx((20 / 9.6045**0.5, 20 * 9.6045**0.5), rel=1e-4)
    steps = [(narrow, wide), (wide, wide), (wide, narrow)]
    told = study.spreads("16b", steps, "fig512_slots", "why", share=True)
    assert (told["value"], *told["interval"]) == pytest.approx((1 / 3, 1 / 3, 2 / 3))


def trials_that_end(values):
    return [
        Search(SPACE, "random", 1, seed, np.zeros((1, 4)), np.array([value]), None)
        for seed, value in enumerate(values)
    ]


def test_w_and_tau_are_chosen_by_both_numbers_of_the_conversation_rows():
    # Half the published R_total is 0.693 off, a deviation too large by R_total is 1 off.
    rows = [
        (trace, letter, width, tau, factor * total, apart + more * total)
        for trace, width, tau, factor, more in (
            ("conv", 200, 0.1, 1, 1), ("conv", 400, 0.1, 0.5, 0), ("conv", 200, 0.5, 0.5, 0),
            ("code", 200, 0.1, 1, 0), ("code", 400, 0.1, 9, 0), ("code", 200, 0.5, 9, 0),
        )
        for letter, total, apart in zip(
            INVENTORIES, study.PUBLISHED[trace], study.PUBLISHED_D[trace], strict=True
        )
    ]  # fmt: skip
    columns = ["trace", "inventory", *study.PAIR, "r_total_rps", "d_total_rps"]
    scanned = pd.DataFrame(rows, columns=columns)
    missed = study.misses_frame(scanned)
    assert missed["conv"].tolist() == pytest.approx([1.0, np.log(2), np.log(2)])
    assert study.chosen(scanned) == (200, 0.5)
    assert len(study.scan_figure(scanned).axes) == 3


def test_the_notebook_takes_what_the_scan_chose():
    section = schema.load().of("island_outer_loop")
    assert study.chosen(study.committed_frame()) == tuple(section[name] for name in study.PAIR)
    assert section["price"] == study.PRICE


def test_a_row_of_the_scan_comes_out_as_it_is_kept(monkeypatch):
    monkeypatch.setattr(study, "WIDTHS", (2000,))
    monkeypatch.setattr(study, "TAUS", (1.0,))
    made, kept = study.scan(), study.committed_frame()
    chosen = kept[(kept["width_tokens"] == 2000) & (kept["tau"] == 1)]
    assert made["r_total_rps"].tolist() == pytest.approx(chosen["r_total_rps"].tolist(), rel=2e-2)


def test_fleets_are_searched_and_solved(models, monkeypatch):
    # The real ones have 256 GPUs.
    small = {"a": (32, 32, 64), "b": (16, 64, 64), "c": (64, 0, 0)}
    monkeypatch.setattr(study, "INVENTORIES", small)
    fleets = Fleets.of(models, PRINTED, Trials((0, 1)), 4, 1)
    assert list(fleets.searches) == [("code", letter) for letter in INVENTORIES]
    table = fleets.table()
    thesis = table[table["reading"] == "thesis"]
    assert thesis["published R_total [req/s]"].tolist() == [176, 199, 139]
    served = thesis["load of the mix carried [req/s]"]
    assert (served <= thesis["bound [req/s]"] * (1 + 1e-6)).all()
    assert table["R_total [req/s]"].isna().sum() == 3
    best = [plan.expected_rps for plan in fleets.plans("code", "a")]
    assert fleets.total_rps("code", "a").tolist() == best
    upper, lower = fleets.figure().axes
    assert [len(axis.patches) for axis in (upper, lower)] == [3, 3]
    throughput = list(fleets.throughput_claims("how"))
    assert [each["claim"] for each in throughput] == [
        *(f"rignall-1{letter}" for letter in "abc"),
        "rignall-3",
    ]
    assert throughput[-1]["value"] == pytest.approx(
        (fleets.total_rps("code", "b") / fleets.total_rps("code", "c")).mean()
    )
    deviation = list(fleets.deviation_claims("how"))
    assert [each["value"] for each in deviation] == pytest.approx(
        thesis["D_total [req/s]"].tolist()
    )
