"""Clients have the rate, the number and the share that they were given."""

from __future__ import annotations

import bisect
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from hetero.apps.serving.accounts import Account
from hetero.apps.serving.bodies import Asked
from hetero.apps.serving.dispatcher import Dispatcher, turn
from hetero.apps.serving.faults import Refusal
from hetero.apps.serving.settings import Client


def account(**settings):
    return Account(Client(name="c", key_env="C", **settings))


def fill(places, *accounts):
    """Let all ask whenever they may; how many each has once some have left, again and again."""
    for _ in range(1000):
        for one in accounts:
            one.inside -= one.inside // 200
        refused = 0
        while refused < len(accounts):
            refused = 0
            for one in accounts:
                try:
                    one.check(places - sum(x.inside for x in accounts), alone=False)
                except Refusal:
                    refused += 1
                else:
                    one.inside += 1
    return [one.inside for one in accounts]


def test_clients_that_all_want_more_have_places_by_their_weights():
    assert fill(900, account()) == [800]
    assert fill(1700, account(), account()) == pytest.approx([800, 800], abs=10)
    once, twice = fill(2500, account(), account(weight=2.0))
    assert twice == pytest.approx(2 * once, rel=0.15)


def test_who_wants_little_finds_a_place():
    greedy, modest = account(), account()
    fill(90, greedy)
    modest.check(90 - greedy.inside, alone=False)
    greedy.check(1, alone=True)  # there is nobody to leave room for


def test_a_rate_is_kept_over_any_time_but_for_one_second_at_once():
    one = account(rps=4.0)
    passed = 0
    for k in range(1000):  # 100 per second, for 10 s
        with suppress(Refusal):
            one.arrive(k / 100)
            passed += 1
    assert 40 <= passed <= 44


def test_of_what_is_held_small_priorities_go_first_then_clients_that_are_served_least():
    idle, busy = account(), account()
    busy.away = 3
    asked = [(busy, 0, 0), (idle, 0, 2), (busy, 1, 0), (idle, 2, 1)]
    waiting = [
        SimpleNamespace(account=who, row=row, asked=SimpleNamespace(model="m", priority=priority))
        for who, row, priority in asked
    ]
    house = SimpleNamespace(held=[], models={"m": None}, accounts={b"i": idle, b"b": busy})
    for one in waiting:
        bisect.insort(house.held, one, key=turn)
    left = []
    while house.held:
        left.append(Dispatcher._first(house, set()))
        house.held.remove(left[-1])
    assert [(one.asked.priority, one.row) for one in left] == [(0, 0), (0, 1), (1, 2), (2, 0)]
    waiting[1].asked.priority = 0
    house.held = sorted(waiting, key=turn)
    assert Dispatcher._first(house, set()) is waiting[1]


@pytest.mark.parametrize(
    ("given", "found"), [(3, 3), (-2, 0), (True, 0), ("1", 0), (10**9, 2**15 - 1)]
)
def test_a_request_may_only_stand_back(given, found):
    assert Asked.of({"model": "m", "prompt": "x", "priority": given}).priority == found
