from __future__ import annotations

import json

import pytest
from quick_cards import PAIR as FLEET
from quick_cards import little, pair

from hetero.apps.cards.card import PlanCard
from hetero.apps.cli import main

ASKED = (FLEET, "--model", "Llama-3-8B", "--slo", "ttft=2s,tpot=100ms")


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    little(monkeypatch)


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, arguments)])
    return end.value.code or 0


def test_a_card_as_json_page_and_text_and_against_another(capsys, monkeypatch, tmp_path):
    page, kept = tmp_path / "card.html", tmp_path / "card.json"
    assert call(*ASKED, "--rate", "1", "--json", "--html", page, "-o", kept) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == kept.read_text()
    card = PlanCard.load(kept)
    assert page.read_text() == card.to_html()
    made = pair()
    assert made.to_json() == said.out  # the same question, the same bytes
    monkeypatch.setattr("hetero.apps.cards.answer.plan", lambda *_, **__: made)
    assert call("card", *ASKED, "--rate", "1", "--against", kept) == 0
    text = capsys.readouterr().out
    assert text.startswith(str(card))
    assert "What differs in figures" in text
    assert call(*ASKED, "--rate", "1", "-o", kept) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_rate_that_is_too_high_is_explained(capsys):
    assert call("--rate", "40", *ASKED, "--json") == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["format"] == "hetero infeasible request"
    assert found["reason"] == "load"
    assert found["met_percent"] < 90 <= found["idle_percent"]
    assert {one["target"] for one in found["missed"]} <= {"ttft", "tpot"}
    assert all(one["reached_s"] > one["target_s"] for one in found["missed"])
    rate = next(one["value"] for one in found["nearest"] if one["kind"] == "rate")
    assert 1 < rate < 40
    assert said.err.startswith("Error: No plan found carries 40 requests/s")
    assert "Resolve: " in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ilands",), "Did you mean 'islands'?"),
        ((FLEET,), "Missing option '--model'"),
        (("none.yaml", "--model", "Llama-3-8B"), "none.yaml: there is no such file"),
        ((*ASKED[:3], "--slo", "ttft=2"), "--slo cannot read 'ttft=2'"),
        ((*ASKED, "--choose", "best"), "--choose does not know 'best'"),
        ((*ASKED, "--effort", "slow"), "--effort does not know 'slow'"),
        ((*ASKED, "--html", "card.png"), "The ending of card.png is of no known kind"),
        ((*ASKED, "--against", "none.json"), "none.json: The file cannot be read as text"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, said):
    assert call(*arguments) in (1, 2)
    err = capsys.readouterr().err
    assert said in err
    assert "Resolve: " in err
    assert len(err.strip().splitlines()) == 1


def test_help_names_the_card_and_the_methods(capsys):
    assert call("--help") == 0
    out = capsys.readouterr().out
    for name in ("card", "phases", "layers", "islands", "CLUSTER"):
        assert name in out
