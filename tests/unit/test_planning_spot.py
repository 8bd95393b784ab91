"""Spot machines against closed forms, a naive walk through the timeline, and every mix."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from hetero import catalog, workload
from hetero.apps.capacity import prices
from hetero.apps.capacity.losses import availability, timeline
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.spot import cheapest_mix, play_hours, spot_risk
from hetero.apps.cli import main
from hetero.errors import ParameterError
from hetero.question import Load
from hetero.simulator import Slo

MODEL = catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv")


def market(losses_per_h: float = 0.5, share: float = 0.4, start_s: float = 900.0) -> Market:
    listed = prices.from_catalog(["A40"], sizes=(1,))
    offers = tuple(
        replace(o, spot_usd_per_h=share * o.usd_per_h, losses_per_h=losses_per_h)
        for o in listed.offers
    )
    load = Load(CHATS, 6.0, Slo(ttft_s=2.0, tpot_s=0.12), 0.9, 0.05, (0,))
    return Market(replace(listed, offers=offers, start_s=start_s), MODEL, load)


def test_machines_serve_as_often_as_the_closed_form_says() -> None:
    numbers, losses = np.array([6, 2]), np.array([0.3, 2.0])
    hours, down_h = 20_000, 0.5
    times, up = timeline(numbers, losses, down_h, hours, seed=1)
    lengths = np.diff(times)
    assert lengths.sum() == pytest.approx(hours)
    assert np.all((up >= 0) & (up <= numbers))
    for c, (n, rate) in enumerate(zip(numbers, losses, strict=True)):
        p = availability(rate, 3600 * down_h)
        assert p == pytest.approx(1 / (1 + rate * down_h))
        for k in range(n + 1):
            seen = lengths[up[:, c] == k].sum() / hours
            assert seen == pytest.approx(binom.pmf(k, n, p), abs=0.012)


def test_a_timeline_starts_in_the_steady_state() -> None:
    first = [
        timeline(np.array([4]), np.array([1.0]), 1.0, 1, seed)[1][0, 0] for seed in range(1500)
    ]
    assert np.mean(first) == pytest.approx(4 * 0.5, abs=0.08)


def test_the_risk_is_the_mean_over_the_moments() -> None:
    here = market()
    at = here.fluid.columns[0]
    found = spot_risk(here, {at: 2}, {at: 3}, hours=300, seed=2)
    times, up = timeline(np.array([3]), np.array([0.5]), 0.25, 300, 2)
    attained, spent = np.zeros(300), np.zeros(300)
    for start, end, (n,) in zip(times[:-1], times[1:], up, strict=True):
        assert int(start) == int(np.nextafter(end, 0)) or end == start
        hour = min(int(start), 299)
        attained[hour] += (end - start) * here.play({at: 2 + int(n)}).mean
        spent[hour] += (end - start) * (2 + 0.4 * n) * here.offers[0].usd_per_h
    assert found.attained == pytest.approx(attained)
    assert found.usd_per_h == pytest.approx(spent.mean())
    assert found.goodput_rps == pytest.approx(6.0 * attained.mean())
    assert found.carried == pytest.approx((attained >= 0.9 - 1e-9).mean())
    assert found.worst == pytest.approx(np.quantile(attained, 0.05))


def test_without_losses_it_is_a_fleet_on_demand_at_another_price() -> None:
    here = market(losses_per_h=1e-9)
    at = here.fluid.columns[0]
    found = spot_risk(here, {}, {at: 5}, hours=50)
    assert found.attained == pytest.approx(here.play({at: 5}).mean)
    assert found.usd_per_h == pytest.approx(5 * 0.4 * here.offers[0].usd_per_h)
    assert play_hours(market(1e-9), {}, {at: 5}, hours=1)[0] > 0.9


def test_played_hours_lose_no_more_than_the_moments_say() -> None:
    here = market(losses_per_h=1.0)
    at = here.fluid.columns[0]
    played = play_hours(here, {}, {at: 5}, hours=3, seed=5)
    assert played == play_hours(here, {}, {at: 5}, hours=3, seed=5)
    risk = spot_risk(here, {}, {at: 5}, hours=2000)
    # Ten minutes of too few machines in a row are the worst that a moment can be taken for.
    assert np.mean(played) >= risk.attained.mean() - 0.1


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99])
def test_no_mix_of_the_machines_is_cheaper(probability: float) -> None:
    here = market()
    at = here.fluid.columns[0]
    found = cheapest_mix(here, probability, hours=400, played_hours=1)
    assert found.risk.carried >= probability
    price = here.offers[0].usd_per_h
    expected = 0.4 * price * availability(0.5, 900.0)
    firm, spot = found.on_demand.get(at, 0), found.spot.get(at, 0)
    cost = firm * price + spot * expected
    assert found.risk.usd_per_h == pytest.approx(cost, rel=0.03)
    better = [
        (a, b)
        for a, b in product(range(8), range(9))
        if 0 < a * price + b * expected < cost - 1e-9
        and spot_risk(here, {at: a} if a else {}, {at: b} if b else {}, hours=400).carried
        >= probability
    ]
    assert better == []
    assert found.risk.usd_per_h < found.on_demand_usd_per_h


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ParameterError, match="probability of 1"):
        cheapest_mix(market(), 1.0)
    plain = prices.from_catalog(["A40"], sizes=(1,))
    load = Load(CHATS, 6.0, Slo(ttft_s=2.0), 0.9, 0.05, (0,))
    with pytest.raises(ParameterError, match="spot price"):
        cheapest_mix(Market(plain, MODEL, load))
    here = Market(plain, MODEL, load)
    with pytest.raises(ParameterError, match="no spot price"):
        spot_risk(here, {}, {here.fluid.columns[0]: 1})


def test_the_command_mixes(tmp_path, capsys) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "machines:\n  - {gpu: A40, usd_per_h: 0.4, spot_usd_per_h: 0.2, losses_per_h: 0.2}\n"
    )
    words = ["size", "--rate", "1", "--seeds", "1", "--prices", str(path), "--spot", "0.9"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hours_that_meet_the_goal"] >= 0.9
    assert 0 <= found["carries_in_draws"] <= 1
    assert found["usd_per_h"] <= found["on_demand_alone_usd_per_h"] + 1e-9
