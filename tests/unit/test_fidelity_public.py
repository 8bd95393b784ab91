"""The picture of published runs joins rows of one GPU, engine and kind by their runs."""

from __future__ import annotations

import pandas as pd
import pytest

from hetero.plots.figures import close
from pipelines.studies.fidelity_figures import public_figure


def test_rows_count_as_often_as_they_have_runs() -> None:
    nothing = {"fitted": "nothing", "floor": float("nan"), "TTFT": float("nan")}
    rows = [
        {"gpu": "G", "llm": "a", "engine": "vllm", "throughput": 2.0, "TPOT": 4.0, "runs": 1},
        {"gpu": "G", "llm": "b", "engine": "vllm", "throughput": 6.0, "TPOT": None, "runs": 9},
        {"gpu": "H", "llm": "a", "engine": "vllm", "throughput": 3.0, "TPOT": 1.0, "runs": 2},
    ]
    frame = pd.DataFrame([row | nothing for row in rows])
    frame.loc[2, "fitted"] = "overheads"
    figure = public_figure(frame)
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["G, vllm (10)", "H, vllm (2)"]
    full, hollow = axis.lines[:2]
    assert full.get_xdata()[0] == pytest.approx(6.0)
    assert hollow.get_fillstyle() == "none"
    assert hollow.get_xdata()[0] == pytest.approx(3.0)
    close(figure)
