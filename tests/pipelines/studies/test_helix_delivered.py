"""Plans by what they deliver: divisions of the nodes, chains, copies, ranking."""

from __future__ import annotations

import pytest

from hetero.errors import InfeasibleError
from hetero.placement import FlowNetwork
from pipelines.studies import helix_delivered as delivered
from pipelines.studies.helix import offline_requests
from pipelines.studies.helix_artifact import expected, problem


def of_kind(whole, gpu: str) -> list[int]:
    return [k for k, node in enumerate(whole.nodes) if node.kind.gpu.startswith(gpu)]


def test_a_chain_holds_every_layer_once_and_keeps_the_cache_it_is_asked_for() -> None:
    whole = problem("single-24", "70B")
    nodes = list(range(len(whole.nodes)))
    caches = []
    for share in (1.0, 0.8, 0.55):
        one = delivered.chain(whole, nodes, share)
        assert (one.copies == 1).all()
        assert FlowNetwork(one).max_flow().tokens_per_s > 0
        caches.append(min(node.kind.kv_tokens(one.layers(k)) for k, node, _ in one.nodes()))
    # No chain has more cache per layer: with one token more, too few layers would fit.
    room = sum(
        sum(node.kind.kv_tokens(x) > caches[0] for x in range(1, node.max_layers + 1))
        for node in whole.nodes
    )
    assert room < 80
    assert caches[1] >= 0.8 * caches[0]
    assert caches[2] >= 0.55 * caches[0]
    assert len(delivered.chain(whole, nodes, 0.55).used) < len(delivered.chain(whole, nodes).used)


def test_too_few_nodes_are_an_error() -> None:
    whole = problem("single-24", "70B")
    with pytest.raises(InfeasibleError, match=r"4 nodes .* hold 48 of the 80 layers"):
        delivered.chain(whole, of_kind(whole, "A100"))


def test_left_over_nodes_copy_the_slowest_stage_they_can_hold() -> None:
    whole = problem("single-24", "70B")
    nodes = list(range(len(whole.nodes)))
    base = delivered.chain(whole, nodes, 0.7)
    full = delivered.copied(base, nodes)
    idle = [k for k in nodes if base.ranges[k] is None]
    assert idle
    for k in nodes:
        if k not in idle:
            assert full.ranges[k] == base.ranges[k]
    copies = [full.ranges[k] for k in idle if full.ranges[k] is not None]
    assert copies
    assert set(copies) <= {held for held in base.ranges if held}
    assert (
        FlowNetwork(full).max_flow().tokens_per_s
        >= FlowNetwork(base).max_flow().tokens_per_s - 1e-6
    )


def test_divisions_part_the_nodes() -> None:
    whole = problem("geo-24", "30B")
    found = delivered.divisions(whole)
    assert {"by type", "by region", "one chain", "4 alike"} <= set(found)
    assert [len(part) for part in found["by region"]] == [4, 10, 10]
    for parts in found.values():
        nodes = [k for part in parts for k in part]
        assert len(nodes) == len(set(nodes))
        for part in parts:
            assert sum(whole.nodes[k].max_layers for k in part) >= 60
    # No GPU type alone holds the 80 layers of the larger model.
    assert set(delivered.divisions(problem("geo-24", "70B"))) == {"one chain"}


def test_ranking_is_by_decode_throughput_and_says_what_the_flow_would_have_chosen() -> None:
    whole = problem("single-24", "30B")
    options = delivered.options(whole, shares=(1.0,))
    found = delivered.rank(whole, options, offline_requests("twin", 1000), (10.0, 60.0))
    decoded = [one.serving.decode_tps for one in found.ranked]
    assert decoded == sorted(decoded, reverse=True)
    assert found.by_flow.flow_tps == max(one.flow_tps for one in found.ranked)
    assert found.gain >= 1.0
    assert len(found.table().rows) == len(options)
    # Separate pipelines are simulated each on their own, and add up.
    best = found.best.option
    alone = [
        delivered.deliver(
            delivered.Option("", (one,)), offline_requests("twin", 1000), (10.0, 60.0)
        )[1].decode_tps
        for one in best.placements
    ]
    assert found.best.serving.decode_tps == pytest.approx(sum(alone))


def test_what_the_artifact_prints() -> None:
    assert expected("hetero-42 70B helix", "offline") == {"decode_throughput": 645.6}
    assert expected("single-24 70B helix", "online", how="prototype")["prompt_latency_mean"] == 2.66
    scheduling = expected("geo-24 70B random", "offline", experiment="request_scheduling")
    assert scheduling["decode_throughput"] == 87.4
