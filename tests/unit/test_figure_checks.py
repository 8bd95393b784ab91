import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from hetero.errors import ParameterError
from hetero.plots import figures
from pipelines import figure_checks
from pipelines.studies.results import ResultFolder


@pytest.fixture(autouse=True)
def _style():
    mpl.use("agg")
    figures.use_style()


def drawn():
    """A figure without a fault, and its axes."""
    figure, axes = plt.subplots(figsize=(4.0, 3.0))
    axes.plot([0, 1, 2], [0, 1, 2], "o-", label="rising")
    axes.set(xlabel="time [s]", ylabel="rate [1/s]", xlim=(0, 2))
    return figure, axes


def test_a_figure_that_can_be_read_has_no_faults():
    figure, axes = drawn()
    axes.legend(loc="upper left")
    # Neither what is not drawn counts, nor ticks out of view.
    axes.text(1.0, 1.0, "unseen", fontsize=3, visible=False)
    axes.set_xticks([0, 1, 2, 2.0001, 50])
    axes.set_xlim(0, 2)
    figures.stamp(figure, "twin traces")
    assert figure_checks.faults(figure) == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda axes: axes.text(1, 0.2, "tiny", fontsize=6), "'tiny' has 6 pt"),
        (lambda axes: axes.figure.text(0.9, 0.5, "far too long"), "'far too long' is cut off"),
        (
            lambda axes: (axes.text(1.5, 0.5, "one"), axes.text(1.5, 0.5, "two")),
            "'one' lies on 'two'",
        ),
        (lambda axes: axes.legend(loc="center"), "a legend lies on data in panel 0"),
        (lambda axes: axes.set_xlabel(""), "no x axis has a title"),
        (
            lambda axes: (axes.bar(1, 1.5, 1.5, label="bar"), axes.legend(loc="lower center")),
            "a legend lies on data in panel 0",
        ),
        (
            lambda axes: (axes.scatter(1, 0.3, label="point"), axes.legend(loc="lower center")),
            "a legend lies on data in panel 0",
        ),
    ],
)
def test_every_fault_is_told(spoil, fault):
    figure, axes = drawn()
    spoil(axes)
    assert figure_checks.faults(figure) == [fault]


def test_what_is_switched_off_is_not_read():
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.0, 3.0))
    left.set(xlabel="time [s]", ylabel="rate [1/s]")
    right.axis("off")
    right.set_title("a network")
    assert figure_checks.faults(figure) == []
    right.set(xlabel="unseen", visible=True)
    left.set_xlabel("")
    assert figure_checks.faults(figure) == ["no x axis has a title"]


def test_faults_stop_the_smoke_profile_alone():
    figure, axes = drawn()
    axes.set_ylabel("")
    result = ResultFolder("01_workloads", "", "smoke", "twin")
    with pytest.raises(ParameterError, match="'01_workloads/bad' has 1 fault: no y axis"):
        result.figure(figure, "bad", caption="")
    ResultFolder("01_workloads", "", "default", "twin").figure(figure, "bad", caption="")
