"""Every planner of the arena: what it answers, that it uses what there is, why it cannot."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.engines import PAPERS
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.base import Planner
from hetero.planners.bound import bound, goodput_bound
from hetero.planners.score import goodput
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.portfolio import ask, planner, planners
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
