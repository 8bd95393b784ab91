"""``hetero plan`` of a card, and ``hetero export`` of a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetero.apps.cards.card import PlanCard
from tests.hetero.apps.cards.quick_cards import PAIR as FLEET
from tests.hetero.apps.cards.quick_cards import little, pair

ASKED = (FLEET, "--model", "Llama-3-8B", "--slo", "ttft=2s,tpot=100ms")


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    little(monkeypatch)


def test_a_card_as_json_page_and_text_and_against_another(said, refused, monkeypatch, tmp_path):
    page, kept = tmp_path / "card.html", tmp_path / "card.json"
    out = said("plan", *ASKED, "--rate", "1", "--json", "--html", page, "-o", kept)
    assert out == kept.read_text()
    card = PlanCard.load(kept)
    assert page.read_text() == card.to_html()
    made = pair()
    assert made.to_json() == out  # the same question, the same bytes
    begun = replace(made, limits=None, changes=(), at_rates=(), notes=made.notes[:-1])
    monkeypatch.setattr(
        "hetero.apps.cards.answer.grown", lambda asked: iter([begun, made][: 2 - asked.brief])
    )
    text = said("plan", "card", *ASKED, "--rate", "1", "--against", kept)
    assert text.startswith(str(card))
    assert "What differs in figures" in text
    assert "exists already" in refused("plan", *ASKED, "--rate", "1", "-o", kept)
    brief = said("plan", *ASKED, "--rate", "1", "--brief")
    assert str(card).startswith(brief.rstrip("\n") + "\n\nWhat it delivers")


def test_a_rate_that_is_too_high_is_explained(run):
    code, out, err = run("plan", "--rate", "40", *ASKED, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["format"] == "hetero infeasible request"
    assert found["reason"] == "load"
    assert found["met_percent"] < 90 <= found["idle_percent"]
    assert {one["target"] for one in found["missed"]} <= {"ttft", "tpot"}
    assert all(one["reached_s"] > one["target_s"] for one in found["missed"])
    rate = next(one["value"] for one in found["nearest"] if one["kind"] == "rate")
    assert 1 < rate < 40
    assert err.startswith("Error: No plan found carries 40 requests/s")
    assert "Resolve: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ilands",), "Did you mean 'islands'?"),
        ((FLEET,), "Missing option '--model'"),
        (("", *ASKED[1:]), "'' is no cluster"),
        ((".", *ASKED[1:]), "'.' is no cluster"),
        (("none.yaml", "--model", "Llama-3-8B"), "none.yaml: there is no such file"),
        ((*ASKED[:3], "--slo", "ttft=2"), "--slo cannot read 'ttft=2'"),
        ((*ASKED, "--choose", "best"), "--choose does not know 'best'"),
        ((*ASKED, "--effort", "slow"), "--effort does not know 'slow'"),
        ((*ASKED, "--html", "card.png"), "The ending of card.png is of no known kind"),
        ((*ASKED, "--what-if", "precision=fp8", "-o", "card.json"), "--what-if compares plans"),
        ((*ASKED, "--model", "Qwen2.5-7B", "--cheapest"), "Several models share the whole fleet"),
        ((*ASKED, "--against", "none.json"), "none.json: The file cannot be read"),
    ],
)
def test_errors_are_one_sentence(run, arguments, says):
    code, _, err = run("plan", *arguments)
    assert code in (1, 2)
    assert says in err
    assert "Resolve: " in err
    assert len(err.strip().splitlines()) == 1


def test_help_names_the_card_and_the_methods(said):
    out = said("plan", "--help")
    for name in ("card", "phases", "layers", "islands", "CLUSTER"):
        assert name in out


TWO = """
machines:
  - {name: big, gpu: A100-SXM-80GB, count: 2, usd_per_h: 3.6}
  - {name: small, gpu: L40S, count: 1, usd_per_h: 1.1}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.1}
"""


@pytest.fixture
def asked(tmp_path: Path) -> tuple[object, ...]:
    """An export of the fleet."""
    own = tmp_path / "own.yaml"
    own.write_text(TWO)
    load = ("--model", "Llama-3.1-70B", "--rate", "0.3", "--slo", "ttft=5s,tpot=200ms")
    return "export", own, *load, "--to", "vllm", "-o", tmp_path / "files"


def test_the_best_plan_for_vllm_is_one_that_it_runs(said, asked, tmp_path: Path) -> None:
    assert said(*asked)
    scripts = {path.name: path.read_text() for path in (tmp_path / "files").iterdir()}
    assert sorted(scripts) == ["big.sh"]
    (line,) = [line for line in scripts["big.sh"].splitlines() if "vllm serve" in line]
    assert line.split()[0] == "CUDA_VISIBLE_DEVICES=0,1"


def test_no_pipeline_leaves_a_machine_that_holds_the_model(said, asked, tmp_path: Path) -> None:
    assert said(*asked, "--engine", "any")
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["big.sh"]
