"""Who says nothing gets the same engine and the same predictor behind every door."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import hetero
from hetero import catalog, workload
from hetero.apps.cli import main
from hetero.cluster import cluster
from hetero.routers import Oracle, Predictive
from hetero.routers.predictors import DEFAULT

FLEET, LLM = cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv").head(300)
SLO = hetero.Slo(ttft_s=2.0)
SAID = f"Predictor {DEFAULT};"


def test_every_answer_says_what_it_stands_on(capsys) -> None:
    card = hetero.plan(FLEET, model=LLM, trace=CHATS, slo="ttft=2s", rate=1.0, effort="quick")
    assert any(note.startswith(SAID) for note in card.notes)
    assert card.question.engine == hetero.EngineSpec().name
    served = hetero.replicated(FLEET, LLM, {"a5000-1": 1, "a5000-2": 1})
    compared = hetero.compare(served, Predictive(), CHATS, seeds=1, resample=False, slo=SLO)
    assert compared.note.startswith(SAID)
    view = hetero.explore(served, CHATS, 1.0, SLO, requests=50)
    assert any(note.startswith(SAID) for note in view.notes)
    with pytest.raises(SystemExit):
        main(["simulate", FLEET.name, "--requests", "50", "--router", "hetero", "--json"])
    assert any(one.startswith(SAID) for one in json.loads(capsys.readouterr().out)["notes"])


def test_what_nobody_says_is_a_guess_and_not_the_truth() -> None:
    served = hetero.replicated(FLEET, LLM, {"a5000-1": 1, "a5000-2": 1})
    busy = CHATS.all_at_once()
    runs = [
        hetero.metrics(hetero.simulate(served, busy, Predictive(), predictor=told)).means["e2e_s"]
        for told in (None, DEFAULT, Oracle())
    ]
    assert runs[0] == runs[1] != runs[2]
    plan = hetero.Plan("by hand", (), served, Predictive(), "hetero", None)
    assert hetero.metrics(plan.simulate(busy)).means["e2e_s"] == runs[0]
    assert hetero.Question(FLEET, LLM, CHATS, 1.0).engine == hetero.EngineSpec()


def test_the_library_names_a_predictor_only_where_lengths_are_known() -> None:
    """All others pass on what they were given, so that one default stands behind them."""
    found = set()
    for path in Path(hetero.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for word in node.keywords if isinstance(node, ast.Call) else ():
                if word.arg == "predictor" and not isinstance(word.value, ast.Name):
                    found.add(path.name)
    assert found == {"observed.py"}
