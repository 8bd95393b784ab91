from __future__ import annotations

import csv
import re
from typing import Any

import numpy as np
import pytest

from hetero import memory, paths
from hetero.catalog import gpu, gpus, llm, serving_engine
from hetero.catalog.engines import EngineMemory
from hetero.errors import ParameterError
from hetero.memory import Budget, engine_room

GIB = 2**30
V100 = gpu("V100-SXM2-32GB", preset="xiong")
LLAMA_8B = llm("Llama-3-8B")


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_capacity_is_equation_1(degree: int) -> None:
    # t d phi - delta - Phi b with the paper's figures; Llama-3-8B has 8030261248 parameters.
    weights = 2 * 8030261248
    per_gpu = degree * 32 * GIB * 0.9 - degree * 2 * GIB - weights
    per_instance = degree * 32 * GIB * 0.9 - 2 * GIB - weights
    assert Budget(LLAMA_8B, V100, tensor_parallel=degree).kv_capacity_bytes == per_gpu
    once = Budget(LLAMA_8B, V100, tensor_parallel=degree, overhead_per="instance")
    assert once.kv_capacity_bytes == per_instance


def test_batch_of_identical_requests_is_equation_5() -> None:
    # Free: 0.9 x 32 GiB - 2 GiB - 16.06 GB = 12.716 GB; a request of 1000 tokens takes 131.072 MB
    # with grouped queries and 524.288 MB with 2 l h values per token.
    assert Budget(LLAMA_8B, V100).max_batch(600, 400) == 97
    assert Budget(LLAMA_8B, V100, kv_formula="full").max_batch(600, 400) == 24
    assert Budget(LLAMA_8B, V100, kv_precision="fp8").max_batch(600, 400) == 194
    assert Budget(llm("Llama-2-70B"), V100).max_batch(600, 400) == 0
    with pytest.raises(ParameterError, match="0 input and 0 output"):
        Budget(LLAMA_8B, V100).max_batch(0, 0)


def test_kv_bytes_of_published_transfers() -> None:
    # ThunderServe Table 8: 1024 tokens of LLaMA-30B are 1.64 GB.
    assert 1024 * llm("LLaMA-1-30B").kv_bytes_per_token() == pytest.approx(1.64e9, rel=0.003)
    # BLOOM-176B caches 4.0 MB per token, DeepSeek-V3 576 values per layer.
    assert llm("BLOOM").kv_bytes_per_token() == pytest.approx(4.0e6, rel=0.01)
    assert llm("DeepSeek-V3").kv_bytes_per_token(precision="fp8") == 61 * 576


def test_kv_heads_fewer_than_gpus_are_copied() -> None:
    model = llm("Qwen3-30B-A3B")  # 4 KV heads
    per_token = [model.kv_bytes_per_token(tensor_parallel=t) for t in (1, 2, 4, 8, 16)]
    assert per_token == [98304, 98304, 98304, 2 * 98304, 4 * 98304]
    # Their projections too: 4 more heads of keys and values in each of 48 layers.
    extra = 48 * 4 * 2 * 2048 * 128 * 2
    assert Budget(model, gpu("L40S"), tensor_parallel=8).weight_bytes == (
        model.weight_bytes() + extra
    )
    assert Budget(model, gpu("L40S"), tensor_parallel=4).weight_bytes == model.weight_bytes()
    # 2 l h values are divided evenly whatever the degree.
    full = model.kv_bytes_per_token(tensor_parallel=8, formula="full")
    assert full == 2 * 48 * 2048 * 2


def test_latent_cache_is_copied_to_every_gpu() -> None:
    model = llm("DeepSeek-V3")
    assert model.kv_bytes_per_token(tensor_parallel=8) == 8 * 70272
    one, eight = (
        Budget(model, gpu("H200"), tensor_parallel=t, weight_precision="fp8").weight_bytes
        for t in (1, 8)
    )
    assert one == model.weight_bytes("fp8") == pytest.approx(model.params, rel=4e-3)
    copied = 7 * 61 * 7168 * (1536 + 512 + 64)
    assert eight - one == pytest.approx(copied, rel=1e-3)


def test_stages_divide_layers_embedding_and_head() -> None:
    model = llm("Llama-2-70B")
    budget = Budget(model, gpu("A100-40"), tensor_parallel=2, pipeline_parallel=3)
    first, middle, last = budget.stages
    assert [s.layers for s in budget.stages] == [27, 27, 26]
    layer = 2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
    table = 2 * 32000 * 8192
    assert first.weight_bytes == 27 * layer + table
    assert middle.weight_bytes == 27 * layer
    assert last.weight_bytes == 26 * layer + table + 2 * 8192
    assert budget.weight_bytes == model.weight_bytes()
    # The first stage has least room per layer.
    free = 2 * 40 * GIB * 0.9 - 2 * 2 * GIB - first.weight_bytes
    assert budget.kv_capacity_bytes == pytest.approx(80 * free / 27)


