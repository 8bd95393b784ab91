"""Notebook 09: Helix's methods served, plans ranked by what they deliver, and the claims."""

import numpy as np
import pytest
from matplotlib import pyplot as plt

from pipelines.studies import helix
from pipelines.studies import helix_serving as hs
from pipelines.studies.helix_artifact import expected, placement
from tests import committed

SETTING = "single-24 70B"


@pytest.fixture(scope="module")
def study():
    return hs.HelixServing("twin", False, (10.0, 40.0), 30.0, 0)


@pytest.fixture(scope="module")
def served(study):
    cases = helix.cases()
    return study.case(cases[f"{SETTING} helix"]) | study.case(cases[f"{SETTING} swarm"])


def _told(*names, **given):
    """What the notebook compares, in little time."""
    small = {"source": "twin", "raw": False, "window_s": (10.0, 40.0), "online_s": 30.0}
    small |= {"seeds": [0], "shares": [0.7], "shallow": []}
    return committed.told("09_helix_serving", *names, **small, **given)


@pytest.fixture(scope="module")
def ranked():
    return _told("effort", "rank")["rank"]("small-10 30B")


def test_every_protocol_of_a_case_is_beside_what_the_artifact_prints(served):
    table = hs.serving_frame(served)
    assert list(table["serving"]) == 2 * [hs.OFFLINE, hs.HAND, hs.PRINTED]
    theirs = expected(f"{SETTING} helix", "offline")["decode_throughput"]
    assert table["Helix's simulator [tokens/s]"][0] == theirs
    assert np.isnan(table["Helix's simulator [tokens/s]"][2])


def test_errors_are_those_of_the_pairs(served):
    pairs = hs.comparison_frame(served)
    fig, errors = hs.agreement(pairs)
    off = (pairs["ours"] / pairs["published"] - 1).abs()
    first = off[pairs["quantity"] == hs.SIMULATOR]
    assert errors["quantity"][0] == hs.SIMULATOR
    assert errors["values"].sum() == len(pairs)
    assert errors["mean error [%]"][0] == pytest.approx(100 * first.mean())
    assert [axis.get_ylabel() for axis in fig.axes] == [
        "our decode throughput [tokens/s]",
        "our latency [s]",
    ]


def test_plans_are_ranked_by_what_they_decode(study, ranked):
    published = study.placement(placement("small-10 30B helix"))
    (row,) = hs.gains_frame({"small": ranked}, {"small": published}).itertuples(index=False)
    assert row[5] == max(one.serving.decode_tps for one in ranked.ranked)
    assert row[5] >= row[2]
    left, right = hs.flow_and_throughput_figure({"small": ranked}, {"small": published}).axes
    for lines in (left.lines[:2], right.lines):
        assert sum(len(line.get_xdata()) for line in lines) == len(ranked.ranked)
    told = [text.get_text() for text in left.get_figure().legends[0].get_texts()]
    assert told == ["small", "Helix's placement", "large flow", "chains"]
    shares = np.concatenate([line.get_xdata() for line in left.lines[:2]])
    assert max(shares) == 1.0
    ours = study.ours("small-10 30B", ranked.best, published)
    assert ours["small-10 30B ours", hs.OFFLINE] is ranked.best.serving


def test_placements_of_swarm_and_petals_stand_beside_what_the_artifact_prints(study, served):
    table = study.baselines(served, [SETTING, "geo-24 70B"])
    rows = table.set_index(["cluster", "placement", "scheduler"])
    assert list(rows.index) == [
        ("single-24", "swarm", "swarm"),
        ("single-24", "swarm", "helix"),
        ("single-24", "petals", "helix"),
        ("geo-24", "swarm", "helix"),
        ("geo-24", "petals", "helix"),
    ]
    printed = rows["Helix's simulator [tokens/s]"]
    assert list(printed.dropna()) == [124.7, 41.6, 66.6]
    off = 100 * (rows["decoded [tokens/s]"] / printed - 1)
    assert list(rows["over it [%]"].dropna()) == pytest.approx(list(off.dropna()))


def test_methods_are_drawn_in_a_row(served):
    _, axes = plt.subplots(1, 3)
    hs.methods(axes, served, SETTING)
    assert len(axes[0].patches) == 4
    assert [text.get_text() for text in axes[1].get_xticklabels()] == ["Helix", "Swarm"]


def test_a_node_fails_and_every_request_is_accounted_for(study):
    chosen = placement(f"{SETTING} helix")
    told = _told("victim", "load_tps", "failed", chosen=chosen, study=study)
    assert "a100" in told["victim"].lower()
    assert sum(told["failed"].counts.values()) == len(told["failed"].requests)


def test_schedulers_and_the_links_that_congest():
    table, links = _told("schedule")["schedule"](0)
    assert list(table["scheduler"].unique()) == list(hs.SCHEDULERS)
    assert len(table) == 8
    assert len(links) == 24
    worst = links.groupby(["cluster", "scheduler"], sort=False)["prompts waited [s]"]
    assert list(worst.apply(lambda w: w.fillna(0.0).mean())) == pytest.approx(list(table["waited"]))
    (bars,) = hs.schedulers_figure(table).axes
    assert [len(group) for group in bars.containers] == [2, 2, 2, 2]
    congested = links[(links["cluster"] == "geo-24") & links["scheduler"].isin(["swarm", "random"])]
    worst_pairs = set(zip(congested["from"], congested["to"], strict=True))
    (plan,) = hs.congestion_figure(links).axes
    waits = [text.get_text() for text in plan.texts if " s" in text.get_text()]
    assert len(waits) == len(worst_pairs)
    rows = {row["claim"]: row["value"] for row in hs.scheduler_claims(table)}
    decoded = table.set_index(["cluster", "scheduler"])["decoded"]
    assert rows["helix-14c"] == decoded["geo-24", "helix"] / decoded["geo-24", "shortest queue"]
    assert sorted(rows["helix-31c"].split("<")) == ["Helix", "Swarm", "random"]


def test_only_methods_that_were_served_have_claims(served):
    rows = {row["claim"]: row["value"] for row in hs.method_claims(served)}
    assert set(rows) == {"helix-3b", "helix-4b", "helix-24a", "helix-24b"}
    mine, theirs = (served[f"{SETTING} {m}", hs.OFFLINE] for m in ("helix", "swarm"))
    assert rows["helix-3b"] == mine.decode_tps / theirs.decode_tps
    errors = {row["claim"]: row["value"] for row in hs.fidelity_claims(served, [SETTING])}
    assert errors["helix-15a"] >= 0
    assert "helix-33a" not in errors
