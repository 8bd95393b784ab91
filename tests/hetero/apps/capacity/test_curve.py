"""A day of machines against brute force over every way to rent them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.apps.capacity import prices
from hetero.apps.capacity.curve import LoadCurve, day
from hetero.apps.capacity.market import Market
from hetero.costs.cost import IN_PAPERS
from hetero.errors import DataError, ParameterError
from hetero.plots import days, figures
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
    drawn = days.draw(found)
    top = drawn.axes[0]
    heights = np.sum(
        [patch.get_data().values - patch.get_data().baseline for patch in top.patches], axis=0
    )
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
        day(replace_rate(market(1.0)), CURVE)


def replace_rate(here: Market) -> Market:
    return Market(here.prices, here.llm, here.load.at(1.0), IN_PAPERS)


def test_the_command_writes_the_day(tmp_path, told) -> None:
    path, picture = tmp_path / "day.csv", tmp_path / "day.svg"
    path.write_text("hour,rate_rps\n0,2\n1,6\n2,2\n")
    words = ("size", "--curve", path, "--gpu", "A40", "--seeds", "1")
    found = told(*words, "--figure", picture)
    assert found["bound_usd"] <= found["usd"]
    assert [hour["rate_rps"] for hour in found["hours"]] == [2, 6, 2]
    assert picture.read_text().startswith("<?xml")
