"""What the shared drawing functions show: the values, the ranges, and nothing by chance."""

import io
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from hetero.errors import ParameterError
from hetero.plots import figures
from pipelines import figure_checks
from pipelines.studies import contest_figures
from pipelines.studies.league import GOODPUT, VLLM

CELLS = pd.DataFrame([[1.0, np.nan], [3.0, 4.0]], index=["a", "b"], columns=["x", "y"])


@pytest.fixture(autouse=True)
def _style():
    mpl.use("agg")
    figures.use_style()


def test_heat_map_writes_the_values_and_leaves_out_what_is_missing():
    _, axis = plt.subplots()
    figures.heat_map(CELLS, axis, annot=True, fmt=".0f", cmap="Blues")
    assert [text.get_text() for text in axis.texts] == ["1", "3", "4"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["x", "y"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert axis.collections[0].get_array().mask.ravel().tolist() == [False, True, False, False]


def test_shared_legend_names_everything_once():
    figure, axes = plt.subplots(1, 2)
    for axis, labels in zip(axes, (("a", "b"), ("b", "c")), strict=True):
        for label in labels:
            axis.plot([0, 1], label=label)
        axis.legend()
    figures.shared_legend(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert not any(axis.get_legend() for axis in axes)


def _contest() -> pd.DataFrame:
    rows = [
        ("one", "m", "w", "fast", 10.0),
        ("one", "m", "w", "slow", 5.0),
        ("one", "m", "w", "none", np.nan),
    ]
    names = ["cluster", "model", "workload", "planner", GOODPUT]
    return pd.DataFrame(rows, columns=names).assign(**{VLLM: None})


def test_winners_of_a_contest_are_framed_and_missing_plans_dashed():
    axis = contest_figures.winners_figure(_contest()).axes[0]
    assert sorted(text.get_text() for text in axis.texts) == ["-", "100", "50"]
    assert len(axis.patches) == 1


def test_fleets_that_pay_most_stand_on_top_with_a_mark_per_workload():
    rows = [
        ("a", "w", 0.5, 0.4, 0.6),
        ("b", "w", 2.0, 1.5, 2.5),
        ("b", "v", np.nan, np.nan, np.nan),
    ]
    pays = pd.DataFrame(
        rows, columns=["cluster", "workload", "mixed over homogeneous", "low", "high"]
    )
    worlds = pays[["mixed over homogeneous", "low", "high"]].head(1)
    axis = contest_figures.pays_figure(pays.assign(model="m", GPUs="g"), worlds).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a, m\ng", "b, m\ng"]
    marks = [one for one in axis.lines if one.get_marker() != "None"]
    assert sorted(x for one in marks for x in one.get_xdata()) == [0.5, 2.0]
    spans = [one[:, 0].tolist() for drawn in axis.collections for one in drawn.get_segments()]
    assert spans == [[0.4, 0.6], [1.5, 2.5]]


def test_standings_show_a_point_per_case_that_is_served():
    axis = contest_figures.standings_figure(_contest()).axes[0]
    points = [drawn.get_offsets()[:, 0].tolist() for drawn in axis.collections]
    assert [one for one in points if one] == [[100.0], [50.0]]


def test_the_same_figure_has_the_same_bytes_and_leaves_style_and_chance_alone():
    before = dict(mpl.rcParams)
    drawn = []
    for _ in range(2):
        state = np.random.get_state()[1].copy()  # noqa: NPY002
        file = io.BytesIO()
        figure = contest_figures.standings_figure(_contest())
        figure.savefig(file, format="svg", metadata={"Date": None})
        drawn.append(file.getvalue())
        assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert dict(mpl.rcParams) == before


def test_what_draws_nothing_imports_no_seaborn():
    code = "import sys, hetero, hetero.apps.cli; sys.exit('seaborn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("width", "inches", "panels"), [("column", 3.33, 2), ("page", 7.0, 4)])
def test_a_figure_for_print_keeps_its_texts_as_texts_of_seven_points(
    tmp_path, width, inches, panels
):
    figure, axes = plt.subplots(2, 4, figsize=(12, 5), sharey="row", layout="constrained")
    for k, axis in enumerate(axes.flat):
        axis.plot([0, 1], [0, k], label=f"series {k % 4} of the figure")
        axis.set_xlabel("a time that is told at length [s]", fontsize=6)
    axes[0, 0].set_ylabel("requests/s")
    axes[0, 0].imshow([[0.0, 1.0]], aspect="auto")
    figures.shared_legend(figure)
    figures.stamp(figure, "twin traces, default profile, seeds 0-4")
    with figures.paper(width):
        figures.save(figure, tmp_path / "one", png=False)
    assert figure.get_size_inches()[0] == inches
    assert figure_checks.faults(figure) == []
    assert len({round(axis.get_position().x0, 2) for axis in figure.axes}) == panels
    assert b"/FontFile2" in (tmp_path / "one.pdf").read_bytes()
    assert "seeds 0-4" in (tmp_path / "one.pgf").read_text()
    figures.save(figure, tmp_path / "other", png=False)
    assert not (tmp_path / "other.pdf").exists()
    with pytest.raises(ParameterError, match="'column' or 'page'"):
        figures.paper("slide")