def test_remaining_layers_go_before_the_last_stage() -> None:
    budget = Budget(llm("Llama-2-70B"), gpu("L4"), pipeline_parallel=6)
    assert [s.layers for s in budget.stages] == [13, 13, 13, 14, 14, 13]


def test_overhead_of_an_instance_is_shared_by_its_stages() -> None:
    for per, each in (("gpu", 2 * 2 * GIB), ("instance", 2 * GIB / 4)):
        stages = Budget(
            llm("Llama-2-70B"),
            gpu("L4"),
            tensor_parallel=2,
            pipeline_parallel=4,
            overhead_per=per,  # type: ignore[arg-type]
        ).stages
        assert [s.overhead_bytes for s in stages] == [each] * 4


def test_tied_embeddings_are_held_at_both_ends() -> None:
    model = llm("OPT-30B")
    one, two = (Budget(model, gpu("A100-80"), pipeline_parallel=p).weight_bytes for p in (1, 2))
    assert two - one == 2 * 50272 * 7168


def test_dense_leading_layers_lighten_the_first_stage() -> None:
    model = llm("DeepSeek-V3")
    first, last = Budget(model, gpu("H200"), tensor_parallel=8, pipeline_parallel=2).stages
    assert first.layers == 31
    assert last.layers == 30
    assert first.weight_bytes < last.weight_bytes


@pytest.mark.parametrize(
    ("model", "card", "settings", "longest", "reason"),
    [
        ("LLaMA-1-30B", "A100-80", {"tensor_parallel": 8}, 1, "52 attention heads cannot be div"),
        ("Llama-3-8B", "T4", {"weight_precision": "bf16"}, 1, "T4 does not compute in bf16"),
        (
            "Llama-2-70B",
            "A100-80",
            {},
            1,
            r"weights of Llama-2-70B in fp16 take 128.48 GiB, but 1 x A100-SXM-80GB offer 70.00 "
            r"GiB .* 58.48 GiB short",
        ),
        (
            "Llama-2-70B",
            "L4",
            {"pipeline_parallel": 4},
            1,
            r"weights of 20 layers of Llama-2-70B .*1 x L4 offer 19.60 GiB",
        ),
        (
            "Llama-3-8B",
            "V100-32",
            {"kv_formula": "full"},
            30_000,
            r"request of 30,000 tokens needs 14.65 GiB of KV cache, but 11.84 GiB "
            r"\(24,253 tokens\) are left",
        ),
    ],
)
def test_reasons_name_the_constraint_with_bytes(
    model: str, card: str, settings: dict[str, Any], longest: int, reason: str
) -> None:
    found = Budget(llm(model), gpu(card), **settings).why_not(longest)
    assert found is not None
    assert re.search(reason, found), found


def test_what_fits_has_no_reason() -> None:
    assert Budget(LLAMA_8B, V100).why_not(97_013) is None
    assert Budget(LLAMA_8B, V100).why_not(97_014) is not None
    # Xiong 5.3: two V100 hold DeepSeek-R1-Distill-Qwen-14B, one does not leave much.
    distilled = llm("DeepSeek-R1-Distill-Qwen-14B")
    assert Budget(distilled, V100, tensor_parallel=2).why_not(8192) is None


def test_helix_table_1() -> None:
    published = {
        "Llama-2-70B": [12, 7, 4],
        "GPT-3-175B": [30, 18, 9],
        "Grok-1": [53, 32, 16],
        "Llama-3.1-405B": [68, 41, 21],
    }
    cards = ("L4", "A100-40", "H100-SXM")
    assert published == {
        name: [memory.minimum_gpus(llm(name), gpu(card)) for card in cards] for name in published
    }
    # Binary gigabytes do not give the table.
    in_gib = {
        name: [memory.minimum_gpus(llm(name), gpu(card), unit="GiB") for card in cards]
        for name in published
    }
    same = sum(a == b for n in published for a, b in zip(published[n], in_gib[n], strict=True))
    assert same == 3


