"""The papermill engine keeps what a notebook says and drops what differs between two runs."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from papermill.engines import papermill_engines

from hetero.notebook_engine import HeteroEngine, strip


def executed(*, clock: str, address: str, process: int) -> nbformat.NotebookNode:
    """A notebook as papermill leaves it, with everything that depends on when and where."""
    code = new_code_cell(
        "print(object())",
        execution_count=1,
        outputs=[
            new_output("stream", name="stderr", text=f"/tmp/ipykernel_{process}/77.py:3: Warn\n"),
            new_output(
                "execute_result",
                {
                    "text/plain": f"<object at {address}>",
                    "application/vnd.jupyter.widget-view+json": {"model_id": clock},
                    "image/png": "aGVsbG8=",
                },
                execution_count=1,
            ),
        ],
        metadata={
            "tags": ["keep"],
            "papermill": {"start_time": clock, "duration": 0.1},
            "execution": {"iopub.execute_input": clock},
        },
    )
    notebook = new_notebook(
        cells=[new_markdown_cell("# Title"), code],
        metadata={
            "papermill": {"parameters": {"n": 3}, "start_time": clock, "output_path": clock},
            "widgets": {"state": clock},
            "language_info": {"name": "python", "version": clock},
        },
    )
    strip(notebook)
    return notebook


def test_saved_figures_become_links_and_tables_stand_once() -> None:
    link = {"text/markdown": "![line](line.svg)", "text/plain": "<figure line.svg>"}
    saved = {"hetero": {"figure": "line.svg"}}
    table = {"text/html": "<table></table>", "text/plain": "a table"}
    code = new_code_cell(
        "show()",
        outputs=[
            new_output("display_data", link, metadata=saved),
            new_output("display_data", table),
        ],
    )
    notebook = new_notebook(cells=[code, new_markdown_cell("After.")])
    strip(notebook)
    assert [cell.source for cell in notebook.cells] == ["show()", "![line](line.svg)", "After."]
    assert [output.data for output in notebook.cells[0].outputs] == [
        {"text/html": "<table></table>"}
    ]
    nbformat.validate(notebook)


def test_two_runs_come_out_equal() -> None:
    one = executed(clock="2020-01-01", address="0x7f0011223344", process=41)
    two = executed(clock="2031-12-31", address="0x7fee99887766", process=99)
    assert nbformat.writes(one) == nbformat.writes(two)


def test_content_stays() -> None:
    notebook = executed(clock="2020-01-01", address="0x7f0011223344", process=41)
    assert notebook.metadata.papermill == {"parameters": {"n": 3}}
    cell = notebook.cells[1]
    assert cell.metadata == {"tags": ["keep"]}
    assert cell.outputs[0].text == "<cell>:3: Warn\n"
    assert cell.outputs[1].data == {"text/plain": "<object>", "image/png": "aGVsbG8="}
    nbformat.validate(notebook)


def test_ids_follow_the_content() -> None:
    ids = [
        [cell.id for cell in executed(clock=c, address="0x0011223344", process=1).cells]
        for c in "ab"
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


@pytest.mark.parametrize("text", ["look at 0x10", "at 12:30", "meet at 0xZZ"])
def test_other_text_is_left_alone(text: str) -> None:
    output = new_output("stream", name="stdout", text=text)
    notebook = new_notebook(cells=[new_code_cell("1", outputs=[output])])
    strip(notebook)
    assert notebook.cells[0].outputs[0].text == text


def test_papermill_finds_the_engine() -> None:
    assert papermill_engines.get_engine("hetero") is HeteroEngine
