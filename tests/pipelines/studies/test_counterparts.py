"""Fleets of equal price: what is asked of them, what is kept, and what the frames make of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hetero.cluster.fleets import fleet
from hetero.search.portfolio import portfolio
from pipelines.studies import counterparts, league
from pipelines.studies.contest import Match, Rules, case_of
from pipelines.studies.league import ALONE, DRAWN, GOODPUT, PLAIN, PRICE, RATIO, SEARCHED

RULES = Rules(seeds=(0, 1), span_s=2.0)


def test_all_fleets_of_a_case_meet_the_same_and_run_as_planned() -> None:
    mixed = case_of(Match("helix-10", "Qwen2.5-14B", "sharegpt"), RULES)
    alike = Match("helix-10 as L4", "Qwen2.5-14B", "sharegpt")
    one = counterparts.question_of(alike, RULES, split=False)
    assert (one.cluster.gpu_counts, one.slo) == ({"L4": 8}, mixed.slo)
    assert one.trace.output_tokens.tolist() == mixed.trace.output_tokens.tolist()
    assert (one.engine.name, one.split, one.spans) == ("vllm", False, False)


def test_the_search_never_sees_the_arrivals_that_tell_its_plan(monkeypatch: Any) -> None:
    seen: list[int] = []

    def watched(*given: Any, seeds: tuple[int, ...], **more: Any) -> Any:
        seen.extend(seeds)
        return portfolio(*given, seeds=seeds, **more)

    monkeypatch.setattr(counterparts, "portfolio", watched)
    match, rules = Match("helix-10 as T4", "Qwen2.5-14B", "sharegpt"), Rules(seeds=(1,), span_s=2.0)
    row = counterparts.solved(match, rules, "quick", split=False)
    assert seen == [1002, 1003]
    assert "(both)" in row["groups"]
    assert 0 < row[PLAIN] < 1.1 * row[GOODPUT]
    larger = replace(match, model="Llama-3.1-70B")
    assert "No planner" in counterparts.solved(larger, rules, "quick", split=False)["reason"]


def test_a_run_that_is_cut_off_goes_on_and_leaves_the_same_bytes(
    monkeypatch: Any, tmp_path: Path
) -> None:
    calls = count()

    def stand_in(match: Match, rules: Rules, effort: str, *, split: bool) -> dict[str, Any]:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return match.names | {"seed": rules.seeds[0], "apart": split, GOODPUT: len(effort) / 3}

    def run(within: Path) -> pd.DataFrame:
        within.mkdir(exist_ok=True)
        of = {"helix-10": "Qwen2.5-14B"}
        return counterparts.solve(of, ["sharegpt"], RULES, effort="quick", within=within)

    monkeypatch.setattr(counterparts, "solved", stand_in)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    assert len(list((tmp_path / "cut").iterdir())) == 4
    pd.testing.assert_frame_equal(run(tmp_path / "cut"), run(tmp_path / "whole"), check_exact=True)
    assert next(calls) == 4 + 1 + 5 + 9  # of three fleets with two seeds, and with phases apart
    cut, whole = (
        {one.name: one.read_bytes() for one in (tmp_path / name).iterdir()}
        for name in ("cut", "whole")
    )
    assert cut == whole


def solved_table() -> pd.DataFrame:
    """A fleet that loses with phases together, and that wins by the best plan with them apart."""
    names = [f"current-small-12{of}" for of in ("", " as H100-SXM", " as L40S")]
    table = pd.DataFrame({"cluster": names * 3, "seed": np.repeat([0, 1, 0], 3)})
    table["apart"], table[PRICE] = table.index > 5, [fleet(one).usd_per_h for one in names] * 3
    table[GOODPUT] = [6.0, 8.0, 2.0, 9.0, 10.0, 2.5, 16.0, 7.0, np.nan]
    rates = {SEARCHED: table[GOODPUT], PLAIN: table[GOODPUT] / 2, ALONE: table[GOODPUT]}
    mixed = table["cluster"] == "current-small-12"
    rates |= {of: table[GOODPUT] * (1 + d * mixed) for d, of in enumerate(DRAWN)}
    return table.assign(model="m", workload="w", **rates)


def test_whether_a_fleet_pays_by_hand() -> None:
    table = solved_table()
    (one,) = league.pays_frame(table).to_dict("records")
    assert (one[RATIO], one["homogeneous"]) == (
        pytest.approx((6 / 8 * 9 / 10) ** 0.5),
        "7 H100-SXM",
    )
    assert one["low"] < 6 / 8 < 9 / 10 < one["high"]
    own, alike = (fleet(f"current-small-12{of}") for of in ("", " as H100-SXM"))
    assert one["per dollar spent"] == pytest.approx(one[RATIO] * alike.usd_per_h / own.usd_per_h)
    # 4 H100 of the 7, and 8 L40S of the 16.
    assert one["parts apart"] == pytest.approx((4 / 7 * 9 + 8 / 16 * 2.25) / 9)
    assert one["mixing adds [%]"] == pytest.approx(100 * (one[RATIO] / one["parts apart"] - 1))
    worlds = league.worlds_frame(table)
    drawn = [1, 2, 3, 4, 5]
    expected = [*(one[RATIO] * k for k in (1, 1, 1, *drawn)), 16 / 8]
    assert worlds[RATIO].tolist() == pytest.approx(expected)
    moves = [0, -50, 0, *(100 * (k - 1) for k in drawn), 100 * (16 / 6 - 1)]
    assert worlds["mixed moves [%]"].tolist() == pytest.approx(moves)
    assert worlds[["pays in", "loses in"]].to_numpy().tolist() == [[0, 1]] * 4 + [[1, 0]] * 5
    text = league.headline(league.pays_frame(table), worlds)
    said = ["carries 0.82 times", "loses in 1 of 1 case", "better 2.00", "its types apart 0.70"]
    said += ["err 0.82 to 4.11 by draw"]
    assert [one for one in said if one not in text] == []
