from __future__ import annotations

import re
from dataclasses import replace

import joblib
import numpy as np
import pandas as pd
import pytest
from scipy import stats

import hetero
from hetero import catalog, cluster, workload
from hetero.comparison import KEYS, Comparison, measured
from hetero.display import Column, Table
from hetero.errors import ParameterError
from hetero.plans import Plan
from hetero.plots import figures
from hetero.routers import DEFER, Normal, Oracle, Predictive, RoundRobin, fresh
from hetero.routers.base import DEFAULT
from hetero.simulator import Slo, metrics, simulate
from hetero.streams import stream
from hetero.workload import Trace

SLO = Slo(ttft_s=0.3, tpot_s=0.06)
# Inputs tell requests apart: they count from 100. Their number is no multiple of the replicas.
CHATS = replace(workload.load("azure2023_conv").head(301), input_tokens=np.arange(100, 401))
FLEET = cluster.cluster("heteroserve-4")
FOUR = hetero.replicated(FLEET, catalog.llm("Llama-3-8B"), {m.name: 1 for m in FLEET.machines})
PLAN = Plan("by hand", (), FOUR, Predictive(), "hetero", None)


class Counting:
    """Replicas in turn, from the one where an earlier run would have left off."""

    name, seen = "counting", list[int]()

    def choose(self, request, fleet):  # type: ignore[no-untyped-def]
        assert fleet.records is None  # they hold true lengths
        with pytest.raises(
            AttributeError, match=r"no fleet\.held\. Resolve: use one of now_s, out"
        ):
            assert fleet.held
        with pytest.raises(
            AttributeError, match=r"no request\.output_tokens\. Resolve: use one of i"
        ):
            assert request.output_tokens
        for own in (fleet.outstanding, fleet.running, fleet.known_tokens, fleet.eligible):
            with pytest.raises(ValueError, match="read-only"):
                own[0] = 0
        self.seen.append(request.index)
        return (len(self.seen) - 1) % 4 if fleet.eligible.all() else DEFER


def drawn(process: str = "", **options: object) -> list[Trace]:
    """Requests that a comparison plays, by seed."""
    found: list[Trace] = []
    made = {"process": process} if process else {}
    hetero.compare(
        FOUR, RoundRobin, CHATS, seeds=2, measure=lambda run: found.append(run.trace) or {"x": 1.0},
        **made, **options,
    )  # fmt: skip
    return found


def test_rows_are_what_simulate_and_metrics_say_by_hand() -> None:
    routers = {"mine": Counting, "rr": "round-robin", "ours": Predictive()}
    found = hetero.compare(
        [PLAN], routers, CHATS, [12.0, np.inf], (3, 5), slo=SLO, resample=False, predictor=Normal()
    )
    rows = []
    for rate in (12.0, np.inf):
        for seed in (3, 5):
            here = CHATS.all_at_once()
            if np.isfinite(rate):
                here = CHATS.poisson(rate, stream(seed, "arrivals"))
            for name, one in zip(routers, (Counting, RoundRobin, Predictive), strict=True):
                run = simulate(FOUR, here, fresh(one()), predictor=Normal(), seed=seed)
                keys = dict(zip(KEYS, ("by hand", rate, name, seed), strict=True))
                rows.append(keys | measured(run, SLO))
                seen = metrics(run, SLO)
                assert rows[-1]["attainment"] == seen.attainment["joint"]
                assert rows[-1]["within_targets_rps"] == seen.within_targets_rps
                assert rows[-1]["tpot_p95_s"] == np.nanpercentile(run.tpot_s, 95)
                assert rows[-1]["finished"] == run.finished.sum()
    pd.testing.assert_frame_equal(found.frame, pd.DataFrame(rows), check_exact=True)
    # What a router of plain Python remembers of a run is not there in the next one.
    mine, turns = (found.frame[found.frame["router"] == name] for name in ("mine", "rr"))
    assert mine["ttft_mean_s"].tolist() == turns["ttft_mean_s"].tolist()


def test_plans_bring_routers_and_the_trace_its_own_arrivals() -> None:
    plans = {"plan": PLAN, "pair": (FOUR, "round-robin")}
    found = hetero.compare(plans, None, CHATS, seeds=[7], resample=False)
    assert list(zip(found.frame["plan"], found.frame["router"], strict=True)) == [
        ("plan", "hetero"),
        ("pair", "round robin"),
    ]
    assert found.frame["e2e_mean_s"][0] == metrics(PLAN.simulate(CHATS, 7)).means["e2e_s"]
    assert found.frame["rate_rps"].tolist() == [CHATS.describe().rate_rps] * 2
    assert "One seed: no interval" in str(found)
    assert found.summary()[["low", "high"]].isna().all(axis=None)
    assert found.ranking("output_tps") == "plan, hetero >= pair, round robin"