def test_layers_per_node_against_the_limits_of_helix() -> None:
    # Limits of the artifact: nodes of so many GPUs, and most layers of each model on each.
    nodes = [("A100-40", 1), ("V100-16", 1), ("L4", 1), ("L4", 2), ("T4", 1), ("T4", 2), ("T4", 4)]
    limits = {"Llama-2-70B": (12, 4, 7, 14, 4, 9, 18), "LLaMA-1-30B": (18, 7, 11, 22, 7, 15, 30)}
    apart = {
        (model, card, count): memory.max_layers(llm(model), gpu(card), gpus=count) - layers
        for model, row in limits.items()
        for (card, count), layers in zip(nodes, row, strict=True)
    }
    assert {k: v for k, v in apart.items() if v} == {
        ("Llama-2-70B", "A100-40", 1): -1,
        ("LLaMA-1-30B", "T4", 2): -1,
        ("LLaMA-1-30B", "T4", 4): -1,
    }


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"pipeline_parallel": 33}, "33 pipeline stages for the 32 layers"),
        ({"memory_fraction": 1.1}, r"memory_fraction is 1\.1"),
        ({"overhead_gib": -1.0}, r"overhead_gib is -1"),
        ({"overhead_per": "node"}, "overhead_per is 'node'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        Budget(LLAMA_8B, V100, **settings)


def test_shares_and_units_are_checked() -> None:
    with pytest.raises(ParameterError, match="weight_share is 0"):
        memory.minimum_gpus(LLAMA_8B, V100, weight_share=0)
    with pytest.raises(ParameterError, match="unit is 'MB'"):
        memory.max_layers(LLAMA_8B, V100, unit="MB")  # type: ignore[arg-type]


def test_the_table_adds_up() -> None:
    budget = Budget(LLAMA_8B, V100, tensor_parallel=2)
    (row,) = budget.table().rows
    total, unused, engine, weights, cache = row[2:]
    assert total == 64
    assert isinstance(unused, float)
    assert unused + engine + weights + cache == pytest.approx(total)  # type: ignore[operator]
    assert "131,072 bytes" in str(budget)
    assert "short" in str(Budget(llm("Llama-2-70B"), V100))


LIMITS = {"max_batch": 16, "max_step_tokens": 4096}


def test_what_an_engine_holds_is_the_peak_of_its_profiling_run() -> None:
    rule = EngineMemory(
        engine="mine",
        since="1",
        share=0.9,
        live_factor=1.0,
        logit_bytes=10.0,
        engine_gib=0.5,
        several_gib=0.25,
        layer_graphs_gib=0.125 / 32,
        source="",
    )
    card = gpu("L4")
    one = engine_room(rule, card, LLAMA_8B, **LIMITS)
    two = engine_room(rule, card, LLAMA_8B, 2, **LIMITS)
    assert one.memory_fraction * card.mem_gib == pytest.approx(0.9 * 22.03)
    # Gate, up and their product, the hidden states and the residual, of 4,096 tokens.
    assert one.overhead_gib == pytest.approx(0.625 + 4096 * (6 * 14336 + 4 * 4096) / GIB)
    assert two.overhead_gib == pytest.approx(0.875 + 4096 * (3 * 14336 + 4 * 4096) / GIB)
    # Many requests: their logits are more than the activations of a step.
    many = engine_room(rule, card, LLAMA_8B, max_batch=1024, max_step_tokens=4096, share=0.5)
    assert many.overhead_gib == pytest.approx(0.625 + 1024 * 128256 * 10 / GIB)
    assert many.memory_fraction * card.mem_gib == pytest.approx(0.5 * 22.03)


def test_no_gpu_shows_more_than_it_has() -> None:
    for one in gpus():
        assert 0.9 * one.mem_bytes < one.visible_bytes <= one.mem_bytes, one.name


def test_capacities_are_those_that_vllm_allocated() -> None:
    """Block counts of vLLM on Helix's nodes, which hold some layers and both ends of a model.

    Their profiling runs prefill the prompts of 2,048 tokens that the artifact allows at once. The
    engine had kernels of its own for A100 and L4 alone.
    """
    rule = serving_engine("vllm").memory_of("0.4")
    assert rule is not None
    apart: dict[bool, list[float]] = {True: [], False: []}
    nominal = []
    with paths.data("measured", "helix_machine_limits.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            card, model, t = gpu(row["gpu"]), llm(row["llm"]), int(row["tensor_parallel"])
            layers, prompts = int(row["layers"]), int(row["prompt_max_requests"])
            room = engine_room(rule, card, model, t, max_batch=0, max_step_tokens=2048 * prompts)
            ends = 2 * (model.embedding_params + model.output_params)
            weights = layers * model.layer_weight_bytes() + ends
            per_token = layers * model.kv_bytes_per_token() / model.layers
            seen = 16 * int(row["kv_blocks"])

            known = [
                (t * (card.mem_bytes * share - gib * GIB) - weights) / per_token / seen - 1.0
                for share, gib in (room, (0.9, 2.0))
            ]
            apart[row["gpu"] in ("A100-SXM-40GB", "L4")].append(abs(known[0]))
            nominal.append(abs(known[1]))
    assert len(apart[True]) == 84
    assert max(apart[True]) < 0.02
    assert np.median(apart[False]) < 0.03
    together = [*apart[True], *apart[False]]
    assert np.median(together) < 0.012
    assert np.median(nominal) > 4 * np.median(together)


def test_releases_divide_memory_as_they_do() -> None:
    vllm = serving_engine("vllm")
    model, card = llm("Llama-3.1-8B"), gpu("H100-SXM")

    def room(release: str) -> memory.Room:
        rule = vllm.memory_of(release)
        assert rule is not None
        return engine_room(rule, card, model, max_batch=1024, max_step_tokens=8192)

    # Sorting the logits of 1,024 requests takes more than the activations.
    assert room("0.10").overhead_gib > room("0.19").overhead_gib + 2.0
    assert room("0.19").memory_fraction < room("").memory_fraction == room("0.33").memory_fraction
    assert serving_engine("any").memory_of() is None
