"""Several models on one fleet: symmetry, and plain enumeration of every division."""

from __future__ import annotations

from itertools import product

import pytest

from hetero import catalog, workload
from hetero.apps.cards.answer import sections
from hetero.apps.cards.card import PlanCard
from hetero.apps.cards.request import CardRequest, request
from hetero.apps.cards.several import (
    SeveralPlans,
    best_division,
    divisions,
    part_of,
    quick_rps,
    several,
)
from hetero.cluster import Cluster, Machine
from hetero.errors import InfeasibleError, ParameterError
from tests.hetero.apps.cards.quick_cards import LITTLE, little

TRACE = workload.load("azure2023_conv").head(300)
ASKED = {"trace": TRACE, "slo": "ttft=2s,tpot=100ms", "engine": "vllm"}


@pytest.fixture(scope="module", autouse=True)
def _little():
    with pytest.MonkeyPatch.context() as patch:
        little(patch)
        patch.setattr("hetero.apps.cards.several.QUICK", LITTLE)
        yield


def fleet(**gpus: int) -> Cluster:
    machines = (Machine(n.lower(), catalog.gpu(n.replace("_", "-")), c) for n, c in gpus.items())
    return Cluster("own", tuple(machines))


@pytest.fixture(scope="module")
def twins(_little) -> SeveralPlans:
    cards = {}

    def once(asked: CardRequest, _: object) -> list[PlanCard]:
        """Equal questions have one card."""
        question = asked.question
        known = (question.llm.name, question.rate_rps, *asked.cluster.gpu_counts.items())
        if known not in cards:
            *_, cards[known] = sections(asked)
        return [cards[known]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.apps.cards.several.sections", once)
        return several(fleet(L4=2), model=["Llama-3.1-8B"] * 2, rate=[1.0, 1.0], **ASKED)


def test_two_equal_models_get_equal_parts(twins):
    assert twins.found.division == ((1,), (1,))
    first, second = twins.cards.values()
    assert first.question.gpus == second.question.gpus == {"L4": 1}
    assert twins.factors[0] == pytest.approx(twins.factors[1])
    assert twins.cut == ("l4",)
    assert "times the rates" in str(twins)
    assert twins.to_dict()["factor"] == min(twins.factors)


def test_unequal_models_are_divided_as_enumeration_has_it(monkeypatch):
    gpus, rates = {"A10G": 1, "L40S": 2}, (4.0, 1.0)
    own = fleet(**gpus)
    loads = [*zip(("Llama-3.1-8B", "Qwen2.5-14B"), rates, strict=True)]
    sizes = list(gpus.values())

    def factor(model: int, kept: tuple[int, ...]) -> float:
        machines = [
            Machine(one.name, one.gpu, k) for one, k in zip(own.machines, kept, strict=True) if k
        ]
        if not machines:
            return 0.0
        name, rate = loads[model]
        asked = request(Cluster("part", tuple(machines)), model=name, rate=rate, **ASKED)
        return quick_rps(asked.question) / rate

    known = {
        (m, kept): factor(m, kept)
        for m in (0, 1)
        for kept in product(*(range(n + 1) for n in sizes))
    }
    best = max(
        min(known[0, kept], known[1, tuple(n - k for n, k in zip(sizes, kept, strict=True))])
        for kept in product(*(range(n + 1) for n in sizes))
    )
    # Cards of the division are what the twins show.
    monkeypatch.setattr("hetero.apps.cards.several.sections", lambda *_: ("card",))
    models = [name for name, _ in loads]
    found = several(own, model=models, rate=rates, **ASKED).found
    assert best > 0
    assert found.factor == pytest.approx(best)
    assert found.planned <= found.divisions == len(known) // 2


def test_no_division_is_left_out_that_could_be_better():
    values = {(0, (0,)): 0.0, (0, (1,)): 2.0, (0, (2,)): 5.0}
    values |= {(1, (0,)): 0.0, (1, (1,)): 3.0, (1, (2,)): 4.0}
    asked = []

    def value(model: int, own: tuple[int, ...]) -> float:
        asked.append((model, own))
        return values[model, own]

    found = best_division(divisions([2], 2), value, lambda m, own: values[m, own])
    assert (found.division, found.factor, found.planned) == (((1,), (1,)), 2.0, 1)
    assert len(asked) == 2


def test_parts_take_every_gpu_once():
    own = fleet(L4=3, L40S=2)
    for way in divisions([3, 2], 3):
        parts = [part_of(own, way, m) for m in range(3)]
        held = {"L4": 0, "L40S": 0}
        for one, kept in zip(parts, way, strict=True):
            assert (one.gpu_counts if one else {}) == {
                name: k for name, k in zip(held, kept, strict=True) if k
            }
            for name, count in (one.gpu_counts if one else {}).items():
                held[name] += count
        assert held == {"L4": 3, "L40S": 2}
    assert len(divisions([64, 64], 2)) <= 300


def test_what_cannot_be_shared_is_told(refused):
    with pytest.raises(InfeasibleError, match="No division"):
        several(fleet(L4=2), model=["Llama-3.1-70B", "Llama-3.1-8B"], rate=[1.0, 1.0], **ASKED)
    with pytest.raises(ParameterError, match="alone"):
        several(fleet(L4=2), model=["Llama-3.1-8B"], rate=[1.0], **ASKED)
    words = ["plan", "thunderserve-a5000-pair", "--model", "Llama-3-8B", "--model", "Llama-3.2-3B"]
    for more in ([], ["--rate", "1"], ["--rate", "1", "--rate", "2", "--cheapest"]):
        assert refused(*words, *more).count("Resolve:") == 1
