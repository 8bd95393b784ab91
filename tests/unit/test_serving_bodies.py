"""Bodies of requests: long strings are passed on as they came, and refused as short ones are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving.bodies import Asked, parsed
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
