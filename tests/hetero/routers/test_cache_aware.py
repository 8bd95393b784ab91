"""Routing by what the dispatcher believes to be cached where."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest

from hetero.deployment import Engine
from hetero.routers import CacheAware, LeastTokens, Predictive, RoundRobin
from hetero.simulator import Event, metrics, simulate
from hetero.workload import Trace
from tests.hetero.routers.router_states import check, fleet, trace

BLOCK = 64
ENGINE = Engine("chunked", "paged", max_batch=24, max_step_tokens=512, prefix_cache=True)


def conversations(count=600, rate_rps=20.0, seed=0) -> Trace:
    """Every prompt shares the first block of all and continues one of thirty conversations.

    Only whole blocks have ids, as in the hash chains of engines.
    """
    served = trace(count, rate_rps, seed)
    rng = np.random.default_rng(seed)
    chains, fresh = [], 1
    talks = [[0] for _ in range(30)]
    for tokens in served.input_tokens.tolist():
        length = tokens // BLOCK
        k = rng.integers(30)
        shared = talks[k][:length]
        talks[k] = [*shared, *range(fresh, fresh + length - len(shared))]
        fresh += length - len(shared)
        chains.append(talks[k])
    return dataclasses.replace(
        served,
        prefix_offsets=np.cumsum([0, *map(len, chains)]),
        prefix_ids=np.array([block for chain in chains for block in chain]),
        block_tokens=BLOCK,
    )


class PrefixIndex:
    """Least tokens less weighted hits, with records of its own in ordered dictionaries."""

    def __init__(self, served, deployment, weight):
        ids, offsets = served.prefix_ids.tolist(), served.prefix_offsets.tolist()
        self.chains = [ids[a:b] for a, b in itertools.pairwise(offsets)]
        self.sizes = [r.kv_tokens // 16 * 16 // BLOCK for r in deployment.replicas]
        self.kept = [OrderedDict() for _ in self.sizes]
        self.weight = weight
        self.differed = 0

    def hits(self, request, i):
        run = 0
        for block in self.chains[request.index]:
            if block not in self.kept[i]:
                break
            run += 1
        # Engines find whole blocks of 16 tokens, and always compute the last token.
        return min(run * BLOCK, request.input_tokens - 1) // 16 * 16

    def expected(self, request, fleet):
        hits = np.array([self.hits(request, i) for i in range(4)])
        assert fleet.known_tokens.tolist() == hits.tolist()
        load = fleet.outstanding_tokens.astype(float)
        if np.isinf(self.weight):
            cost = np.lexsort((load, -hits))
            return {next(int(i) for i in cost if fleet.eligible[i])}
        cost = np.where(fleet.eligible, load - self.weight * hits, np.inf)
        self.differed += int(cost.argmin() != np.where(fleet.eligible, load, np.inf).argmin())
        return {int(cost.argmin())}

    def dispatched(self, request, i):
        for block in reversed(self.chains[request.index][: self.sizes[i]]):
            self.kept[i][block] = None
            self.kept[i].move_to_end(block)
            if len(self.kept[i]) > self.sizes[i]:
                self.kept[i].popitem(last=False)


@pytest.mark.parametrize("weight", [0.5, 4.0, np.inf])
def test_decisions_are_those_of_a_plain_implementation(weight):
    deployment, served = fleet(ENGINE), conversations()
    prefix_index = PrefixIndex(served, deployment, weight)
    decisions = check(CacheAware(hit_weight=weight), prefix_index, deployment, served)
    fast = simulate(deployment, served, CacheAware(hit_weight=weight))
    assert fast.requests["node"].tolist() == decisions.tolist()
    assert np.isinf(weight) or prefix_index.differed > 20
    # Some records were full, so that age counted.
    assert any(
        len(kept) == size for kept, size in zip(prefix_index.kept, prefix_index.sizes, strict=True)
    )


def test_without_blocks_it_is_least_tokens():
    for engine, served in ((ENGINE, trace()), (Engine(max_batch=24), conversations())):
        ours = simulate(fleet(engine), served, CacheAware())
        least = simulate(fleet(engine), served, LeastTokens())
        assert ours.requests["node"].tolist() == least.requests["node"].tolist()


def test_the_prefix_index_foresees_what_the_caches_have():
    """They differ only by what was evicted, or not yet prefilled, when a prefill began."""
    run = simulate(fleet(ENGINE), conversations(2000), CacheAware())
    found, believed = run.requests["hit_tokens"], run.requests["believed_tokens"]
    assert (found == believed).mean() > 0.9
    assert found.sum() == pytest.approx(believed.sum(), rel=0.05)
    assert found.sum() > 0.3 * run.requests["input_tokens"].sum()


@pytest.mark.parametrize("router", [CacheAware(), Predictive()], ids=lambda r: r.name)
def test_it_hits_more_and_starts_sooner_than_rotation(router):
    served = conversations(2000)
    ours = simulate(fleet(ENGINE), served, router)
    rotation = simulate(fleet(ENGINE), served, RoundRobin())
    assert ours.requests["hit_tokens"].sum() > 1.2 * rotation.requests["hit_tokens"].sum()
    assert metrics(ours).percentiles["ttft_s"][95] < metrics(rotation).percentiles["ttft_s"][95]


def test_a_failed_replica_has_nothing_cached_in_the_prefix_index():
    served = conversations(40, rate_rps=1.0)
    fail_s = float(served.arrival_s[20])

    def choose(request, fleet):
        known.append(int(fleet.known_tokens[0]))
        return 0 if fleet.eligible[0] else 1

    known, look = [], SimpleNamespace(name="look", choose=choose)
    events = [Event(fail_s, "0:H100-SXM"), Event(fail_s, "0:H100-SXM", "recover")]
    run = simulate(fleet(ENGINE), served, look, events=events)
    assert run.requests["retries"].sum() > 1
    assert sum(tokens > 0 for tokens in known[1:20]) > 15
    # Back at once and empty: the first that is sent again finds nothing, the next its one block.
    assert known[20:22] == [0, BLOCK]
