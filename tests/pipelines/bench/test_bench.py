"""The benchmark at its smallest size: what it prints, never how fast it is."""

from __future__ import annotations

import csv
import json
import math
from typing import Any

import numpy as np
import pytest

from hetero import paths, workload
from hetero.deployment import Engine
from hetero.routers import Router
from hetero.timings import timings
from pipelines.bench import recorded
from pipelines.bench.commands import BENCHES
from pipelines.bench.simulator import (
    LOADS,
    FreestCache,
    SimulatorBench,
    Speed,
    fleet,
    peers,
    requests,
)


def test_the_smallest_run_measures_everything(run: Any) -> None:
    code, out, _ = run("bench", "simulate", "largest=300", "many=9", "repeats=1", "--json")
    assert code == 0
    found = json.loads(out)
    speeds = found["speeds"]
    assert {one["replicas"] for one in speeds} == {8, 9}
    assert {one["load"] for one in speeds} == set(LOADS)
    assert len({one["router"] for one in speeds}) == len(found["decision_us"]) == 10
    assert {one["engine"] for one in speeds} == {"prefill first, known", "chunked, paged"}
    assert max(one["requests"] for one in speeds) == 300
    for one in [*speeds, found["plain"], found["recorded"]]:
        assert one["cpu_s"] > 0
        assert one["requests_per_cpu_s"] == pytest.approx(one["requests"] / one["cpu_s"])
        assert one["rate_rps"] > 0
    assert found["recorded"]["load"] is None
    assert found["recorded"]["requests"] == 19366
    assert found["bytes_per_request"] > 88
    assert set(found["first_call"]) == {"import_s", "first_call_s", "process_s"}
    assert len(found["peers"]) == 5


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["nothing"], "no bench 'nothing'. Resolve: use simulate, search, cards"),
        (["simulate", "many=few"], "cannot do 'many=few'. Resolve: it has largest=1000000, many="),
        (["cards", "changes=no"], "cannot do 'changes=no'"),
        (["search", "fleets=0"], "cannot do 'fleets=0'"),
        (["search", "most=1"], "No fleet has 1 GPUs"),
        (["islands", "keys=placement"], "No time begins with 'placement'"),
    ],
)
def test_what_cannot_be_measured_is_told_what_can(refused, asked: list[str], says: str) -> None:
    assert says in refused("bench", *asked)


def test_every_time_that_was_recorded_can_be_made_again() -> None:
    made = {
        name: [row.key for row in getattr(recorded, f"_{name}")()]
        for name in ("arena", "islands", "phases", "pipelines", "placement")
    }
    for key, one in timings().items():
        (name,) = one.command.removeprefix("hetero bench ").removesuffix(" --record").split()
        assert name in BENCHES
        rows = made.get(name, [key])
        assert any(key == row or key.startswith(f"{row}.") for row in rows), key


def test_a_recorded_time_is_measured_as_its_row_says() -> None:
    found = recorded.placement(keys="placement.small-10").timings
    assert {one.key for one in found} == {k for k in timings() if "small-10" in k}
    assert {(one.clock, one.repeats) for one in found} == {("wall", 1)}
    rows = iter([recorded.Timed("sum", range, sum, "median", 3), recorded.Timed("max", range, max)])
    (one,) = recorded.timed(rows, "islands", "sum", "cpu", print).timings
    assert (one.clock, one.statistic, one.repeats) == ("cpu", "median", 3)
    assert one.seconds > 0


def test_tables_say_how_loaded_how_fast_and_beside_whom() -> None:
    one = Speed("r", 8, "e", 1000, 0.7, 70.0, 0.5)
    bench = SimulatorBench(
        speeds=(one,),
        plain=one,
        recorded=Speed("r", 8, "e", 1000, math.nan, 70.0, 0.5),
        source="somewhere",
        decision_us={"a": 1.0, "b": 3.0},
        bytes_per_request=100.0,
        exponent=1.0,
        first_call={"import_s": 1.0, "first_call_s": 0.1, "process_s": 1.2},
    )
    speeds, other, beside = (str(table) for table in bench.tables())
    assert "70%" in speeds
    assert "as recorded" in speeds
    assert "2,000" in speeds
    assert "slowest decision, 8 replicas (b)" in other
    # 2,000 requests per CPU second against (19366 - 1000) / (30.33 - 2.80) of splitwise-sim.
    assert f"{2000 / (18366 / 27.53):.2f}" in beside


def test_peers_are_those_of_the_file() -> None:
    with paths.data("published", "peers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(peers())
    for peer in peers():
        mine = [r for r in rows if r["configuration"] == peer.configuration]
        assert peer.requests == max(int(r["requests"]) for r in mine)
        assert peer.requests_per_cpu_s == peer.requests / peer.cpu_s
        assert peer.marginal_per_cpu_s >= 0.9 * peer.requests_per_cpu_s


def test_fleet_and_requests() -> None:
    ten = fleet(10, Engine(batching="chunked"))
    assert len({replica.name for replica in ten.replicas}) == 10
    assert ten.replicas[9].gpu == ten.replicas[1].gpu
    assert ten.replicas[0].engine.batching == "chunked"
    assert isinstance(FreestCache(), Router)
    drawn, trace = requests(50_000, 20.0), workload.load("azure2023_conv")
    assert len(drawn) == 50_000
    assert 49_999 / (drawn.arrival_s[-1] - drawn.arrival_s[0]) == pytest.approx(20.0, rel=0.02)
    assert drawn.input_tokens.mean() == pytest.approx(trace.input_tokens.mean(), rel=0.03)
    # Drawn in pairs, and in no order.
    pairs = set(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    first = zip(drawn.input_tokens[:99].tolist(), drawn.output_tokens[:99].tolist(), strict=True)
    assert set(first) <= pairs
    halves = np.array_split(drawn.input_tokens, 2)
    assert halves[0].mean() == pytest.approx(halves[1].mean(), rel=0.03)
