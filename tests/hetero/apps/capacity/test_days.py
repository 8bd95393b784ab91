"""Days of machines: against brute force over every way to rent, and under an autoscaler."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.apps.capacity import prices
from hetero.apps.capacity.autoscale import Policy, autoscaled, day_of, rentals, short_share
from hetero.apps.capacity.curve import DayPlan, LoadCurve, day
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.spot import Rental
from hetero.costs.cost import IN_PAPERS
from hetero.errors import DataError, ParameterError
from hetero.plots import answers, figures
from hetero.question import Load
from hetero.simulator import Slo

MODEL = catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv")
CURVE = LoadCurve((2.0, 7.0, 7.0, 2.0, 12.0, 2.0))


def market(discount: float, start_s: float = 600.0) -> Market:
    listed = prices.from_catalog(["A40"], sizes=(1,))
    offers = tuple(replace(o, reserved_usd_per_h=discount * o.usd_per_h) for o in listed.offers)
    load = Load(CHATS, CURVE.peak_rps, Slo(ttft_s=2.0, tpot_s=0.12), 0.9, 0.05, (0,))
    return Market(replace(listed, offers=offers, start_s=start_s), MODEL, load, IN_PAPERS)


@pytest.mark.parametrize("discount", [1.0, 0.75, 0.4])
@pytest.mark.parametrize("start_s", [0.0, 1800.0])
def test_no_way_to_rent_one_kind_of_machine_is_cheaper(discount: float, start_s: float) -> None:
    here = market(discount, start_s)
    at = here.fluid.columns[0]
    price = here.offers[0].usd_per_h
    need = []
    for rate in CURVE.rates_rps:
        n = 1
        while not here.sustains({at: n}, here.load.at(rate)):
            n += 1
        need.append(n)
    best = np.inf
    most = max(need)
    for reserved in range(most + 1):
        # By the hour at least what is missing; keeping a machine on may save its next start.
        options = [range(max(n - reserved, 0), most - reserved + 1) for n in need]
        for rented in product(*options):
            starts = sum(max(rented[h] - rented[h - 1], 0) for h in range(len(rented)))
            usd = price * (
                discount * len(need) * reserved + sum(rented) + starts * start_s / 3600.0
            )
            best = min(best, usd)
    found = day(here, CURVE)
    assert found.usd == pytest.approx(best)
    assert found.bound_usd <= found.usd <= found.static_usd + 1e-9
    for hour, rate in enumerate(CURVE.rates_rps):
        assert here.sustains(found.machines(hour), here.load.at(rate))
    if discount == 0.4 and start_s:
        assert found.reserved


@pytest.mark.parametrize("model", ["Llama-3-8B", "LLaMA-1-30B"])
def test_machines_that_others_outdo_are_left_out_and_no_optimum_changes(model: str) -> None:
    load = Load(CHATS, 20.0, Slo(ttft_s=2.0, tpot_s=0.12))
    here = Market(prices.from_catalog().limited({"A40": 3}), catalog.llm(model), load)
    full, lean = (here.program(parts=(3, 2), lean=lean) for lean in (False, True))
    assert len(lean.columns) < len(full.columns) / 2
    assert any(kind.machine.gpu.name == "A40" for kind in lean.kinds)
    for rate in (0.5, 3.0, 20.0):
        assert lean.cheapest(rate).usd_per_h == pytest.approx(full.cheapest(rate).usd_per_h)


def test_the_table_and_the_figure_show_every_hour(tmp_path) -> None:
    found = day(market(0.75), CURVE)
    assert len(found.tight) == 3
    assert 4 in found.tight or found.outcomes[4].mean > min(one.mean for one in found.outcomes)
    assert len(found.draws) == 24
    assert "tightest hours" in str(found)
    frame = found.table().to_frame()
    assert list(frame["load [requests/s]"]) == list(CURVE.rates_rps)
    assert frame["price [$/h]"].sum() <= found.usd + 1e-9
    figures.use_style()
    drawn = answers.day(found)
    bars = (patch.get_data() for patch in drawn.axes[0].patches)
    heights = np.sum([bar.values - bar.baseline for bar in bars], axis=0)
    assert list(heights) == [sum(found.machines(hour).values()) for hour in range(6)]
    figures.close(drawn)


def test_curves_come_from_files(tmp_path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("hour,rate_rps\n0,2.5\n1,4\n")
    assert LoadCurve.load(path).rates_rps == (2.5, 4.0)
    for text, said in (
        ("hour,rate\n0,2\n", "column is missing"),
        ("hour,rate_rps\n1,2\n", "hours 0, 1, 2"),
        ("hour,rate_rps\n0,-2\n", "a number > 0"),
        ("hour,rate_rps\n", "one row per hour"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            LoadCurve.load(path)
    with pytest.raises(DataError, match="no such file"):
        LoadCurve.load(tmp_path / "none.csv")
    with pytest.raises(ParameterError, match="make it for the peak"):
        day(replace(market(1.0), load=Load(CHATS, 1.0)), CURVE)


def test_the_command_writes_the_day(tmp_path, told) -> None:
    path, picture = tmp_path / "day.csv", tmp_path / "day.svg"
    path.write_text("hour,rate_rps\n0,2\n1,6\n2,2\n")
    found = told("size", "--curve", path, "--gpu", "A40", "--seeds", "1", "--figure", picture)
    assert found["bound_usd"] <= found["usd"]
    assert [hour["rate_rps"] for hour in found["hours"]] == [2, 6, 2]
    assert picture.read_text().startswith("<?xml")


STEP = LoadCurve((2.0, 8.0, 8.0))
AT = (0, (1,))


@pytest.fixture(scope="module")
def stepped() -> DayPlan:
    listed = prices.from_catalog(["A40"], sizes=(1,))
    offers = tuple(
        replace(o, usd_per_h=1.0, reserved_usd_per_h=0.9, spot_usd_per_h=0.5, losses_per_h=1.0)
        for o in listed.offers
    )
    load = Load(CHATS, STEP.peak_rps, Slo(ttft_s=2.0, tpot_s=0.12), 0.9, 0.05, (0,))
    listed = replace(listed, offers=offers, start_s=400.0)
    return day(Market(listed, catalog.llm("Llama-3-8B"), load, IN_PAPERS), STEP)


@pytest.mark.parametrize("start_s", [0.0, 400.0])
def test_after_a_step_machines_are_too_few_for_the_start_up_time(start_s: float) -> None:
    even = np.concatenate([np.arange(0, 3600, 0.5), np.arange(3600, 3 * 3600, 0.125)])
    policy = Policy(target=1.0, period_s=1.0, window_s=1.0)
    steps = policy.asked(even, STEP, np.arange(1, 9) / 4)
    assert steps == [(0.0, 1), (3601.0, 4)]  # it sees the step a period later
    found = rentals(steps, start_s, policy.drain_s, STEP.end_s)
    assert [one.ready_s for one in found] == [0.0, *[3601.0 + start_s] * 3]
    late = short_share({AT: found}, {AT: [1, 4, 4]})
    assert late == pytest.approx((1.0 + start_s) / STEP.end_s)


def test_fewer_are_asked_for_after_the_time_that_it_holds_on() -> None:
    even = np.concatenate([np.arange(0, 3600, 0.125), np.arange(3600, 7200, 0.5)])
    policy = Policy(target=0.5, period_s=10.0, window_s=20.0, hold_s=300.0)
    curve, shares = LoadCurve((8.0, 2.0)), np.arange(1, 9) / 4
    # A window with a quarter, or a half, of the arrivals is whole 20 s, or 10 s, after the step.
    assert policy.asked(even, curve, shares) == [(0.0, 8), (3910.0, 5), (3920.0, 2)]
    assert policy.asked(even, curve, shares[:6], least=3) == [(0.0, 6), (3910.0, 5), (3920.0, 3)]


def test_a_place_is_taken_again_once_it_is_drained_and_the_newest_goes_first() -> None:
    found = rentals([(0.0, 2), (100.0, 1), (120.0, 2), (500.0, 1)], 30.0, 60.0, 1000.0)
    assert found == [
        Rental(0, 0.0, 0.0, 1000.0),
        Rental(1, 0.0, 0.0, 100.0),
        Rental(2, 120.0, 150.0, 500.0),  # the other place drains until 160 s
    ]
    cancelled = rentals([(0.0, 1), (100.0, 2), (120.0, 1)], 30.0, 60.0, 1000.0)
    assert [one.serves for one in cancelled] == [True, False]


def test_a_day_has_the_rates_of_its_curve(stepped: DayPlan) -> None:
    trace = day_of(stepped.market.load, STEP, seed=1)
    counts = np.histogram(trace.arrival_s, bins=3600.0 * np.arange(4))[0]
    expected = 3600 * np.array(STEP.rates_rps)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    assert counts.sum() == len(trace)


def test_a_day_beside_the_optimum_and_the_constant_fleet(stepped: DayPlan) -> None:
    found = autoscaled(stepped)
    scaled, hourly, constant = found.courses
    assert constant.usd == pytest.approx(stepped.static_usd)
    assert (constant.starts, constant.short, hourly.short) == (0, 0, 0)
    # A start is paid for in both; the machines of the first hour are there already.
    assert stepped.usd <= hourly.usd + 1e-9
    assert stepped.reserved
    for one in (scaled, hourly):
        kept_h = 3 * sum(stepped.reserved.values())
        assert one.usd == pytest.approx(one.gpu_hours - 0.1 * kept_h)
    # Within its window the step is seen; then the machines start.
    assert 400 <= scaled.short * STEP.end_s <= 400 + 75
    assert scaled.worst < scaled.attained < hourly.attained
    slower = autoscaled(stepped, Policy(weights_gbs=0.02))
    assert slower.start_s == 400 + stepped.market.llm.weight_bytes("fp16") / 2e7
    assert slower.courses[0].attained < scaled.attained
    assert "autoscaler" in str(found)


def test_machines_at_spot_prices_are_lost(stepped: DayPlan) -> None:
    firm, spot = (autoscaled(stepped, Policy(spot=spot)).courses[0] for spot in (False, True))
    kept_h = 3 * sum(stepped.reserved.values())
    assert spot.usd == pytest.approx(0.9 * kept_h + 0.5 * (spot.gpu_hours - kept_h))
    assert spot.lost > firm.lost == 0
    assert spot.short > firm.short
    assert spot.attained < firm.attained
    with pytest.raises(ParameterError, match="cannot follow"):
        autoscaled(stepped, Policy(weights_gbs=0.004))


def test_the_command_shows_the_day(tmp_path, told, refused) -> None:
    file = tmp_path / "day.csv"
    file.write_text("hour,rate_rps\n0,1\n1,4\n")
    common = ["size", "--gpu", "A40", "--slo", "ttft=2s,tpot=120ms", "--seeds", "1"]
    scaled = ["--autoscale", "0.8", "--weights-gbs", "1"]
    found = told(*common, "--curve", file, *scaled)
    assert found["over_the_day"][0]["name"] == "autoscaler"
    assert found["autoscaler"]["start_s"] == pytest.approx(300 + 16.06, abs=0.01)
    for wrong in ([*scaled, "--rate", "4"], ["--curve", file, "--on-spot"]):
        assert "Resolve: give --" in refused(*common, *wrong)
