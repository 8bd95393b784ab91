from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero import paths
from hetero.catalog import Gpu, Link, Llm, find_llm, gpu, gpus, link, links, llm, llms, presets
from hetero.catalog.precision import bytes_of
from hetero.catalog.tables import read_table
from hetero.errors import CatalogError, DataError, ParameterError
from hetero.memory import Budget
from hetero.workload import datasets

# Counted independently from the public configs: parameters and active parameters [1e9], and the
# bytes of 16-bit KV cache per token.
COUNTED = {
    "LLaMA-1-7B": (6.738, 6.738, 524288),
    "LLaMA-1-13B": (13.016, 13.016, 819200),
    "LLaMA-1-30B": (32.529, 32.529, 1597440),
    "Llama-2-7B": (6.738, 6.738, 524288),
    "Llama-2-13B": (13.016, 13.016, 819200),
    "Llama-2-70B": (68.977, 68.977, 327680),
    "CodeLlama-34B": (33.744, 33.744, 196608),
    "Llama-3-8B": (8.030, 8.030, 131072),
    "Llama-3.1-8B": (8.030, 8.030, 131072),
    "Llama-3-70B": (70.554, 70.554, 327680),
    "Llama-3.1-70B": (70.554, 70.554, 327680),
    "Llama-3.1-405B": (405.853, 405.853, 516096),
    "Mistral-7B": (7.242, 7.242, 131072),
    "DeepSeek-R1-Distill-Qwen-14B": (14.770, 14.770, 196608),
    "Qwen2.5-7B": (7.616, 7.616, 57344),
    "Qwen2.5-14B": (14.770, 14.770, 196608),
    "Qwen2.5-32B": (32.764, 32.764, 262144),
    "Qwen2.5-72B": (72.706, 72.706, 327680),
    "Qwen3-8B": (8.191, 8.191, 147456),
    "Qwen3-32B": (32.762, 32.762, 262144),
    "GPT-3-175B": (174.604, 174.604, 4718592),
    "OPT-30B": (29.975, 29.975, 1376256),
    "BLOOM-176B": (176.247, 176.247, 4014080),
    "Grok-1": (315.684, 83.756, 262144),
    "Mixtral-8x7B": (46.703, 12.880, 131072),
    "Mixtral-8x22B": (140.621, 39.152, 229376),
    "Qwen3-30B-A3B": (30.532, 3.353, 98304),
    "Qwen3-235B-A22B": (235.094, 22.191, 192512),
    "gpt-oss-120b": (116.789, 5.711, 36864),
    "gpt-oss-20b": (20.908, 4.187, 24576),
    "DeepSeek-V3-R1-671B": (671.026, 37.552, 70272),
    "Kimi-K2": (1026.408, 32.861, 70272),
    "Llama-3.2-1B": (1.236, 1.236, 32768),
    "Llama-3.2-3B": (3.213, 3.213, 114688),
    "Phi-4": (14.660, 14.660, 204800),
    "Mistral-Small-24B": (23.572, 23.572, 163840),
    "Qwen3-0.6B": (0.596, 0.596, 114688),
    "Qwen3-1.7B": (1.721, 1.721, 114688),
    "Qwen3-4B": (4.022, 4.022, 147456),
    "Qwen3-14B": (14.768, 14.768, 163840),
    "Qwen3-Coder-480B-A35B": (480.155, 35.475, 253952),
    "Qwen3-Next-80B-A3B": (79.674, 3.875, 12 * 2048),
    "Qwen3.5-27B": (26.896, 26.896, 16 * 4096),
    "Qwen3.5-35B-A3B": (34.661, 3.455, 10 * 2048),
    "Qwen3.5-122B-A10B": (122.111, 9.771, 12 * 2048),
    "Qwen3.5-397B-A17B": (396.346, 17.349, 15 * 2048),
    "Gemma-3-12B": (11.766, 11.766, 8 * 8192),
    "Gemma-3-27B": (27.009, 27.009, 10 * 8192),
    "Gemma-4-26B-A4B": (25.233, 3.822, 5 * 4096),
    "Gemma-4-31B": (30.697, 30.697, 10 * 8192),
    "Llama-4-Scout-17B-16E": (107.770, 17.173, 12 * 4096),
    "Llama-4-Maverick-17B-128E": (400.712, 17.185, 12 * 4096),
    "GLM-4.5-Air": (106.852, 13.424, 188416),
    "GLM-4.5": (352.798, 33.633, 376832),
    "GLM-5": (743.911, 41.785, 78 * (1152 + 132)),
    "MiniMax-M2.5": (228.689, 11.030, 253952),
    "MiMo-V2-Flash": (308.779, 15.446, 9 * 4 * (192 + 128) * 2),
    "DeepSeek-V3.2": (671.878, 38.404, 61 * (1152 + 132)),
    "Kimi-Linear-48B-A3B": (49.123, 3.485, 7 * 1152),
    "Nemotron-3-Nano-30B-A3B": (31.578, 3.580, 6 * 1024),
    "Nemotron-3-Super-120B-A12B": (120.668, 12.769, 8 * 1024),
}
# What is published of models, and where: parameters and active parameters [1e9], and the bytes of
# 16-bit KV cache per token, as printed or from the numbers of layers and KV heads that are.
GQA = 4 * 128  # Bytes per KV head: keys and values of 128
PUBLISHED = {
    "Mixtral-8x7B": (46.7, 12.9, 32 * 8 * GQA, "arXiv 2401.04088"),
    "Llama-3.1-8B": (8.03, 8.03, 131072, "arXiv 2407.21783, table 3"),
    "Llama-3.1-405B": (405, 405, 516096, "arXiv 2505.09343, table 1: 516.096 KB"),
    "DeepSeek-V3-R1-671B": (671, 37, 70272, "arXiv 2505.09343, table 1: 70.272 KB"),
    # Of an index: 128 numbers of 8 bits and a scale per token.
    "DeepSeek-V3.2": (671, 37, 70272 + 61 * 132, "DeepSeek-V3.2-Exp report: V3 and an index"),
    "GLM-5": (744, 40, 78 * (1152 + 132), "arXiv 2602.15763"),
    # With experts in all 61 layers it would be 1043; the first of the checkpoint is dense.
    "Kimi-K2": (1040, 32.6, 61 * 1152, "arXiv 2507.20534, table 2"),
    "Qwen3-32B": (32.8, 32.8, 64 * 8 * GQA, "card; arXiv 2505.09388, table 1"),
    "Qwen3-30B-A3B": (30.5, 3.3, 48 * 4 * GQA, "card; arXiv 2505.09388, table 2"),
    "Qwen3-235B-A22B": (235, 22, 94 * 4 * GQA, "card; arXiv 2505.09388, table 2"),
    "Qwen3-Coder-480B-A35B": (480, 35, 62 * 8 * GQA, "card"),
    "Qwen3.5-27B": (27, 27, 16 * 4 * 2 * GQA, "card: 16 of 64 layers attend, heads of 256"),
    "Qwen3.5-35B-A3B": (35, 3, 10 * 2 * 2 * GQA, "card: 10 of 40"),
    "Qwen3.5-122B-A10B": (122, 10, 12 * 2 * 2 * GQA, "card: 12 of 48"),
    "Qwen3.5-397B-A17B": (397, 17, 15 * 2 * 2 * GQA, "card: 15 of 60"),
    "Nemotron-3-Nano-30B-A3B": (31.6, 3.6, 6 * 2 * GQA, "arXiv 2512.20848"),
    "Nemotron-3-Super-120B-A12B": (120.6, 12.7, 8 * 2 * GQA, "technical report"),
    "MiniMax-M2.5": (229.9, 9.8, 62 * 8 * GQA, "arXiv 2605.26494"),
    "MiMo-V2-Flash": (309, 15, 9 * 4 * (192 + 128) * 2, "arXiv 2601.02780"),
    "gpt-oss-20b": (20.91, 3.61, 12 * 8 * 4 * 64, "arXiv 2508.10925, table 1"),
    "gpt-oss-120b": (116.83, 5.13, 18 * 8 * 4 * 64, "arXiv 2508.10925, table 1"),
    "Gemma-4-26B-A4B": (25.2, 3.8, 5 * 2 * 4 * 512, "card: 5 of 30 layers see all tokens"),
    "Gemma-4-31B": (30.7, 30.7, 10 * 4 * 4 * 512, "card: 10 of 60"),
    "Llama-4-Scout-17B-16E": (109, 17, 12 * 8 * GQA, "card: every fourth layer without window"),
    "Llama-4-Maverick-17B-128E": (400, 17, 12 * 8 * GQA, "card: as Scout"),
}

