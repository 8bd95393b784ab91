"""Whose fault a failure is, and what an engine's circuit breaker makes of it."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp", reason="the serving extra is not installed")

from aiohttp import (
    ClientConnectorError,
    ClientOSError,
    ClientPayloadError,
    ConnectionTimeoutError,
    ServerDisconnectedError,
    SocketTimeoutError,
)

from hetero.apps.serving.engines import Seen
from hetero.apps.serving.faults import Failed, Fault, guilty
from hetero.apps.serving.relay import busy_or_broken
from hetero.apps.serving.settings import Backend, DispatcherLimits


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
