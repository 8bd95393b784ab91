"""Plan cards, as files and as objects, and the command that exports them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hetero import catalog
from hetero.apps.cards.card import CardQuestion, PlanCard, Replicas, Sampled
from hetero.apps.export import Service, vllm
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import DataError, ExportError
from hetero.latency.step import StepModel
from hetero.plans import Group, Plan
from hetero.routers import LeastTokens

ENGINE = Engine(batching="chunked", admission="paged", max_batch=64, max_step_tokens=1024)


def card(**changes):
    group = Group("r", "both", (("m1", "L4", 2, 16), ("m1", "L4", 2, 16)))
    groups = (
        Replicas(
            2,
            {"L4": 4},
            group.parallelism,
            "both",
            0.8,
            ("r0", "r1"),
            (group.stages, (("m2", "L4", 2, 16), ("m2", "L4", 2, 16))),
            {**asdict(ENGINE), "kv_tokens": 70_000},
        ),
        Replicas(1, {"A10": 1}, "TP 1", "both", 0.2, ("s",), ((("m3", "A10", 1, 32),),), {}),
    )
    question = CardQuestion(
        "fleet", {"L4": 8, "A10": 1}, "Llama-3-8B", "t", 1.0, True, {}, 0.9, None, "fp16",
        "nominal", 0, 10,
    )  # fmt: skip
    values = {
        "question": question,
        "planner": "test",
        "precision": "fp8",
        "groups": groups,
        "idle": {},
        "routing": "hetero",
        "goodput_rps": Sampled(1.0, (1.0,)),
        "served": {},
        "latencies_s": {},
        "usd_per_h": None,
        "usd_per_mtok": None,
        "bound": None,
        "limits": None,
        "changes": (),
        "tried": (),
        "sources": (),
    }
    values |= changes
    return PlanCard(**({"plan": plan(values["groups"])} | values))


def plan(groups):
    """The plan of a card's groups."""
    step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    parts, replicas = [], []
    for group in groups:
        for name, stages in zip(group.names, group.places, strict=True):
            parts.append(Group(name, group.phase, stages, group.share / group.count))
            known = dict(group.engine)
            tokens = known.pop("kv_tokens", 50_000)
            replicas.append(Replica(name, step, tokens, engine=Engine(**known)))
    made = Deployment("fleet", tuple(replicas))
    return Plan("test", tuple(parts), made, LeastTokens(), "hetero", None)


def test_a_card_that_was_read_back_has_all_that_engines_need():
    service = Service.of_card(PlanCard.from_json(card().to_json()))
    assert [one.name for one in service.servings] == ["r0", "r1", "s"]
    assert [one.share for one in service.servings] == [0.4, 0.4, 0.2]
    first, _, last = service.servings
    assert first.engine == ENGINE
    assert (first.kv_tokens, last.kv_tokens, last.engine) == (70_000, 50_000, Engine())
    [command] = vllm.commands(service, first)
    assert dict(command.env) == {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "VLLM_PP_LAYER_PARTITION": "16,16",
    }
    text = " ".join(command.argv)
    assert "--max-num-seqs 64" in text
    assert "--quantization fp8" in text
    assert list(service.families()) == ["l4-tp2-pp2", "a10-tp1"]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("question", "targets_s"), {"ttfx": 0.5}, "ttfx"),
        (("question", "targets_s"), {"ttft": 0.0}, "greater than 0"),
        (("question", "targets_s"), {"ttft": 0.5}, "lacks the TTFT"),
        (("latencies_s",), {"x": {}}, "none of ttft"),
        (("usd_per_h",), float("inf"), "usd_per_h"),
        (("goodput_rps", "seeds"), [], "goodput_rps.seeds"),
        (("goodput_rps", "value"), 1e300, "no figure is as large"),
    ],
)
def test_a_damaged_card_is_refused_in_a_sentence(place, value, says):
    values = card().to_dict()
    *way, last = place
    inner = values
    for key in way:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(DataError, match=says):
        PlanCard.from_json(json.dumps(values))


