from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pipelines.studies import heteroserve as hs
from pipelines.studies import heteroserve_results as results
from pipelines.studies.heteroserve import MAIN, P95, SETTINGS, SLO, TPS, Study
from tests import committed

NAMES = "paper ours readings switched free workloads rivals compared mixed prompts edges swept"
VALUES = {
    "loads": [1.0, 2.0], "long_shares": [0.1, 0.9], "margins": [0.05, 0.1, 0.15],
    "queue_limits": [4.0, 32.0], "dampings": [2.0, 4.0], "bins": [2, 3, 4],
}  # fmt: skip


@pytest.fixture(scope="module")
def study() -> Study:
    return Study((0, 1), 300)


@pytest.fixture(scope="module")
def told(study):
    """What the notebook compares, and what comes of it in few requests."""
    return committed.told("05_heteroserve", *NAMES.split(), "scaled", "runs", study=study, **VALUES)


@pytest.fixture(scope="module")
def runs(told) -> dict[str, pd.DataFrame]:
    return told["runs"]


@pytest.fixture(scope="module")
def by_setting(runs) -> dict[hs.Setting, dict[str, results.Value]]:
    return {setting: results.claim_values(setting, runs) for setting in SETTINGS}


def test_the_published_table_1():
    table = results.table1()
    assert list(table) == [TPS, SLO, P95]
    assert table[TPS]["Uniform"] == 17234
    assert set(results.claims()) >= {"heteroserve-1-uniform", "heteroserve-32"}


@pytest.mark.parametrize(
    ("gains", "share"), [([-1.0, -2.0], 0.0), ([3.0, -1.0], 40.0), ([3.0, 1.0], 100.0)]
)
def test_crossing(gains, share):
    assert results.crossing([0.1, 0.5], gains) == pytest.approx(share)


def test_ratios_of_means_have_the_spread_of_the_jackknife():
    over, under = np.array([1.0, 3.0, 5.0]), np.array([2.0, 9.0, 4.0])
    values = results.of_means(over, under)
    assert values.mean() == pytest.approx(over.sum() / under.sum())
    left_out = np.array([8 / 13, 6 / 6, 4 / 11])
    # Tukey's variance of the estimate: (n - 1) / n times the squared deviations.
    expected = 2 / 3 * ((left_out - left_out.mean()) ** 2).sum()
    assert values.var(ddof=1) / 3 == pytest.approx(expected)


def test_every_claim_but_those_of_other_measurements_has_a_value(runs, by_setting):
    missing = results.claims().keys() - by_setting[MAIN].keys()
    assert {name.split("-")[1].rstrip("abc") for name in missing} == {"16", "17", "18"}
    tps = {
        name: hs.values(hs.at(runs["table1"], MAIN), TPS, scheduler=name)
        for name in ("HeteroServe", "Uniform")
    }
    ratio = by_setting[MAIN]["heteroserve-5"]
    assert ratio == pytest.approx(tps["HeteroServe"] / tps["Uniform"])
    assert results.mean(ratio) == pytest.approx(np.mean(ratio))
    assert results.mean("U>H") == "U>H"
    # Eq. 4 as printed admits every bin everywhere.
    assert by_setting[MAIN]["heteroserve-27a"] == 0.0
    margins = results.over_uniform(hs.at(runs["shares"], MAIN), "Uniform")
    assert margins.tolist() == [[0, 0], [0, 0]]


def test_survival_counts_the_settings_that_reproduce(by_setting):
    table = results.survival_frame(by_setting)
    verdicts = table.filter(like=": verdict")
    assert (verdicts == "reproduced").sum(axis=1).tolist() == table["reproduced in"].tolist()
    fig = results.verdict_bars_figure(table)
    assert sum(bar.get_width() for bar in fig.axes[0].patches) == 4 * len(table)


def test_notes_tell_reasons_and_the_other_settings(study, told, runs, by_setting):
    paper = told["paper"]
    windowed = study.windowed(paper, 10.0)
    reasons = results.reasons(study, paper["Latency-Aware"], runs, windowed)
    assert reasons["heteroserve-8"].startswith("Eq. 4 as printed admits every bin")
    assert reasons["heteroserve-24c"] == reasons["heteroserve-24a"] != ""
    assert reasons["heteroserve-31b"] == ""
    ablated = {name: told["switched"][name] for name in ("full", "no queue-awareness")}
    window = {"table1": windowed, "ablation": study.windowed(ablated, 10.0, 0.9)}
    found = results.window_frame(by_setting, window)
    assert (found["verdict"] != found["its verdict"]).all()
    order = by_setting[SETTINGS[1]]["heteroserve-20"]
    said = results.elsewhere("heteroserve-20", by_setting, found)
    assert f"at 49.8 requests/s {order};" in said
    # The runs themselves in place of the window: nothing to tell.
    same = results.window_frame(by_setting, {key: runs[key] for key in window})
    assert same.empty
    assert "window" not in results.elsewhere("heteroserve-20", by_setting, same)


def test_static_weights_and_unbounded_queues_lose_most_of_the_throughput():
    """Section 4.3: -75.5 % of the throughput, 96.65 to 1.1 % of attainment."""
    study = Study((0,), 2000)
    names = ("full", "no queue-awareness", "eq. 5 off, Q_max kept")
    switched = committed.told("05_heteroserve", "switched")["switched"]
    rows = study.runs({name: switched[name] for name in names}, 0.9)
    for setting in (MAIN, hs.WEIGHTS_ONLY):
        (full,), (static,), (kept,) = hs.grid(hs.at(rows, setting), "scheduler", TPS)
        assert static < 0.5 * full < kept
        one, other, _ = hs.grid(hs.at(rows, setting), "scheduler", SLO)
        assert one - other > 50


def test_flips(runs):
    row = results.flips_frame(runs["table1"]).iloc[0]
    assert (row["metric"], row["rival"]) == (TPS, "Oracle")
    # h / b - 1 = 2 s / (1 - s) with the symmetric error s.
    s = row["symmetric [%]"] / 100
    assert row["as printed [%]"] / 100 == pytest.approx(2 * s / (1 - s))


def test_figures_have_a_panel_per_metric_or_setting(study, told, runs):
    paper, both = told["paper"], told["paper"] | told["ours"]
    fig = results.bars_figure(runs["table1"], [*paper], [*told["readings"]], results.table1(), 6.4)
    titles = [axis.get_title() for axis in fig.axes]
    assert titles == ["Throughput", "SLO attainment", "P95 TTFT", "Beside the paper", "", ""]
    assert fig.axes[2].get_xscale() == "log"
    # The paper's schedulers as bars in its order, with what Table 1 prints.
    assert [tick.get_text() for tick in fig.axes[0].get_yticklabels()] == list(paper)
    means = [hs.values(hs.at(runs["table1"], MAIN), TPS, scheduler=x).mean() for x in paper]
    assert [bar.get_width() for bar in fig.axes[0].patches] == pytest.approx(means)
    (published,) = [line for line in fig.axes[0].lines if line.get_label() == "published"]
    assert list(published.get_xdata()) == list(results.table1()[TPS].values())
    fig = results.first_tokens_figure(study, both, (MAIN, SETTINGS[2]))
    assert len(fig.axes[0].lines) == len(both) + 1
    fig = results.shares_figure(runs["shares"], ("HeteroServe", "HeteroServe, long to H100"))
    assert [axis.get_title() for axis in fig.axes] == ["HeteroServe", "HeteroServe, long to H100"]