# What the five papers print: preset, the paper's name, and the fields it prints.
PRINTED = [
    ("heteroserve", "H100 SXM5", {"fp16_tflops": 989, "mem_gib": 80, "mem_bw_gbs": 3350}),
    ("heteroserve", "A100 SXM4", {"fp16_tflops": 312, "mem_gib": 80, "mem_bw_gbs": 2000}),
    ("heteroserve", "L40S", {"fp16_tflops": 362, "mem_gib": 48, "mem_bw_gbs": 864}),
    ("helix", "H100", {"fp16_tflops": 1979, "mem_gib": 80, "mem_bw_gbs": 3350, "tdp_w": 700}),
    ("helix", "A100", {"fp16_tflops": 312, "mem_gib": 40, "mem_bw_gbs": 1555, "tdp_w": 400}),
    ("helix", "L4", {"fp16_tflops": 242, "mem_gib": 24, "mem_bw_gbs": 300, "tdp_w": 72}),
    ("helix", "T4", {"fp16_tflops": 65, "mem_gib": 16, "mem_bw_gbs": 300, "tdp_w": 70}),
    ("thunderserve", "A100", {"fp16_tflops": 312, "mem_bw_gbs": 2000, "usd_per_h": 1.753}),
    ("thunderserve", "A6000", {"fp16_tflops": 38.7, "mem_bw_gbs": 768, "usd_per_h": 0.483}),
    ("thunderserve", "A5000", {"fp16_tflops": 27.8, "mem_bw_gbs": 626.8, "usd_per_h": 0.223}),
    ("thunderserve", "A40", {"fp16_tflops": 149.7, "mem_bw_gbs": 696, "usd_per_h": 0.403}),
    ("thunderserve", "3090Ti", {"fp16_tflops": 40, "mem_bw_gbs": 1008, "usd_per_h": 0.307}),
    ("rignall", "H200", {"usd_per_h": 4, "mem_gib": 141, "pcie_gbs": 50}),
    ("rignall", "H800", {"usd_per_h": 2, "mem_bw_gbs": 4000, "pcie_gbs": 50}),
    ("rignall", "H20", {"usd_per_h": 1, "fp16_tflops": 148, "fp8_tflops": 296}),
    ("rignall", "DGX-B300", {"fp16_tflops": 3375, "fp8_tflops": 7500, "mem_gib": 288}),
    ("rignall", "Rubin-NVL144", {"fp16_tflops": 6400, "mem_gib": 144, "mem_bw_gbs": 6500}),
    ("xiong", "V100-SXM2-32GB", {"mem_gib": 32, "link_type": "PCIe3-x16", "link_gbs": 16}),
    ("xiong", "A800 80GB PCIe", {"mem_gib": 80}),
]

