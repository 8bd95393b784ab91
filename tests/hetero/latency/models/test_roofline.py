from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetero.catalog import gpu, llm
from hetero.errors import CatalogError, ParameterError
from hetero.latency import for_gpu
from hetero.latency.models.roofline import Efficiency, Roofline

IDEAL = Efficiency(
    compute_efficiency=1, bandwidth_efficiency=1, kv_efficiency=1, attention_efficiency=1,
    link_efficiency=1, padding_tokens=0, layer_overhead_s=0, step_overhead_s=0, hop_latency_s=0,
)  # fmt: skip
# Llama-2-70B by hand: 80 layers of 2*8192*8192 + 2*8192*1024 + 3*8192*28672 parameters.
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
HEAD = 8192 * 32000


def ideal(**changes):
    given = {"gpu": gpu("A100-SXM-80GB"), "llm": llm("Llama-2-70B"), "efficiency": IDEAL}
    return Roofline(**(given | changes))


def test_decode_reads_every_weight_once():
    vectors = 80 * 2 * 8192  # norms
    expected = 2 * (80 * LAYER + HEAD + vectors) / 2039e9
    assert float(ideal().seconds(1, 1)) == pytest.approx(expected, rel=1e-9)


def test_long_prefill_is_bound_by_compute():
    n, pairs = 4096, 4096**2 / 2
    expected = 2 * 80 * LAYER * n / 312e12 + 4 * 8192 * 80 * pairs / 312e12
    head = 2 * HEAD / 2039e9
    assert float(ideal().seconds(n, 0, 0, pairs)) == pytest.approx(expected + head, rel=1e-9)


def test_cached_tokens_are_read_once_per_kv_head():
    per_token = 80 * 2 * 1024 * 2  # layers, keys and values, width, bytes

    def rate(t):
        model = ideal(tensor_parallel=t)
        return float(model.seconds(1, 1, 1e6) - model.seconds(1, 1, 0)) / 1e6

    assert rate(1) == pytest.approx(per_token / 2039e9, rel=1e-6)
    assert rate(8) == pytest.approx(per_token / 8 / 2039e9, rel=1e-6)
    # 8 KV heads on 16 GPUs: each head is kept twice.
    assert rate(16) == pytest.approx(rate(8), rel=1e-6)


def test_all_reduce_sends_two_ring_sums_per_layer():
    link = gpu("A100-SXM-80GB").link_gbs * 1e9
    four = ideal(tensor_parallel=4)
    sent = 2 * 80 * (2 * 3 / 4) * 8192 * 2
    assert float(four.terms(100)["all-reduce"]) == pytest.approx(100 * sent / link)
    hops = dataclasses.replace(IDEAL, hop_latency_s=1e-6)
    late = ideal(tensor_parallel=4, efficiency=hops)
    extra = late.terms(100)["all-reduce"] - four.terms(100)["all-reduce"]
    assert float(extra) == pytest.approx(2 * 80 * 2 * 3 * 1e-6)
    assert float(ideal().terms(100)["all-reduce"]) == 0.0


def test_efficiencies_and_overheads_act_where_they_are_named():
    slow = dataclasses.replace(IDEAL, compute_efficiency=0.5)
    assert float(ideal(efficiency=slow).terms(10)["products"]) == pytest.approx(
        2 * float(ideal().terms(10)["products"])
    )
    padded = dataclasses.replace(IDEAL, padding_tokens=90)
    assert float(ideal(efficiency=padded).terms(10)["products"]) == pytest.approx(
        float(ideal().terms(100)["products"])
    )
    late = dataclasses.replace(IDEAL, layer_overhead_s=1e-5, step_overhead_s=1e-3)
    assert float(ideal(efficiency=late).terms(10)["overhead"]) == pytest.approx(80e-5 + 1e-3)


def test_a_node_of_some_layers_has_no_logits_and_no_step_overhead():
    late = dataclasses.replace(IDEAL, layer_overhead_s=1e-5, step_overhead_s=1e-3)
    node = ideal(layers=8, efficiency=late)
    assert float(node.terms(1)["logits"]) == 0.0
    assert float(node.terms(1)["overhead"]) == pytest.approx(8e-5)
    assert float(node.terms(1)["weights"]) == pytest.approx(2 * 8 * (LAYER + 2 * 8192) / 2039e9)


def test_precision_changes_bytes_and_rates():
    half = ideal().terms(1)["weights"]
    assert float(ideal(precision="int8").terms(1)["weights"]) == pytest.approx(
        float(half) / 2, rel=1e-3
    )
    h100 = {"gpu": gpu("H100-SXM")}
    fast, plain = ideal(**h100, precision="fp8"), ideal(**h100)
    assert float(plain.terms(1)["products"] / fast.terms(1)["products"]) == pytest.approx(
        1979 / 989
    )
    # No fp8 units on A100: weights are halved, products run at the fp16 rate.
    assert float(ideal(precision="fp8").terms(1)["products"]) == float(ideal().terms(1)["products"])
    half_cache = ideal(kv_precision="fp8").terms(1, 1, 1e5)["kv cache"]
    assert float(half_cache) == pytest.approx(float(ideal().terms(1, 1, 1e5)["kv cache"]) / 2)