def test_intervals_are_those_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    level = rng.normal(100.0, 30.0, 6)
    values = {"a": level, "b": level - 1.0 + 0.1 * rng.normal(size=6), "c": rng.normal(98, 20, 6)}
    rows = [("p", 5.0, n, k, x[k]) for k in range(6) for n, x in values.items()]
    found = Comparison(pd.DataFrame(rows, columns=[*KEYS, "ttft_p95_s"]), "")
    table = found.summary(baseline="a").set_index("system")
    for name in "bc":
        gain = values[name] - values["a"]
        ends = stats.ttest_1samp(gain, 0.0).confidence_interval(0.95)
        assert table.loc[name, "difference"] == pytest.approx(gain.mean())
        assert table.loc[name, ["low", "high"]].tolist() == pytest.approx([ends.low, ends.high])
    # Times are better the shorter they are, b surely before a; nothing parts c from either.
    means = sorted(values, key=lambda n: values[n].mean())
    assert found.summary()["baseline"].unique().tolist() == means[:1]
    assert found.ranking(lower=False).replace(">=", ">").split(",")[0].split(" > ") == means[::-1]
    del values["c"]
    two = Comparison(found.frame[found.frame["router"] != "c"], "")
    assert (two.ranking(), two.ranking(lower=False)) == ("b > a", "a > b")
    later = two.frame.assign(rate_rps=9.0, ttft_p95_s=1.0)
    assert Comparison(pd.concat([two.frame, later]), "").ranking().splitlines() == [
        "5 requests/s: b > a",
        "9 requests/s: a >= b",
    ]


def test_what_was_found_is_said_and_drawn_with_paired_intervals() -> None:
    long = Table("", (Column("n"),), tuple((k,) for k in range(99)))
    assert repr(long).split("\n")[39:] == ["[62 more lines: print() shows them]"]
    chats, rates = workload.load("azure2023_conv").head(400), [40.0, 60.0]
    found = hetero.compare(FOUR, ["round-robin", "hetero"], chats, rates, 4, slo="ttft=500ms")
    with pytest.raises(ParameterError, match=r"No metric is called 'ttft'. .* one of .*ttft_p95_s"):
        found.summary("ttft")
    with pytest.raises(
        ParameterError, match=r"No system is called 'jsq'. .* one of round robin, h"
    ):
        found.summary(baseline="jsq")
    rows = found.summary().set_index(["rate_rps", "system"])
    *lines, came = found.sentence.splitlines()
    assert came == found.note
    for rate, line in zip((40.0, 60.0), lines, strict=True):
        worse = rows.loc[rate, "round robin"]
        assert f"{rate:.4g} requests/s: hetero has the best attainment" in line
        gap, low, high = -worse["difference"], -worse["high"], -worse["low"]
        apart = r"\]\." if low > 0 else r": cannot tell, about [\d,]+ seeds would\]\."
        assert re.search(rf"round robin by {gap:.3g} \[{low:.3g}, {high:.3g}{apart}$", line)
        assert line in repr(found)
    assert "attainment low" in found.table().to_latex()
    figure = found.figure("ttft_p95_s")
    assert [axis.get_xlabel() for axis in figure.axes[2:]] == ["ttft_p95_s [s]", "difference [s]"]
    drawn = figure.axes[3].collections[0].get_segments()
    gains = found.summary("ttft_p95_s").query("rate_rps == 60.0")[["low", "high"]].to_numpy()
    assert [[one[0][0], one[1][0]] for one in drawn] == gains.tolist()
    figures.close(figure)


def test_a_plan_takes_a_router_of_ones_own() -> None:
    mine = replace(PLAN, router=Counting())  # type: ignore[arg-type]
    runs = [mine.simulate(CHATS, 3), mine.simulate(CHATS, 3)]  # each begins afresh
    turns = [k % 4 for k in range(len(CHATS))]
    assert [one.requests["node"].tolist() for one in runs] == [turns, turns]
    assert "Routing: counting." in str(mine)
    found = hetero.compare({"mine": mine, "hetero": PLAN}, None, CHATS, 30.0, 2)
    assert set(found.frame["router"]) == {"counting", "hetero"}
    with pytest.raises(ParameterError, match="Counting cannot be written"):
        mine.to_json()
    with pytest.raises(ParameterError, match="3 is no router"):
        replace(PLAN, router=3).simulate(CHATS)  # type: ignore[arg-type]


