"""Requests: engines get what clients sent, and a failure is laid at whose fault it is."""

from __future__ import annotations

import bisect
import errno
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from aiohttp import (
    ClientConnectorError,
    ClientOSError,
    ClientPayloadError,
    ConnectionTimeoutError,
    ServerDisconnectedError,
    SocketTimeoutError,
)

from hetero.apps.serving.app import busy_or_broken
from hetero.apps.serving.bodies import Asked, parsed
from hetero.apps.serving.dispatcher import Dispatcher, turn
from hetero.apps.serving.engines import Seen
from hetero.apps.serving.faults import Failed, Fault, Refusal, guilty
from hetero.apps.serving.settings import Backend, DispatcherLimits

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
    asked = Asked.of(parsed(bytearray(json.dumps(body, ensure_ascii=escaped).encode())))
    sent = json.loads(asked.forwarded("other", usage=False))
    assert sent == body | {"model": "other"}
    assert asked.prompt.characters >= len(prompt)


@pytest.mark.parametrize("length", [10, 5000])
@pytest.mark.parametrize("bad", ["\\ud800", "\n", "\x00", "\\q", "\\u12", '"x', "\\"])
def test_strings_that_are_no_json_are_refused(bad, length):
    content = '{"prompt": "' + "a" * length + bad + '"}'
    with pytest.raises(Refusal) as refused:
        Asked.of(parsed(bytearray(content.encode())))
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    "content", [b'{"t":NaN}', b'{"t":-Infinity}', b'{"t":1e999}', b'{"t":"\xff"}', b"[" * 40_000]
)
def test_bodies_that_are_no_json_by_the_letter_are_refused(content):
    with pytest.raises(Refusal, match="no JSON"):
        Asked.of(parsed(bytearray(content)))


@pytest.mark.parametrize(("given", "found"), [(3, 3), (-100, 0), (10**9, 2**15 - 1)])
def test_a_request_may_only_stand_back(given, found):
    asked = Asked.of({"model": "m", "prompt": "x", "priority": given})
    sent = json.loads(asked.forwarded("m", usage=False))
    assert (asked.priority, sent["priority"]) == (found, found)


@pytest.mark.parametrize("given", ["-100", -100.0, True, [1]])
def test_a_priority_that_engines_would_read_in_their_own_way_is_refused(given):
    with pytest.raises(Refusal, match="a whole number"):
        Asked.of({"model": "m", "prompt": "x", "priority": given})


def test_of_what_is_held_small_priorities_go_first_then_the_oldest():
    dispatcher = SimpleNamespace(held=[], models={"m": None, "n": None})
    for priority, row, model in ((0, 1, "m"), (0, 0, "m"), (1, 2, "m"), (0, 3, "n"), (2, 4, "n")):
        asked = SimpleNamespace(model=model, priority=priority)
        bisect.insort(dispatcher.held, SimpleNamespace(row=row, asked=asked), key=turn)
    assert Dispatcher._first(dispatcher, {"m"}).row == 3
    assert Dispatcher._first(dispatcher, {"m", "n"}) is None
    left = []
    while (one := Dispatcher._first(dispatcher, set())) is not None:
        left.append(one.row)
        dispatcher.held.remove(one)
    assert left == [0, 1, 3, 2, 4]


def connector(number):
    return ClientConnectorError(SimpleNamespace(ssl=None), OSError(number, "no"))


@pytest.mark.parametrize(
    ("error", "sent", "fault"),
    [
        (connector(errno.EMFILE), False, Fault.OWN),
        (connector(errno.ENFILE), False, Fault.OWN),
        (connector(errno.ECONNREFUSED), False, Fault.GONE),
        (connector(errno.EPERM), False, Fault.ENGINE),
        (ConnectionTimeoutError(), False, Fault.OWN),
        (SocketTimeoutError(), False, Fault.ENGINE),
        (SocketTimeoutError(), True, Fault.ENGINE),
        (TimeoutError(), False, Fault.ENGINE),
        (TimeoutError(), True, Fault.NOBODY),  # an answer that came piece by piece, or was not read
        (ClientPayloadError(), True, Fault.ENGINE),
        (ServerDisconnectedError(), False, Fault.ENGINE),
        (ClientOSError(errno.ECONNRESET, "lost"), False, Fault.ENGINE),
    ],
)
def test_each_error_of_a_connection_has_its_culprit(error, sent, fault):
    failed = Failed.by(error, "a", lost=False, begun=sent, sent=sent)
    assert failed.fault is fault
    # Only what may have been idle for too long is asked again.
    idle = isinstance(error, ServerDisconnectedError) or type(error) is ClientOSError
    assert failed.stale is idle
    assert not Failed.by(error, "a", lost=False, begun=True, sent=sent).stale


def test_what_several_engines_fail_alike_is_nobodys_fault():
    failed = {"a": "engine_error", "b": "engine_error", "c": "engine_timeout"}
    assert guilty(failed, answered=True) == ["c"]
    assert guilty(failed, answered=False) == []


def seen(**limits):
    backend = Backend(name="a", url="http://127.0.0.1:1", step="s.json", kv_tokens=1000)
    return Seen(backend, DispatcherLimits(failures=2, **limits), 0)


def test_one_request_repeated_counts_once_and_the_last_engine_stays():
    one = seen()
    for _ in range(5):
        one.ill(0.0, 17, last=False)
    assert one.up
    one.ill(0.0, 18, last=False)
    assert not one.up
    last = seen()
    for k in range(20):
        last.ill(0.0, k, last=True)
    assert last.up


def test_a_health_check_that_the_dispatcher_was_unable_to_make_says_nothing():
    one = seen()
    for _ in range(5):
        one.probed(0.0, Fault.OWN)
    assert one.up
    one.probed(0.0, Fault.GONE)
    assert not one.up
    one.probed(100.0, None)
    assert one.up


@pytest.mark.parametrize("after", ["nan", "inf", "1e400", "-5", "1e9", "soon"])
def test_a_full_engine_asks_for_a_second_to_an_hour(after):
    failed = busy_or_broken("a", SimpleNamespace(status=503, headers={"retry-after": after}))
    assert failed.fault is Fault.NOBODY
    assert 1 <= int(failed.refusal.answer().headers["retry-after"]) <= 3600
