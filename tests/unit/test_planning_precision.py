"""The data type of the weights as a choice, against closed forms and the plans of each type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero import catalog, workload
from hetero.apps.cards.precision import PRECISIONS, choose_precision, support
from hetero.apps.portfolio.case import Case
from hetero.apps.portfolio.planners import planner
from hetero.apps.portfolio.score import goodput
from hetero.cluster import Cluster, Machine
from hetero.errors import CatalogError, InfeasibleError, ParameterError
from hetero.latency import for_gpu
from hetero.memory import Budget
from hetero.simulator import Slo

MODEL = catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv").head(400)


def case(*gpus: str, rate: float = 4.0) -> Case:
    machines = tuple(Machine(f"m{n}", catalog.gpu(name), 1) for n, name in enumerate(gpus))
    return Case(Cluster("few", machines), MODEL, CHATS, rate, Slo(ttft_s=2.0, tpot_s=0.15))


def test_every_gpu_has_a_step_time_in_every_type() -> None:
    for gpu in catalog.gpus():
        for precision in (*PRECISIONS, "fp4"):
            assert float(for_gpu(gpu, MODEL, precision=precision).seconds(1.0)) > 0
            known = support(gpu, precision) == "computes"
            if known:
                assert gpu.peak_tflops(precision) > 0
            else:
                with pytest.raises(CatalogError):
                    gpu.peak_tflops(precision)


def test_support_is_what_the_data_sheets_say() -> None:
    # FP8 came with Ada and Hopper, INT8 matrix units with Turing, INT4 ones left with Hopper.
    assert support(catalog.gpu("A100-SXM-80GB"), "fp8") == "none"
    assert support(catalog.gpu("L4"), "fp8") == "computes"
    assert support(catalog.gpu("H100-SXM"), "fp8") == "computes"
    assert support(catalog.gpu("T4"), "int8") == "stores"
    assert support(catalog.gpu("V100-SXM2-32GB"), "int8") == "none"
    assert support(catalog.gpu("H100-SXM"), "int4") == "none"
    assert support(catalog.gpu("B200-SXM"), "fp4") == "stores"
    with pytest.raises(ParameterError, match="No precision"):
        support(catalog.gpu("L4"), "fp6")


@pytest.mark.parametrize(
    ("precision", "bits"), [("fp16", 16), ("fp8", 8), ("int8", 8), ("int4", 4)]
)
def test_memory_and_decode_steps_follow_the_bits(precision: str, bits: int) -> None:
    gpu = catalog.gpu("L40S")
    budget = Budget(MODEL, gpu, weight_precision=precision)
    assert budget.weight_bytes == MODEL.params * bits // 8
    free = 0.9 * gpu.mem_bytes - 2 * 2**30 - MODEL.params * bits / 8
    # 32 layers, 8 KV heads of 128 values, keys and values, 2 bytes each.
    assert budget.max_tokens == int(free / (32 * 8 * 128 * 2 * 2))
    half = Budget(MODEL, gpu, weight_precision=precision, kv_precision="fp8")
    assert half.max_tokens == int(free / (32 * 8 * 128 * 2))
    line = for_gpu(gpu, MODEL, precision=precision)
    terms, whole = line.terms(1.0, 1, 1000.0), for_gpu(gpu, MODEL).terms(1.0, 1, 1000.0)
    for name, share in (("weights", bits / 16), ("logits", bits / 16), ("kv cache", 1.0)):
        assert float(terms[name]) == pytest.approx(share * float(whole[name]))
    doubled = precision == "fp8"  # of 362 and 733 TFLOPS in 16 and 8 bits
    ratio = gpu.fp16_tflops / gpu.fp8_tflops if doubled else 1.0
    assert float(terms["products"]) == pytest.approx(ratio * float(whole["products"]))


def test_the_choice_is_the_best_of_the_plans_of_each_type() -> None:
    asked = case("L4", "A40", "H100-SXM")
    found = choose_precision(asked)
    by = {one.precision: one for one in found.trials}
    assert tuple(by) == PRECISIONS
    assert by["fp8"].left_out == ("A40",)
    assert by["int4"].left_out == ("H100-SXM",)
    maker = planner("Mélange")
    for precision, names in (("fp16", "L4 A40 H100-SXM"), ("fp8", "L4 H100-SXM")):
        alone = replace(case(*names.split()), precision=precision)
        assert by[precision].goodput_rps == pytest.approx(goodput(maker.plan(alone), alone))
        assert by[precision].weight_gb == pytest.approx(
            MODEL.params * (2 if precision == "fp16" else 1) / 1e9
        )
    assert found.best.goodput_rps == max(one.goodput_rps for one in found.trials)
    assert found.best_case.precision == found.best.precision
    text = str(found)
    assert "quality of replies is not modelled" in text
    assert "fp8: without A40, which does not compute in it." in text


def test_a_type_may_make_a_model_fit() -> None:
    small = replace(case("A10G"), llm=catalog.llm("DeepSeek-R1-Distill-Qwen-14B"), rate_rps=0.2)
    found = choose_precision(replace(small, slo=Slo(e2e_s=120.0)))
    by = {one.precision: one for one in found.trials}
    assert by["fp16"].entry is None
    assert "fits no machine" in by["fp16"].reason
    assert "no GPU of few computes in fp8" in by["fp8"].reason
    assert found.best.precision in ("int8", "int4")
    with pytest.raises(InfeasibleError, match=r"fp16: .*fits no machine"):
        choose_precision(small, precisions=("fp16",))
