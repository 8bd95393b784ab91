"""Routed experts: their time by hand, gpt-oss as published, and runs of servers left out."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import paths
from hetero.catalog import gpu, huggingface, llm, serving_engine
from hetero.engines import EngineSpec
from hetero.errors import CatalogError
from hetero.latency.models.efficiencies import expert_efficiency, for_gpu
from hetero.latency.models.roofline import ExpertEfficiency
from hetero.memory import Budget
from pipelines.studies import expert_kernels, expert_runs, operators, servers
from tests.hetero.catalog.test_catalog import config as sizes

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
    work = read / (gpu("H100-SXM").fp16_tflops * 1e12 * e.compute_efficiency)
    assert terms("Qwen3-30B-A3B", 1.0, gpus)["experts"] == pytest.approx(want + work)


def test_two_tokens_touch_fewer_than_twice_the_experts() -> None:
    """15 / 8 of what one touches among 16 of which each visits 2: 2 + 2 (14 / 16)."""
    no_work = ExpertEfficiency(compute_share=1e12)
    one, two, many = (terms("Mixtral-8x7B", n, 1, no_work)["experts"] for n in (1.0, 2.0, 64.0))
    assert two / one == pytest.approx(2 - 2 / 8)
    assert many / one == pytest.approx(8 / 2, rel=1e-6)


def test_reading_and_computing_add_up_and_shares_divide() -> None:
    model, of = llm("Mixtral-8x7B"), gpu("H100-SXM")
    slow = ExpertEfficiency(compute_share=0.25, bandwidth_share=0.5, layer_s=1e-5)
    fast = terms("Mixtral-8x7B", 65536.0)
    e = for_gpu(of, model).efficiency
    flops, count = 1e12 * of.fp16_tflops * e.compute_efficiency, 2 * 32 * model.expert_params
    bytes_s = 1e9 * of.mem_bw_gbs * e.bandwidth_efficiency
    work, read = 2 * count * 65536 / flops, 8 * count / bytes_s
    assert fast.pop("experts") == pytest.approx(work + read)
    slower = terms("Mixtral-8x7B", 65536.0, experts=slow)
    assert slower.pop("experts") == pytest.approx(4 * work + 2 * read + 32 * 1e-5)
    assert slower == fast


def test_dense_models_have_no_such_term() -> None:
    assert "experts" not in terms("Llama-3.1-8B", 16.0)
    shares = ExpertEfficiency(compute_share=0.1)
    assert terms("Llama-3.1-8B", 16.0) == terms("Llama-3.1-8B", 16.0, experts=shares)


def test_gpt_oss_is_as_its_configuration_says() -> None:
    model = llm("openai/gpt-oss-120b")
    config = sizes("gpt_oss", 36, 2880, 64, 8, 2880, 201088, 131072) | {
        "head_dim": 64,
        "num_local_experts": 128,
        "experts_per_token": 4,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    }
    read = huggingface.read(config, name="gpt-oss-120b")
    for name in ("params", "mixers", "expert_bits", "weight_bytes", "kv_bytes_per_token"):
        own, there = getattr(model, name), getattr(read, name)
        assert (own() if callable(own) else own) == (there() if callable(there) else there)
    assert model.params == pytest.approx(116.83e9, rel=1e-3)  # the model card
    # Its files are 60.8 GiB (the model card): experts in 4.25 bits, the rest in 16.
    assert model.weight_bytes() / 2**30 == pytest.approx(60.8, rel=5e-3)
    # Engines pad the experts' matrices, each GPU its part of the width.
    budget = Budget(model, gpu("H100-SXM"), tensor_parallel=2)
    more = 36 * 128 * (3 * 3072 * 2 * 1536 - model.expert_params) * 4.25 / 8
    assert budget.weight_bytes == pytest.approx(model.weight_bytes() + more, rel=1e-6)
    # Without the format's word the checkpoint has 16 bits, whatever the family.
    del config["quantization_config"]
    assert huggingface.read(config).weight_bytes() == 2 * model.params
    # Half of the layers keep 128 tokens and no more.
    assert model.kv_bytes_per_token() == 18 * 2 * 8 * 64 * 2


def test_some_layer_looks_back_over_everything() -> None:
    import dataclasses

    with pytest.raises(CatalogError, match="leave one"):
        dataclasses.replace(llm("gpt-oss-20b"), mixers="w")


def test_shares_are_of_the_gpu_the_engine_and_the_type() -> None:
    frame = pd.read_csv(paths.data("measured", "experts.csv"))
    assert (frame[["compute_share", "bandwidth_share", "layer_us"]] > 0).all(axis=None)
    assert (frame["latent_us"] >= 0).all()
    own = frame[(frame["latent_us"] > 0) & ~frame["source"].str.contains("latent attention of")]
    assert (own.groupby("latent_us")[["engine", "gpu"]].nunique() == 1).all(axis=None)
    hbm = frame[(frame["latent_us"] > 0) & (frame["gpu"].map(lambda n: gpu(n).mem_bw_gbs) > 1900)]
    whole = hbm["latent_us"] + 10.0  # within 10 us of nothing all are alike
    assert (whole / whole.groupby(hbm["engine"]).transform("median")).between(0.5, 2.0).all()
    assert not frame.duplicated(["engine", "gpu", "type"]).any()
    deepseek, oss = llm("DeepSeek-R1"), llm("gpt-oss-20b")

    def found(model=oss, name="H100-SXM", *more, **options):
        return expert_efficiency(model, gpu(name), *more, **options)

    assert len({found(), found(oss, "B200-SXM"), found(oss, "H100-SXM", "trtllm")}) == 3
    assert found(deepseek, "H100-SXM", "vllm", "fp8") != found(deepseek, "H100-SXM", "vllm")
    assert found(oss, "H100-PCIE-80GB") == found(oss, "H100-SXM")  # of one die
    assert found(oss, "H100-SXM", without="H100-SXM") == found(oss, "H200-SXM")
    # Nothing of the maker, engine or type: the nearest that there is.
    assert found(oss, "Gaudi2", "any") == found(oss, "RTX-4090", "any")
    assert found(deepseek, "MI300X", "sglang", "fp8") == found(deepseek, "MI325X", "sglang", "fp8")
    assert found(deepseek, "MI300X", "vllm", "fp8") != found(deepseek, "MI300X", "sglang", "fp8")


def test_tables_of_relatives_agree_or_say_why() -> None:
    """GPUs of one generation under one engine, in flops and bytes a second and in time a layer."""
    frame = pd.read_csv(paths.data("measured", "experts.csv"))
    frame = frame[frame["gpu"].isin(expert_kernels.RELATIVES)]
    of, kinds = frame["gpu"].map(gpu), frame["type"].replace("mxfp4", "fp4")
    dense = [*map(expert_kernels._dense, frame["gpu"], frame["engine"])]
    parts = {
        "compute": frame["compute_share"]
        * [
            e.compute_efficiency * g.peak_tflops(k)
            for e, g, k in zip(dense, of, kinds, strict=True)
        ],
        "bandwidth": frame["bandwidth_share"]
        * [e.bandwidth_efficiency * g.mem_bw_gbs for e, g in zip(dense, of, strict=True)],
        "layer": frame["layer_us"] + 10.0,  # within 10 us of nothing all are alike
        "latent": frame["latent_us"] + 10.0,
    }
    apart = set()
    for name, values in parts.items():
        usual = values.groupby([frame["engine"], frame["type"]]).transform("median")
        factor = np.exp(np.abs(np.log(values / usual)))
        rows = frame[factor > expert_kernels.APART]
        apart |= {(row["engine"], row["type"], row["gpu"], name) for row in rows.to_dict("records")}
    # Shapes do not tell compute from time a layer there: both are four times as low as high.
    assert {row[:2] for row in apart} <= {("trtllm", "fp4")}, apart


def test_latent_attention_adds_its_layers_time() -> None:
    frame = pd.read_csv(paths.data("measured", "experts.csv"))
    row = frame.set_index(["engine", "gpu", "type"]).loc[("vllm", "H200-SXM", "fp8")]
    shares = [
        expert_efficiency(llm(name), gpu("H200-SXM"), "vllm", "fp8").layer_s
        for name in ("DeepSeek-R1", "Mixtral-8x7B")
    ]
    assert row["latent_us"] > 10
    assert shares[0] - shares[1] == pytest.approx(1e-6 * row["latent_us"])


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Llama-3.1-70B"])
def test_an_engine_that_prepares_steps_ahead_hides_its_own_time_behind_them(name: str) -> None:
    def beside(release: str, ahead: bool | None = None) -> float:
        spec = EngineSpec(release=release, schedule_ahead=ahead)
        found = spec.resolved(gpu("H100-SXM"), llm(name), 4)
        return float(found.step.decode_seconds([100]) - found.kernels.decode_seconds([100]))

    own = serving_engine("vllm").overheads_of("0.13")
    assert beside("0.13") == beside("0.14", False) == pytest.approx(own.step_s + own.decoding_s)
    assert beside("0.14") == beside("0.13", True) == pytest.approx(0.0, abs=1e-12)


def fake_kernels(*shares: float) -> pd.DataFrame:
    """Times of two shapes at given shares, as :func:`expert_kernels.experts` has them."""
    tokens = np.geomspace(1, 16384, 15)
    rows = [
        {
            **dict(zip(expert_kernels._KEY, (hidden, 768, 8, 128), strict=True)),
            "tokens": n,
            "computing": 1e-9 * hidden * n,
            "reading": 1e-7 * hidden * min(1.0, n / 16),
        }
        for hidden in (2048, 4096)
        for n in tokens
    ]
    frame = pd.DataFrame(rows)
    compute, bandwidth, layer_s = shares
    seconds = frame["computing"] / compute + frame["reading"] / bandwidth + layer_s
    return frame.assign(seconds=seconds)


@given(st.floats(0.1, 2.0), st.floats(0.1, 2.0), st.floats(1e-6, 1e-4))
@settings(max_examples=20, deadline=None)
def test_shares_come_back_from_times_of_kernels(
    compute: float, bandwidth: float, layer_s: float
) -> None:
    shares = (compute, bandwidth, layer_s)
    frame = fake_kernels(*shares)
    found = expert_kernels.fit(frame)
    made = (found.compute_share, found.bandwidth_share, found.layer_s)
    assert made == pytest.approx(shares, rel=2e-2)
    assert expert_kernels.left_out(frame) < 1.0


def test_rows_of_a_model_are_left_out_by_its_shape() -> None:
    frame = fake_kernels(1.0, 1.0, 1e-5)
    rest = expert_kernels.left_out_frame(frame, llm("Qwen3-30B-A3B"))
    assert set(rest["hidden_size"]) == {4096}
    assert len(expert_kernels.left_out_frame(frame, llm("Mixtral-8x7B"))) == len(frame)


@pytest.mark.skipif(not operators.available(), reason="the extra silicon is not installed")
def test_committed_shares_are_those_of_the_kernels() -> None:
    frame = pd.read_csv(paths.data("measured", "experts.csv"))
    kept = frame.set_index(["gpu", "engine", "type"]).loc[("H200-SXM", "sglang", "fp8")]
    made = expert_kernels.row(
        "H200-SXM", "sglang", "fp8", expert_kernels.experts_frame("H200-SXM", "sglang", "fp8")
    )
    for name in ("compute_share", "bandwidth_share", "layer_us", "error_percent"):
        assert made[name] == pytest.approx(kept[name], rel=2e-2)
    assert made["left_out_percent"] < 15


def test_runs_of_servers_are_met_without_their_gpu_or_model() -> None:
    """As committed; the fits take minutes."""
    frame = pd.read_csv(paths.data("measured", "expert_servers.csv"))
    frame = frame[frame["source"] == "inferencemax"]
    vllm = frame[frame["server"] == "vllm 0.13.0"]
    assert set(vllm["gpu"]) == {"H100-SXM", "H200-SXM", "B200-SXM"}
    for test in ("default", "gpu", "llm"):
        of = [rows[rows["test"] == test] for rows in (frame, vllm)]
        assert [len(rows) for rows in of] == [151, 70]
        for rows, bar in zip(of, (15, 12), strict=True):
            assert rows["TPOT"].abs().median() <= bar
            assert rows["throughput"].abs().median() <= bar


def test_intervals_hold_runs_of_mixtures() -> None:
    """Nine of ten of all; a group is one GPU or two, which all runs leave or none."""
    found, none = expert_runs.coverage_frame(), expert_runs.coverage_frame(1e-6)
    assert found["runs"].sum() == 2 * 151
    for label in ("TPOT", "throughput"):
        assert 0.85 <= (found["runs"] * found[label]).sum() / found["runs"].sum() <= 0.96
        assert found[label].min() >= 0.7  # 14 of 19 under SGLang
        assert none[label].max() < 0.1


def test_committed_errors_are_those_of_the_command(need) -> None:
    need("serving_runs")
    frame = pd.read_csv(paths.data("measured", "expert_servers.csv"))
    kept = frame[frame["test"] == "default"].set_index(["gpu", "llm", "degree", "load"])["TPOT"]
    runs = [run for run in expert_runs.inferencemax() if run.gpu == "H200-SXM"]
    made = servers.errors_frame(runs).set_index(["gpu", "llm", "degree", "load"])["TPOT"]
    assert len(made) == 30
    assert np.abs(made - kept[made.index]).max() < 0.2


def test_the_shell_simulates_a_mixture(tmp_path, told) -> None:
    cluster = tmp_path / "two.yaml"
    cluster.write_text("machines:\n  - {name: one, gpu: H100-SXM, count: 2}\n")
    options = ["--trace", "azure2023_conv", "--requests", "200", "--rate", "4", "--degree", "2"]
    found = told("simulate", cluster, "--model", "gpt-oss-120b", *options)
    assert found["routers"][0]["means"]["tpot_s"] < 0.02