def test_each_seed_draws_blocks_of_consecutive_requests() -> None:
    block = 25
    traces = drawn(resample=block)
    found = [(one.input_tokens - 100).tolist() for one in traces]
    assert found[0] != found[1]
    gaps = np.diff(CHATS.arrival_s)
    for order, one in zip(found, traces, strict=True):
        steps = np.diff(order) % len(CHATS)
        assert (np.delete(steps, np.arange(block - 1, len(steps), block)) == 1).all()
        inside = [k for k in range(len(steps)) if order[k + 1] == order[k] + 1]
        assert np.diff(one.arrival_s)[inside] == pytest.approx(gaps[np.take(order, inside)])
    same = drawn(resample=False)
    assert all(one is CHATS for one in same)
    scaled, other = drawn("scaled", rates=8.0, resample=block)
    assert scaled.describe().rate_rps == pytest.approx(8.0)
    assert [(one.input_tokens - 100).tolist() for one in (scaled, other)] == found
    assert drawn(rates=8.0)[0].arrival_s[:3].tolist() == (
        CHATS.poisson(8.0, stream(0, "arrivals")).arrival_s[:3].tolist()
    )
    # At a rate a file of one's own keeps its bursts, as in commands; and says so.
    told, same = (
        hetero.compare(FOUR, RoundRobin, trace, 8.0, 2, slo=SLO, process=process)
        for trace, process in ((replace(CHATS, source="file:mine.csv"), None), (CHATS, "scaled"))
    )
    assert told.frame.equals(same.frame)
    assert "; the trace's own bursts, stretched to the rate, " in told.sentence
    root = [drawn(resample=one)[1].input_tokens.tolist() for one in (True, 17)]  # 17^2 of 301
    assert root[0] == root[1]


def test_any_number_of_processes_gives_the_same() -> None:
    count: list[int] = []
    asked = (FOUR, ["round-robin", "power-of-two"], CHATS, [5.0, 20.0], 2)
    one = hetero.compare(*asked, progress=count.append)
    assert count == [2] * 4
    pd.testing.assert_frame_equal(one.frame, hetero.compare(*asked, jobs=2).frame, check_exact=True)
    with joblib.parallel_config("threading", n_jobs=2):
        told = hetero.compare(*asked)
    pd.testing.assert_frame_equal(one.frame, told.frame, check_exact=True)
    assert (one.note, told.note) == (told.note, one.note)
    assert "Oracle(), the true lengths" in hetero.compare(*asked[:-1], 1, predictor=Oracle()).note
    assert one.note == (
        f"Predictor {DEFAULT}; engine chunked, paged admission; Poisson "
        "arrivals, requests drawn in blocks of 17; seeds 0, 1."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": 0}, "No seeds are given."),
        ({"routers": []}, "No routers are given."),
        ({"plans": {}}, "No plans are given."),
        ({"routers": "algoritm-2"}, "did you mean 'algorithm-2'?"),
        ({"routers": ["Algorithm 2", "xiong"]}, "Two routers have one name."),
        ({"routers": "fastest"}, "No router is called 'fastest'. Resolve: use one of round-robin,"),
        ({"routers": [3]}, "3 is no router. Resolve: pass a name, or an object with a name"),
        ({"routers": dict}, "{} is no router."),
        ({"routers": ["hetero", Predictive()]}, "Two routers have one name."),
        ({"routers": None}, "heteroserve-4 has no router of its own."),
        ({"rates": [4.0, 0.0]}, "A rate of 0 requests/s."),
        ({"rates": -np.inf}, "A rate of -inf requests/s."),
        ({"trace": []}, r"\[\] is no trace."),  # one without requests cannot be made
        ({"trace": lambda rate, seed: CHATS, "rates": None}, "Requests are made of no rates."),
        ({"plans": [7]}, "7 is no plan and no deployment."),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(change, said) -> None:  # type: ignore[no-untyped-def]
    asked = {"plans": FOUR, "routers": "hetero", "trace": CHATS, "rates": 5.0, "seeds": 1} | change
    with pytest.raises(ParameterError, match=said):
        hetero.compare(**asked)
