"""Losses of machines against deployments without them, and spares against every set."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.apps.capacity import prices
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.outcome import dispatcher, outcome
from hetero.apps.capacity.resilience import kinds_of_loss, resilience, spare
from hetero.cluster import Cluster, Machine, cluster
from hetero.costs.cost import IN_PAPERS
from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.plans import Group, Plan
from hetero.question import DRAWS, Load, Question
from hetero.routers import RoundRobin
from hetero.search.portfolio import planner
from hetero.simulator import Event, Slo, simulate
from tests.hetero.engine_plans import as_in_papers

MODEL = catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv")
SLO = Slo(ttft_s=2.0, tpot_s=0.12)
FLEET = Cluster(
    "three",
    (
        Machine("a", catalog.gpu("A40"), 1),
        Machine("b", catalog.gpu("A40"), 1),
        Machine("c", catalog.gpu("L40S"), 1),
    ),
)
CASE = as_in_papers(FLEET, MODEL, CHATS, 7.0, SLO)


def planned(question: Question = CASE) -> Plan:
    found = planner("Mélange").plan(question)
    return replace(found, router=RoundRobin())


def test_a_lost_machine_leaves_what_a_deployment_without_it_delivers() -> None:
    plan = planned()
    found = resilience(plan, CASE, precision=0.04, seeds=(0, 1))
    assert plan.deployment is not None
    load = Load(CHATS, 7.0, SLO, 0.9, 0.04, (0, 1))
    assert sum(len(one.machines) for one in found.losses) == 3
    for one in found.losses:
        left = tuple(r for r in plan.deployment.replicas if r.name not in one.replicas)
        alone = outcome(plan.on(Deployment("left", left)), load)
        # Runs of other lengths, where the slowest replica is the one that is lost.
        assert one.after.mean == pytest.approx(alone.mean, abs=0.03)
        assert one.after.sustained == alone.sustained
    alike = next(one for one in found.losses if len(one.machines) == 2)
    assert set(alike.machines) == {"a", "b"}
    assert found.whole.sustained_rps >= max(one.sustained_rps for one in found.losses)
    assert found.worst.after.mean == min(one.after.mean for one in found.losses)
    assert "machine lost" in str(found)
    every = [found.whole, *found.losses]
    assert all(len(one.draws) == DRAWS for one in every)
    assert found.draws == tuple(all(one.draws[d] for one in every) for d in range(DRAWS))
    assert np.mean(found.draws) <= np.mean(found.whole.draws)
    assert f"{100 * np.mean(found.draws):.0f} % of 24 draws of step times" in str(found)
    assert resilience(plan, CASE, precision=0.04, seeds=(0,), draws=0).draws == ()


def test_the_minute_after_a_loss_is_that_of_a_run_with_the_event() -> None:
    plan = planned()
    found = resilience(plan, CASE, precision=0.05, seeds=(3,))
    load = Load(CHATS, 7.0, SLO, 0.9, 0.05, (3,))
    trace = load.arrivals(load.requests(plan), 3)
    middle = float(trace.arrival_s[len(trace) // 2])
    for one in found.losses:
        run = simulate(
            plan.deployment,
            trace,
            RoundRobin(),
            events=[Event(middle, name) for name in one.replicas],
            seed=3,
        )
        counted = [
            run.finished[k] and run.ttft_s[k] <= 2.0 and not run.tpot_s[k] > 0.12
            for k in range(len(trace))
            if middle <= trace.arrival_s[k] < middle + 60
        ]
        assert one.shock == pytest.approx(sum(counted) / len(counted))
        assert one.interrupted == sum(run.requests["retries"] > 0)


def test_machines_of_a_plan_over_a_network_are_planned_again_without_them() -> None:
    fleet = cluster("helix-single-24")
    question = as_in_papers(
        fleet, catalog.llm("LLaMA-1-30B"), CHATS.filter(input_tokens=(4, 1024)), 0.3, SLO
    )
    maker = planner("Swarm")
    plan = maker.plan(question)
    with pytest.raises(ParameterError, match="lays layers over a network"):
        resilience(plan, question)
    found = resilience(plan, question, planner=maker, precision=0.1, seeds=(0,))
    assert len(found.losses) == 3  # A100, L4 and T4
    for one in found.losses:
        assert one.after is None
        left = [machine for machine in fleet.machines if machine.name != one.machines[0]]
        smaller = replace(question, cluster=fleet.part(left))
        run = maker.plan(smaller).simulate(question.load().arrivals(100, 0), 0)
        assert one.planned_again.tokens_per_s[0] > 0
        assert float(run.finished.mean()) == 1.0


def test_a_machine_that_holds_stages_of_two_groups_takes_both_down() -> None:
    plan = planned()
    both = (
        Group("x", "both", (("a", "A40", 1, 16), ("b", "A40", 1, 16))),
        Group("y", "both", (("b", "A40", 1, 16), ("c", "L40S", 1, 16))),
    )
    losses = {names: down for names, _, down in kinds_of_loss(replace(plan, groups=both), FLEET)}
    assert losses == {("a",): ("x",), ("b",): ("x", "y"), ("c",): ("y",)}


def test_no_cheaper_spare_survives_every_loss() -> None:
    busy = replace(CASE, rate_rps=13.0)
    plan = planned()
    listed = prices.from_catalog(["L4", "A40", "L40S"], sizes=(1,))
    found = spare(plan, busy, listed, precision=0.05, seeds=(0,))
    load = Load(CHATS, 13.0, SLO, 0.9, 0.05, (0,))
    market = Market(listed, MODEL, load, IN_PAPERS)
    columns = market.fluid.columns

    def survives(chosen: tuple[int, ...]) -> bool:
        counts = {columns[k]: chosen.count(k) for k in set(chosen)}
        added = market.plan(counts).deployment.replicas if counts else ()
        every = plan.deployment.replicas + tuple(
            replace(one, name=f"spare {one.name}") for one in added
        )
        lefts = [every, *((*every[:k], *every[k + 1 :]) for k in range(len(every)))]
        served = replace(plan, router=dispatcher(load))
        return all(outcome(served.on(Deployment("left", one)), load).sustained for one in lefts)

    assert found.counts
    cheaper = [
        chosen
        for size in range(4)
        for chosen in combinations_with_replacement(range(len(columns)), size)
        if sum(market.offers[columns[k][0]].usd_per_h for k in chosen) < found.usd_per_h - 1e-9
    ]
    assert len(cheaper) > 2
    assert not any(survives(chosen) for chosen in cheaper)
    assert all(one.sustained for _, one in found.losses)
    # Every machine of the plan by kind, the spare's own, and none.
    assert [name for name, _ in found.losses][:3] == ["", "a", "c"]


def test_no_spare_is_needed_where_the_fleet_has_room() -> None:
    easy = replace(CASE, rate_rps=1.0)
    found = spare(planned(), easy, prices.from_catalog(["A40"]), precision=0.05, seeds=(0,))
    assert found.counts == {}
    assert found.usd_per_h == 0
    assert "none is needed" in str(found)


def test_spares_are_for_whole_replicas() -> None:
    fleet = cluster("thunderserve-a100-8")
    question = as_in_papers(
        fleet, catalog.llm("LLaMA-1-13B"), CHATS.head(500), 2.0, Slo(e2e_s=30.0)
    )
    plan = planner("DistServe").plan(question)
    with pytest.raises(ParameterError, match="whole replicas"):
        spare(plan, question, prices.from_catalog(["A40"]))


def test_the_command_says_what_is_left(tmp_path, run, told) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("machines:\n  - {name: a, gpu: A40, copies: 2}\n  - {name: c, gpu: L40S}\n")
    words = ["resilience", path, "--rate", "2"]
    found = told(*words, "--seeds", "1", "--spare", "--gpu", "L4")
    assert found["whole"]["attainment"] > 0.9
    assert {name for one in found["losses"] for name in one["machines"]} == {"a-1", "a-2", "c"}
    assert found["spare"]["usd_per_h"] >= 0
    assert 0 <= found["holds_in_draws"] <= min(one["carries_in_draws"] for one in found["losses"])
    assert "--planner does not know 'nobody'" in run(*words, "--planner", "nobody")[2]
