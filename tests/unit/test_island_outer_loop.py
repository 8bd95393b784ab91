from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from hetero import workload
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import READINGS
from pipelines.studies import island_outer_loop as study
from pipelines.studies.island_outer_loop import INVENTORIES, Fleets, Trials, ends

SPACE = Divider({"H200-SXM": 16, "H20": 16}, minimum=8)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], IslandModel]:
    trace = workload.load("azure2023_code", "twin")
    return {
        ("code", reading): IslandModel.of_trace(trace, 3200, reading=READINGS[reading])
        for reading in ("thesis", "fitting")
    }


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_trials_are_one_search_per_seed_and_resumed_from_their_files(models, tmp_path):
    objective = study.tabulated(models["code", "thesis"], ("H200", "H20"), 16)
    trials = Trials((0, 3), tmp_path)
    searches = trials(SPACE, objective, "random", 2, 2)
    assert [each.seed for each in searches] == [0, 3]
    assert len(list(tmp_path.iterdir())) == 2
    again = trials(SPACE, objective, "random", 2, 2)
    assert ends(again).tolist() == ends(searches).tolist()
    bound = exact(objective.rates, {"H200-SXM": 16, "H20": 16}, minimum=2).bound
    assert (ends(searches) <= bound * (1 + 1e-6)).all()
    fig = study.progress({2: searches, 4: searches}, "batch", {2: bound, 4: 2 * bound})
    assert [axis.get_title().split("\n")[0] for axis in fig.axes] == ["batch 2", "batch 4"]
    assert [line.get_ydata()[0] for line in fig.axes[1].lines[1:]] == [
        2 * bound,
        ends(searches).max(),
    ]
    axis = study.regrets({"random": searches}, bound).axes[0]
    assert axis.get_xlabel() == "batches of 2"
    assert axis.lines[0].get_ydata()[-1] == pytest.approx(100 * (1 - ends(searches) / bound).mean())


def test_spread_and_extent_need_two_trials():
    values = np.array([1.0, 3.0])
    assert study.spread(values) == pytest.approx(np.sqrt(2))
    assert study.extent(values) == (1.0, 3.0)
    assert (study.spread(values[:1]), study.extent(values[:1])) == (0.0, None)


def test_claim_takes_what_the_results_folder_takes():
    told = study.claim("12a", 2.0, "fig57_skew", "why", interval=(1.0, 3.0))
    assert told["claim"] == "rignall-12a"
    assert told["interval"] == (1.0, 3.0)


def test_fleets_are_searched_and_solved(models, monkeypatch):
    # The real ones have 256 GPUs.
    small = {"a": (32, 32, 64), "b": (16, 64, 64), "c": (64, 0, 0)}
    monkeypatch.setattr(study, "INVENTORIES", small)
    fleets = Fleets.of(models, Trials((0,)), 4, 1)
    assert list(fleets.searches) == [("code", letter) for letter in INVENTORIES]
    table = fleets.table()
    thesis = table[table["reading"] == "thesis"]
    assert thesis["published [req/s]"].tolist() == [176, 199, 139]
    assert (thesis["search [req/s]"] <= thesis["bound [req/s]"] * (1 + 1e-6)).all()
    assert table["search [req/s]"].isna().sum() == 3
    axis = fleets.figure().axes[0]
    assert len(axis.containers) == 4
    throughput, deviation = list(fleets.throughput_claims()), list(fleets.deviation_claims())
    assert [each["claim"] for each in throughput] == [
        *(f"rignall-1{letter}" for letter in "abc"),
        "rignall-3",
    ]
    assert throughput[-1]["value"] == pytest.approx(
        fleets.best_rps("code", "b")[0] / fleets.best_rps("code", "c")[0]
    )
    assert [each["value"] for each in deviation] == thesis["D_total [req/s]"].tolist()
    assert fleets.unfinished("code", "a") in (0, 1)


def test_times():
    spent = {4: 1.0, 8: 2.0}
    direct = {(method, batch): 1.0 for method in ("bo", "saasbo") for batch in (4, 16)}
    left, right = study.times(spent, direct).axes
    assert left.lines[0].get_ydata().tolist() == [1.0, 2.0]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["standard GP", "SAASBO"]
