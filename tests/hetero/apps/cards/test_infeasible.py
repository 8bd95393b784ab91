from __future__ import annotations

from dataclasses import replace

import pytest

import hetero
from hetero.apps.cards.infeasible import NoPlanError
from hetero.apps.cards.request import request
from hetero.cluster import cluster
from hetero.question import judged
from hetero.search.portfolio import planner
from hetero.simulator import Slo
from tests.hetero.apps.cards.quick_cards import little

PAIR = "thunderserve-a5000-pair"


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    little(monkeypatch)


def explained(fleet=PAIR, **asked):
    with pytest.raises(NoPlanError) as error:
        hetero.plan(fleet, **({"model": "Llama-3-8B"} | asked))
    return error.value


def test_targets_that_an_idle_fleet_misses():
    error = explained(slo="ttft=50ms,tpot=100ms", rate=0.5)
    found = error.explanation
    assert found.reason == "targets"
    assert found.idle_percent < 90
    assert {one.target for one in found.missed} == {"ttft"}
    # Long prompts miss a time to first token by more than short ones.
    over = [one.reached_s / one.target_s for one in found.missed]
    assert over == sorted(over)
    assert found.missed[-1].idle_percent < found.missed[0].idle_percent
    nearest = next(one for one in found.nearest if one.kind == "targets")
    scaled = Slo(0.05 * nearest.value, 0.1 * nearest.value)
    asked = request(PAIR, model="Llama-3-8B", slo=scaled, rate=0.5)
    question, load = asked.question, asked.question.load(precision=asked.effort.precision)
    tight = replace(question, slo=Slo(0.05, 0.1))
    plans = [planner(found.planner).plan(tight)] if found.planner != "portfolio" else []
    for plan in plans:
        assert judged(plan, load, 0)[1].attained >= 0.9
    assert "idle fleet" in str(error)
    assert error.explanation._repr_html_()


def test_a_model_that_does_not_fit_says_how_much_is_missing():
    error = explained(model="Llama-3-70B", slo="ttft=2s,tpot=100ms", rate=1.0)
    found = error.explanation
    assert found.reason == "memory"
    held = cluster(PAIR).mem_bytes / 2**30
    assert f"{held:,.1f} GiB" in found.sentence
    machines = [one for one in found.nearest if one.kind == "machines"]
    if machines:
        more = machines[0].value
        assert (2 + more) * 24 > 130  # GiB of its weights


def test_a_budget_that_pays_for_no_machine():
    error = explained(slo="ttft=2s,tpot=100ms", rate=1.0, budget=0.1)
    found = error.explanation
    assert found.reason == "planners"
    budget = next(one for one in found.nearest if one.kind == "budget")
    each = cluster(PAIR).machines[0].usd_per_h
    assert each <= budget.value <= 2.1 * each
    assert "0.1 $/h" in found.sentence
