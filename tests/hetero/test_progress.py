from __future__ import annotations

import nbclient
import nbformat

from hetero.progress import progress


def test_nothing_is_printed_where_nobody_looks(capsys):
    with progress(10, "routing") as advance:
        advance(10)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_pipe_gets_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("hetero.progress.EVERY_S", 0.0)
    with progress(None, "plan", unit="") as advance:
        advance(0, "Mélange")
    with progress(9, "routing") as advance:
        advance(4)
    assert capsys.readouterr().err == "plan: Mélange, 0 s\nrouting: 4 of 9 requests, 0 s\n"


def test_a_shown_bar_counts_and_leaves_nothing_behind(capsys):
    with progress(10, "routing", show=True) as advance:
        advance(4)
        advance(6)
    said = capsys.readouterr()
    assert said.out == ""
    assert "routing" in said.err
    # The last thing written returns to the start of the line and blanks it.
    assert said.err.endswith("\r")


def test_a_terminal_shows_a_bar_and_a_log_does_not(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress(10, "routing") as advance:
        advance(10)
    assert "routing" in capsys.readouterr().err


def run_cell(source):
    """Outputs of a cell that a notebook kernel runs, as the pipeline runs it."""
    code = nbformat.v4.new_code_cell(source, id="cell")
    notebook = nbformat.v4.new_notebook(cells=[code])
    nbclient.NotebookClient(
        notebook, kernel_name="python3", allow_errors=True, startup_timeout=600
    ).execute()
    return [dict(output) for output in code.outputs]


BAR = """\
import time

from hetero.progress import progress
with progress(3, "routing", unit="<plans>", show={show}) as advance:
    for _ in range(3):
        {inside}
        advance(1)
        time.sleep(0.15)
print("done")
"""


def test_a_bar_below_a_cell_leaves_one_empty_output():
    shown = run_cell(BAR.format(show=True, inside="pass"))
    assert [output["output_type"] for output in shown] == ["display_data", "stream"]
    assert shown[0]["data"] == {"text/html": ""}
    assert (shown[1]["name"], shown[1]["text"]) == ("stdout", "done\n")


def test_a_bar_that_nobody_sees_leaves_no_output():
    hidden = run_cell(BAR.format(show=False, inside="pass"))
    assert [(output["name"], output["text"]) for output in hidden] == [("stdout", "done\n")]


def test_a_bar_below_a_cell_is_cleared_by_an_error_too():
    shown = run_cell(BAR.format(show=True, inside="1 / 0"))
    assert shown[0]["data"] == {"text/html": ""}
    assert (shown[1]["output_type"], shown[1]["ename"]) == ("error", "ZeroDivisionError")
