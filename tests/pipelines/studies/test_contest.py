from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from joblib import parallel_config

from hetero.catalog import llm
from hetero.cluster.fleets import fleet
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency import for_gpu
from hetero.planners.base import Effort
from hetero.planners.bound import bound
from hetero.planners.score import Estimate, Score, goodput, score
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.portfolio import planner
from hetero.simulator import Slo
from hetero.workload import Trace
from pipelines.studies import contest as arena_contest
from pipelines.studies import league
from pipelines.studies.contest import (
    COLUMNS,
    LEAST_TPOT_S,
    LEAST_TTFT_S,
    Match,
    Rules,
    case_of,
    contest,
    describe,
    grid,
    play,
    requests_of,
    targets,
)

EFFORT = Effort(
    requests=200,
    tabu_steps=1,
    tabu_neighbours=2,
    generations=1,
    population=2,
    improved=1,
    designs=4,
)
MATCH = Match("heteroserve-4", "Qwen2.5-14B", "azure2023_conv")
RULES = Rules(seeds=(0, 1), span_s=5.0, loads=(0.5, 1.0))
NAMES = ("tensor-parallel search", "vLLM homogeneous", "DistServe")


@pytest.fixture(scope="module")
def asked():
    return [planner(name, EFFORT) for name in NAMES]


@pytest.fixture(scope="module")
def table(asked) -> pd.DataFrame:
    return contest([MATCH], asked, RULES, effort=EFFORT)


# The question -----------------------------------------------------------------------------------


def test_a_case_asks_for_half_the_bound_within_targets_of_the_fleet() -> None:
    question = case_of(MATCH, RULES)
    limit = bound(question)
    assert limit is not None
    assert (question.rate_rps, question.least_s) == (pytest.approx(0.5 * limit.rps()), 5.0)
    assert len(question.trace) == pytest.approx(5.0 * limit.rps(), rel=0.15)
    longer = case_of(MATCH, Rules(span_s=30.0))
    assert len(longer.trace) == pytest.approx(30.0 * limit.rps(), rel=0.15)
    # Long prompts have late targets, and a growing queue needs time to miss them.
    late = case_of(Match("heteroserve-4", "Qwen2.5-14B", "mooncake_conversation"), RULES)
    # The target before the requests of the case are sampled is near the one after.
    assert late.least_s == pytest.approx(6 * (late.slo.ttft_s or 0), rel=0.3)
    assert question.slo == targets(question.cluster, question.llm, question.trace, 4.0)
    assert case_of(MATCH, RULES).trace.input_tokens.tolist() == question.trace.input_tokens.tolist()


def test_targets_are_those_of_one_request_in_a_pipeline_over_all_gpus() -> None:
    cluster, model = fleet("helix-single-24"), llm("Llama-3.1-70B")
    one = Trace([0.0, 0.0], [1000, 1000], [201, 201])
    found = targets(cluster, model, one, 4.0)
    # Layers dealt out by speed: every GPU takes the same time, their sum is the request's.
    decode = {}
    for name, gpu in cluster.gpu_types.items():
        step = for_gpu(gpu, model).step_model()
        decode[name] = float(step.seconds(np.ones(1), np.ones(1, np.int64), np.array([1100.5]))[0])
    speed = sum(count / decode[name] for name, count in cluster.gpu_counts.items())
    shares = {name: (1.0 / decode[name]) / speed for name in decode}
    through = sum(count * shares[name] * decode[name] for name, count in cluster.gpu_counts.items())
    assert found.tpot_s == pytest.approx(4.0 * through)
    # Faster GPUs alone would be held to less, and nobody to less than people notice.
    assert targets(fleet("helix-single-24 as L4"), model, one, 4.0).tpot_s > found.tpot_s
    assert targets(fleet("current-mixed-32"), llm("Llama-3.1-8B"), one, 1e-3) == Slo(
        LEAST_TTFT_S, LEAST_TPOT_S
    )


def test_a_mixture_of_experts_has_a_rate_from_its_islands_and_no_targets() -> None:
    question = case_of(Match("rignall-budget-c", "DeepSeek-V3-R1-671B", "azure2023_conv"), RULES)
    assert question.slo == Slo()
    plan = planner("islands exact").plan(question)
    assert question.rate_rps == pytest.approx(0.5 * plan.bound_rps)


