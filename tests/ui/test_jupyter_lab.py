"""The notebooks that people meet first, in a real JupyterLab."""

from __future__ import annotations

import math
from pathlib import Path

import nbformat
import pytest

from pipelines import source
from tests.ui.driven_lab import THEMES, Lab, Notebook

pytestmark = pytest.mark.slow

SEEN = ("00_quickstart", "14_explorer")  # what they show is tested, too
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}

# Of the explorer: whether the last of a menu is chosen; its figure, and what it says below.
LAST = "() => document.activeElement.selectedOptions?.[0].nextSibling === null"
SHOWN = "at => at.querySelector('img').src + at.querySelector('.widget-html').innerText"
TYPED = {"requests/s": "0.3", "TTFT [s]": "2.5", "TPOT [ms]": "70"}

# What people look at, one cell each.
OBJECTS = """\
from hetero import catalog, cluster, workload; catalog.gpu("H100-SXM")
catalog.llm("Llama-3-8B")
fleet = cluster.cluster("xiong-v100-a800"); fleet
chats = workload.load("azure2023_conv").head(500); chats
from hetero.latency import for_gpu; for_gpu(catalog.gpu("L4"), catalog.llm("Llama-3-8B"))
from hetero.planners.xiong import tensor_parallel
plan = tensor_parallel.search(fleet, catalog.llm("Llama-3-8B"), chats.head(100)); plan
plan.best[0]
from hetero.engines import replicated
deployed = replicated(fleet, catalog.llm("Llama-3-8B"), {"v100": 4}); deployed
deployed.replicas[0]
deployed.replicas[0].step
from hetero.latency.models.phase import fit_phase
import numpy as np; b, n = np.repeat([1, 2, 4, 8], 4), np.tile([64, 128, 256, 512], 4)
fit_phase(b, n, 0.01 + 1e-4 * b * n + 1e-4 * np.sin(b * n), decode=False)
from hetero.routers import LeastTokens
from hetero.simulator import Slo, metrics, simulate
run = simulate(deployed, chats, LeastTokens()); run
metrics(run, Slo(ttft_s=1.0, tpot_s=0.1))
from hetero.apps.explorer import explore; explore(fleet, chats, 2.0, Slo(ttft_s=1.0), "hetero")
"""


def opened_cell(notebook: Notebook, cell: str) -> str:
    """Text of the outputs of a cell, as a reader sees it."""
    notebook.show(cell)
    return notebook.page.locator(".jp-Cell.jp-mod-active .jp-OutputArea").first.inner_text()


def test_quickstart_ends_in_a_plan_card(lab: Lab) -> None:
    with lab.notebook("00_quickstart.ipynb") as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        card = opened_cell(notebook, "plan-code")
        assert "on my-fleet" in card
        assert "What one change would do" in card
        assert "$/h" in card  # not typeset as mathematics
        assert notebook.page.locator(".hetero-card svg").first.is_visible()
        assert notebook.page.locator(".hetero-card mjx-container").count() == 0
        for theme in THEMES:
            notebook.theme(theme)
            notebook.show("plan-code")
            notebook.shot(f"quickstart-{theme}")
            assert notebook.faint() == []
            assert notebook.clear() == []
        opened_cell(notebook, "picture-code")
        picture = notebook.page.locator(".jp-Cell.jp-mod-active .jp-RenderedImage img")
        assert picture.evaluate("image => image.naturalWidth") > 500
        notebook.shot("quickstart-picture")


@pytest.mark.parametrize("name", [one for one in source.notebooks() if one not in SEEN])
def test_all_cells_run_in_the_browser_without_an_error(lab: Lab, name: str) -> None:
    with lab.notebook(f"{name}.ipynb") as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        assert any(cell["outputs"] for cell in notebook.cells())
        notebook.shot(name)


