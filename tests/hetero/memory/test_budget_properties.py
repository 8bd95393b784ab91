"""What must hold for every model, GPU and setting."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import memory
from hetero.catalog import Gpu, Llm, gpus, llms
from hetero.memory import Budget

QUICK = settings(max_examples=400)

MODELS = st.sampled_from(list(llms()))
CARDS = st.sampled_from(list(gpus()))
DEGREES = st.sampled_from([1, 2, 4, 8, 16])
PRECISIONS = st.sampled_from(["fp16", "fp8", "int4"])
FORMULAS: st.SearchStrategy[memory.KvFormula] = st.sampled_from(["model", "full"])


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    return Budget(
        draw(MODELS),
        draw(CARDS),
        tensor_parallel=draw(DEGREES),
        pipeline_parallel=draw(st.integers(1, 8)),
        memory_fraction=draw(st.floats(0.05, 1.0)),
        overhead_gib=draw(st.floats(0, 8)),
        overhead_per=draw(st.sampled_from(["gpu", "instance"])),
        weight_precision=draw(PRECISIONS),
        kv_precision=draw(PRECISIONS),
        kv_formula=draw(FORMULAS),
    )


@QUICK
@given(budgets())
def test_stages_hold_every_layer_and_weight_once(budget: Budget) -> None:
    layers = [stage.layers for stage in budget.stages]
    assert sum(layers) == budget.llm.layers
    assert max(layers) - min(layers) <= 1
    one = Budget(
        budget.llm,
        budget.gpu,
        tensor_parallel=budget.tensor_parallel,
        weight_precision=budget.weight_precision,
    )
    tied = budget.llm.tied_embeddings and budget.pipeline_parallel > 1
    form = budget.llm.format(budget.weight_precision)
    copy = int(budget.llm.head_params * form.rest / 8) if tied else 0
    # Each stage rounds up to a whole byte.
    assert 0 <= budget.weight_bytes - copy - one.weight_bytes <= budget.pipeline_parallel
    assert one.weight_bytes >= budget.llm.weight_bytes(budget.weight_precision)


@QUICK
@given(budgets())
def test_no_stage_holds_more_than_its_memory(budget: Budget) -> None:
    """The tokens that fit, times what each stage caches of them, stay within each stage."""
    tokens = budget.max_tokens
    if tokens == 0:
        return
    for stage in budget.stages:
        share = stage.layers / budget.llm.layers
        cache = tokens * budget.kv_bytes_per_token * share
        used = cache + stage.weight_bytes + stage.overhead_bytes
        limit = budget.tensor_parallel * budget.gpu.mem_bytes * budget.memory_fraction
        assert used <= limit * (1 + 1e-12)


@QUICK
@given(budgets(), st.integers(1, 100_000), st.integers(0, 100_000))
def test_the_largest_batch_is_the_largest(budget: Budget, inputs: int, outputs: int) -> None:
    batch = budget.max_batch(inputs, outputs)
    size = (inputs + outputs) * budget.kv_bytes_per_token
    capacity = budget.kv_capacity_bytes
    assert batch * size <= max(0.0, capacity)
    assert (batch + 1) * size > capacity


@QUICK
@given(budgets(), st.integers(1, 200_000))
def test_reasons_and_capacity_agree(budget: Budget, longest: int) -> None:
    reason = budget.why_not(longest)
    if reason is None:
        assert budget.max_tokens >= longest
        assert budget.why_not(max(1, longest // 2)) is None
    elif "KV cache" in reason:
        assert 0 <= budget.max_tokens < longest
    elif "weights" in reason:
        assert budget.max_tokens == 0


@QUICK
@given(MODELS, DEGREES, PRECISIONS)
def test_copies_of_the_cache_are_bounded(model: Llm, degree: int, precision: str) -> None:
    one = model.kv_bytes_per_token(precision=precision)
    many = model.kv_bytes_per_token(tensor_parallel=degree, precision=precision)
    assert one == model.kv_bytes_per_token(precision)
    assert one <= many <= degree * one
    if not model.latent and model.kv_heads % degree == 0:
        assert many == one
    # Grouped and latent attention never cache more than 2 l h, unless heads are wider than hidden.
    if model.heads * model.head_dim <= model.hidden:
        assert one <= model.kv_bytes_per_token(precision, "full")


@QUICK
@given(MODELS, CARDS, st.floats(0.05, 1.0), PRECISIONS)
def test_minimum_gpus_is_the_minimum(model: Llm, card: Gpu, share: float, precision: str) -> None:
    least = memory.minimum_gpus(model, card, weight_share=share, weight_precision=precision)
    held = share * card.mem_gib * 1e9
    weights = model.weight_bytes(precision)
    assert weights <= least * held * (1 + 1e-12)
    assert least == 1 or weights > (least - 1) * held * (1 - 1e-12)
    layers = memory.max_layers(model, card, weight_share=share, weight_precision=precision)
    assert 0 <= layers <= model.layers
    assert math.floor(layers) * model.layer_weight_bytes(precision) <= held * (1 + 1e-12)
