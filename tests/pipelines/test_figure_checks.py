"""Committed figures where the report shows them: letters large enough, dashes explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from hetero import paths
from hetero.errors import ParameterError
from hetero.plots import figures
from pipelines import figure_checks
from pipelines.figure_checks import SMALLEST_PT
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


PAGE_PT = 900.0  # of the report in a window of 1,280 pixels; wider figures are shown smaller
#: Dashes that neither a legend nor a caption names, and why they need no name.
PLAIN = {
    "00_quickstart/card.svg": "100 % of the target",
    "01_workloads/rignall_fig5_13.svg": "its median stands beside each",
    "05_heteroserve/fig7.svg": "100 % of the efficiency",
}


def faults(svg: str, caption: str) -> list[str]:
    """Letters below 7 pt where the page shows them, and dashes without a word of what they are."""
    root = ElementTree.fromstring(svg)
    shown = min(1.0, PAGE_PT / float(root.attrib["width"].removesuffix("pt")))
    sizes, free, named = [], set(), set()
    for node, inside in _nodes(root, ""):
        legend = "legend_" in inside
        # Letters are outlines of 100 units.
        if "text_" in inside and (found := re.search(r"scale\((\S+) ", node.get("transform", ""))):
            sizes.append(100.0 * float(found[1]) * shown)
        if found := re.search(r"stroke-dasharray: ([\d., ]+)", node.get("style", "")):
            on, off, *more = map(float, found[1].replace(",", " ").split())
            kind = "dash-dot" if more else "dashed" if on > off else "dotted"
            (named if legend else free).add(kind)
    small = [size for size in sizes if size < SMALLEST_PT - 0.01]
    said = [f"letters of {min(small):.1f} pt"] if small else []
    free -= named | {kind for kind in free if kind in caption}
    return said + [f"nothing says what is {kind}" for kind in sorted(free)]


def _nodes(node: ElementTree.Element, inside: str) -> Iterator[tuple[ElementTree.Element, str]]:
    inside = f"{inside}/{node.get('id', '')}"
    yield node, inside
    for child in node:
        yield from _nodes(child, inside)


def test_committed_figures_can_be_read_where_the_report_shows_them() -> None:
    told, seen = {}, 0
    for path in sorted(paths.results().glob("*/*/manifest.json")):
        for one in json.loads(path.read_text(encoding="utf-8"))["figures"]:
            file = path.parent / one["file"]
            seen += 1
            found = faults(file.read_text(encoding="utf-8"), one["caption"])
            if found:
                told[f"{path.parent.name}/{one['file']}"] = found
    assert seen > 150
    assert set(told) == set(PLAIN)
    assert all(one.startswith("nothing says") for found in told.values() for one in found)


@pytest.mark.parametrize(
    ("width_in", "label", "caption", "told"),
    [
        (8.0, "bound", "", []),
        (8.0, "", "The bound is dashed.", []),
        (8.0, "", "The bound is dotted.", ["nothing says what is dashed"]),
        (14.4, "bound", "", ["letters of 6.1 pt"]),
    ],
)
def test_faults_of_a_committed_figure_are_told(tmp_path, width_in, label, caption, told) -> None:  # type: ignore[no-untyped-def]
    figures.use_style()
    figure, axes = plt.subplots(figsize=(width_in, 3.0))
    axes.plot([0, 1], [0, 1], label="served")
    axes.axhline(0.5, linestyle="--", label=label)
    axes.text(0.5, 0.2, "small", fontsize=7)
    axes.legend()
    figures.save(figure, tmp_path / "one", png=False)
    plt.close(figure)
    assert faults((tmp_path / "one.svg").read_text(encoding="utf-8"), caption) == told
