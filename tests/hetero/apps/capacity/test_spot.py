"""Spot machines against closed forms, hours drawn one by one, and every mix."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom

from hetero import catalog, workload
from hetero.apps.capacity import prices
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.spot import (
    Rental,
    availability,
    cheapest_mix,
    cheapest_set,
    play_hours,
    spot_risk,
    states,
)
from hetero.costs.cost import IN_PAPERS
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
    return Market(replace(listed, offers=offers, start_s=start_s), MODEL, load, IN_PAPERS)


def test_states_last_as_long_as_machines_that_are_drawn_one_by_one() -> None:
    numbers, losses, hours, down_s = [3, 2], [0.3, 2.0], 4000, 1800.0
    share, up = states(numbers, [availability(rate, down_s) for rate in losses])
    assert share.sum() == pytest.approx(1.0)
    marks = np.arange(0.0, 3600.0 * hours, 60.0)
    draws, seen = np.random.default_rng(1), []
    for n, rate in zip(numbers, losses, strict=True):
        serving = np.zeros(len(marks), np.int64)
        for place in range(n):
            for one in Rental(place, 0.0, 0.0, 3600.0 * hours).losses(rate, down_s, draws):
                serving += (marks >= one.ready_s) & (marks < one.end_s)
        seen.append(serving)
    for part, row in zip(share, up, strict=True):
        drawn = np.all(np.transpose(seen) == row, axis=1).mean()
        assert drawn == pytest.approx(part, abs=0.015)


def test_the_cheapest_set_is_the_first_of_all_in_order_of_price() -> None:
    usd, worth, tried = {"a": 3.0, "b": 2.0, "c": 4.0}, {"a": 4, "b": 2, "c": 7}, []

    def holds(counts: dict[str, int]) -> dict[str, int] | None:
        tried.append(counts)
        return counts if sum(n * worth[key] for key, n in counts.items()) >= 17 else None

    every = [dict(zip(usd, numbers, strict=True)) for numbers in product(range(5), repeat=3)]
    every = [{key: n for key, n in one.items() if n} for one in every if one["c"] < 2]
    every.sort(
        key=lambda one: (
            sum(n * usd[key] for key, n in one.items()),
            [-one.get(key, 0) for key in usd],
        )
    )
    found = cheapest_set(usd, lambda one: max(one.values()) < 5 and one.get("c", 0) < 2, holds, 999)
    assert found == tried[-1]
    assert tried == every[: len(tried)]
    assert cheapest_set(usd, lambda _: True, lambda _: None, 5) is None


def test_the_risk_is_the_mean_over_the_states() -> None:
    here = market()
    at, n = here.fluid.columns[0], 3
    found = spot_risk(here, {at: 2}, {at: n})
    there = availability(0.5, 900.0)
    share = binom.pmf(range(n + 1), n, there)
    attained = np.array([here.play({at: 2 + up}).mean for up in range(n + 1)])
    # States of less than a thousandth of the time together count as nobody served.
    attained[np.cumsum(share) < 1e-3] = 0.0
    assert found.attained == pytest.approx(share @ attained)
    assert found.usd_per_h == pytest.approx((2 + 0.4 * n * there) * here.offers[0].usd_per_h)
    assert found.time_met == pytest.approx(share[attained >= 0.9].sum())
    below = [value for value in attained if share[attained <= value].sum() >= 0.05]
    assert found.worst == pytest.approx(min(below))
    assert spot_risk(here, {at: 2}, {at: n}, found.time_met + 1e-6) is None


def test_without_losses_it_is_a_fleet_on_demand_at_another_price() -> None:
    here = market(losses_per_h=1e-9)
    at = here.fluid.columns[0]
    found = spot_risk(here, {}, {at: 5})
    assert found.attained == pytest.approx(here.play({at: 5}).mean)
    assert found.usd_per_h == pytest.approx(5 * 0.4 * here.offers[0].usd_per_h)
    assert play_hours(market(1e-9), {}, {at: 5}, hours=1)[0] > 0.9


def test_simulated_hours_lose_no_more_than_the_moments_say() -> None:
    here = market(losses_per_h=1.0)
    at = here.fluid.columns[0]
    simulated = play_hours(here, {}, {at: 5}, hours=3, seed=5)
    assert simulated == play_hours(here, {}, {at: 5}, hours=3, seed=5)
    risk = spot_risk(here, {}, {at: 5})
    # Ten minutes of too few machines in a row are the worst that a moment can be taken for.
    assert np.mean(simulated) >= risk.attained - 0.1


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99])
def test_no_mix_of_the_machines_is_cheaper(probability: float) -> None:
    here = market()
    at = here.fluid.columns[0]
    found = cheapest_mix(here, probability, simulated_hours=1)
    assert found.risk.time_met >= probability
    price = here.offers[0].usd_per_h
    expected = 0.4 * price * availability(0.5, 900.0)
    firm, spot = found.on_demand.get(at, 0), found.spot.get(at, 0)
    cost = firm * price + spot * expected
    assert found.risk.usd_per_h == pytest.approx(cost)
    better = [
        (a, b)
        for a, b in product(range(8), range(9))
        if 0 < a * price + b * expected < cost - 1e-9
        and spot_risk(here, {at: a} if a else {}, {at: b} if b else {}, probability)
    ]
    assert better == []
    assert found.risk.usd_per_h < found.on_demand_usd_per_h


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ParameterError, match="probability of 1"):
        cheapest_mix(market(), 1.0)
    plain = prices.from_catalog(["A40"], sizes=(1,))
    load = Load(CHATS, 6.0, Slo(ttft_s=2.0), 0.9, 0.05, (0,))
    with pytest.raises(ParameterError, match="spot price"):
        cheapest_mix(Market(plain, MODEL, load, IN_PAPERS))
    here = Market(plain, MODEL, load, IN_PAPERS)
    with pytest.raises(ParameterError, match="no spot price"):
        spot_risk(here, {}, {here.fluid.columns[0]: 1})


def test_the_command_mixes(tmp_path, told) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "machines:\n  - {gpu: A40, usd_per_h: 0.4, spot_usd_per_h: 0.2, losses_per_h: 0.2}\n"
    )
    found = told("size", "--rate", "1", "--seeds", "1", "--prices", path, "--spot", "0.9")
    assert found["time_that_meets_the_goal"] >= 0.9
    assert 0 <= found["carries_in_draws"] <= 1
    assert found["usd_per_h"] <= found["on_demand_alone_usd_per_h"] + 1e-9