def test_a_moved_slider_changes_the_figure(lab: Lab) -> None:
    with lab.notebook("14_explorer.ipynb") as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        page = notebook.page
        notebook.show("explorer")
        explorer = page.locator(".jp-Cell.jp-mod-active .jp-OutputArea")
        image = explorer.locator("img.jupyter-widgets")
        rate = explorer.locator(".widget-hslider", has_text="requests/s")
        before, said = image.get_attribute("src"), rate.locator(".widget-readout").inner_text()
        notebook.shot("explorer-before")

        def changed(since: str | None) -> str | None:
            page.wait_for_function(
                "([image, since]) => image.src !== since && image.complete",
                arg=[image.element_handle(), since],
            )
            return image.get_attribute("src")

        # The track is logarithmic and ends at twice what the fleet could do at best.
        handle, track = rate.locator(".noUi-handle"), rate.locator(".noUi-base")
        box, base = handle.bounding_box(), track.bounding_box()
        assert box is not None
        assert base is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + base["width"] / 10, y, steps=8)
        page.mouse.up()
        after = changed(before)
        low, high = (float(handle.get_attribute(f"aria-value{end}") or "nan")
                     for end in ("min", "max"))  # fmt: skip
        taken = float(rate.locator(".widget-readout").inner_text())
        # A step of the slider is 0.02, and the ends are told to 0.1.
        assert math.log10(taken / float(said)) == pytest.approx((high - low) / 10, abs=0.03)
        # What is said comes in a message after the picture.
        text = explorer.locator(".widget-html")
        text.filter(has_text=f"thunderserve-cloud-32, {taken:.3g} requests/s").wait_for()
        notebook.shot("explorer-after")

        router = explorer.locator(".widget-dropdown", has_text="router").locator("select")
        router.select_option("round-robin")
        again = changed(after)
        text.filter(has_text="round robin").wait_for()

        # What cannot be served says why, and comes back.
        model = explorer.locator(".widget-dropdown", has_text="model").locator("select")
        model.select_option("Llama-3.1-405B")
        page.wait_for_selector("text=can serve Llama-3.1-405B")
        assert not image.is_visible()
        notebook.shot("explorer-cannot")
        model.select_option("Llama-3-8B")
        changed(again)
        image.wait_for()
        for theme in THEMES:
            notebook.theme(theme)
            notebook.shot(f"explorer-{theme}")
            assert notebook.faint() == []
            assert notebook.clear() == []
        assert notebook.errors() == []


def test_every_control_is_reached_and_moved_by_keys(lab: Lab) -> None:
    with lab.notebook("14_explorer.ipynb", width=1024) as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        page = notebook.page
        notebook.show("explorer")
        explorer = page.locator(".jp-OutputArea:has(.widget-hslider)").first
        labels = explorer.locator(".widget-dropdown, .widget-hslider").locator(".widget-label")
        menus, sliders = (names := labels.all_inner_texts())[:4], names[4:]
        page.keyboard.press("Escape")  # from the editor of the cell to the cell
        for name, kind in [
            *((name, "menu") for name in menus),
            *((name, kind) for name in sliders for kind in ("handle", "number")),
        ]:
            page.keyboard.press("Tab")
            assert notebook.focused() == [name, kind]
            before = explorer.evaluate(SHOWN)
            # Arrows alone are JupyterLab's, which takes them to the next cell.
            if kind == "menu":
                page.keyboard.press("Space")
                page.keyboard.press("ArrowUp" if page.evaluate(LAST) else "ArrowDown")
                page.keyboard.press("Enter")
            elif kind == "handle":
                page.keyboard.press("PageDown")
            else:
                page.keyboard.press("Control+A")
                page.keyboard.type(TYPED[name])
                page.keyboard.press("Enter")
            page.wait_for_function(
                f"([at, since]) => ({SHOWN})(at) !== since",
                arg=[explorer.element_handle(), before],
            )
            assert notebook.focused() == [name, kind]  # what changed did not take it away
        for theme in THEMES:
            notebook.theme(theme)
            assert notebook.cut() == []
            assert notebook.faint() == []
            notebook.shot(f"explorer-1024-{theme}")
        assert notebook.errors() == []


def test_objects_show_themselves_in_both_themes(lab: Lab, notebooks: Path) -> None:
    cells = [
        nbformat.v4.new_code_cell(line, id=f"cell-{k:02d}")
        for k, line in enumerate(OBJECTS.splitlines())
    ]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), notebooks / "objects.ipynb"
    )
    with lab.notebook("objects.ipynb", height=2400) as notebook:
        notebook.run_all()
        assert notebook.errors() == []
        for cell in notebook.cells():
            for output in cell["outputs"]:
                assert "<table" in output["data"]["text/html"], cell["source"]
        for theme in THEMES:
            notebook.theme(theme)
            for cell in ("cell-00", "cell-07"):
                notebook.show(cell)
                notebook.shot(f"objects-{theme}-{cell}")
                assert notebook.faint() == []


def test_a_progress_bar_is_seen_and_then_gone(lab: Lab, notebooks: Path) -> None:
    seen = notebooks / "seen"
    source = f"""\
import time
from pathlib import Path
from hetero.progress import progress
with progress(20, "routing", show=True) as advance:
    for _ in range(3000):
        if Path({str(seen)!r}).exists():
            break
        time.sleep(0.2)
    advance(20)
"""
    cell = nbformat.v4.new_code_cell(source, id="bar")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=KERNEL), notebooks / "bar.ipynb")
    with lab.notebook("bar.ipynb") as notebook:
        notebook.page.click('.lm-MenuBar-itemLabel:text-is("Run")')
        notebook.page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        notebook.page.wait_for_selector(".jp-OutputArea pre:has-text('routing')")
        notebook.shot("progress")
        seen.touch()
        notebook.page.wait_for_selector(".jp-OutputArea pre", state="detached")
        assert notebook.page.locator(".jp-OutputArea").first.inner_text().strip() == ""
        assert notebook.errors() == []