def test_a_card_with_a_price_needs_what_the_price_is_shown_by():
    values = card().to_dict() | {"usd_per_h": 1.0, "usd_per_mtok": {"value": 1.0, "seeds": [1.0]}}
    with pytest.raises(DataError, match="total_tps under 'served'"):
        PlanCard.from_json(json.dumps(values))
    with pytest.raises(DataError, match="not JSON"):
        PlanCard.from_json('{"format": ' + "9" * 5000 + "}")


@pytest.mark.parametrize(
    "engine", [{"batching": "x"}, {"max_bach": 1}, {"max_batch": "x"}, {"max_batch": -1}]
)
def test_an_engine_that_a_card_describes_wrongly(engine):
    values = card().to_dict()
    shared = next(one for one in values["plan"]["shared"] if "Engine" in one)
    shared["Engine"] |= engine
    with pytest.raises(DataError, match=r"the plan cannot be read: .*(engine|Engine|batching)"):
        PlanCard.from_json(json.dumps(values))


def test_weights_are_those_that_the_card_was_asked_for():
    hub = "meta-llama/Llama-3.1-8B-Instruct"
    asked = replace(card(), question=replace(card().question, checkpoint=hub))
    service = Service.of_card(PlanCard.from_json(asked.to_json()))
    assert (service.model, service.llm.name) == (hub, "Llama-3.1-8B")
    assert Service.of_card(asked, weights="mine/other").model == "mine/other"
    assert Service.of_card(card()).model == card().question.model
    llm = catalog.llm("Mistral-7B")
    assert Service.of_card(card(), llm).llm is llm


@pytest.mark.parametrize(
    "changes", [{"stages": ()}, {"stages": (("m1", "L4", 0, 32),)}, {"tensor": 3}, {"phase": "x"}]
)
def test_a_group_that_a_card_describes_wrongly(changes):
    made = card()
    groups = (replace(made.plan.groups[0], **changes), *made.plan.groups[1:])
    with pytest.raises(ExportError, match=r"Group r0 .* has no phase or no whole GPUs"):
        Service.of_card(replace(made, plan=replace(made.plan, groups=groups)))


def test_the_command_writes_what_it_says(tmp_path, said):
    plan = tmp_path / "plan.json"
    card().save(plan)
    out = said("export", plan, "--to", "vllm", "-o", tmp_path / "out", "--weights", "org/m")
    assert "m1.sh" in out
    assert "vllm serve org/m" in (tmp_path / "out" / "m1.sh").read_text()
    assert said(
        "export", plan, "--to", "routing", "-o", tmp_path / "table", "--hosts", "kubernetes"
    )
    table = json.loads((tmp_path / "table" / "routing.json").read_text())
    assert table["engines"][1]["url"] == "http://l4-tp2-pp2-1.l4-tp2-pp2:8000"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan.json", "--to", "helm", "-o", "x"), "--to does not know 'helm'"),
        (("none.json", "--to", "vllm", "-o", "x"), "cannot be read"),
        (("my_fleet", "--to", "vllm", "-o", "x"), "No model is named"),
        (("plan.json", "--to", "vllm", "-o", "no/x"), "does not exist"),
        (("plan.json", "--to", "vllm", "-o", "x", "--hosts", "moon"), "does not know 'moon'"),
        (("plan.json", "--to", "vllm", "-o", "x", "--memory", "2"), "starts no engine"),
        (("plan.json", "--to", "vllm", "-o", "x", "--engine", "sglang"), "as it was planned"),
        (("plan.json", "--to", "vllm", "-o", "x", "--slo", "ttft=2s"), "--slo: a plan card is"),
    ],
)
def test_errors_are_one_sentence_and_leave_nothing(tmp_path, refused, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    card().save("plan.json")
    err = refused("export", *words)
    assert says in err
    assert err.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]
