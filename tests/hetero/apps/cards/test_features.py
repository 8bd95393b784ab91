"""Features of engines, each against arithmetic, and what they save."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

import hetero
from hetero import catalog, paths, simulate
from hetero.apps.cards.answer import _of_engine
from hetero.apps.cards.difference import changed, compared
from hetero.apps.cards.request import adapter_bytes, request, speculation
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.resolve import resolve
from hetero.latency.speculation import Speculation
from hetero.latency.step import StepModel
from hetero.memory import Budget
from hetero.planners import ground
from hetero.planners.bound import bound, goodput_bound
from hetero.question import sustained_rps
from hetero.routers import RoundRobin
from hetero.search.portfolio import planner
from hetero.workload import Trace
from tests.hetero.apps.cards.quick_cards import little

MODEL, PAIR = catalog.llm("Llama-3-8B"), "thunderserve-a5000-pair"
ASKED = {"model": "Llama-3-8B", "slo": "ttft=2s,tpot=100ms", "rate": 1.0}
FLOOR, PER_TOKEN, PER_CACHED = 0.02, 1e-4, 1e-7
STEP = StepModel.affine(floor_s=FLOOR, per_token_s=PER_TOKEN, per_cached_token_s=PER_CACHED)
KINDS = "precision=fp8 kv-precision=fp8 chunk=512 chunk=16384 slo=ttft=60s memory=0.5"
DRAFTS = Speculation(length=4, acceptance=0.7, cost=0.05)


def served(step: StepModel, trace: Trace, **engine: object) -> hetero.simulator.Run:
    how = Engine(**{"batching": "chunked", "admission": "paged", **engine})
    one = Replica("one", step, kv_tokens=100_000, engine=how)
    return simulate(Deployment("one", (one,)), trace, RoundRobin())


def test_tokens_of_a_step_are_those_of_drawn_drafts():
    rng = np.random.default_rng(0)
    hits = rng.random((200_000, DRAFTS.length)) < DRAFTS.acceptance
    tokens = 1 + np.cumprod(hits, axis=1).sum(axis=1)
    assert DRAFTS.tokens == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    assert tokens.mean() == pytest.approx(DRAFTS.tokens, rel=0.01)
    assert tokens.std() / tokens.mean() == pytest.approx(DRAFTS.spread, rel=0.01)
    assert Speculation(3, 1.0).tokens == 4.0
    assert Speculation(3, 0.0).tokens == 1.0


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_a_token_takes_its_share_of_verification_and_drafts(batch):
    cached = 1000.0
    alone = FLOOR + PER_TOKEN * batch + PER_CACHED * cached * batch
    verified = FLOOR + PER_TOKEN * batch * 5 + PER_CACHED * cached * batch
    expected = (verified + 4 * 0.05 * alone) / DRAFTS.tokens
    found = DRAFTS.applied(STEP, 300).decode_seconds(np.full(batch, cached))
    assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gpu", ["H100-SXM", "L4", "RTX-PRO-6000-Server"])
def test_drafts_are_not_flattered(gpu):
    step = resolve(catalog.gpu(gpu), MODEL).step
    made = DRAFTS.applied(step, 256)
    b, q, c = np.meshgrid([1, 8, 64, 256], [1, 64, 512, 1700], [200.0, 2000.0])
    # A step that prefills and gives one token, and the others of its tokens by themselves, take no
    # less than the step of the engine that gives all of them and the drafts.
    own = made.seconds(b + q, b, b * c, q**2 / 2)
    own += (DRAFTS.tokens - 1.0) * made.seconds(b, b, b * c)
    drafted = 4 * DRAFTS.cost * step.seconds(b, b, 0.0)
    assert np.all(own >= 0.98 * (step.seconds(q + 5 * b, 0, 0.0, q**2 / 2) + drafted))
    prompts = step.prefill_seconds([900.0])
    assert float(made.prefill_seconds([900.0])) == pytest.approx(float(prompts), rel=1e-12)
    assert np.all(made.seconds(b, b, b * c) >= step.seconds(b, b, b * c) / DRAFTS.gain * 0.999)


def test_simulated_answers_take_so_long():
    made = DRAFTS.applied(STEP, 256)
    run = served(made, Trace([0.0], [100], [301]))
    each = np.mean([float(made.decode_seconds([n])) for n in range(100, 400)])
    assert float(run.tpot_s[0]) == pytest.approx(each, rel=1e-3)


def test_published_gains_are_below_what_verifying_for_free_gives():
    with paths.data("published", "acceptance.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["draft_tokens"]:
            said = "length={draft_tokens},acceptance={acceptance_high}".format(**row)
            free = speculation(said, catalog.llm(row["model"])).speculation.gain
            assert 0.9 * free <= float(row["speedup"]) <= free
        else:
            assert float(row["speedup"]) <= float(row["tokens_per_step"])
    assert len(rows) == 7


@pytest.mark.parametrize("said", [*KINDS.split(), "speculate=length=3,acceptance=0.8"])
def test_no_kind_of_plan_carries_more_than_its_bound(said):
    one = Cluster("one", (Machine("m", catalog.gpu("H100-SXM"), 1),))
    asked = request(one, **(ASKED | {"goal": 0.5} | changed(said))).question
    plan, most = planner("tensor-parallel search").plan(asked), goodput_bound(asked)
    assert 0.4 * most < sustained_rps(plan, asked.load(precision=0.05), seed=0) <= most


def test_drafts_raise_the_bound_and_hold_memory():
    plain = request(PAIR, **ASKED).question
    drafts = request(PAIR, **ASKED, speculate="length=3,acceptance=0.8").question
    one, two = (planner("tensor-parallel search").plan(asked) for asked in (plain, drafts))
    assert bound(plain).rps() < bound(drafts).rps()
    (seen,) = {replica.kv_tokens for replica in two.deployment.replicas}
    (before,) = {replica.kv_tokens for replica in one.deployment.replicas}
    layer = 2 * sum(MODEL.layer_params(0, 1))
    assert before - seen == pytest.approx(layer / MODEL.kv_bytes_per_token(), abs=1)


def test_a_cache_in_fp8_holds_twice_the_tokens_and_is_read_in_half_the_time():
    gpu = catalog.gpu("H100-SXM")
    full, half = (Budget(MODEL, gpu, kv_precision=p).max_tokens for p in ("fp16", "fp8"))
    assert half in (2 * full, 2 * full + 1)  # scales are one number per tensor
    one, two = (
        request("thunderserve-a100-8", **ASKED, engine="sglang", kv_precision=p).question
        for p in ("bf16", "fp8")
    )
    rates = [ground.costs(asked).rates(0, 1) for asked in (one, two)]
    assert rates[1].kv_layer_bytes == rates[0].kv_layer_bytes / 2
    assert rates[1].cached_s == pytest.approx(rates[0].cached_s / 2, rel=0.2)


def test_a_shared_prefix_is_prefilled_once():
    trace = Trace([0.0, 10.0], [1600, 1600], [2, 2])
    cold = served(STEP, trace, prefix_cache=True)
    warm = served(STEP, trace.with_prefix(0.5), prefix_cache=True)
    assert cold.ttft_s[1] == pytest.approx(float(STEP.prefill_seconds([1600])))
    assert warm.ttft_s[0] == pytest.approx(float(STEP.prefill_seconds([1600])))
    assert warm.ttft_s[1] == pytest.approx(float(STEP.prefill_seconds([800], 800)), rel=0.01)


def test_adapters_take_what_their_matrices_hold():
    llama, rank = catalog.llm("Llama-3.1-8B"), 16
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    mlp = 3 * (4096 + 14336)
    assert adapter_bytes(llama, rank) == 2 * rank * 32 * attention
    both = adapter_bytes(llama, rank, everywhere=True)
    assert both == 2 * rank * 32 * (attention + mlp)
    plain = request(PAIR, **ASKED).question
    with_them = request(PAIR, **ASKED, lora="adapters=8,rank=64,on=all").question
    held = 8 * adapter_bytes(MODEL, 64, everywhere=True)
    a, b = (ground.costs(asked).rates(0, 1).usable_bytes for asked in (plain, with_them))
    assert a - b == pytest.approx(held)


def test_formats_are_known_by_name():
    fleet = "thunderserve-a100-8"
    assert request(fleet, **ASKED, precision="awq").question.engine.precision == "int4"
    assert request(fleet, **ASKED, precision="w8a8").question.engine.precision == "int8"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("speculate", "length=4"),
        ("speculate", "length=0,acceptance=0.7"),
        ("speculate", "length=4,acceptance=1.7"),
        ("speculate", "4:0.7"),
        ("lora", "adapters=8"),
        ("lora", "adapters=8,rank=0"),
        ("lora", "adapters=8,rank=8,on=somewhere"),
    ],
)
def test_what_says_nothing_is_told(what, text):
    with pytest.raises(ParameterError):
        request(PAIR, **ASKED, **{what: text})


@pytest.mark.parametrize("what", ["speculate", "lora"])
def test_the_example_of_an_error_can_be_asked(what):
    with pytest.raises(ParameterError, match="for instance") as error:
        request(PAIR, **ASKED, **{what: "nothing"})
    example = error.value.resolve.removeprefix("write for instance ").split(" ")[0].rstrip(".")
    assert request(PAIR, **ASKED, **{what: example}).question


def test_drafts_are_of_engines_that_exist():
    with pytest.raises(ParameterError, match="engines that exist"):
        request(PAIR, **ASKED, engine="any", speculate="length=4,acceptance=0.7")
    with pytest.raises(ParameterError, match="no change"):
        changed("colour=red")


def test_a_comparison_has_the_question_first(monkeypatch):
    little(monkeypatch)
    found = compared(PAIR, what_if=["kv-precision=fp8"], **ASKED)
    asked, fp8 = found.variants
    assert asked.what == "as asked"
    assert found.saved(asked) == 0.0
    assert fp8.goodput_rps >= asked.goodput_rps
    assert "kv-precision=fp8" in str(found)
    assert found.to_dict()["variants"][0]["saved"] == 0.0


def test_a_comparison_reads_all_changes_before_it_searches():
    steps: list[str] = []
    with pytest.raises(ParameterError, match="speculate"):
        compared(PAIR, what_if=["speculate=4,0.7"], progress=steps.append, **ASKED)
    assert not steps


def test_without_drafts_steps_are_as_they_were():
    own, gpu = request(PAIR, **ASKED).question.engine, catalog.gpu("RTX-A5000")
    assert own.drafting(STEP, gpu) is STEP
    assert replace(own, speculation=DRAFTS).drafting(STEP, gpu) is not STEP


def test_cards_say_what_experts_come_in():
    asked = request("thunderserve-a100-8", **ASKED | {"model": "gpt-oss-20b"})
    plan = planner("tensor-parallel search").plan(asked.question)
    notes = _of_engine(asked.cluster, asked.question, plan)
    assert "Weights in mxfp4, as the checkpoint states: 12.8 GiB." in notes
