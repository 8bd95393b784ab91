"""Rotation, chance and load; and that the simulator and ``choose`` decide alike."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine
from hetero.errors import ParameterError
from hetero.latency.models.affine import Affine
from hetero.routers import (
    CacheAware,
    CapacityProportional,
    FleetState,
    HeteroServe,
    LatencyAware,
    LeastRequests,
    LeastTokens,
    LengthAware,
    Normal,
    PowerOfTwo,
    Predictive,
    Request,
    RoundRobin,
    Router,
    SingleInstance,
    WeightedRandom,
    WeightedRoundRobin,
    Workload,
)
from hetero.simulator import simulate
from tests.hetero.routers.router_states import check, decide_alike, fleet, trace

EVERY = [
    RoundRobin(),
    WeightedRandom([1, 2, 3, 4]),
    WeightedRoundRobin([4, 3, 2, 1]),
    SingleInstance(2),
    LeastRequests(),
    LeastTokens(),
    CacheAware(),
    PowerOfTwo(),
    Workload(),
    Workload(memory_based=True),
    HeteroServe(),
    HeteroServe(dispatch="proportional"),
    LatencyAware(),
    LengthAware(),
    CapacityProportional(),
    Predictive(),
    Predictive(target_s=0.5, name="hetero with a target"),
]


@pytest.mark.parametrize("router", EVERY, ids=lambda router: router.name)
@pytest.mark.parametrize(
    "engine", [Engine(max_batch=24), Engine("chunked", "paged", max_batch=24, max_step_tokens=512)]
)
def test_choose_and_the_compiled_path_decide_alike(router, engine):
    assert decide_alike(fleet(engine), trace(500, 25.0), router, 5, predictor=Normal())


class Figures:
    """Least of a figure that the state shows, first on ties."""

    def __init__(self, figure):
        self.figure = figure

    def expected(self, request, fleet):
        values = np.where(fleet.eligible, self.figure(fleet), np.inf)
        return {int(values.argmin())}


def test_least_requests_and_least_tokens():
    served = trace(500, 25.0)
    check(LeastRequests(), Figures(lambda f: f.outstanding), fleet(), served)
    check(LeastTokens(), Figures(lambda f: f.outstanding_tokens), fleet(), served)


def test_power_of_two_compares_two_draws():
    """With one replica much slower, its share lies between none and that of chance."""
    nodes = simulate(fleet(), trace(2000, 25.0), PowerOfTwo()).requests["node"]
    counts = np.bincount(nodes, minlength=4) / 2000
    assert counts[3] < 0.2 < 0.25 < counts[0]
    assert counts[3] > 0.02


def test_rotation_keeps_its_shares_in_every_window():
    nodes = simulate(fleet(), trace(400), RoundRobin()).requests["node"]
    assert nodes.tolist() == [0, 1, 2, 3] * 100
    nodes = simulate(fleet(), trace(400), WeightedRoundRobin([4, 3, 2, 1])).requests["node"]
    for block in nodes.reshape(-1, 10):
        assert np.bincount(block, minlength=4).tolist() == [4, 3, 2, 1]
    # Interleaved: the heaviest never serves more than twice in a row.
    assert not any((nodes[k : k + 3] == 0).all() for k in range(398))


def test_weights_default_to_the_number_of_gpus():
    replicas = tuple(
        dataclasses.replace(r, gpus=g) for r, g in zip(fleet().replicas, (4, 1, 1, 2), strict=True)
    )
    deployment = dataclasses.replace(fleet(), replicas=replicas)
    nodes = simulate(deployment, trace(400), WeightedRoundRobin()).requests["node"]
    assert np.bincount(nodes).tolist() == [200, 50, 50, 100]


def test_weighted_random_never_takes_a_weight_of_0():
    nodes = simulate(fleet(), trace(2000), WeightedRandom([0, 1, 0, 3])).requests["node"]
    counts = np.bincount(nodes, minlength=4) / 2000
    assert counts == pytest.approx([0, 0.25, 0, 0.75], abs=0.04)
    assert counts[0] == counts[2] == 0


@pytest.mark.parametrize("router", EVERY, ids=lambda router: router.name)
def test_a_request_goes_only_where_it_fits(router):
    """Prompts above 9,000 tokens fit no L40S; one above every cache is rejected."""
    deployment = fleet()
    served = trace(200, 5.0)
    inputs = served.input_tokens.copy()
    inputs[50:150] = 10_000
    inputs[199] = 70_000
    run = simulate(deployment, dataclasses.replace(served, input_tokens=inputs), router)
    assert not (run.requests["node"][50:150] == 3).any()
    assert run.counts["rejected"] == 1
    assert "KV cache of every replica" in run.frame().reason.iloc[199]


@pytest.mark.parametrize("router", EVERY, ids=lambda router: router.name)
def test_live_routers_are_routers_and_say_what_they_miss(router):
    live = router.live(fleet(), np.random.default_rng(0))
    assert isinstance(live, Router)
    figures = np.zeros(4, np.int64)
    bare = FleetState(0.0, figures, figures, figures, figures, figures, figures > 0, figures)
    with pytest.raises(ParameterError, match="has none"):
        live.choose(Request(0, 0.0, 10, 10), bare)
    if router.draws:
        with pytest.raises(ParameterError, match="no generator"):
            router.live(fleet())


def first(deployment, **changes):
    """Its first replica alone, with changes."""
    return Deployment("x", (dataclasses.replace(deployment.replicas[0], **changes),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: WeightedRandom([1, 2]).memory(d), "2 weights for 4"),
        (lambda d: WeightedRoundRobin([0, 0, 0, 0]).memory(d), "at least one"),
        (lambda d: WeightedRoundRobin([1, 1, 1, -1]).memory(d), "weight >= 0"),
        (lambda d: WeightedRandom([1, 1, 1, float("nan")]).memory(d), "weight >= 0"),
        (lambda d: WeightedRandom([]).memory(d), "0 weights for 4"),
        (lambda d: SingleInstance(4).memory(d), "no replica 4"),
        (lambda d: SingleInstance(-1).memory(d), "no replica -1"),
        (lambda d: Predictive(price_s=-1.0), "0 or more"),
        (lambda d: Predictive(steepness=float("nan")), "0 or more"),
        (lambda d: Predictive(target_s=0.0), "target"),
        (lambda d: CacheAware(hit_weight=-1.0), "cached token is -1"),
        (lambda d: Workload(theta=-1.0), "theta"),
        (lambda d: Workload(theta=float("nan")), "theta"),
        (lambda d: Workload(coefficients=[Affine(*range(1, 9))] * 2).memory(d), "2 sets of coeff"),
        (lambda d: Workload().memory(first(d, kv_tokens=10)), "too small to profile"),
        (lambda d: HeteroServe(bins_tokens=(512, 256)), "increasing edges"),
        (lambda d: HeteroServe(bins_tokens=(0, 256)), "increasing edges"),
        (lambda d: HeteroServe(queue_max=0), "queue_max"),
        (lambda d: HeteroServe(epoch_s=0), "epoch"),
        (lambda d: HeteroServe(dampening=-1), "dampening"),
        (lambda d: LatencyAware([1.0]).memory(d), "1 speeds for 4"),
        (lambda d: LatencyAware([1.0, 1.0, 1.0, 0.0]).memory(d), "speed above 0"),
        (lambda d: CapacityProportional().memory(first(d, gpu=None)), "names no GPU"),
    ],
)
def test_errors_are_clear(make, words):
    with pytest.raises(ParameterError, match=words):
        make(fleet())
