"""Ranges of input lengths sent to the replicas that a plan gives them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero.errors import ParameterError
from hetero.routers.ranges import RangeShares
from hetero.simulator import Event, simulate
from hetero.workload import Trace
from tests.hetero.routers.router_states import decide_alike, handed_over, phases

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "f": "decode"}
ENDS = (300, 1000, 3000)
PREFILL = np.array([[1, 0, 0, 0, 0], [2, 3, 0, 0, 0], [0, 1, 0, 0, 0]], float)
DECODE = np.array([[0, 0, 1, 1, 2], [0, 0, 0, 1, 0], [0, 0, 4, 0, 1]], float)


def split():
    return phases(ROLES, 60_000)


def test_every_range_keeps_its_shares():
    served = handed_over(600)
    run = simulate(split(), served, RangeShares(ENDS, PREFILL, DECODE))
    ranges = np.minimum(np.searchsorted(ENDS, served.input_tokens, side="right"), 2)
    assert np.bincount(ranges).min() > 50
    for j in range(3):
        for column, weight in (("node", PREFILL[j]), ("decode_node", DECODE[j])):
            counts = np.bincount(run.requests[column][ranges == j], minlength=5)
            share = counts / counts.sum()
            # Rotation is never further from its share than one request.
            assert np.abs(share - weight / weight.sum()).max() <= 1 / counts.sum()


def test_the_first_range_that_ends_beyond_a_length_holds_it():
    lengths = [1, 299, 300, 999, 1000, 2999, 3000, 9999]
    eye = np.zeros((3, 5))
    eye[:, 0] = 1
    decode = np.zeros((3, 5))
    decode[[0, 1, 2], [2, 3, 4]] = 1
    served = Trace(np.arange(8.0), lengths, [5] * 8)
    run = simulate(split(), served, RangeShares(ENDS, eye, decode))
    assert run.requests["decode_node"].tolist() == [2, 2, 3, 3, 4, 4, 4, 4]


def test_by_load_the_emptier_replica_serves():
    served = Trace(np.zeros(6), [500] * 6, [50] * 6)
    weight = np.array([[1, 4, 0, 0, 0]], float)
    run = simulate(split(), served, RangeShares([1000], weight, [[0, 0, 1, 1, 1]], among="load"))
    # q is four times as fast: it takes requests until its queue over four passes that of p.
    assert np.bincount(run.requests["node"][:5]).tolist() == [1, 4]
    assert np.bincount(run.requests["decode_node"])[2:].tolist() == [2, 2, 2]


def test_without_a_replica_of_the_range_another_takes_over():
    served = handed_over(200)
    router = RangeShares(ENDS, PREFILL, DECODE)
    half_s = float(served.arrival_s[100])
    run = simulate(split(), served, router, events=[Event(half_s, "e"), Event(half_s, "q")])
    assert run.counts == {"finished": 200, "rejected": 0}
    late = np.arange(200) >= 100
    assert not np.isin(run.requests["decode_node"][late], [3]).any()
    assert (run.requests["node"][late] == 0).all()
    # Range 1 belongs to e alone: its requests go to the emptiest of the others.
    middle = (served.input_tokens >= 300) & (served.input_tokens < 1000)
    assert set(run.requests["decode_node"][late & middle]) <= {2, 4}
    assert (~late & middle).any()


def test_choose_and_the_compiled_path_decide_alike():
    for among in ("shares", "load"):
        router = RangeShares(ENDS, PREFILL, DECODE, among=among)
        assert decide_alike(split(), handed_over(600), router, 4)


@pytest.mark.parametrize(
    ("ends", "prefill", "decode", "sentence"),
    [
        ((300, 300, 900), PREFILL, DECODE, "do not rise"),
        (ENDS, PREFILL[:2], DECODE, r"prefill weights .* shape \(2, 5\) for 3 ranges and 5"),
        (ENDS, PREFILL, -DECODE, "decode weights"),
        (ENDS, PREFILL * [[1], [0], [1]], DECODE, "No replica is to prefill range 1"),
        (ENDS, DECODE, DECODE, "Replica d, which serves decode, is to prefill"),
        (ENDS, PREFILL, PREFILL, "Replica p, which serves prefill, is to decode"),
    ],
)
def test_wrong_plans_say_what_is_wrong(ends, prefill, decode, sentence):
    with pytest.raises(ParameterError, match=sentence):
        simulate(split(), handed_over(10), RangeShares(ends, prefill, decode))
    with pytest.raises(ParameterError, match="called 'luck'"):
        RangeShares(ENDS, PREFILL, DECODE, among="luck")


def test_replicas_of_both_phases_take_no_part():
    both = split()
    both = replace(
        both, replicas=(*both.replicas, replace(both.replicas[0], name="w", role="both"))
    )
    wide = np.column_stack([PREFILL, np.ones(3)])
    with pytest.raises(ParameterError, match="Replica w, which serves both"):
        simulate(
            both, handed_over(10), RangeShares(ENDS, wide, np.column_stack([DECODE, np.zeros(3)]))
        )
