from __future__ import annotations

from dataclasses import replace

import pytest

from hetero import catalog
from hetero.cluster import Cluster, Machine, cluster
from hetero.engines import PAPERS, EngineSpec, replicated, roofline_steps
from hetero.errors import CatalogError, InfeasibleError, ParameterError

LLAMA = catalog.llm("Llama-3-8B")
V100 = cluster("xiong-8xv100")


def test_a_degree_divides_a_machine_into_equal_instances() -> None:
    found = replicated(V100, LLAMA, {"v100": 2}, PAPERS)
    assert [replica.gpus for replica in found.replicas] == [2, 2, 2, 2]
    assert len({replica.name for replica in found.replicas}) == 4
    assert {replica.engine.admission for replica in found.replicas} == {"paged"}
    # 0.9 of 2 x 32 GiB, less the weights and 2 GiB per GPU, at 131,072 bytes a token.
    free = 0.9 * 2 * 32 * 2**30 - 2 * 2 * 2**30 - LLAMA.weight_bytes("fp16")
    assert found.replicas[0].kv_tokens == pytest.approx(free / 131_072, abs=1)


def test_instances_of_different_degrees_stand_on_one_machine() -> None:
    found = replicated(V100, LLAMA, {"v100": (4, 1)})
    assert [replica.gpus for replica in found.replicas] == [4, 1]
    large, small = found.replicas
    # Four GPUs hold the weights once, one GPU pays for them alone.
    assert large.kv_tokens > 4 * small.kv_tokens


def test_prices_follow_the_machine() -> None:
    machine = Machine("node", catalog.gpu("A40"), 4, usd_per_h=10.0)
    found = replicated(Cluster("one", (machine,)), LLAMA, {"node": (2, 1)})
    assert [replica.usd_per_h for replica in found.replicas] == [5.0, 2.5]


def test_link_of_the_machine_and_of_the_caller_change_the_step() -> None:
    nvlink = catalog.link("NVLink2")
    kernels, linked_by = roofline_steps(), EngineSpec(steps=roofline_steps(link=nvlink))
    printed = replicated(V100, LLAMA, {"v100": 4}, EngineSpec(steps=kernels)).replicas[0].step
    fast = replicated(V100, LLAMA, {"v100": 4}, linked_by).replicas[0].step
    assert float(fast.decode_seconds([512] * 64)) < float(printed.decode_seconds([512] * 64))
    machine = replace(V100.machines[0], link=nvlink)
    linked = Cluster("linked", (machine,))
    own = replicated(linked, LLAMA, {"v100": 4}, EngineSpec(steps=kernels)).replicas[0].step
    assert float(own.decode_seconds([512] * 64)) == float(fast.decode_seconds([512] * 64))


def test_engine_time_per_step_is_added() -> None:
    slow = roofline_steps(step_overhead_s=1.0)(V100.machines[0].gpu, LLAMA, 1)
    fast = roofline_steps(step_overhead_s=0.0)(V100.machines[0].gpu, LLAMA, 1)
    gap = float(slow.decode_seconds([64])) - float(fast.decode_seconds([64]))
    assert gap == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("degrees", "error", "words"),
    [
        ({}, ParameterError, "No machine"),
        ({"v100": 3}, ParameterError, "8 GPUs"),
        ({"v100": 0}, ParameterError, "8 GPUs"),
        ({"v100": (8, 1)}, ParameterError, "do not fit"),
        ({"v100": ()}, ParameterError, "do not fit"),
        ({"v10": 2}, CatalogError, "v10"),
    ],
)
def test_impossible_divisions_are_refused(degrees, error, words) -> None:
    with pytest.raises(error, match=words):
        replicated(V100, LLAMA, degrees)


def test_heads_that_cannot_be_shared_and_weights_that_do_not_fit() -> None:
    six = Cluster("six", (Machine("m", catalog.gpu("A40"), 6),))
    with pytest.raises(ParameterError, match="32 attention heads"):
        replicated(six, LLAMA, {"m": 6})
    with pytest.raises(InfeasibleError):
        replicated(V100, catalog.llm("LLaMA-2-70B"), {"v100": 1})


def test_replicas_take_the_memory_that_the_weights_leave() -> None:
    gpu, llm = catalog.gpu("A100-SXM-80GB"), catalog.llm("Llama-2-7B")
    two = PAPERS.on(gpu, llm).replicas("r", 2)
    assert [r.name for r in two] == ["r/0", "r/1"]
    free = 0.9 * gpu.mem_bytes - 2.0 * 2**30 - llm.weight_bytes()
    # 32 layers, keys and values of 4096 numbers of two bytes.
    assert two[0].kv_bytes_per_token == 32 * 2 * 4096 * 2
    assert two[0].kv_tokens == pytest.approx(free / (32 * 2 * 4096 * 2), rel=1e-3)
    with pytest.raises(InfeasibleError, match="Resolve: use more GPUs"):
        PAPERS.on(catalog.gpu("T4"), catalog.llm("Llama-2-70B")).replicas("r")