@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_weights_in_fewer_bits_than_are_multiplied_need_as_much_less_padding(precision):
    padded = dataclasses.replace(IDEAL, padding_tokens=90)
    plain, packed = ideal(efficiency=padded), ideal(efficiency=padded, precision=precision)
    share = float(packed.terms(1)["weights"] / plain.terms(1)["weights"])
    assert plain.padding_tokens == 90
    assert packed.padding_tokens == pytest.approx(90 * share)
    assert share < 0.51
    # What has units of its own is multiplied in as many bits as it is read.
    assert ideal(efficiency=padded, gpu=gpu("H100-SXM"), precision="fp8").padding_tokens == 90
    # Where a step of one token is bound by its weights in 16 bits, it is in fewer.
    at = [float(one.terms(1)["products"] / one.terms(1)["weights"]) for one in (plain, packed)]
    assert at[1] == pytest.approx(at[0], rel=0.05)


STEPS = np.unique(np.geomspace(1, 65536, 200).round())


def assert_exact(model):
    found = model.step_model().seconds(STEPS, STEPS, 1024 * STEPS, 512 * STEPS)
    assert found == pytest.approx(model.seconds(STEPS, STEPS, 1024 * STEPS, 512 * STEPS), rel=1e-8)


def test_bend_is_where_products_take_as_long_as_weights():
    model = ideal()
    bend = model.bend_tokens
    terms = model.terms(bend)
    assert float(terms["products"]) == pytest.approx(float(terms["weights"]), rel=1e-9)
    assert model.step_model().pieces[0].knots_tokens[1] == pytest.approx(bend)
    assert_exact(model)


def test_padding_beyond_the_bend_leaves_one_line():
    model = ideal(efficiency=dataclasses.replace(IDEAL, padding_tokens=2000))
    assert model.bend_tokens == 0.0
    assert_exact(model)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-235B-A22B", "DeepSeek-V3"])
def test_experts_are_read_as_they_are_touched(name):
    model = ideal(gpu=gpu("H200-SXM"), llm=llm(name), tensor_parallel=8)
    shape, terms = llm(name), model.terms(np.array([1.0, 400.0]))
    dense = shape.params - shape.embedding_params - shape.output_params
    routed = shape.moe_layers * shape.experts * shape.expert_params
    assert terms["weights"] == pytest.approx(2 * (dense - routed) / 8 / 4800e9, rel=1e-6)
    computed = routed * shape.experts_active / shape.experts * np.array([1.0, 400.0]) / 8
    reading = terms["experts"] - 2 * computed / (1e12 * model.gpu.fp16_tflops)
    few, many = reading * 8 * 4800e9 / (2 * routed)
    assert few == pytest.approx(shape.experts_active / shape.experts)
    assert many == pytest.approx(1.0, abs=1e-5)
    error = np.abs(model.step_model().seconds(STEPS, STEPS) / model.seconds(STEPS, STEPS) - 1.0)
    assert 0 < error.max() < 0.05
    assert error.mean() < 0.005


def test_impossible_replicas_and_efficiencies_are_refused():
    with pytest.raises(ParameterError, match="0 GPUs"):
        ideal(tensor_parallel=0)
    with pytest.raises(ParameterError, match="has 80 layers; received layers = 81"):
        ideal(layers=81)
    with pytest.raises(ParameterError, match="compute_efficiency = 0"):
        dataclasses.replace(IDEAL, compute_efficiency=0)
    with pytest.raises(ParameterError, match="hop_latency_s = -1"):
        dataclasses.replace(IDEAL, hop_latency_s=-1)
    with pytest.raises((CatalogError, ParameterError)):
        ideal(precision="fp7").seconds(1)


def test_tables_show_terms_and_states():
    replica = for_gpu(gpu("V100-SXM2-32GB", preset="xiong"), llm("Llama-3-8B"), 4)
    text = str(replica)
    assert "all-reduce [ms]" in text
    assert "estimated" in text
    shown = replica.efficiency.table().to_frame().set_index("value of")["is"]
    assert shown["link efficiency"] == "estimated"


def test_mixed_steps_share_the_weights():
    model = ideal()
    together = float(model.seconds(40, 8, 8000.0, 0.0))
    apart = float(model.seconds(32)) + float(model.seconds(8, 8, 8000.0))
    assert together < apart
    step = model.step_model()
    assert float(step.seconds(40, 8, 8000.0)) == pytest.approx(together)
    assert np.isinf(step.max_tokens)
