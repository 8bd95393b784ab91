"""What engines print of their memory when they start, by public logs of vLLM."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from hetero import workload
from hetero.catalog import gpu, llm
from hetero.cluster import Cluster, Machine
from hetero.deployment import Replica
from hetero.engines import PAPERS, EngineSpec, Instance, replicated
from hetero.plans import Plan
from hetero.question import Question, drawn, fit_draws
from hetero.routers import LeastTokens

GIB = 2**30
# Model, data type, GPU, degree, release, share, sampler; then what was printed per GPU: weights
# [GiB], KV cache [GiB], tokens of the cache, or requests of 16,384 tokens.
PRINTED = [
    ("Llama-3.1-8B", "fp16", "A100-SXM-40GB", 1, "0.19", 0.9, "", "tokens", 163168),
    ("Llama-3.1-8B", "fp16", "H100-NVL", 1, "0.19", 0.9, "", "tokens", 545456),
    ("Llama-3.1-8B", "fp16", "H100-SXM", 1, "0.11", 0.9, "", "cache", 51.38),
    ("gpt-oss-20b", "fp16", "H100-SXM", 1, "0.11", 0.9, "", "cache", 50.28),
    ("gpt-oss-20b", "fp16", "H100-SXM", 1, "0.11", 0.9, "", "weights", 13.47),
    ("Qwen3-32B", "fp16", "H100-SXM", 1, "0.11", 0.9, "", "cache", 4.45),
    ("Llama-3.1-70B", "fp8", "H100-SXM", 1, "0.11", 0.9, "", "cache", -1.44),
    ("Llama-3.1-70B", "fp8", "H100-SXM", 1, "0.11", 0.9, "", "weights", 67.72),
    ("Qwen3-235B-A22B", "fp8", "L40S", 8, "0.10", 0.9, "", "tokens", 238208),
    ("Qwen2.5-32B", "int4", "RTX-4090", 1, "0.25", 0.9, "", "weights", 18.14),
    ("Qwen3-8B", "fp16", "RTX-4090", 1, "0.25", 0.9764, "", "tokens", 46368),
    ("Llama-3.1-8B", "fp16", "H200-SXM", 1, "0.25", None, "", "tokens", 919824),
    ("Qwen3-30B-A3B", "fp16", "H200-SXM", 1, "0.25", None, "", "tokens", 744656),
    ("Qwen3-32B", "fp16", "H200-SXM", 1, "0.25", None, "", "tokens", 269312),
    ("Qwen3-30B-A3B", "fp16", "A10", 4, "0.8", None, "", "weights", 14.2474),
    ("Qwen2.5-7B", "fp16", "A100-SXM-80GB", 1, "0.10", 0.25, "flashinfer", "tokens", 93872),
    ("Qwen2.5-7B", "fp16", "A100-SXM-80GB", 2, "0.10", 0.25, "flashinfer", "tokens", 450192),
    ("gpt-oss-120b", "fp16", "A100-SXM-80GB", 4, "0.10", 0.8, "", "requests", 284.25),
]


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: f"{row[0]} {row[2]} {row[-2]}")
def test_memory_is_as_engines_print_it(row) -> None:
    name, precision, card, degree, release, share, sampler, what, printed = row
    spec = EngineSpec(
        release=release,
        precision=precision,
        memory_fraction=share,
        sampler=sampler,
        expert_ranks=int(name == "Qwen3-235B-A22B"),
    )
    model, where = llm(name), gpu(card)
    found = Instance(spec, where, model, degree, None, "", spec.room(where, model, degree))  # type: ignore[arg-type]
    budget = found.budget
    cache = budget.kv_capacity_bytes / degree / GIB
    said = {
        "weights": budget.weight_bytes / degree / GIB,
        "cache": cache,
        "tokens": budget.max_tokens,
        "requests": budget.max_requests(16384, spec.limits(where).max_step_tokens),
    }[what]
    if what == "weights":
        assert said == pytest.approx(printed, rel=0.015)
    elif what == "cache" and printed < 6.0:
        assert said == pytest.approx(printed, abs=0.3)
        assert (budget.why_not() is None) == (printed > 0)
    else:
        assert said == pytest.approx(printed, rel=0.05)


def test_the_command_says_so(tmp_path, told) -> None:
    (tmp_path / "f.yaml").write_text(
        "machines: [{name: g, gpu: NVIDIA GeForce RTX 4090, count: 1}]"
    )

    def notes(*words: str) -> str:
        asked = [tmp_path / "f.yaml", *words, "--engine", "vllm@0.25", "--memory", "0.9"]
        few = ("--requests", "9", "--router", "round-robin")
        return " ".join(told("simulate", *asked, *few)["notes"])

    # A log prints 2,368 to 4,432 tokens, with which steps it does not say.
    said = notes("--model", "Qwen/Qwen2.5-32B-Instruct-AWQ")
    tokens = int(re.search(r": ([\d,]+) tokens,", said)[1].replace(",", ""))
    assert 2368 <= tokens <= 4432
    assert "18 GiB of weights" in said
    assert "Weights in awq, as the checkpoint states, loaded as int4." in said
    assert re.search(r"give or take [\d,]+: the longest request fits in \d+%", said)


def test_what_engines_hold_is_drawn_beside_the_step_times() -> None:
    fleet, model = Cluster("one", (Machine("m", gpu("RTX-4090"), 1),)), llm("Qwen2.5-32B")
    trace = workload.load("azure2023_conv").head(200)

    def draws(spec: EngineSpec) -> tuple[Replica, list[int], float]:
        deployment = replicated(fleet, model, {"m": 1}, spec)
        plan = Plan("by hand", (), deployment, LeastTokens(), "least-tokens", None)
        question = Question(fleet, model, trace, 1.0, engine=spec)
        found = [one.deployment.replicas[0].kv_tokens for one in drawn(plan, question, 200)]
        assert found == [o.deployment.replicas[0].kv_tokens for o in drawn(plan, question, 200)]
        return deployment.replicas[0], found, float(np.mean(fit_draws(plan, question, 200)))

    one, tokens, fits = draws(EngineSpec(precision="int4", memory_fraction=0.9))
    assert one.kv_error_tokens == pytest.approx(0.4 * GIB / 262144)
    assert np.std(tokens) == pytest.approx(one.kv_error_tokens, rel=0.2)
    assert np.median(tokens) == pytest.approx(one.kv_tokens, abs=0.2 * one.kv_error_tokens)
    longest = (trace.input_tokens + trace.output_tokens).max()
    assert fits == np.mean(np.array(tokens) >= longest)
    assert 0.5 < fits < 1.0
    # What is told or a paper's is not drawn.
    for spec in (EngineSpec(precision="int4", overhead_gib=1.0), replace(PAPERS, precision="int4")):
        one, tokens, _ = draws(spec)
        assert set(tokens) == {one.kv_tokens}
