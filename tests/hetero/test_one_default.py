"""Who says nothing gets the same engine and the same predictor at every entry point."""

from __future__ import annotations

import hetero
from hetero import catalog, workload
from hetero.apps.answers.fleets import record
from hetero.cluster import cluster
from hetero.routers import Oracle, Predictive
from hetero.routers.base import DEFAULT

FLEET, LLM = cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv").head(300)
SERVED = hetero.replicated(FLEET, LLM, {"a5000-1": 1, "a5000-2": 1})


def test_every_answer_says_what_it_stands_on(told) -> None:
    slo = hetero.Slo(ttft_s=2.0)
    asked = {"model": LLM, "trace": CHATS, "slo": slo, "rate": 1.0}
    card = hetero.plan(FLEET, **asked, effort="quick")
    compared = hetero.compare(SERVED, Predictive(), CHATS, seeds=1, resample=False, slo=slo)
    view = hetero.explore(SERVED, CHATS, 1.0, slo, requests=50)
    sized = hetero.size(**asked, gpu=["A40"], engine="any", seeds=1)
    said = told("simulate", FLEET.name, "--requests", 50, "--router", "hetero")
    others = (said["notes"], sized.table().notes, record(sized)["notes"])
    for notes in (card.notes, [compared.note], view.notes, *others):
        assert any(one.startswith(f"Predictor {DEFAULT}; engine ") for one in notes)
    assert hetero.Question(FLEET, LLM, CHATS, 1.0).engine == hetero.EngineSpec()
    assert card.question.engine == hetero.EngineSpec().name


def test_what_nobody_says_is_a_guess_and_not_the_truth() -> None:
    busy, plan = (
        CHATS.all_at_once(),
        hetero.Plan("by hand", (), SERVED, Predictive(), "hetero", None),
    )
    runs = [hetero.simulate(SERVED, busy, Predictive(), predictor=one) for one in (None, DEFAULT)]
    runs += [plan.simulate(busy), plan.simulate(busy, predictor=Oracle())]
    ends = [one.requests["finish_s"].tolist() for one in runs]
    assert ends[0] == ends[1] == ends[2] != ends[3]
