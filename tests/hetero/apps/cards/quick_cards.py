"""Cards in seconds: a small fleet of two kinds, and the least effort that shows what one says."""

from __future__ import annotations

from functools import cache

import pytest

import hetero
from hetero import catalog
from hetero.apps.cards import delivery
from hetero.apps.cards.card import PlanCard
from hetero.cluster import Cluster, Machine, Network
from hetero.planners.base import EFFORTS, Effort

LITTLE = Effort(
    requests=120, rates=1, tabu_steps=3, tabu_neighbours=3, generations=2, population=4, layouts=4,
    node_degrees=1, exchanges=20, variety=2, exact_nodes=20, keep=2, parts=1, improved=2,
    designs=20,
)  # fmt: skip
FEW = delivery.CardEffort(requests=500, seeds=2, draws=4, precision=0.02)
TWO_KINDS = Cluster(
    "two kinds",
    (
        Machine("a800", catalog.gpu("A800-PCIE-80GB"), 1),
        Machine("v100", catalog.gpu("V100-SXM2-32GB"), 2),
    ),
    Network(within_region=catalog.link("Ethernet-100G")),
)


ASKED = {"model": "Llama-3-8B", "slo": "ttft=2s,tpot=100ms", "rate": 2.0, "engine": "any"}
PAIR = "thunderserve-a5000-pair"
AT_VLLM = ASKED | {"rate": 1.0, "engine": "vllm"}


@cache
def two_kinds() -> PlanCard:
    """One card for all tests that look at one."""
    with pytest.MonkeyPatch.context() as patch:
        little(patch)
        return hetero.plan(TWO_KINDS, **ASKED)


@cache
def pair() -> PlanCard:
    """The same of two equal GPUs for vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        little(patch)
        return hetero.plan(PAIR, **AT_VLLM)


def little(patch: pytest.MonkeyPatch) -> None:
    """Plans of a quick effort are made with as little as that."""
    patch.setitem(delivery.EFFORTS, "quick", FEW)
    patch.setitem(EFFORTS, "quick", LITTLE)
    patch.setattr("hetero.apps.cli.plan.PROCESSES", 1)  # others would not be patched
