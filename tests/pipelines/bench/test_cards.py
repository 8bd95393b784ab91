"""Plan cards of random fleets beside long runs that were made without the rule of the cards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.engines import EngineSpec, replicated
from hetero.plans import Plan
from hetero.routers import factories
from hetero.simulator import Slo
from hetero.workload.statistics import fano
from pipelines.bench import cards

FLEETS = {asked.cluster.name: asked for asked in cards.draws(40)}
SMALL = [name for name, asked in FLEETS.items() if asked.cluster.gpus <= 22]
TOO_LARGE = {"fleet-22"}  # 131 GiB of weights for 6 GPUs of 16 GiB
TARGETS = Slo(ttft_s=1.0, tpot_s=0.1)


def test_fleets_are_as_varied_as_they_should_be():
    types = [len(asked.cluster.gpu_counts) for asked in FLEETS.values()]
    regions = [len({m.region for m in asked.cluster.machines}) for asked in FLEETS.values()]
    gpus = [asked.cluster.gpus for asked in FLEETS.values()]
    assert set(types) == {1, 2, 3, 4}
    assert set(regions) == {1, 2, 3}
    assert 2 <= min(gpus) < 8
    assert 48 < max(gpus) <= 64
    assert {asked.model for asked in FLEETS.values()} == {*cards.DENSE, *cards.EXPERTS}
    assert {asked.trace for asked in FLEETS.values()} == set(cards.TRACES)
    assert list(cards.draws(3)) == list(FLEETS.values())[:3]
    assert list(cards.draws(3, seed=1)) != list(FLEETS.values())[:3]


@cache
def pair() -> Plan:
    engine = EngineSpec(batching="prefill first", max_batch=64)
    made = replicated(cluster("xiong-8xv100"), catalog.llm("Llama-3-8B"), {"v100": 4}, engine)
    router = factories()["least-tokens"]()
    return Plan("given degrees", (), made, router, router.name, None)


def test_long_runs_find_where_the_goal_is_just_met():
    trace = workload.load("azure2023_conv", "twin")
    found = cards.limit_rps(pair(), trace, TARGETS, 0.6, 1.0, seed=3)
    assert cards.met(pair(), trace, 0.97 * found, TARGETS, seed=3) >= 0.6
    assert cards.met(pair(), trace, 1.1 * found, TARGETS, seed=3) < 0.6
    again = cards.limit_rps(pair(), trace, TARGETS, 0.6, 10.0 * found, seed=3)
    assert again == pytest.approx(found, rel=0.02)
    # Targets that nothing meets have no limit, whatever the rate.
    assert cards.limit_rps(pair(), trace, Slo(ttft_s=1e-9), 0.9, 1.0, seed=3) == 0.0


def test_runs_that_count_are_long():
    trace = workload.load("sharegpt", "twin")
    runs = []

    class Watched(Plan):
        def simulate(self, load, seed):
            runs.append(load)
            return super().simulate(load, seed)

    one = pair()
    watched = Watched(one.planner, (), one.deployment, one.router, one.routing, None)
    for rate in (1.0, 100.0):
        cards.met(watched, trace, rate, TARGETS, seed=0)
        load = runs.pop()
        assert len(load) >= cards.LEAST_REQUESTS
        assert load.arrival_s[-1] >= 0.95 * cards.LEAST_S
        assert np.diff(load.arrival_s).mean() == pytest.approx(1.0 / rate, rel=0.05)


def test_logs_come_in_bursts_and_are_played_with_their_gaps():
    asked = next(one for one in FLEETS.values() if one.log)
    log = asked.requests(3)
    assert log.own_bursts
    assert fano(log.arrival_s, 100.0) > 5.0
    plain = replace(asked, log=False).requests(3)
    assert not plain.own_bursts
    few = log.head(2000)
    slow, fast = (cards.met(pair(), few, rate, TARGETS, 0, own_rps=1.0) for rate in (0.1, 50.0))
    assert slow > 0.8 > fast + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_card_holds_in_long_runs(name):
    found = cards.checked(FLEETS[name])
    if name in TOO_LARGE:
        assert "together hold 96.0 GiB" in found.reason
        return
    assert not found.reason
    assert found.holds, found
    assert found.promised_rps < 1.06 * found.limit_rps