def test_requests_beyond_the_context_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Match("heteroserve-4", "Qwen2.5-32B", "mooncake_conversation")
    kept, left_out = requests_of(long, RULES)
    assert (kept.input_tokens + kept.output_tokens).max() <= 32768
    assert 0.05 < left_out < 0.1
    prompts = Trace([0.0] * 300, [900] * 99 + [5000] * 201, [100] * 300)
    monkeypatch.setattr(arena_contest, "_load", lambda *_: prompts)
    with pytest.raises(InfeasibleError, match="takes 2,048 tokens, and 99 of the 300"):
        requests_of(Match("heteroserve-4", "LLaMA-1-7B", "azure2023_conv"), RULES)


def test_rules_refuse_what_decides_nothing() -> None:
    refused = ({"seeds": ()}, {"loads": (0.0,)}, {"span_s": float("inf")})
    for rules, said in zip(refused, ("Without a seed", "above 0", "above 0"), strict=True):
        with pytest.raises(ParameterError, match=said):
            Rules(**rules)


def test_the_grid_holds_counterparts_behind_their_fleet() -> None:
    found = grid({"heteroserve-4": "Qwen2.5-14B"}, ["arxiv", "sharegpt"], alike=True)
    assert [m.workload for m in found] == ["arxiv", "sharegpt"] * 4
    told = describe(found[:2], RULES)
    assert told["price of the cluster [$/h]"].tolist() == pytest.approx([6.886] * 2)


# The table --------------------------------------------------------------------------------------


def test_one_row_per_planner_and_load(table: pd.DataFrame) -> None:
    assert tuple(table.columns) == COLUMNS
    assert set(table["planner"]) == {*NAMES, league.PORTFOLIO}
    assert (table.groupby("planner")["load"].nunique()[["tensor-parallel search"]] == 2).all()
    lost = table[table["planner"] == "DistServe"]
    assert len(lost) == 1
    assert "cannot be apart" in lost["reason"].iloc[0]


def test_the_table_says_which_plans_vllm_refuses(table: pd.DataFrame) -> None:
    planned = table[table["reason"].isna()]
    assert planned[league.VLLM].isna().all()  # whole replicas of one type
    placed = contest([MATCH], [planner("layer placement", EFFORT)], RULES, effort=EFFORT)
    assert placed[league.VLLM].str.contains("of the 48 layers").all()


def test_goodput_of_the_table_is_what_the_plan_carries(table: pd.DataFrame, asked) -> None:
    question = case_of(MATCH, RULES)
    plan = asked[0].plan(question)
    rates = goodput(plan, question, RULES.seeds)
    row = table[table["planner"] == NAMES[0]].iloc[0]
    assert row[league.GOODPUT] == pytest.approx(np.mean(rates))
    spread = Estimate.of(rates)
    assert row["goodput, low [requests/s]"] == pytest.approx(spread.low)
    assert row["gap [%]"] == pytest.approx(
        100 * max(0.0, 1 - row[league.GOODPUT] / row["bound [requests/s]"])
    )
    tokens = float((question.trace.input_tokens + question.trace.output_tokens).mean())
    per_second = np.mean([1e6 * row[league.PRICE] / 3600 / (tokens * rate) for rate in rates])
    assert row["cost at goodput [$/10^6 tokens]"] == pytest.approx(per_second)


def test_loads_are_shares_of_the_best_single_goodput(table: pd.DataFrame) -> None:
    best = table[table["planner"] != league.PORTFOLIO][league.GOODPUT].max()
    simulated = table[table["load"].notna()]
    np.testing.assert_allclose(simulated["rate [requests/s]"], simulated["load"] * best)
    # At half the best goodput the best planner meets its targets.
    top = simulated[(simulated[league.GOODPUT] == best) & (simulated["load"] == 0.5)]
    assert (top["SLO met [%]"] >= 90).all()


