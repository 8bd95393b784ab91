"""Routed experts: their time by hand, gpt-oss as published, and runs of servers left out."""

import json

import numpy as np
import pandas as pd
import pytest

from hetero import paths
from hetero.apps.cli import main
from hetero.catalog import gpu, huggingface, llm
from hetero.errors import CatalogError
from hetero.latency.models.efficiencies import expert_efficiency, for_gpu
from hetero.latency.models.roofline import ExpertEfficiency
from hetero.latency.resolve import resolve
from hetero.memory import Budget
from pipelines.studies import expert_runs, servers

PLAIN = ExpertEfficiency()


def terms(name: str, tokens: float, gpus: int = 1, experts: ExpertEfficiency = PLAIN):
    found = for_gpu(gpu("H100-SXM"), llm(name), gpus, experts=experts).terms(tokens)
    return {key: float(value) for key, value in found.items()}


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_one_token_reads_the_experts_it_visits(gpus: int) -> None:
    model, e = llm("Qwen3-30B-A3B"), for_gpu(gpu("H100-SXM"), llm("Qwen3-30B-A3B")).efficiency
    read = 48 * 8 * 3 * 2048 * 768 * 2 / gpus
    assert model.expert_params == 3 * 2048 * 768
    want = read / (gpu("H100-SXM").mem_bw_gbs * 1e9 * e.bandwidth_efficiency)
    assert terms("Qwen3-30B-A3B", 1.0, gpus)["experts"] == pytest.approx(want)


def test_two_tokens_touch_fewer_than_twice_the_experts() -> None:
    """15 / 8 of what one touches among 16 of which each visits 2: 2 + 2 (14 / 16)."""
    one, two, many = (terms("Mixtral-8x7B", n)["experts"] for n in (1.0, 2.0, 64.0))
    assert two / one == pytest.approx(2 - 2 / 8)
    assert many / one == pytest.approx(8 / 2, rel=1e-6)


def test_many_tokens_compute_and_shares_divide() -> None:
    model, slow = llm("Mixtral-8x7B"), ExpertEfficiency(compute_share=0.25, layer_s=1e-5)
    fast = terms("Mixtral-8x7B", 65536.0)
    e = for_gpu(gpu("H100-SXM"), model).efficiency
    work = 2 * 32 * 2 * model.expert_params * 65536
    peak = gpu("H100-SXM").fp16_tflops * 1e12
    assert fast["experts"] == pytest.approx(work / (peak * e.compute_efficiency))
    slower = terms("Mixtral-8x7B", 65536.0, experts=slow)
    assert slower.pop("experts") == pytest.approx(4 * fast.pop("experts") + 32 * 1e-5)
    assert slower == fast


def test_dense_models_have_no_such_term() -> None:
    assert "experts" not in terms("Llama-3.1-8B", 16.0)
    shares = ExpertEfficiency(compute_share=0.1)
    assert terms("Llama-3.1-8B", 16.0) == terms("Llama-3.1-8B", 16.0, experts=shares)


def test_gpt_oss_is_as_its_configuration_says() -> None:
    model = llm("openai/gpt-oss-120b")
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "num_local_experts": 128,
        "experts_per_token": 4,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    read = huggingface.read(config, name="gpt-oss-120b")
    for name in ("params", "windowed_layers", "expert_bits", "weight_bytes", "kv_bytes_per_token"):
        own, there = getattr(model, name), getattr(read, name)
        assert (own() if callable(own) else own) == (there() if callable(there) else there)
    assert model.params == pytest.approx(116.83e9, rel=1e-3)  # the model card
    # Its files are 60.8 GiB (the model card): experts in 4.25 bits, the rest in 16.
    assert model.weight_bytes() / 2**30 == pytest.approx(60.8, rel=5e-3)
    budget = Budget(model, gpu("H100-SXM"), tensor_parallel=2)
    assert budget.weight_bytes == pytest.approx(model.weight_bytes(), rel=1e-3)
    # Half of the layers keep 128 tokens and no more.
    assert model.kv_bytes_per_token() == 18 * 2 * 8 * 64 * 2


def test_some_layer_looks_back_over_everything() -> None:
    import dataclasses

    with pytest.raises(CatalogError, match="leave one"):
        dataclasses.replace(llm("gpt-oss-20b"), windowed_layers=24)


def test_step_times_follow_the_engine_and_the_vendor() -> None:
    frame = pd.read_csv(paths.data("measured", "experts.csv"))
    assert (frame[["compute_share", "bandwidth_share", "layer_us"]] > 0).all(axis=None)
    step = {
        engine: resolve(
            gpu("MI300X"), llm("DeepSeek-R1"), 8, engine=engine, precision="fp8"
        ).kernels
        for engine in ("vllm", "sglang")
    }
    shares = {engine: expert_efficiency(llm("DeepSeek-R1"), "AMD", engine) for engine in step}
    assert shares["vllm"] != shares["sglang"]
    assert step["vllm"].decode_seconds([1000] * 8) != step["sglang"].decode_seconds([1000] * 8)
    for name in ("gpt-oss-20b", "Mixtral-8x7B"):
        assert expert_efficiency(llm(name), "Intel", "any") == expert_efficiency(
            llm(name), "NVIDIA"
        )
    assert expert_efficiency(llm("gpt-oss-20b"), "NVIDIA") != expert_efficiency(
        llm("Mixtral-8x7B"), "NVIDIA"
    )


def test_runs_of_servers_are_met_without_their_gpu_or_model() -> None:
    """As committed; the fits take minutes."""
    frame = pd.read_csv(paths.data("measured", "expert_servers.csv"))
    vllm = frame[frame["server"] == "vllm 0.13.0"]
    assert set(vllm["gpu"]) == {"H100-SXM", "H200-SXM", "B200-SXM"}
    for test in ("gpu", "llm"):
        rows = vllm[vllm["test"] == test]
        assert len(rows) == 70
        assert rows["TPOT"].abs().median() <= 15
        assert rows["throughput"].abs().median() <= 15


def test_committed_errors_are_those_of_the_command(need) -> None:
    need("serving_runs")
    frame = pd.read_csv(paths.data("measured", "expert_servers.csv"))
    kept = frame[frame["test"] == "default"].set_index(["gpu", "llm", "degree", "load"])["TPOT"]
    runs = [run for run in expert_runs.inferencemax() if run.gpu == "H200-SXM"]
    made = servers.errors(runs).set_index(["gpu", "llm", "degree", "load"])["TPOT"]
    assert len(made) == 30
    assert np.abs(made - kept[made.index]).max() < 0.2


def test_the_shell_simulates_a_mixture(tmp_path, capsys) -> None:
    cluster = tmp_path / "two.yaml"
    cluster.write_text("machines:\n  - {name: one, gpu: H100-SXM, count: 2}\n")
    options = ["--trace", "azure2023_conv", "--requests", "200", "--rate", "4", "--degree", "2"]
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", str(cluster), "--model", "gpt-oss-120b", *options, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["routers"][0]["means"]["tpot_s"] < 0.02
