from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero import workload
from hetero.planners.rignall.divider import divide
from hetero.planners.rignall.rates import occupied
from hetero.workload.lengths import ranges
from pipelines.studies import island_inner_loop as study
from pipelines.studies import island_inner_loop_figures as draw
from pipelines.studies.island_evaluator import evaluate
from pipelines.studies.island_inner_loop import LAYOUTS, OTHERS, SHOWN

WIDTH, LENGTHS = 2000, 8


@pytest.fixture(scope="module")
def solved() -> dict[tuple[str, str], study.Solution]:
    return study.solutions(WIDTH)


@pytest.fixture(scope="module")
def evaluated(solved):
    lengths = occupied(ranges(study.INPUT, 1, limit_tokens=study.LIMIT))
    single = study.islands("thesis", WIDTH).on(lengths)
    return {
        name: evaluate(solved["thesis", name].plan, single.rates(LAYOUTS[name])) for name in "ab"
    }


def test_quirks_change_what_a_model_with_them_mended_says():
    table = study.quirks_frame()
    assert table["oddity mended"].iloc[-1] == "all mended"
    assert len(table) == 12
    usual, mended = (
        study.latency("H20", kept).decode(4096, 16, tp=4, gpus=64, output_tokens=1000).tpot_ms
        for kept in (study.FAITHFUL, study.CORRECTED)
    )
    change = 100 * (mended / usual - 1)
    assert table["decode step, H20 [%]"].iloc[-1] == pytest.approx(change)
    fig = draw.quirks_figure(table)
    assert [axis.get_title() for axis in fig.axes] == [f"{what} [%]" for what in study.SEEN]


def test_the_most_divided_prefill_wins_as_printed():
    measured = study.benchmark64("H20", "prefill", "printed", LENGTHS)
    assert measured.length_tokens[[0, -1]].tolist() == [16, 8192]
    never, partly = study.fitting(study.benchmark64("H20", "decode", "thesis", LENGTHS))
    table = study.best64_frame(LENGTHS).set_index("GPU")
    assert table["decode configurations that never fit"]["H20"] == never
    assert table["that do not fit some lengths"]["H20"] == never + partly
    five, kinds, misfits = study.parallelism_claims(table.reset_index())
    won = table["tp64 dp1 best above 128, printed [% of lengths]"] == 100
    assert five[:2] == ("rignall-5", won.mean())
    assert kinds[1] == table["decode, printed"].nunique()
    assert misfits[1] == table["decode configurations that never fit"].sum()


def test_solutions_use_every_island(solved):
    table = study.solution_frame(solved)
    assert len(table) == 16
    for (_, name), each in solved.items():
        assert sum(study.count(each.plan, phase) for phase in study.PHASES) == sum(
            LAYOUTS[name].values()
        )
        assert study.largest(each.plan, "decode") in {island.size for island in LAYOUTS[name]}
        assert 0 <= study.mismatch(each.plan) < 1
        assert -1 <= study.resemblance(each.plan) <= 1
    splits = {claim: value for claim, value, *_ in study.split_claims(solved)}
    assert list(splits) == [f"rignall-8{letter}" for letter in "abcdef"]
    a = solved["thesis", "a"].plan
    assert splits["rignall-8a"] == study.count(a, "decode") / study.count(a, "prefill")
    nine, twenty = study.order_claims(solved)
    assert sorted(nine[1].replace("=", "<").split("<")) == list("abcd")
    assert all(f"{reading}: " in nine[3] for reading in OTHERS)
    assert twenty[2] == "fig52_assignment"


def test_islands_that_hold_no_weights_are_idle_where_these_must_fit():
    idle = study.idle("fitting", "prefill", WIDTH)
    assert set(study.idle("thesis", "prefill", WIDTH)) < set(idle)


def test_evaluation_of_single_lengths(evaluated):
    table = study.evaluation_frame(evaluated)
    assert len(table) == 4
    above, below = study.halves(evaluated["a"], "prefill")
    assert min(above, below) >= 0
    columns = ["above the model below", "below the model above"]
    row = table.iloc[0]
    for value, column in zip((above, below), columns, strict=True):
        assert row[f"evaluated {column} the middle [% of ranges]"] == 100 * value


def test_a_simulated_plan_sustains_at_most_a_little_more_than_it_promises():
    trace = workload.load("azure2023_code", "twin")
    row, plan = study.replay(trace, "code", 3200, True, 300, 0)
    assert row["plan [requests/s]"] == plan.served_rps
    assert row["mean output"] == "per range"
    sustained = [value for name, value in row.items() if name.startswith("sustained")]
    assert len(sustained) == 3
    other = row | {"mean output": "one for all"}
    axis = draw.replay_figure(pd.DataFrame([other, row])).axes[0]
    heights = np.array([bar.get_height() for bar in axis.containers[0]])
    assert heights.tolist() == pytest.approx([sustained[0]] * 2)
    labels = [text.get_text() for text in axis.get_xticklabels()]
    assert labels == ["code\nW = 3200\none mean output", "code\nW = 3200\noutput per range"]


def test_figures_have_a_panel_per_gpu_or_layout(solved, evaluated):
    layouts = [f"layout ({name})" for name in LAYOUTS]
    assert [axis.get_title() for axis in draw.prefill64_figure(LENGTHS).axes[:6]] == list(SHOWN)
    assert [axis.get_title().split(":")[0] for axis in draw.decode64_figure(LENGTHS).axes] == list(
        SHOWN
    )
    for fig in (
        draw.readings_figure(solved),
        draw.rates_figure(solved),
        draw.assignment_figure(solved, WIDTH),
        draw.throughput_figure(solved, WIDTH),
    ):
        assert [axis.get_title() for axis in fig.axes[:4]] == layouts
    for axis in draw.assignment_figure(solved, WIDTH).axes:  # islands give out their whole time
        assert sum(p.get_height() for bars in axis.containers for p in bars) == pytest.approx(100)
    assert [axis.get_title() for axis in draw.evaluation_figure(evaluated).axes] == layouts[:2]
    where = study.islands("thesis", WIDTH).ranges
    axis = draw.lengths_figure(where, WIDTH).axes[0]
    assert sum(bar.get_height() for bar in axis.patches) * WIDTH == pytest.approx(100)
    sizes = {skew: divide(100, 5, skew) for skew in (-5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0)}
    left, right = draw.division_figure(sizes).axes
    assert sum(bar.get_height() for bar in left.containers[0]) == 100
    assert right.lines[0].get_xdata().tolist() == list(sizes)