def test_a_plan_is_simulated_once_at_every_load(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[float] = []

    def counted(*given: Any, **options: Any) -> Score:
        simulated.append(options["rate_rps"])
        return score(*given, **options)

    monkeypatch.setattr(arena_contest, "score", counted)
    rules = Rules(seeds=(0,), span_s=2.0, loads=(0.5, 1.0))
    # Without moves the portfolio's plan is the best one of the planners.
    found = contest([MATCH], asked[:2], rules, effort=replace(EFFORT, designs=0))
    assert len(simulated) == 2 * len(rules.loads)
    whole = found[found["planner"] == league.PORTFOLIO].drop(columns="planner")
    others = found[found[league.GOODPUT] == whole[league.GOODPUT].iloc[0]]
    best = others[others["planner"] != league.PORTFOLIO].drop(columns="planner").head(2)
    pd.testing.assert_frame_equal(
        whole.reset_index(drop=True), best.reset_index(drop=True), check_exact=True
    )


def test_the_same_bytes_for_one_worker_and_for_two(asked) -> None:
    matches = [MATCH, Match("heteroserve-4", "Qwen2.5-14B", "azure2023_code")]
    rules = Rules(seeds=(0,), span_s=2.0, loads=(0.5,))
    one = contest(matches, asked[1:2], rules, effort=EFFORT)
    # What workers are handed survives the way; starting processes takes longer than the rest.
    assert [one.name for one in pickle.loads(pickle.dumps(asked))] == list(NAMES)
    with parallel_config(backend="threading"):
        two = contest(matches, asked[1:2], rules, effort=EFFORT, jobs=2)
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert one["workload"].drop_duplicates().tolist() == ["azure2023_conv", "azure2023_code"]


def test_planners_without_any_plan_all_say_why() -> None:
    asked = [planner("vLLM homogeneous", EFFORT), planner("DistServe", EFFORT)]
    found = contest([Match("helix-10", "Llama-3.1-70B", "sharegpt")], asked, RULES)
    assert found["planner"].tolist() == ["vLLM homogeneous", "DistServe", league.PORTFOLIO]
    assert found["reason"][:2].str.contains("does not fit").all()


def test_planners_that_raise_something_else_are_not_hidden() -> None:
    class Broken:
        name = "broken"

        def unfit(self, question: Question) -> str | None:
            return None

        def plan(self, question: Question) -> Plan:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(MATCH, [Broken()], RULES)


# The league -------------------------------------------------------------------------------------


def rows(*found: tuple[str, str, str, float, float]) -> pd.DataFrame:
    """Rows of cluster, workload, planner, goodput and price."""
    columns = ["cluster", "workload", "planner", league.GOODPUT, league.PRICE]
    table = pd.DataFrame(found, columns=columns)
    refused = np.where(table["planner"] == "b", "It joins two types.", None)
    return table.assign(model="m", load=0.5, reason=None, **{league.VLLM: refused})


MADE = rows(
    ("x", "w", "a", 10.0, 5.0),
    ("x", "w", "b", 5.0, 2.0),
    ("x", "w", "c", np.nan, np.nan),
    ("x", "w", league.PORTFOLIO, 12.0, 5.0),
    ("x as G", "w", "a", 4.0, 5.0),
    ("x as G", "w", "b", 8.0, 4.0),
    ("x as G", "w", "c", 7.9, 6.0),
    ("x as G", "w", league.PORTFOLIO, 8.0, 4.0),
)


def test_league_by_hand() -> None:
    found = league.league_frame(MADE).set_index("planner")
    assert found.index.tolist() == [league.PORTFOLIO, "c", "a", "b"]
    mean = found["geometric mean [% of best]"]
    assert mean["a"] == pytest.approx(100 * np.sqrt(1.0 * 0.5))
    assert mean["b"] == pytest.approx(100 * np.sqrt(0.5 * 1.0))
    assert mean["c"] == pytest.approx(100 * 7.9 / 8.0)
    assert mean[league.PORTFOLIO] == pytest.approx(100 * np.sqrt(1.2 * 1.0))
    # 7.9 is within 2 % of 8; the case that c cannot take counts as 0 in the last column.
    counts = found[["wins", "cases served", "of them on vLLM"]].T.to_dict("list")
    assert counts == {league.PORTFOLIO: [2, 2, 2], "c": [1, 1, 1], "a": [1, 2, 2], "b": [1, 2, 0]}
    assert found.loc["c", "mean over all cases [% of best]"] == pytest.approx(50 * 7.9 / 8.0)


def test_a_plan_that_carries_nothing_is_not_served() -> None:
    made = rows(("x", "w", "a", 0.0, 1.0), ("x", "w", "b", 1.0, 1.0))
    found = league.league_frame(made).set_index("planner")
    assert found.loc["a", "cases served"] == 0
    assert np.isnan(found.loc["a", "geometric mean [% of best]"])
    nobody = league.league_frame(rows(("x", "w", "a", 0.0, 1.0)))
    assert nobody["wins"].tolist() == [0]


def test_shares_keep_the_order_and_tell_none_from_nothing() -> None:
    wide = league.shares_frame(MADE)
    assert wide.columns.tolist() == ["a", "b", "c", league.PORTFOLIO]
    assert wide["c"].isna().tolist() == [True, False]
