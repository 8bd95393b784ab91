"""Mélange, HexGen, DistServe and vLLM on the shared cost model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import Cluster, Machine, cluster
from hetero.costs.cost import IN_PAPERS, CostModel
from hetero.costs.demand import Demand
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.step import StepModel
from hetero.planners.baselines import melange
from hetero.planners.baselines.capacity import Bucket, buckets, capacity_rps
from hetero.planners.baselines.hexgen import hexgen
from hetero.planners.baselines.homogeneous import Shape, colocated, distserve
from hetero.planners.baselines.plan import goodput_rps
from hetero.routers import RoundRobin
from hetero.simulator import Slo, simulate
from hetero.simulator.metrics import attainment
from hetero.workload import Trace
from pipelines.studies.thunderserve import Scales

STEP = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
SEVEN = catalog.llm("LLaMA-1-7B")
CHATS = workload.load("azure2023_conv")


def test_capacity_is_what_the_simulator_keeps_up_with() -> None:
    node = Replica("a", STEP, kv_tokens=10_000_000, engine=Engine(max_batch=64))
    count = 3000
    arrival = np.cumsum(np.random.default_rng(0).exponential(1.0, count))
    trace = Trace(arrival, np.full(count, 400), np.full(count, 80))
    capacity = capacity_rps(node, Bucket(400, 80, 1.0, (0, np.inf)))

    def late(rate_rps: float) -> float:
        """How much longer than the arrivals the run takes."""
        served = trace.rescale(rate_rps=rate_rps)
        run = simulate(Deployment("one", (node,)), served, RoundRobin())
        return run.span_s / float(served.arrival_s[-1] - served.arrival_s[0])

    assert late(0.95 * capacity) < 1.02
    # Waiting prompts share a prefill, so a queue is served somewhat faster than the closed form.
    assert late(1.4 * capacity) > 1.05


def test_buckets_share_out_all_requests() -> None:
    found = buckets(CHATS.head(3000))
    assert sum(one.share for one in found) == pytest.approx(1.0)
    mean = sum(one.share * one.input_tokens for one in found)
    assert mean == pytest.approx(CHATS.head(3000).input_tokens.mean())


def shop() -> Cluster:
    """Machines to choose from, with prices of our own."""
    kinds = (("a", "A40", 2, 0.9), ("b", "RTX-3090Ti", 2, 0.7), ("c", "RTX-A5000", 2, 0.5))
    machines = tuple(
        Machine(f"{name}{k}", catalog.gpu(gpu), count, usd_per_h=price)
        for name, gpu, count, price in kinds
        for k in range(3)
    )
    return replace(cluster("thunderserve-a5000-pair"), name="shop", machines=machines)


def test_melange_is_the_cheapest_of_all_mixes() -> None:
    fleet, rate = shop(), 8.0
    found = melange.cheapest(fleet, SEVEN, CHATS.head(2000), rate, settings=IN_PAPERS)
    assert found.status == "optimal"
    assert found.gap <= 1e-4
    program = melange.MelangeProgram(fleet, SEVEN, CHATS.head(2000), settings=IN_PAPERS)
    prices = [kind.machine.usd_per_h for kind in program.kinds]
    cheapest = np.inf
    for numbers in product(range(4), repeat=len(program.kinds)):
        price = sum(n * float(p or 0) for n, p in zip(numbers, prices, strict=True))
        if not any(numbers) or price >= cheapest:
            continue
        part = replace(
            fleet,
            machines=tuple(
                fleet.machines[kind.machines[k]]
                for kind, n in zip(program.kinds, numbers, strict=True)
                for k in range(n)
            ),
        )
        if melange.fastest(part, SEVEN, CHATS.head(2000), settings=IN_PAPERS).rate_rps >= rate:
            cheapest = price
    assert found.usd_per_h == pytest.approx(cheapest)


def test_melange_serves_what_it_promises() -> None:
    found = melange.cheapest(shop(), SEVEN, CHATS.head(2000), 6.0, load=0.7, settings=IN_PAPERS)
    trace = CHATS.head(2000).poisson(6.0, np.random.default_rng(0))
    run = simulate(found.deployment(), trace, found.router())
    assert run.counts["rejected"] == 0
    # It keeps up: the last request is served soon after the last arrival.
    assert run.span_s < float(trace.arrival_s[-1]) * 1.1


def test_melange_says_what_it_cannot_do() -> None:
    with pytest.raises(InfeasibleError, match="of the 500 requests/s"):
        melange.cheapest(shop(), SEVEN, CHATS.head(500), 500.0, settings=IN_PAPERS)
    with pytest.raises(InfeasibleError, match="within the targets"):
        melange.fastest(shop(), SEVEN, CHATS.head(500), slo=Slo(ttft_s=1e-3), settings=IN_PAPERS)
    unpriced = replace(
        shop(),
        machines=tuple(
            replace(m, usd_per_h=None, gpu=replace(m.gpu, usd_per_h=None)) for m in shop().machines
        ),
    )
    with pytest.raises(ParameterError, match="has no price"):
        melange.cheapest(unpriced, SEVEN, CHATS.head(500), 1.0, settings=IN_PAPERS)


def test_slices_cost_no_less_than_continuous_shares() -> None:
    whole = melange.cheapest(shop(), SEVEN, CHATS.head(1000), 8.0, slices=2, settings=IN_PAPERS)
    free = melange.cheapest(shop(), SEVEN, CHATS.head(1000), 8.0, settings=IN_PAPERS)
    assert whole.usd_per_h is not None
    assert free.usd_per_h is not None
    assert whole.usd_per_h >= free.usd_per_h - 1e-9


# In house ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats() -> Trace:
    return CHATS.sample(600, np.random.default_rng(0))


def test_divisions_use_every_gpu_once_and_the_best_wins(chats: Trace) -> None:
    in_house, llm, slo = cluster("thunderserve-a100-8"), catalog.llm("LLaMA-1-30B"), Slo(e2e_s=30.0)
    for found in (
        colocated(in_house, llm, chats, slo, rate_rps=6.0, settings=IN_PAPERS),
        distserve(in_house, llm, chats, slo, rate_rps=6.0, settings=IN_PAPERS),
    ):
        assert sum(node.gpus for node in found.deployment.replicas) <= 8
        assert found.value == max(value for _, value in found.tried)
        assert found.deployment.usd_per_h == pytest.approx(
            1.753 * sum(node.gpus for node in found.deployment.replicas)
        )
    roles = {node.role for node in found.deployment.replicas}
    assert roles == {"prefill", "decode"}
    pair = Shape(2, 1)
    fixed = [
        make(in_house, llm, chats, slo, rate_rps=6.0, only=pair) for make in (colocated, distserve)
    ]
    assert [[node.gpus for node in one.deployment.replicas] for one in fixed] == [[2] * 4] * 2
    assert [len(one.tried) for one in fixed] == [1, 3]


def test_goodput_is_the_last_rate_that_reaches_the_goal(chats: Trace) -> None:
    one = Deployment("one", (Replica("a", STEP, 80_000),))
    weights = {("a", "a"): 1.0}
    slo = Slo(e2e_s=15.0)
    rate = goodput_rps(one, weights, chats, slo, goal=0.9)

    def met(at: float) -> float:
        from hetero.planners.baselines.plan import attained

        return attained(one, weights, chats, at, slo)

    assert met(rate) >= 0.9
    assert met(1.05 * rate) < 0.9


def test_machines_of_several_kinds_are_refused(chats: Trace) -> None:
    with pytest.raises(ParameterError, match="several kinds"):
        distserve(
            cluster("thunderserve-cloud-32"), SEVEN, chats, Slo(e2e_s=30.0), settings=IN_PAPERS
        )


# HexGen -----------------------------------------------------------------------------------------


def test_hexgen_uses_each_gpu_at_most_once_and_repeats_itself(chats: Trace) -> None:
    fleet = cluster("thunderserve-a40-3090ti-40gbit")
    costs = CostModel(fleet, catalog.llm("LLaMA-1-13B"), IN_PAPERS)
    demand, slo = Demand.of(chats, 3.0), Slo(e2e_s=20.0)
    found = hexgen(costs, demand, chats.head(200), slo, generations=4, population=4, children=8)
    used = np.zeros(2, int)
    for pipeline in found.pipelines:
        for stage in pipeline.stages:
            used[stage.machine] += stage.gpus
    assert (used <= [4, 4]).all()
    assert {node.role for node in found.deployment.replicas} == {"both"}
    values = [value for _, value in found.tried]
    assert values == sorted(values)
    again = hexgen(costs, demand, chats.head(200), slo, generations=4, population=4, children=8)
    assert [one.label for one in again.pipelines] == [one.label for one in found.pipelines]


# Deadlines --------------------------------------------------------------------------------------


def test_smallest_scale_is_where_the_goal_is_reached(chats: Trace) -> None:
    one = Deployment("one", (Replica("a", STEP, 80_000),))
    run = simulate(one, chats.poisson(2.0, np.random.default_rng(0)), RoundRobin())
    unit = Slo(ttft_s=0.1, tpot_s=0.02, e2e_s=4.0)
    scales = Scales.of(run, unit)
    for goal in (0.5, 0.9, 0.99, 1.0):
        smallest = scales.smallest("e2e", goal)
        assert attainment(run, Slo(e2e_s=smallest * 4.0 * (1 + 1e-12))) >= goal
        assert attainment(run, Slo(e2e_s=smallest * 4.0 * (1 - 1e-9))) < goal
        assert scales.attained("e2e", [smallest])[0] >= goal
