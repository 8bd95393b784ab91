"""The mixed fleets of MLPerf: ratios of the published runs, and what simulation makes of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero.routers import factories
from hetero.simulator import simulate
from hetero.streams import stream
from pipelines.studies import mixed_fleets, servers

ROUND_ROBIN = factories()["round-robin"]


def test_ratios_are_those_of_the_published_runs(need):
    kept = mixed_fleets.measured_frame()
    assert kept["ratio"].between(0.9, 1.0).all()
    need(servers.DATASET)
    pd.testing.assert_frame_equal(kept, mixed_fleets.fleets_frame())
    frame = servers.read("mlperf_v4.1_v5.1.csv")
    of = frame[(frame["submitter"] == "MangoBoost") & (frame["scenario"] == "Offline")]
    of = of.set_index("accelerators")["tokens_per_s"]
    # Machines of eight: the first is of MI300X, the second of MI325X.
    assert kept["ratio"][0] == pytest.approx(
        of[48] / (4 * of[8].iloc[0] + 2 * of[8].iloc[1]), abs=1e-4
    )


def test_a_fleet_of_one_kind_loses_nothing_and_a_static_split_waits_for_the_slowest():
    alone = {name: mixed_fleets.offline({name: 1}, ROUND_ROBIN(), "static", 1200)
             for name in ("MI300X", "MI325X")}  # fmt: skip
    twice = mixed_fleets.offline({"MI300X": 2}, ROUND_ROBIN(), "static", 1200)
    assert twice == pytest.approx(2 * alone["MI300X"], rel=0.03)
    mixed = {"MI300X": 1, "MI325X": 1}
    static = mixed_fleets.offline(mixed, ROUND_ROBIN(), "static", 1200)
    assert static == pytest.approx(2 * min(alone.values()), rel=0.03)
    ((name, planned),) = mixed_fleets.routers(mixed, ["planned shares"])
    assert name == "planned shares"
    shares = mixed_fleets.offline(mixed, planned, "static", 1200)
    assert static < shares <= 1.03 * sum(alone.values())


def test_the_rate_of_a_server_holds_its_targets():
    counts = {"MI300X": 1, "MI325X": 1}
    rate, tokens = mixed_fleets.server(counts, ROUND_ROBIN(), 60.0, 4)
    trace = mixed_fleets.requests(int(60.0 * rate)).poisson(rate, stream(0, "server"))
    run = simulate(mixed_fleets.fleet(counts), trace, ROUND_ROBIN())
    assert np.percentile(run.ttft_s, 99) <= 2.0
    assert np.nanpercentile(run.tpot_s, 99) <= 0.2
    assert tokens == pytest.approx(run.trace.output_tokens.sum() / run.span_s)


def test_distances_are_from_the_measured_ratio_of_the_scenario():
    fleet = next(iter(mixed_fleets.FLEETS))
    scenarios = ("Offline, static", "Offline, static", "Server")
    told = zip(scenarios, "aba", (0.90, 0.94, 0.95), (np.nan, np.nan, 0.9), strict=True)
    rows = [(fleet, *one) for one in told]
    found = mixed_fleets.comparison_frame(
        pd.DataFrame(rows, columns=["fleet", "scenario", "router", "ratio", "asked"])
    )
    real = mixed_fleets.measured_frame().set_index(["fleet", "scenario"])["ratio"]
    assert found["router"].tolist() == ["b", "a", "a"]
    assert found["off"].iloc[2] == pytest.approx(0.95 - real[fleet, "Server"])
