"""Every planner, and the portfolio of all: what it answers, always the same, and why it cannot."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import Cluster, Machine, cluster
from hetero.engines import PAPERS, EngineSpec
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.base import Planner
from hetero.planners.bound import bound, goodput_bound
from hetero.planners.score import PRECISION, Rank, goodput, score
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.improve import improve
from hetero.search.portfolio import (
    IMPROVED,
    Portfolio,
    ask,
    planner,
    planners,
    portfolio,
)
from hetero.simulator import Slo
from tests.hetero.apps.cards.quick_cards import LITTLE as QUICK
from tests.hetero.engine_plans import as_in_papers

LITTLE = replace(QUICK, rates=2, layouts=16, designs=60)
CHATS = workload.load("azure2023_conv").sample(200, np.random.default_rng(3))
TARGETS = Slo(ttft_s=2.0, tpot_s=0.2)
THIRTEEN = catalog.llm("LLaMA-1-13B")
DENSE = as_in_papers(
    cluster("thunderserve-a40-3090ti-40gbit"), THIRTEEN, CHATS, 1.5, TARGETS, least_s=30.0
)
SPARSE = as_in_papers(
    cluster("rignall-budget-c"), catalog.llm("DeepSeek-V3"), CHATS, 10.0, TARGETS, least_s=2.0
)
NAMES = tuple(one.name for one in planners())
OF_EXPERTS = ("islands exact", "islands by BO")
OF_DENSE = tuple(name for name in NAMES if name not in OF_EXPERTS)


def case(name: str) -> Question:
    return SPARSE if name in OF_EXPERTS else DENSE


@lru_cache(maxsize=32)
def made(name: str) -> Plan:
    return planner(name, LITTLE).plan(case(name))


def test_all_planners_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES) == 13
    assert all(isinstance(one, Planner) for one in planners())
    with pytest.raises(ParameterError, match="No planner is called 'Alpa'"):
        planner("Alpa")


@pytest.mark.parametrize("name", NAMES)
def test_plans_use_the_gpus_that_there_are_and_cost_what_these_do(name: str) -> None:
    question, plan = case(name), made(name)
    assert plan.planner == name
    for gpu, count in plan.gpus.items():
        assert 0 < count <= question.cluster.gpu_counts[gpu]
    if name in OF_DENSE:
        used: dict[str, int] = {}
        for group in plan.groups:
            layers = sum(stage[3] for stage in group.stages)
            assert layers == THIRTEEN.layers or plan.deployment is None
            for machine, _, gpus, _ in group.stages:
                used[machine] = used.get(machine, 0) + gpus
        for machine, gpus in used.items():
            assert gpus <= question.cluster.machine(machine).count
    each = {m.gpu.name: (m.usd_per_h or 0.0) / m.count for m in question.cluster.machines}
    price = sum(each[gpu] * count for gpu, count in plan.gpus.items())
    assert plan.usd_per_h == pytest.approx(price)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_accounted_for_and_none_beyond_the_bound(name: str) -> None:
    question, plan = case(name), made(name)
    limit = bound(question)
    assert (limit is None) == (name in OF_EXPERTS)
    for trace in (question.arrivals(seed=1), CHATS.all_at_once()):
        run = plan.simulate(trace, 1)
        assert len(run.requests) == len(trace)
        ended = run.counts
        assert ended["finished"] + ended["rejected"] == len(trace)
        done = run.requests[run.finished]
        assert (done["first_token_s"] > done["arrival_s"]).all()
        assert (done["finish_s"] >= done["first_token_s"]).all()
        if limit is not None:
            served = float(run.finished.mean())
            assert run.finished.sum() / run.span_s <= limit.rps(served) * (1 + 1e-9)
            tpot_s = np.nan_to_num(run.tpot_s[run.finished])
            target_s = float(max(np.median(tpot_s), 1e-9))
            in_time = float((tpot_s <= target_s).mean())
            kept = trace.take(np.flatnonzero(run.finished))
            asked = replace(question, trace=kept, slo=Slo(tpot_s=target_s), goal=in_time)
            most = goodput_bound(asked)
            assert most is not None
            assert run.finished.sum() / run.span_s <= most * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_plan_and_run_twice(name: str) -> None:
    question = case(name)
    again = planner(name, LITTLE).plan(question)
    assert str(again) == str(made(name))
    one, two = (plan.simulate(question.arrivals(seed=2), 2) for plan in (made(name), again))
    assert one.frame().equals(two.frame())


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_read_back_is_the_same_plan_and_plays_the_same_run(name: str) -> None:
    question, plan = case(name), made(name)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    trace = question.arrivals(seed=3)
    assert again.simulate(trace, 3).frame().equals(plan.simulate(trace, 3).frame())


@pytest.mark.parametrize("name", NAMES)
def test_who_cannot_take_a_case_says_so_in_a_sentence(name: str) -> None:
    one = planner(name, LITTLE)
    other = DENSE if name in OF_EXPERTS else SPARSE
    reason = one.unfit(other)
    assert reason is not None
    assert reason.endswith(".")
    assert "\n" not in reason
    with pytest.raises(InfeasibleError, match=r".*"):
        one.plan(other)
    assert ask(one, other).reason == reason
    unpriced = as_in_papers(cluster("xiong-8xv100"), THIRTEEN, CHATS, 1.0, budget_usd_per_h=5.0)
    assert one.unfit(unpriced) is not None


@pytest.mark.parametrize("name", ["DistServe", "HexGen", "phase splitting", "layer placement"])
def test_machines_without_a_network_do_not_work_together(name: str) -> None:
    apart = as_in_papers(cluster("heteroserve-8"), THIRTEEN, CHATS, 1.0)
    assert "states no network" in (planner(name, LITTLE).unfit(apart) or "")


@pytest.mark.parametrize("name", ["tensor-parallel search", "Mélange", "vLLM homogeneous"])
def test_replicas_inside_machines_need_no_network(name: str) -> None:
    apart = replace(DENSE, cluster=cluster("heteroserve-8"), budget_usd_per_h=None)
    plan = planner(name, LITTLE).plan(apart)
    assert all(len(group.stages) == 1 for group in plan.groups)


@pytest.mark.parametrize("name", ["tensor-parallel search", "Mélange", "HexGen", "layer placement"])
def test_a_budget_rents_no_more_than_it_pays_for(name: str) -> None:
    question = replace(
        DENSE, cluster=cluster("thunderserve-cloud-32"), budget_usd_per_h=4.0, least_s=10.0
    )
    plan = planner(name, LITTLE).plan(question)
    machines = {stage[0] for group in plan.groups for stage in group.stages}
    rented = sum(question.cluster.machine(machine).usd_per_h or 0.0 for machine in machines)
    assert 0 < rented <= 4.0
    poor = replace(question, budget_usd_per_h=0.5)
    with pytest.raises(InfeasibleError):
        planner(name, LITTLE).plan(poor)


def test_fewer_bytes_per_weight_carry_more() -> None:
    question = as_in_papers(cluster("current-small-12"), catalog.llm("Llama-3.1-70B"), CHATS, 2.0,
                TARGETS, least_s=20.0)  # fmt: skip
    half, full = (
        planner("tensor-parallel search", LITTLE).plan(replace(question, engine=engine))
        for engine in (replace(PAPERS, precision="fp8"), PAPERS)
    )
    # Half the bytes: the model fits half the GPUs, and twice as many replicas share the load.
    assert len(half.groups) == 2 * len(full.groups)
    assert goodput(half, question)[0] > 1.2 * goodput(full, question)[0]
    reason = planner("Mélange").unfit(replace(DENSE, engine=replace(PAPERS, precision="fp8")))
    assert reason is not None
    assert "do not compute in fp8" in reason


def test_homogeneous_takes_the_best_kind_of_a_mixed_cluster() -> None:
    for name in ("vLLM homogeneous", "DistServe"):
        plan = made(name)
        assert len(plan.gpus) == 1
        assert any("best of 2 kinds" in note for note in plan.notes)


def test_islands_prove_their_bound() -> None:
    exact = made("islands exact")
    assert exact.bound_rps is not None
    assert exact.gpus == {"H200-SXM": 128}
    assert {group.phase for group in exact.groups} == {"prefill", "decode"}
    for phase in ("prefill", "decode"):
        shares = [group.share for group in exact.groups if group.phase == phase]
        assert sum(shares) == pytest.approx(1.0, abs=1e-6)


LESS = replace(QUICK, layouts=16, designs=30)
CODE = workload.load("azure2023_code").sample(200, np.random.default_rng(4))
CASES = {
    "two kinds": as_in_papers(
        cluster("thunderserve-a40-3090ti-40gbit"), catalog.llm("LLaMA-1-13B"), CHATS, 1.5, TARGETS
    ),
    "small team": as_in_papers(
        cluster("current-small-12"), catalog.llm("Llama-3.1-70B"), CODE, 2.0, Slo(e2e_s=8.0)
    ),
    "no targets": as_in_papers(
        cluster("thunderserve-a5000-8"), catalog.llm("LLaMA-1-7B"), CHATS, 2.0
    ),
    "experts": as_in_papers(
        Cluster("one", (Machine("one", catalog.gpu("H200-SXM"), 8),)),
        catalog.llm("Mixtral-8x7B"),
        CHATS,
        10.0,
        TARGETS,
    ),
    "budget": as_in_papers(
        cluster("thunderserve-cloud-32"),
        catalog.llm("LLaMA-1-30B"),
        CHATS,
        1.0,
        Slo(ttft_s=4.0, tpot_s=0.3),
        budget_usd_per_h=4.0,
    ),
}
CASES = {name: replace(question, least_s=10.0) for name, question in CASES.items()}
ALWAYS_IMPROVED = ("two kinds",)


def seeds_of(name: str) -> tuple[int, ...]:
    return (0, 1) if name == "small team" else (0,)


@cache
def found(name: str) -> Portfolio:
    return portfolio(CASES[name], effort=LESS, seeds=seeds_of(name))


@pytest.mark.parametrize("name", CASES)
def test_it_is_never_worse_than_the_best_single_planner(name: str) -> None:
    question, one, seeds = CASES[name], found(name), seeds_of(name)
    for tried in one.tried:
        if tried.plan is not None:
            alone = np.mean(goodput(tried.plan, question, seeds))
            # Where a search begins moves what it finds by no more than its precision.
            assert one.score.goodput_rps.mean >= alone / (1 + PRECISION), tried.planner
            if tried.score is not None:
                assert one.score.goodput_rps.mean >= tried.score.goodput_rps.mean
    # What it claims, it delivers when it is simulated anew.
    again = score(one.plan, question, seeds=seeds, known=one.score.seeds_rps)
    assert again.attainment == one.score.attainment
    # Every planner has a row with figures or a reason.
    asked = [tried.planner for tried in one.tried if tried.planner != IMPROVED]
    assert asked == [single.name for single in planners()]
    for tried in one.tried:
        assert (tried.score is None) == bool(tried.reason)
    assert one.best in one.tried
    # A plan that is improved says how.
    assert one.best.planner == IMPROVED or name not in ALWAYS_IMPROVED
    if one.best.planner == IMPROVED:
        single = max((x for x in one.tried if x is not one.best), key=lambda x: Rank(x.score))
        assert single.score is not None
        assert one.score.goodput_rps.mean > single.score.goodput_rps.mean
        assert one.plan.notes[0] == f"Improved from the plan of {single.planner}."
    if name == "budget":
        machines = {stage[0] for group in one.plan.groups for stage in group.stages}
        rented = [question.cluster.machine(machine).usd_per_h for machine in machines]
        assert sum(usd_per_h or 0.0 for usd_per_h in rented) <= 4.0


def test_the_same_bytes_twice() -> None:
    asked = [planner(name, LESS) for name in ("tensor-parallel search", "HexGen")]
    one, two = (portfolio(CASES["two kinds"], effort=LESS, planners=asked) for _ in "ab")
    assert one.plan.to_json() == two.plan.to_json()


def test_improvement_keeps_gpus_once_and_carries_more() -> None:
    question = CASES["two kinds"]
    plan = planner("vLLM homogeneous", LESS).plan(question)
    (before,) = goodput(plan, question)
    better = improve([(plan, (before,))], question, seeds=(0,), designs=40)
    for gpu, count in better.plan.gpus.items():
        assert count <= question.cluster.gpu_counts[gpu]
    # The other kind of machine stands idle: dividing it is the first thing to find.
    assert len(better.plan.gpus) == 2
    assert goodput(better.plan, question)[0] > 1.2 * before


def test_steps_are_as_large_as_targets_allow() -> None:
    """Short time between tokens: those that decode wait for less in small steps."""
    machine = Machine("one", catalog.gpu("H100-SXM"), 1)
    fleet = Cluster("one", (machine,))
    sizes = {}
    for tpot_s in (0.02, 0.1):
        question = replace(
            CASES["two kinds"],
            cluster=fleet,
            llm=catalog.llm("Llama-3.1-8B"),
            rate_rps=10.0,
            slo=Slo(ttft_s=0.5, tpot_s=tpot_s),
            engine=EngineSpec(),
        )
        one = portfolio(question, effort=LESS)
        (node,) = one.plan.deployment.replicas
        sizes[tpot_s] = node.engine.max_step_tokens
        default = replace(node, engine=replace(node.engine, max_step_tokens=2048))
        usual = replace(one.plan, serving=replace(one.plan.deployment, replicas=(default,)))
        gained = one.score.goodput_rps.mean / goodput(usual, question)[0]
        assert gained > (1.05 if tpot_s < 0.05 else 0.95)  # what short runs find, long ones judge
    assert sizes[0.02] < 2048 <= sizes[0.1]


def test_no_designs_no_changes() -> None:
    question = CASES["two kinds"]
    plan = planner("tensor-parallel search", LESS).plan(question)
    better = improve([(plan, (1.0,))], question, seeds=(0,), designs=0)
    assert better.plan is plan
    assert better.changes == ()


def test_progress_names_the_planners_then_the_search() -> None:
    said: list[str] = []
    portfolio(CASES["two kinds"], effort=replace(LESS, designs=3), progress=said.append)
    asked = len(planners())
    assert said[:asked] == [one.name for one in planners()]
    assert all(one.startswith("search of layouts, at most ") for one in said[asked:])
    assert said[-1].startswith("search of layouts, at most 1 of ")


def test_a_case_that_no_planner_takes_says_why_of_each() -> None:
    question = as_in_papers(cluster("helix-10"), catalog.llm("Llama-3.1-405B"), CHATS, 1.0)
    with pytest.raises(InfeasibleError, match="No planner has a plan") as raised:
        portfolio(question, effort=LESS)
    assert "fits no machine of helix-10" in str(raised.value)
    with pytest.raises(ParameterError, match="No planner is asked"):
        portfolio(question, planners=())