# Most families call their sizes so; the rest of a config.json, or other words, follow by name.
SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def config(family: str, *sizes: int | None, **own: object) -> dict[str, object]:
    given = {key: size for key, size in zip(SIZES, sizes, strict=True) if size is not None}
    return {"model_type": family, **given, **own}


LLAMA = config("llama", 32, 4096, 32, 8, 14336, 128256, 8192)
LATENT: dict[str, object] = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
ROUTED: dict[str, object] = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
ROUTED |= {"num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
SUPER = 4 * "EMEMEMEMEM*" + "EMEMEMEM*EMEMEMEME"
# The sizes that each family's public config.json states, under the family's own keys.
CONFIGS: dict[str, dict[str, object]] = {
    "Llama-3-8B": LLAMA,
    "LLaMA-1-7B": config("llama", 32, 4096, 32, None, 11008, 32000, 2048),
    "Mistral-7B": config("mistral", 32, 4096, 32, 8, 14336, 32000, 32768),
    "Qwen2.5-7B": config("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, tie_word_embeddings=False),
    "Qwen3-32B": config(
        "qwen3", 64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128, attention_bias=False
    ),
    "Mixtral-8x7B": config(
        *("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "Qwen3-30B-A3B": config(
        "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, head_dim=128, **ROUTED
    ),
    "DeepSeek-V3-R1-671B": config(
        *("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, 163840),
        n_routed_experts=256,
        first_k_dense_replace=3,
        **LATENT,
    ),
    "Kimi-K2": config(
        *("kimi_k2", 61, 7168, 64, 64, 18432, 163840, 131072),
        n_routed_experts=384,
        first_k_dense_replace=1,
        **LATENT,
    ),
    "OPT-30B": config(
        "opt", 48, 7168, 56, None, None, 50272, 2048, ffn_dim=28672, word_embed_proj_dim=7168
    ),
    "BLOOM-176B": config(
        "bloom", None, None, 112, None, None, 250880, None, n_layer=70, n_embed=14336
    ),
    "Grok-1": config(
        "grok-1", 64, 6144, 48, 8, 32768, 131072, 8192, num_experts=8, num_experts_per_tok=2
    ),
    "DeepSeek-V3.2": config(
        *("deepseek_v32", 61, 7168, 128, 128, 18432, 129280, 163840),
        **LATENT
        | {"n_routed_experts": 256, "first_k_dense_replace": 3}
        | {"index_n_heads": 64, "index_head_dim": 128},
    ),
    "Qwen3.5-35B-A3B": config(
        *("qwen3_5_moe_text", 40, 2048, 16, 2, None, 248320, 262144),
        **ROUTED
        | {"head_dim": 256, "num_experts": 256, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "full_attention_interval": 4}
        | {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4}
        | {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "attn_output_gate": True}
        | {"mamba_ssm_dtype": "float32"},
    ),
    "Nemotron-3-Super-120B-A12B": config(
        *("nemotron_h", 88, 4096, 32, 2, 2688, 131072, 262144),
        **{"hybrid_override_pattern": "MEMEMEM*" + 2 * "EMEMEMEM*" + SUPER}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
        | {"conv_kernel": 4, "head_dim": 128, "mlp_hidden_act": "relu2", "n_routed_experts": 512}
        | {"num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024}
        | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 5376},
    ),
    "MiMo-V2-Flash": config(
        *("mimo_v2_flash", 48, 4096, 64, 4, 16384, 152576, 262144),
        **ROUTED
        | {"num_experts": 256, "moe_intermediate_size": 2048, "head_dim": 192, "v_head_dim": 128}
        | {"swa_num_key_value_heads": 8, "swa_head_dim": 192, "sliding_window": 128}
        | {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7]}
        | {"moe_layer_freq": [0] + [1] * 47},
    ),
    "Gemma-4-26B-A4B": config(
        *("gemma4_text", 30, 2816, 16, 8, 2112, 262144, 262144),
        **{"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2}
        | {"attention_k_eq_v": True, "enable_moe_block": True, "sliding_window": 1024}
        | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
}


def test_every_model_is_counted() -> None:
    assert set(llms().names) == set(COUNTED)


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_and_cache_follow_from_the_shape(name: str) -> None:
    params_b, active_b, kv_bytes = COUNTED[name]
    model = llm(name)
    assert round(model.params / 1e9, 3) == params_b
    assert round(model.active_params / 1e9, 3) == active_b
    assert model.kv_bytes_per_token("fp16") == kv_bytes
    assert model.params_nominal_b == pytest.approx(model.params / 1e9, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_those_that_are_published(name: str) -> None:
    params_b, active_b, kv_bytes, source = PUBLISHED[name]
    model = Llm.from_config(CONFIGS[name], name=name) if name in CONFIGS else llm(name)
    # Makers count the part for images too, a percent at most, and round.
    assert model.params / 1e9 == pytest.approx(params_b, rel=0.015), source
    # Some makers count neither the embedding nor the head as active, some one of them, some both.
    ends = (0, model.embedding_params, model.embedding_params + model.output_params)
    counted = [(model.active_params - end) / 1e9 for end in ends]
    assert any(one == pytest.approx(active_b, rel=0.025) for one in counted), (source, counted)
    assert model.kv_bytes_per_token("fp16") == kv_bytes, source


def test_windows_and_states_are_held_by_request() -> None:
    gemma, hybrid = llm("Gemma-3-27B"), llm("Qwen3.5-27B")
    per_layer = 2 * 16 * 128 * 2
    assert gemma.request_bytes(500) == 52 * 500 * per_layer
    assert gemma.request_bytes(9000) == 52 * 1024 * per_layer
    assert gemma.request_bytes(9000, step_tokens=2048) == 52 * (1024 + 2048) * per_layer
    # 48 states of 48 heads x 128 x 128 in 32 bits, and 3 tokens of the convolution in 16.
    state = 4 * 48 * 128 * 128 + 2 * 3 * (48 + 2 * 16) * 128
    assert hybrid.request_bytes(1) == hybrid.request_bytes(10**5) == 48 * state
    held = Budget(hybrid, gpu("H100-SXM"), request_tokens=1000.0)
    alone = Budget(hybrid, gpu("H100-SXM"))
    share = 1000 * 65536 / (1000 * 65536 + 48 * state)
    assert held.max_tokens == pytest.approx(share * alone.max_tokens, rel=1e-3)
    assert llm("Llama-3-8B").request_bytes(10**6) == 0


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Llama-2-70B", 68976648192),
        ("Llama-3-8B", 8030261248),
        ("Qwen2.5-7B", 7615616512),  # biases of queries, keys and values
        ("Qwen3-8B", 8190735360),  # norms over queries and keys
        ("Qwen3-30B-A3B", 30532122624),
        ("Mixtral-8x7B", 46702792704),
        # Norms of the latent vectors; 58 layers balance their 256 experts by a bias not counted.
        ("DeepSeek-V3", 671026419200 - 58 * 256),
    ],
)
def test_parameters_to_the_last_one(name: str, params: int) -> None:
    """Totals of the published checkpoints."""
    assert llm(name).params == params


def test_products_leave_out_lookups_and_norms() -> None:
    # Llama-2-7B: all but the embedding (32000 x 4096) and 65 norms of 4096.
    assert llm("Llama-2-7B").matmul_params == 6738415616 - 131072000 - 65 * 4096
    # Tied models do the logits' product all the same.
    bloom = llm("BLOOM-176B")
    assert bloom.matmul_params == pytest.approx(bloom.params, rel=2e-4)
    # A mixture of experts: 12.88 B active of Mixtral less its embedding.
    mixtral = llm("Mixtral-8x7B")
    assert mixtral.matmul_params == pytest.approx(12.88e9 - 131e6, rel=1e-3)


def test_layers_embedding_and_head_make_up_the_model() -> None:
    for model in llms():
        layers = sum(sum(model.layer_params(k, 1)) for k in range(model.layers))
        assert model.embedding_params + layers + model.output_params == model.params


def test_attention_operations() -> None:
    assert llm("Llama-3-8B").attention_flops_per_pair() == 4 * 32 * 128 * 32
    deepseek = llm("DeepSeek-V3")
    # Expanded: 192-wide scores, 128-wide sums; absorbed: 576 and 512.
    assert deepseek.attention_flops_per_pair() == 2 * 128 * (192 + 128) * 61
    assert deepseek.attention_flops_per_pair(absorbed=True) == 2 * 128 * (576 + 512) * 61


def test_full_formula_is_2_l_h() -> None:
    assert llm("Llama-3-8B").kv_bytes_per_token("fp16", "full") == 2 * 32 * 4096 * 2
    assert llm("DeepSeek-V3").kv_bytes_per_token("fp8", "full") == 2 * 61 * 7168
    with pytest.raises(ParameterError, match=r"'modl'.*2 l h"):
        llm("Llama-3-8B").kv_bytes_per_token("fp16", "modl")  # type: ignore[arg-type]


def test_precisions() -> None:
    model = llm("Llama-3-8B")
    assert model.weight_bytes("fp32") == 4 * model.params
    assert model.weight_bytes("fp16") == model.weight_bytes("bf16") == 2 * model.params
    # Embedding, head and norms stay in 16 bits; the rest has scales, and zero points in awq.
    kept = 2 * 128256 * 4096 + 65 * 4096
    for precision, bits in {"fp8": 8.002, "int8": 8.004, "int4": 4 + 20 / 128, "fp4": 4.5}.items():
        found = model.weight_bytes(precision)
        assert found == pytest.approx(2 * kept + (model.params - kept) * bits / 8, abs=1)
    assert bytes_of(3, "int4") == 2
    with pytest.raises(ParameterError, match="'fp17'"):
        model.weight_bytes("fp17")


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_configs_give_the_catalog_shape(name: str) -> None:
    read, known = Llm.from_config(CONFIGS[name], name=name), llm(name)
    assert (read.params, read.active_params) == (known.params, known.active_params)
    assert read.matmul_params == known.matmul_params
    assert read.kv_bytes_per_token() == known.kv_bytes_per_token()
    assert read.attention_flops_per_pair() == known.attention_flops_per_pair()
    assert read.max_position == known.max_position


def test_config_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert find_llm(folder) == find_llm(str(file)) == Llm.from_config(file)
    monkeypatch.chdir(folder)
    assert find_llm(folder).name == find_llm("config.json").name == "my-model"
    assert find_llm("llama 3 8b").name == "Llama-3-8B"
    nested = {"model_type": "llava", "text_config": LLAMA, "_name_or_path": "org/seeing"}
    assert Llm.from_config(nested).params == llm("Llama-3-8B").params
    assert Llm.from_config(nested).name == "seeing"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": None}, "the key 'hidden_size' is missing"),
        ({"vocab_size": "128256"}, "'vocab_size' is '128256'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"state_size": 16}, "no layer looks back over the context"),
        ({"compress_ratios": [4]}, "cache groups of tokens"),
        ({"layer_types": ["full_attention"] * 31 + ["ring"]}, "'layer_types' names layers"),
        ({"layer_types": ["full_attention", "mamba"] * 16}, "layers with states"),
        ({"model_type": "mixtral"}, "the key 'num_local_experts' is missing"),
        ({"model_type": "qwen3"}, "the key 'head_dim' is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq'"),
    ],
)
def test_wrong_configs_name_the_key(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Llm.from_config(LLAMA | change)


def test_config_that_is_no_json(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text('{"a": 1,\n "b": }', encoding="utf-8")
    with pytest.raises(DataError, match=r"config.json, line 2: this is no JSON"):
        Llm.from_config(broken)
    with pytest.raises(DataError, match="no such file"):
        Llm.from_config(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 0}, "layers = 0"),
        ({"kv_heads": 5}, "32 heads for 5 KV heads"),
        ({"experts": 8, "experts_active": 9, "moe_intermediate": 1}, "9 active of 8 experts"),
        ({"biases": "some"}, "biases = 'some'"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], sentence: str) -> None:
    shape = {
        "name": "x",
        "layers": 2,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 100,
        "vocab": 1000,
        "max_position": 100,
    }
    with pytest.raises(CatalogError, match=sentence):
        Llm(**(shape | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(("preset", "printed", "figures"), PRINTED)
def test_presets_are_as_printed(preset: str, printed: str, figures: dict[str, object]) -> None:
    found = gpu(printed, preset=preset)
    assert {field: getattr(found, field) for field in figures} == figures
    assert found.preset == preset


def test_preset_rignall_is_the_table_of_its_simulator(need: Callable[[str], None]) -> None:
    need("moe_reference")
    with datasets.path("moe_reference", "gpu_info.csv").open(encoding="utf-8") as file:
        rows = {row["gpu_type"]: row for row in csv.DictReader(file)}
    assert len(rows) == len(gpus("rignall"))
    for name, row in rows.items():
        ours = gpu(name, preset="rignall")
        assert ours.fp4_tflops == (float(row["fp4"]) or None), name
        fields = ("fp16_tflops", "fp8_tflops", "mem_gib", "mem_bw_gbs", "link_gbs", "pcie_gbs")
        keys = ("fp16", "fp8", "mem", "mem_bw", "nvlink_bw", "pcie_bw")
        assert [getattr(ours, one) for one in fields] == [float(row[key]) for key in keys], name


def test_presets_keep_what_the_paper_does_not_print() -> None:
    printed, sheet = gpu("T4", preset="helix"), gpu("T4")
    assert (printed.fp16_tflops, printed.link_gbs) == (sheet.fp16_tflops, sheet.link_gbs)
    assert sheet.mem_bw_gbs == 320
    assert set(presets()) == {"xiong", "heteroserve", "rignall", "helix", "thunderserve"}


def test_gpus_of_papers_and_artifact_are_there() -> None:
    names = "V100-32 V100-16 A800 H100-SXM A100-80 A100-40 L40S H200 H800 H20 B300 Rubin L4 T4"
    for name in [*names.split(), "A6000", "A5000", "A40", "3090Ti"]:
        assert gpu(name).source


def test_dense_peaks_where_papers_print_others() -> None:
    assert gpu("H100-SXM").fp16_tflops == 989
    assert gpu("L4").fp16_tflops == 121
    assert gpu("A6000").fp16_tflops == 154.8
    assert gpu("H100-SXM").peak == "dense tensor, fp32 accumulation"
    assert gpu("H100", preset="helix").peak == "tensor with sparsity"
    assert gpu("A6000", preset="thunderserve").peak == "vector"


def test_memory_is_gib() -> None:
    assert gpu("A100-80").mem_bytes == 80 * 2**30


def test_gpu_links_agree_with_the_link_table() -> None:
    for found in gpus():
        assert link(found.link_type).bandwidth_gbs == found.link_gbs, found.name


def test_rows_say_where_they_come_from() -> None:
    for record in [*gpus(), *llms(), *links()]:
        assert record.source, record.name
        assert record.checked in ("yes", "partly", "no"), record.name
    for record in [*gpus(), *(g for name in presets() for g in gpus(name))]:
        assert (record.usd_per_h is None) == (record.price_source == ""), record.name


def test_peak_rates_by_precision() -> None:
    assert gpu("L4").peak_tflops("fp8") == 242
    assert gpu("A100-40").peak_tflops("bf16") == 312
    with pytest.raises(CatalogError, match=r"does not compute in bf16.*use fp16"):
        gpu("T4").peak_tflops("bf16")
    with pytest.raises(CatalogError, match="no peak rate in the catalog for int8"):
        gpu("A100-40").peak_tflops("int8")


@pytest.mark.parametrize(
    ("name", "found"),
    [("l40s", "L40S"), ("RTX 3090 Ti", "RTX-3090Ti"), ("a100_sxm_40gb", "A100-SXM-40GB")],
)
def test_names_are_found_however_they_are_written(name: str, found: str) -> None:
    assert gpu(name).name == found


# What nvidia-smi, rocm-smi, nvidia.com/gpu.product, SkyPilot and clouds call them or a machine.
PRINTED_NAMES = """
NVIDIA H100 80GB HBM3=H100-SXM  NVIDIA-H100-80GB-HBM3=H100-SXM  NVIDIA H100 PCIe=H100-PCIE-80GB
NVIDIA H100 NVL=H100-NVL  NVIDIA H200=H200-SXM  NVIDIA H200 NVL=H200-NVL  NVIDIA H20=H20
NVIDIA GH200 480GB=GH200-96GB  NVIDIA H800=H800-SXM  NVIDIA A100-SXM4-80GB=A100-SXM-80GB
NVIDIA-A100-SXM4-40GB=A100-SXM-40GB  NVIDIA A100-PCIE-40GB=A100-PCIE-40GB
NVIDIA A100 80GB PCIe=A100-PCIE-80GB  NVIDIA-A100-80GB-PCIe=A100-PCIE-80GB
NVIDIA A800-SXM4-80GB=A800-SXM-80GB  NVIDIA A800 80GB PCIe=A800-PCIE-80GB  NVIDIA L40S=L40S
NVIDIA-L40S-SHARED=L40S  NVIDIA L40=L40  NVIDIA L20=L20  NVIDIA L4=L4  Tesla T4=T4  Tesla-T4=T4
Tesla V100-SXM2-16GB=V100-SXM2-16GB  Tesla-V100-SXM2-32GB=V100-SXM2-32GB
Tesla V100-PCIE-16GB=V100-16GB  Tesla V100-PCIE-32GB=V100-PCIE-32GB  NVIDIA A40=A40
NVIDIA RTX A6000=RTX-A6000  NVIDIA-RTX-A5000=RTX-A5000  NVIDIA A10G=A10G  NVIDIA A10=A10
NVIDIA RTX 6000 Ada Generation=RTX-6000-Ada  NVIDIA GeForce RTX 3090=RTX-3090  NVIDIA A30=A30
NVIDIA GeForce RTX 3090 Ti=RTX-3090Ti  NVIDIA-GeForce-RTX-4090=RTX-4090  NVIDIA B200=B200-SXM
NVIDIA GeForce RTX 5090=RTX-5090  NVIDIA GB200=GB200  NVIDIA GB300=GB300
NVIDIA RTX PRO 6000 Blackwell Server Edition=RTX-PRO-6000-Server  AMD Instinct MI300X=MI300X
AMD_Instinct_MI300X_OAM=MI300X  AMD Instinct MI325X=MI325X  AMD Instinct MI355X=MI355X
A100-80GB=A100-SXM-80GB  H100-MEGA-80GB=H100-SXM  RTX6000-Ada=RTX-6000-Ada  V100-32GB=V100-SXM2-32GB
p5.48xlarge=H100-SXM  p4d.24xlarge=A100-SXM-40GB  p4de.24xlarge=A100-SXM-80GB  g5.12xlarge=A10G
g6e.xlarge=L40S  a2-highgpu-8g=A100-SXM-40GB  a2-ultragpu-4g=A100-SXM-80GB  g2-standard-24=L4
nvidia-tesla-t4=T4  nvidia-tesla-v100=V100-SXM2-16GB  nvidia-l4=L4  nvidia-tesla-a100=A100-SXM-40GB
nvidia-a100-80gb=A100-SXM-80GB  nvidia-h100-80gb=H100-SXM  nvidia-h100-mega-80gb=H100-SXM
nvidia-h200-141gb=H200-SXM  nvidia-b200=B200-SXM  nvidia-rtx-pro-6000=RTX-PRO-6000-Server
Standard_NC24ads_A100_v4=A100-PCIE-80GB  Standard_ND96isr_H100_v5=H100-SXM
"""


def test_names_of_drivers_labels_and_clouds_find_the_gpu() -> None:
    pairs = [one.split("=") for one in PRINTED_NAMES.replace("\n", "  ").split("  ") if one]
    assert len(pairs) >= 60
    assert {name: gpu(name).name for name, _ in pairs} == dict(pairs)


def test_advice_keeps_memory_and_form() -> None:
    for name, near, not_near in [
        ("A100-PCIE-20GB", "describe it", "use"),
        ("A100-SXM5-80GB", "A100-SXM-80GB", "PCIE|40GB"),
    ]:
        with pytest.raises(CatalogError, match=near) as told:
            gpu(name)
        assert re.search(not_near, told.value.resolve or "") is None
    with pytest.raises(CatalogError, match="a part of a GPU"):
        gpu("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb")


@pytest.mark.parametrize(
    ("name", "near"),
    [("H1000", "H100-SXM"), ("A100", "A100-SXM-40GB"), ("4O90", "RTX-4090"), ("V100", "V100-16GB")],
)
def test_unknown_names_list_near_ones(name: str, near: str) -> None:
    with pytest.raises(CatalogError, match=f"No GPU is called '{name}'.*{near}"):
        gpu(name)


def test_names_of_a_hub_lead_to_the_catalog() -> None:
    with pytest.raises(CatalogError, match=r"Resolve: use Llama-3\.1-8B\."):
        llm("meta-llama/Llama-3.1-8B-Instruct")


def test_unknown_names_without_near_ones_list_all() -> None:
    with pytest.raises(CatalogError, match=r"use one of .*L40S.*T4"):
        gpu("quantum")
    with pytest.raises(CatalogError, match="No model is called 'Llama-4-8B'"):
        llm("Llama-4-8B")
    with pytest.raises(CatalogError, match="use one of xiong"):
        gpu("T4", preset="nobody")
    with pytest.raises(CatalogError, match="No GPU of the preset 'xiong' is called 'T4'"):
        gpu("T4", preset="xiong")


def test_links_take_latency_and_size() -> None:
    # ThunderServe Table 8: 1.64 GB at 40 Gb/s; the line rate alone gives 0.328 s.
    assert link("Ethernet-40G").seconds(1.64e9) == pytest.approx(0.3281)
    with pytest.raises(CatalogError, match="bandwidth above 0"):
        Link(name="x", bandwidth_gbs=0, latency_s=0)
    with pytest.raises(CatalogError, match="mem_gib = -1"):
        Gpu(
            name="x",
            mem_gib=-1,
            mem_bw_gbs=1,
            fp16_tflops=1,
            link_type="PCIe4-x16",
            link_gbs=1,
            pcie_gbs=1,
        )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("name,kind", "name,kindd", "column 'kindd': the column is unknown"),
        ("NVLink2,nvlink,150", "NVLink2,nvlink,fast", "line 2, column 'bandwidth_gbs': 'fast'"),
        ("NVLink2,nvlink,150", "NVLink2,nvlink,", "line 2, column 'bandwidth_gbs': the cell is em"),
        ("NVLink2,nvlink,150", "NVLink2,nvlink,-1", "line 2: Link 'NVLink2' has bandwidth -1"),
    ],
)
def test_wrong_cells_name_line_and_column(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    text = paths.data("specs", "links.csv").read_text(encoding="utf-8")
    assert old in text
    copy = tmp_path / "links.csv"
    copy.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(DataError, match=sentence):
        read_table(copy, "link", Link)


def test_tables_show_units_and_sources() -> None:
    assert "bandwidth [GB/s]" in str(gpus())
    assert "RTX-A6000" in gpus()._repr_html_()
    assert len(gpus().table().rows) == len(gpus()) > 40
    shown = str(gpu("A6000", preset="thunderserve"))
    assert "As printed by thunderserve" in shown
    assert "Vast.ai" in shown
    assert "8 of 256" in str(llm("DeepSeek-R1"))
    assert gpus()[0] is gpu("A100-SXM-80GB")
