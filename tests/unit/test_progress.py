from __future__ import annotations

from hetero.progress import progress


def test_nothing_is_printed_where_nobody_looks(capsys):
    with progress(10, "routing") as advance:
        advance(10)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_shown_bar_counts_and_leaves_nothing_behind(capsys):
    with progress(10, "routing", show=True) as advance:
        advance(4)
        advance(6)
    said = capsys.readouterr()
    assert said.out == ""
    assert "routing" in said.err
    # The last thing written returns to the start of the line and blanks it.
    assert said.err.endswith("\r")
