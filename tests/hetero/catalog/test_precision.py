"""The data type of the weights: who computes in it, memory and step times by closed forms."""

from __future__ import annotations

import pytest

from hetero import catalog
from hetero.apps.cards.request import PRECISIONS
from hetero.errors import CatalogError
from hetero.latency import for_gpu
from hetero.latency.models.roofline import Efficiency, Roofline
from hetero.memory import Budget

MODEL = catalog.llm("Llama-3-8B")


def test_every_gpu_has_a_step_time_in_every_type() -> None:
    for gpu in catalog.gpus():
        for precision in (*PRECISIONS, "fp4"):
            assert float(for_gpu(gpu, MODEL, precision=precision).seconds(1.0)) > 0
            if precision in gpu.rated:
                assert gpu.peak_tflops(precision) > 0
            else:
                with pytest.raises(CatalogError):
                    gpu.peak_tflops(precision)


def test_types_of_a_gpu_are_what_the_data_sheets_say() -> None:
    # FP8 came with Ada and Hopper, INT8 matrix units with Turing, INT4 ones left with Hopper.
    assert "fp8" not in catalog.gpu("A100-SXM-80GB").precisions
    assert "fp8" in catalog.gpu("L4").rated
    assert "fp8" in catalog.gpu("H100-SXM").rated
    assert "int8" in catalog.gpu("T4").precisions
    assert "int8" not in catalog.gpu("V100-SXM2-32GB").precisions
    assert "int4" not in catalog.gpu("H100-SXM").precisions
    assert "fp4" in catalog.gpu("B200-SXM").precisions


# Weights of Llama-3-8B's layers, and of its logits; embedding, logits and norms stay in 16 bits.
LAYERS, HEAD = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336), 128256 * 4096
# Bits per weight with a scale per 128 x 128, per output, and with a zero point per 128.
BITS = {"fp16": 16.0, "fp8": 8 + 32 / 128**2, "int8": 8 + 16 / 4096, "int4": 4 + 20 / 128}


@pytest.mark.parametrize(
    ("precision", "logits"), [("fp16", 16), ("fp8", 8), ("int8", 8), ("int4", 16)]
)
def test_memory_and_decode_steps_follow_the_bits(precision: str, logits: int) -> None:
    gpu = catalog.gpu("L40S")
    budget = Budget(MODEL, gpu, weight_precision=precision)
    weights = (LAYERS * BITS[precision] + (2 * HEAD + 65 * 4096) * 16) / 8
    assert budget.weight_bytes == pytest.approx(weights, rel=2e-4)
    free = 0.9 * gpu.mem_bytes - 2 * 2**30 - budget.weight_bytes
    # 32 layers, 8 KV heads of 128 values, keys and values, 2 bytes each.
    assert budget.max_tokens == int(free / (32 * 8 * 128 * 2 * 2))
    half = Budget(MODEL, gpu, weight_precision=precision, kv_precision="fp8")
    assert half.max_tokens == int(free / (32 * 8 * 128 * 2))
    line = for_gpu(gpu, MODEL, precision=precision)
    terms, whole = line.terms(1.0, 1, 1000.0), for_gpu(gpu, MODEL).terms(1.0, 1, 1000.0)
    shares = {"weights": BITS[precision] / 16, "logits": logits / 16, "kv cache": 1.0}
    for name, share in shares.items():
        assert float(terms[name]) == pytest.approx(share * float(whole[name]), rel=2e-4)
    doubled = precision == "fp8"  # of 362 and 733 TFLOPS in 16 and 8 bits
    ratio = gpu.fp16_tflops / gpu.fp8_tflops if doubled else 1.0
    padding = line.efficiency.padding_tokens
    # As much less of it as bits are read, where they are multiplied in 16.
    own = padding if doubled else padding * BITS[precision] / 16
    products = ratio * float(whole["products"]) * (1 + own) / (1 + padding)
    assert float(terms["products"]) == pytest.approx(products, rel=2e-4)


IDEAL = Efficiency(
    compute_efficiency=1, bandwidth_efficiency=1, kv_efficiency=1, attention_efficiency=1,
    link_efficiency=1, padding_tokens=0, layer_overhead_s=0, step_overhead_s=0, hop_latency_s=0,
)  # fmt: skip


def test_weights_alone_are_traffic_and_no_compute() -> None:
    def of(name: str, precision: str) -> Roofline:
        card = catalog.gpu(name)
        return Roofline(gpu=card, llm=MODEL, efficiency=IDEAL, precision=precision)

    def decode_s(name: str, precision: str) -> float:
        return float(of(name, precision).seconds(1, 1))

    def prefill_s(name: str, precision: str) -> float:
        n = 2.0**20
        line = of(name, precision)
        return float(line.seconds(2 * n, 0, 0, n) - line.seconds(n, 0, 0, 0))

    for name in ("A100-SXM-80GB", "H100-SXM", "B200-SXM"):
        # Fewer bytes in decode, the logits' in 16 bits beside 4, and the rate of fp16 in prefill.
        fewer = (LAYERS * BITS["int4"] / 16 + HEAD) / (LAYERS + HEAD)
        assert decode_s(name, "int4") == pytest.approx(fewer * decode_s(name, "fp16"), rel=1e-4)
        assert decode_s(name, "int8") == pytest.approx(decode_s(name, "fp16") / 2, rel=1e-3)
        assert prefill_s(name, "int4") == pytest.approx(prefill_s(name, "fp16"))
    # Eight bits on a GPU without the units are read alone as well.
    assert prefill_s("A100-SXM-80GB", "fp8") == pytest.approx(prefill_s("A100-SXM-80GB", "fp16"))
    assert decode_s("A100-SXM-80GB", "fp8") == pytest.approx(
        decode_s("H100-SXM", "fp8") * 3350 / 2039
    )
    # With them the products are at their peak, and attention stays in 16 bits.
    for name, precision, peak in (("H100-SXM", "fp8", 1979), ("B200-SXM", "fp4", 9000)):
        native, plain = (
            of(name, precision).terms(64, 0, 0, 64),
            of(name, "fp16").terms(64, 0, 0, 64),
        )
        ratio = catalog.gpu(name).fp16_tflops / peak
        assert float(native["products"]) == pytest.approx(ratio * float(plain["products"]))
        assert float(native["attention"]) == float(plain["attention"])


def test_engines_serve_what_they_read_where_gpus_do_not_compute_in_it() -> None:
    vllm, sglang = catalog.serving_engine("vllm"), catalog.serving_engine("sglang")
    h100, a100 = catalog.gpu("H100-SXM"), catalog.gpu("A100-SXM-80GB")
    assert vllm.serves(h100, "int4")
    assert vllm.serves(a100, "fp8")
    assert not vllm.serves(a100, "fp4")  # no page says so
    assert not sglang.serves(a100, "fp8")
    assert not vllm.serves(catalog.gpu("V100-SXM2-32GB"), "int4")
