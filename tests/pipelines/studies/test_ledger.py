from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ParameterError
from pipelines.studies.ledger import Order, ledger

quick = settings(max_examples=150)

SIGNS = ("<", "<=", "=", ">=", ">")
NUMERIC = [claim for claim in ledger() if claim.op not in ("order", "none")]
ORDERED = [claim for claim in ledger() if claim.op == "order"]

ranks = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4), min_size=2)
relations = st.tuples(st.sampled_from("abcdef"), st.sampled_from(SIGNS), st.sampled_from("abcdef"))


def holds(left: int, sign: str, right: int) -> bool:
    return {
        "<": left < right,
        "<=": left <= right,
        "=": left == right,
        ">=": left >= right,
        ">": left > right,
    }[sign]


def written(rank: dict[str, int], *, downwards: bool) -> str:
    """One chain of a full ranking, in either direction."""
    names = sorted(rank, key=rank.__getitem__, reverse=downwards)
    text = names[0]
    for before, name in pairwise(names):
        strict = ">" if downwards else "<"
        text += ("=" if rank[before] == rank[name] else strict) + name
    return text


@quick
@given(ranks, st.data(), st.booleans())
def test_a_full_ranking_entails_exactly_what_its_numbers_say(rank, data, downwards):
    order = Order(written(rank, downwards=downwards))
    assert order.names == rank.keys()
    left, right = data.draw(st.sampled_from(list(combinations(sorted(rank), 2))))
    for sign in SIGNS:
        expected = holds(rank[left], sign, rank[right])
        assert order.entails(Order(f"{left}{sign}{right}")) == expected


@quick
@given(st.lists(relations.filter(lambda r: r[0] != r[2]), min_size=1, max_size=6))
def test_a_partial_order_entails_what_every_ranking_that_meets_it_says(parts):
    """Its closure is exact: the truth is found by trying every ranking of the names."""
    names = sorted({name for left, _, right in parts for name in (left, right)})[:4]
    parts = [part for part in parts if part[0] in names and part[2] in names]
    if not parts:
        return
    names = sorted({name for left, _, right in parts for name in (left, right)})
    every = [{}]
    for name in names:
        every = [{**rank, name: k} for rank in every for k in range(len(names))]
    meeting = [r for r in every if all(holds(r[a], s, r[b]) for a, s, b in parts)]
    text = ",".join("".join(part) for part in parts)
    if not meeting:
        with pytest.raises(ParameterError, match="above itself"):
            Order(text)
        return
    order = Order(text)
    for left, right in combinations(names, 2):
        for sign in SIGNS:
            truth = all(holds(rank[left], sign, rank[right]) for rank in meeting)
            assert order.entails(Order(f"{left}{sign}{right}")) == truth


@quick
@given(st.sampled_from(ORDERED), st.data())
def test_a_verdict_on_an_order_depends_on_the_ranking_alone(claim, data):
    names = sorted(Order(claim.expected).names)
    values = st.lists(st.integers(0, 5), min_size=len(names), max_size=len(names))
    rank = dict(zip(names, data.draw(values), strict=True))
    if len(names) < 2:
        return
    up = claim.judge(written(rank, downwards=False))
    assert claim.judge(written(rank, downwards=True)) == up
    # More things ranked below everything else change nothing.
    assert claim.judge(written({**rank, "another": -1}, downwards=True)) == up


@quick
@given(st.sampled_from(NUMERIC), st.data())
def test_what_reproduces_a_number_is_one_interval(claim, data):
    around = max(abs(end) for end in (claim.low, claim.high) if end is not None) or 1.0
    numbers = st.floats(-3 * around, 3 * around)
    low, middle, high = sorted(data.draw(st.tuples(numbers, numbers, numbers)))
    if claim.judge(low) == claim.judge(high) == "reproduced":
        assert claim.judge(middle) == "reproduced"
    # Values that share a direction are one interval too.
    if "not reproduced" not in (claim.judge(low), claim.judge(high)) and claim.direction:
        assert claim.judge(middle) != "not reproduced"


@quick
@given(st.sampled_from([c for c in NUMERIC if c.direction]), st.floats(-1e6, 1e6))
def test_no_value_on_the_wrong_side_reproduces(claim, value):
    limit = float(claim.direction.lstrip("<>="))
    wrong = value < limit if claim.direction[0] == ">" else value > limit
    if wrong:
        assert claim.judge(value) == "not reproduced"
