"""Shares for pairs of a prefill and a decode replica."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hetero.deployment import KvLink
from hetero.errors import ParameterError
from hetero.routers import PairShares
from hetero.simulator import Event, simulate
from tests.hetero.routers.router_states import decide_alike, handed_over, phases

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "w": "both"}
WEIGHTS = {("p", "d"): 4, ("p", "e"): 1, ("q", "d"): 2, ("w", "w"): 3}


def split(gbs=10.0):
    return phases(ROLES, 40_000, (("p", "e", KvLink(gbs / 4)),), gbs)


def pairs(run):
    names = [*ROLES, ""]
    r = run.requests
    return [
        (names[i], names[j]) if j >= 0 else (names[i],) * 2
        for i, j in zip(r["node"], r["decode_node"], strict=True)
    ]


def test_every_window_has_its_shares():
    found = pairs(simulate(split(), handed_over(400), PairShares(WEIGHTS)))
    for start in range(0, 400, 10):
        window = found[start : start + 10]
        assert {pair: window.count(pair) for pair in WEIGHTS} == WEIGHTS


def test_a_matrix_says_the_same_as_names():
    matrix = np.zeros((5, 5))
    for (a, b), weight in WEIGHTS.items():
        matrix[list(ROLES).index(a), list(ROLES).index(b)] = weight
    named = simulate(split(), handed_over(400), PairShares(WEIGHTS))
    assert pairs(simulate(split(), handed_over(400), PairShares(matrix))) == pairs(named)


def test_draws_have_the_shares_as_probabilities():
    found = pairs(simulate(split(), handed_over(4000), PairShares(WEIGHTS, drawn=True), seed=3))
    counts = np.array([found.count(pair) for pair in WEIGHTS])
    expected = 400 * np.array(list(WEIGHTS.values()))
    assert counts.sum() == 4000
    # Chi-square with 3 degrees of freedom: above 16.3 in one case of a thousand.
    assert 0 < ((counts - expected) ** 2 / expected).sum() < 16.3


def test_shares_change_at_their_time():
    served = handed_over(400)
    change_s = float(served.arrival_s[200])
    router = PairShares({("p", "d"): 1}, changes=[(change_s, {("q", "e"): 1, ("w", "w"): 1})])
    found = pairs(simulate(split(), served, router))
    assert set(found[:200]) == {("p", "d")}
    assert [found[200:].count(pair) for pair in (("q", "e"), ("w", "w"))] == [100, 100]


def test_choose_and_the_compiled_path_decide_alike():
    for router in (PairShares(WEIGHTS), PairShares(WEIGHTS, drawn=True)):
        assert decide_alike(split(), handed_over(400), router, 4)


def test_others_serve_while_a_pair_is_down():
    served = handed_over(400)
    down_s, up_s = (float(served.arrival_s[k]) for k in (100, 200))
    events = [Event(down_s, "d"), Event(up_s, "d", "recover")]
    run = simulate(split(), served, PairShares({("p", "d"): 1}), events=events)
    assert run.counts["finished"] == 400
    found = pairs(run)
    assert not any("d" in pair for pair in found[100:200])
    assert found[200:] == [("p", "d")] * 200


def test_each_pair_has_its_link_and_prefill_memory_waits_for_it():
    """A slow link fills the memory of the prefill replica, so that later prompts wait."""
    served = handed_over(400)
    run = simulate(split(gbs=0.05), served, PairShares({("p", "d"): 1, ("p", "e"): 1}))
    r = run.requests
    rate_gbs = np.where(r["decode_node"] == 2, 0.05, 0.05 / 4)
    np.testing.assert_allclose(r["transfer_s"], r["input_tokens"] * 1e5 / 1e9 / rate_gbs)
    # At any time the prompts between admission and the end of their transfer fit the memory.
    begin, end = r["first_token_s"], r["first_token_s"] + r["transfer_s"]
    size = r["input_tokens"] + 1
    held = [size[(begin <= t) & (t < end)].sum() for t in begin]
    assert 30_000 < max(held) <= 40_000
    wide = simulate(split(gbs=50.0), served, PairShares({("p", "d"): 1, ("p", "e"): 1}))
    assert run.ttft_s.max() > 5 * wide.ttft_s.max()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PairShares({("p", "x"): 1}), "no pair of replicas 'p' and 'x'"),
        (lambda: PairShares({("d", "p"): 1}), "serves decode, and p"),
        (lambda: PairShares({("p", "p"): 1}), "cannot serve"),
        (lambda: PairShares({("p", "d"): -1}), "0 or more"),
        (lambda: PairShares({("p", "d"): 0}), "above 0"),
        (lambda: PairShares(np.ones((2, 2))), r"\(2, 2\), for 5"),
        (lambda: PairShares(WEIGHTS, changes=[(2.0, WEIGHTS), (1.0, WEIGHTS)]), "2, 1 s"),
    ],
)
def test_errors_are_clear(make, words):
    with pytest.raises(ParameterError, match=words):
        make().memory(split())


@pytest.mark.parametrize("chosen", [(0, 0), (2, 0), (0, 9), (0, "d"), (0, 2, 3), "p"])
def test_a_python_router_may_name_a_pair_and_hears_of_a_wrong_one(chosen):
    def run(answer):
        router = SimpleNamespace(name="own", choose=lambda request, fleet: answer)
        return simulate(split(), handed_over(20), router)

    assert set(pairs(run((0, 3)))) == {("p", "e")}
    with pytest.raises(ParameterError, match="Router 'own' chose"):
        run(chosen)
