"""Bodies of requests: long strings are passed on as they came, and refused as short ones are."""

from __future__ import annotations

import bisect
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving.bodies import Asked, parsed
from hetero.apps.serving.dispatcher import Dispatcher, turn
from hetero.apps.serving.faults import Refusal

PIECES = st.lists(
    st.sampled_from(['"', "\\", "\n", "\x01", "é", "😀", "{", "word ", "\u2028"]), max_size=6
)
TEXTS = st.tuples(PIECES, st.sampled_from([1, 900, 4000])).map(lambda x: "".join(x[0]) * x[1])
VALUES = st.recursive(
    st.one_of(
        TEXTS,
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)


@given(VALUES, TEXTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_engines_get_is_what_clients_sent(value, prompt, escaped):
    body = {"model": "m", "prompt": prompt, "more": value, "stream": True}
    asked = Asked.of(*parsed(bytearray(json.dumps(body, ensure_ascii=escaped).encode())))
    sent = json.loads(b"".join(asked.forwarded("other", usage=False)))
    assert sent == body | {"model": "other"}
    assert asked.prompt.characters >= len(prompt)


@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("bad", ["\\ud800", "\n", "\x00", "\\q", "\\u12", '"x', "\\"])
def test_long_strings_are_refused_as_short_ones(bad, length):
    content = '{"prompt": "' + "a" * length + bad + '"}'
    with pytest.raises(Refusal) as refused:
        Asked.of(*parsed(bytearray(content.encode())))
    assert refused.value.code == "invalid_json"


def test_a_long_string_is_not_written_anew():
    prompt = "a\\u00e9\\/" * 1000
    asked = Asked.of(*parsed(bytearray(f'{{"prompt": "{prompt}", "n": 1}}'.encode())))
    assert prompt.encode() in asked.rest


@pytest.mark.parametrize(
    ("given", "found"), [(3, 3), (-2, 0), (True, 0), ("1", 0), (10**9, 2**15 - 1)]
)
def test_a_request_may_only_stand_back(given, found):
    assert Asked.of({"model": "m", "prompt": "x", "priority": given}).priority == found


def test_of_what_is_held_small_priorities_go_first_then_the_oldest():
    house = SimpleNamespace(held=[], models={"m": None, "n": None})
    for priority, row, model in ((0, 1, "m"), (0, 0, "m"), (1, 2, "m"), (0, 3, "n"), (2, 4, "n")):
        asked = SimpleNamespace(model=model, priority=priority)
        bisect.insort(house.held, SimpleNamespace(row=row, asked=asked), key=turn)
    assert Dispatcher._first(house, {"m"}).row == 3
    assert Dispatcher._first(house, {"m", "n"}) is None
    left = []
    while (one := Dispatcher._first(house, set())) is not None:
        left.append(one.row)
        house.held.remove(one)
    assert left == [0, 1, 3, 2, 4]
