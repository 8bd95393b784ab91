"""The lower level: configurations, routes, transfers, attainment and the transportation problem."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import workload
from hetero.catalog import llm
from hetero.cluster import cluster
from hetero.costs.attainment import Pairs
from hetero.costs.cost import IN_PAPERS, CostModel, PipelineStage
from hetero.costs.demand import Demand
from hetero.costs.groups import Fleet
from hetero.costs.parallel import Configurations, shortest, widest
from hetero.costs.transfer import KvTransfer
from hetero.planners.thunderserve.evaluate import Evaluator, orchestrate, transport
from hetero.simulator import Slo

MODEL = llm("LLaMA-1-30B")


@pytest.fixture(scope="module")
def cloud() -> CostModel:
    return CostModel(cluster("thunderserve-cloud-32"), MODEL, IN_PAPERS)


@pytest.fixture(scope="module")
def conversation() -> Demand:
    return Demand.of(workload.load("azure2023_conv"), 5.0)


# Routes --------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_routes_are_the_best_of_all_permutations(data):
    size = data.draw(st.integers(1, 4))
    counts = [data.draw(st.integers(1, 2)) for _ in range(size)]
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    hop = rng.integers(1, 20, (size, size)).astype(float)
    hop = np.triu(hop) + np.triu(hop, 1).T
    if data.draw(st.booleans()):  # links inside are the fastest, as they usually are
        np.fill_diagonal(hop, 0.5)
    path, cost = shortest(counts, hop)
    assert sorted(path) == sorted(m for m, n in enumerate(counts) for _ in range(n))
    assert cost == pytest.approx(sum(hop[a, b] for a, b in pairwise(path)))
    stages = [m for m, n in enumerate(counts) for _ in range(n)]
    every = {p: sum(hop[a, b] for a, b in pairwise(p)) for p in permutations(stages)}
    assert cost == pytest.approx(min(every.values()))
    path, least = widest(counts, hop)
    assert sorted(path) == sorted(stages)
    narrowest = {p: min((hop[a, b] for a, b in pairwise(p)), default=np.inf) for p in every}
    assert least == narrowest[path] == max(narrowest.values())


# Parallel configurations ----------------------------------------------------------------------


def test_algorithm_2_gives_a_group_one_degree_and_uses_all_its_gpus(conversation):
    settings = replace(IN_PAPERS, max_stages=2, one_degree=True, max_gpus=4)
    search = Configurations(
        CostModel(cluster("thunderserve-cloud-32"), MODEL, settings), conversation
    )
    fleet = Fleet(search.model)
    for group, degrees in ((((0, 2), (5, 2)), {2}), (((3, 4),), {2, 4}), (((4, 2),), {1, 2})):
        assert fleet.fits(group)
        found = [{t for _, t, _ in one} for one in search.configurations(group)]
        assert all(len(one) == 1 for one in found)
        assert set().union(*found) == degrees
        assert {sum(t for _, t, _ in one) for one in search.configurations(group)} == {
            sum(n for _, n in group)
        }
    # Three stages of one degree, and more GPUs than any printed group has.
    assert not fleet.fits(((0, 2), (4, 1)))
    assert not fleet.fits(((0, 4), (1, 4)))


def test_the_value_that_is_compared_is_that_of_the_pipeline(cloud, conversation):
    search = Configurations(cloud, conversation)
    for group in (((4, 4),), ((0, 2), (5, 2)), ((0, 4), (2, 4))):
        for configuration in search.configurations(group):
            pipeline = cloud.pipeline(
                [PipelineStage(group[k][0], t, n) for k, t, n in configuration]
            )
            n = conversation.mean_input
            assert search.value(group, configuration, "prefill") == pytest.approx(
                -float(pipeline.prefill_latency_s(n)), rel=1e-9
            )
            assert search.value(group, configuration, "decode") == pytest.approx(
                pipeline.decode_tps(conversation.context_tokens), rel=1e-9
            )


def test_the_best_configuration_is_no_worse_than_any(cloud, conversation):
    search = Configurations(cloud, conversation)
    group = ((0, 2), (5, 2))
    best = search.best(group, "decode")
    every = [search.value(group, one, "decode") for one in search.configurations(group)]
    assert best.decode_tps(conversation.context_tokens) == pytest.approx(max(every))
    assert len(every) > 4
    assert best.gpus == 4


def test_machines_of_a_kind_share_their_configuration(cloud, conversation):
    search = Configurations(cloud, conversation)
    one, other = search.best(((0, 4),), "prefill"), search.best(((1, 4),), "prefill")
    assert [(s.gpus, s.layers) for s in one.stages] == [(s.gpus, s.layers) for s in other.stages]
    assert (one.stages[0].machine, other.stages[0].machine) == (0, 1)


def test_early_checks_agree_with_configurations(cloud, conversation):
    """What the memory check throws out has no configuration."""
    search, fleet = Configurations(cloud, conversation), Fleet(cloud)
    assert not fleet.fits(((5, 3),))  # 58.8 GiB for weights of 60.6
    assert search.best(((5, 3),), "decode") is None
    assert fleet.fits(((5, 4),))
    assert search.best(((5, 4),), "decode") is not None


# KV transfers ---------------------------------------------------------------------------------


def test_transfers_within_and_across_machines(cloud):
    layer = MODEL.kv_bytes_per_token() / MODEL.layers
    a40, ti = cloud.pipeline([PipelineStage(4, 4, 60)]), cloud.pipeline([PipelineStage(5, 4, 60)])
    fixed, per_token = KvTransfer(bits=16).seconds(a40, ti)
    assert fixed == pytest.approx(1e-4)
    assert per_token == pytest.approx(60 * layer / (0.56 * 5e9))
    # Both stages of the source send at once, each over its own network port to the same target.
    split = cloud.pipeline([PipelineStage(0, 2, 30), PipelineStage(1, 2, 30)])
    _, per_token = KvTransfer(bits=16).seconds(split, ti)
    assert per_token == pytest.approx(60 * layer / (0.56 * 5e9))  # the receiver is the bottleneck
    pair = cloud.pipeline([PipelineStage(5, 2, 30), PipelineStage(6, 2, 30)])
    _, per_token = KvTransfer(bits=16).seconds(split, pair)
    assert per_token == pytest.approx(30 * layer / (0.56 * 5e9))
    here = cloud.pipeline([PipelineStage(4, 2, 60)])
    _, per_token = KvTransfer(bits=16).seconds(a40, here)
    assert per_token == pytest.approx(60 * layer / (0.75 * 32e9))


def test_bits_codec_and_overlap(cloud):
    a40, ti = cloud.pipeline([PipelineStage(4, 4, 60)]), cloud.pipeline([PipelineStage(5, 4, 60)])
    whole = KvTransfer(bits=16).seconds(a40, ti)[1]
    quick = {"compress_gbs": 1e9, "decompress_gbs": 1e9}
    assert KvTransfer(bits=4, **quick).seconds(a40, ti)[1] == pytest.approx(whole / 4, rel=1e-6)
    assert KvTransfer(bits=8, **quick).seconds(a40, ti)[1] == pytest.approx(whole / 2, rel=1e-6)
    scales = KvTransfer(bits=4, scale_bits=1.0, **quick).seconds(a40, ti)[1]
    assert scales == pytest.approx(whole * 5 / 16, rel=1e-6)
    # Table 8: with 4 bits the codec adds 14 and 18 ms to 1.64 GB.
    codec = KvTransfer(bits=4).seconds(a40, ti)[1] - whole / 4
    assert 1024 * codec == pytest.approx(0.032, abs=0.001)
    hidden = KvTransfer(bits=4, overlap=True).seconds(a40, ti)[1]
    assert hidden == pytest.approx(KvTransfer(bits=4).seconds(a40, ti)[1] / 60)
    link = KvTransfer(bits=4).link(a40, ti)
    size = MODEL.kv_bytes_per_token() * link.compression
    assert size / (1e9 * link.bandwidth_gbs) == pytest.approx(KvTransfer().seconds(a40, ti)[1])


# Transportation problem -----------------------------------------------------------------------


def test_transport_without_capacities_takes_the_best_pair():
    """The problem as printed in the paper."""
    gain = np.array([[0.3, 0.9], [0.8, 0.1]])
    assert transport(gain, np.ones(2), np.ones(2)) == pytest.approx(np.array([[0, 1], [0, 0]]))
    bounded = transport(gain, np.ones(2), np.ones(2), np.full((2, 2), 0.5))
    assert bounded == pytest.approx(np.array([[0, 0.5], [0.5, 0]]))


# Attainment -----------------------------------------------------------------------------------


def pairs_of(cloud, demand, slo, prefill, decode) -> Pairs:
    parts = [(one, "prefill") for one in prefill] + [(one, "decode") for one in decode]
    named = [(((k, 1),), cloud.pipeline([one]), phase) for k, (one, phase) in enumerate(parts)]
    fixed = tuple((group, pipeline) for group, pipeline, _ in named)
    design = tuple((group, phase) for group, _, phase in named)
    found = Evaluator(cloud, demand, slo, fixed=fixed).pairs(design)
    assert found is not None
    return found


def one_pair(cloud, slo, rate=1.0, inputs=1024.0, outputs=100.0) -> Pairs:
    demand = Demand(rate, np.array([inputs]), np.array([outputs]), np.array([1.0]))
    return pairs_of(cloud, demand, slo, [PipelineStage(4, 4, 60)], [PipelineStage(5, 4, 60)])


def test_attainment_without_load_is_a_matter_of_the_targets(cloud):
    idle = np.array([0.0])
    first = float(cloud.pipeline([PipelineStage(4, 4, 60)]).prefill_latency_s(1024))
    for slo, met in (
        (Slo(ttft_s=first * 1.01), 1.0),
        (Slo(ttft_s=first * 0.99), 0.0),
        (Slo(tpot_s=1.0), 1.0),
        (Slo(tpot_s=0.02), 0.0),
        (Slo(e2e_s=60.0), 1.0),
        (Slo(e2e_s=1.0), 0.0),
        (Slo(), 1.0),
    ):
        assert one_pair(cloud, slo).attainment(idle, idle)[0, 0] == pytest.approx(met), slo


def test_attainment_falls_with_load(cloud):
    pairs = one_pair(cloud, Slo(ttft_s=1.0, tpot_s=0.2))
    loads = np.linspace(0.0, 2.0, 9)
    by_prefill = [pairs.attainment(np.array([x]), np.array([0.1]))[0, 0] for x in loads]
    assert all(a >= b - 1e-12 for a, b in pairwise(by_prefill))
    assert by_prefill[0] == 1.0
    assert by_prefill[-1] < 0.6


def test_waiting_follows_pollaczek_and_khinchine(cloud):
    pairs = one_pair(cloud, Slo(ttft_s=1.0))
    busy = float(cloud.pipeline([PipelineStage(4, 4, 60)]).prefill_occupancy_s(1024))
    rate = 0.6 / busy
    wait = rate * busy**2 / (2 * (1 - 0.6))  # M/D/1
    late = 0.6 * np.exp(-0.6 * (1.0 - busy) / wait)
    found = pairs.attainment(np.array([rate]), np.array([0.0]))[0, 0]
    assert found == pytest.approx(1 - late)


def test_orchestration_keeps_to_capacities_and_settles(cloud, conversation):
    demand = conversation.at(4.0)
    pairs = pairs_of(
        cloud,
        demand,
        Slo(ttft_s=2.0, tpot_s=0.3, e2e_s=60.0),
        [PipelineStage(4, 4, 60), PipelineStage(0, 4, 60)],
        [PipelineStage(5, 4, 60), PipelineStage(1, 4, 60)],
    )
    found = orchestrate(pairs, iterations=20)
    assert found.settled
    assert orchestrate(pairs, iterations=1).iterations == 1
    assert (found.share.sum(axis=1) <= pairs.prefill_share + 1e-9).all()
    assert (found.share.sum(axis=0) <= pairs.decode_share + 1e-9).all()
    loads = demand.rate_rps * found.share.sum(axis=1), demand.rate_rps * found.share.sum(axis=0)
    again = (found.share * pairs.attainment(*loads)).sum()
    assert found.attainment == pytest.approx(again)
    # No single shift of 2 % between pairs attains more.
    step = 0.02
    for source in np.ndindex(2, 2):
        for target in np.ndindex(2, 2):
            share = found.share.copy()
            moved = min(step, share[source])
            share[source] -= moved
            share[target] += moved
            rows, columns = share.sum(axis=1), share.sum(axis=0)
            if (rows > pairs.prefill_share).any() or (columns > pairs.decode_share).any():
                continue
            value = (share * pairs.attainment(4.0 * rows, 4.0 * columns)).sum()
            assert value <= found.attainment + 2e-3
