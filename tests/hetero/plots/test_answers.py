"""Figures of hetero simulate."""

from __future__ import annotations

import pytest

from hetero.errors import DataError, ParameterError
from hetero.plots.answers import timeline_figure, timelines
from hetero.routers import LeastTokens, RoundRobin
from hetero.simulator import simulate
from tests.hetero.routers.router_states import fleet, trace


def test_one_figure_per_router_and_one_of_all(tmp_path) -> None:
    runs = [
        (router.name, simulate(fleet(), trace(60), router, sample_s=0.5))
        for router in (LeastTokens(), RoundRobin())
    ]
    written = timelines(tmp_path, runs, "a test")
    assert [path.name for path in written] == [
        "timeline_least_tokens",
        "timeline_round_robin",
        "ttft",
    ]
    for path in written:
        assert path.with_name(path.name + ".png").stat().st_size > 5_000
        assert path.with_name(path.name + ".svg").exists()


def test_every_replica_is_drawn_with_what_was_sampled() -> None:
    run = simulate(fleet(), trace(60), RoundRobin(), sample_s=0.5)
    figure = timeline_figure("round robin", run)
    waiting, memory, spent = figure.axes
    assert run.samples is not None
    for k in range(4):
        assert waiting.lines[k].get_ydata().tolist() == run.samples.waiting[:, k].tolist()
        assert memory.lines[k].get_ydata().max() == pytest.approx(
            100 * run.samples.kv_use[:, k].max()
        )
        assert 0 <= spent.lines[k].get_ydata().min() <= spent.lines[k].get_ydata().max() <= 100.01


def test_errors_are_clear(tmp_path) -> None:
    with pytest.raises(ParameterError, match="no samples"):
        timeline_figure("round robin", simulate(fleet(), trace(20), RoundRobin()))
    run = simulate(fleet(), trace(20), RoundRobin(), sample_s=1.0)
    with pytest.raises(DataError, match="cannot be written"):
        timelines(tmp_path / "missing", [("round robin", run)], "a test")
