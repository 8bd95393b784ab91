"""Operator measurements: the hint without the extra, and the published grid with it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero import paths
from hetero.catalog import gpu, llm
from hetero.errors import ParameterError
from hetero.latency.frames import raw_available
from hetero.latency.sources import measured
from pipelines.studies import measured_tables, operators
from pipelines.studies.table_reduction import reduce_table

needs_extra = pytest.mark.skipif(
    not operators.available(), reason="the extra silicon is not installed"
)


def test_without_the_extra_the_hint_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "available", lambda: False)
    operators._handle.cache_clear()
    with pytest.raises(ParameterError, match=r"hetero\[silicon\]"):
        operators.measurements(gpu("H100-SXM"), llm("Llama-3.1-8B"))


def test_gpus_and_models_outside_say_so() -> None:
    with pytest.raises(ParameterError, match="H100-SXM"):
        operators.measurements(gpu("T4"), llm("Llama-3.1-8B"))
    with pytest.raises(ParameterError, match="dense"):
        operators.measurements(gpu("H100-SXM"), llm("DeepSeek-V3"))


@needs_extra
def test_the_published_grid_comes_out() -> None:
    if not raw_available("aiconfigurator"):
        pytest.skip("aiconfigurator_grid is not here")
    grid = next(
        t
        for t in measured.aiconfigurator(raw=True)
        if (t.gpu, t.llm, t.tensor_parallel) == ("H100-SXM", "Llama-3.1-8B", 2)
        and t.engine.startswith("vllm")
    )
    own = operators.measurements(
        gpu("H100-SXM"), llm("Llama-3.1-8B"), 2, batches=[1, 16], lengths=[512, 2048]
    )
    for decode, b, length, seconds in zip(
        own.decode, own.batch, own.length_tokens, own.seconds, strict=True
    ):
        at = (grid.decode == decode) & (grid.batch == b) & (grid.length_tokens == length)
        assert seconds == pytest.approx(float(grid.seconds[at][0]), rel=2e-3)


@needs_extra
def test_step_models_carry_their_error() -> None:
    found = reduce_table(operators.measurements(gpu("B200-SXM"), llm("Llama-3.1-8B")))
    assert found.accuracy["decode"].mape_percent < 1.5
    assert found.accuracy["prefill"].mape_percent < 3.0
    faster = reduce_table(operators.measurements(gpu("H100-SXM"), llm("Llama-3.1-8B"))).model
    assert float(found.model.decode_seconds([1024])) < float(faster.decode_seconds([1024]))


@needs_extra
def test_committed_all_reduce_is_what_the_package_gives() -> None:
    committed = pd.read_csv(paths.data("measured", "all_reduce.csv"))
    pd.testing.assert_frame_equal(
        committed, measured_tables.all_reduce_knots_frame(), check_dtype=False
    )
    for _, rows in committed.groupby("engine"):
        assert bool(np.all(np.diff(rows["message_bytes"]) > 0))
