"""What is made of the recorded runs of real engines."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero.errors import DataError
from hetero.intervals import interval
from pipelines.studies import live_data

REAL = {"round robin": [50.0, 54.0, 52.0], "hetero": [80.0, 90.0, 85.0], "workload": [82, 84, 86]}
SIMULATED = {"round robin": [55.0, 60.0, 58.0], "hetero": [90, 95, 94], "workload": [80, 82, 85]}


@pytest.fixture
def found():
    rows = [
        {"case": case, "kind": "router", "repeat": k, "origin": origin, "output_tps": float(value)}
        for origin, values in (("real", REAL), ("simulated", SIMULATED))
        for case, of in values.items()
        for k, value in enumerate(of)
    ]
    # The order of rows must not matter: repeats are told by their number.
    return pd.DataFrame(rows).sample(frac=1.0, random_state=1).sort_values("case")


def test_means_intervals_and_errors_are_those_of_the_repeats(found):
    table = live_data.cases_frame(found).set_index("case")
    for case, values in REAL.items():
        row = table.loc[case]
        assert row["repeats"] == 3
        assert row["real"] == pytest.approx(np.mean(values))
        assert (row["real_low"], row["real_high"]) == pytest.approx(interval(values))
        expected = 100 * (np.mean(SIMULATED[case]) / np.mean(values) - 1)
        assert row["error_percent"] == pytest.approx(expected)


def test_gains_are_paired_by_repeat(found):
    gains = live_data.gains_frame(found, "round robin").set_index(["case", "origin"])
    ratios = np.array(REAL["hetero"]) / np.array(REAL["round robin"])
    row = gains.loc[("hetero", "real")]
    assert row["ratio"] == pytest.approx(ratios.mean())
    assert (row["low"], row["high"]) == pytest.approx(interval(ratios))
    assert len(gains) == 4


def test_pairs_say_what_the_repeats_tell_and_whether_the_simulation_agrees(found):
    pairs = live_data.pairs_frame(found).set_index(["first", "second"])
    assert len(pairs) == 3
    flipped = pairs.loc[("hetero", "workload")]
    # 80, 90, 85 against 82, 84, 86: no telling; simulated 93 against 82.3.
    assert not flipped["told_apart"]
    clear = pairs.loc[("hetero", "round robin")]
    assert clear["told_apart"]
    assert clear["same_order"]
    assert clear["real_percent"] == pytest.approx(100 * (85 / 52 - 1))


def test_a_missing_or_other_file_is_said(tmp_path):
    with pytest.raises(DataError, match=r"missing.*hetero bench live --record"):
        live_data.runs_frame(tmp_path / "live.csv")
    (tmp_path / "live.csv").write_text("case,kind\na,b\n")
    with pytest.raises(DataError, match="'repeat' is missing"):
        live_data.runs_frame(tmp_path / "live.csv")


def test_what_is_recorded_is_whole():
    runs = live_data.runs_frame()
    assert set(runs["origin"]) == {"real", "simulated"}
    assert runs.groupby(["case", "repeat"])["origin"].nunique().eq(2).all()
    routers = runs[runs["kind"] == "router"]
    assert set(routers["case"]) == {
        *("round robin", "weighted round robin", "workload", "HeteroServe", "hetero"),
    }
    # The same requests in a repeat, whichever the router: only times differ.
    tokens = routers["output_tps"] * routers["span_s"]
    spread = tokens.groupby(routers["repeat"]).agg(lambda x: x.max() / x.min())
    assert (spread < 1.001).all()
    assert (routers["span_s"] > 0).all()
    rounds = live_data.profiles_frame()
    fits = live_data.fits(rounds)
    assert list(fits) == ["small", "large"]
    slower = [float(fit.step.seconds(4, 4, 400, 0)) for fit in fits.values()]
    assert slower[0] < slower[1]
    errors = live_data.step_errors_frame(rounds)
    assert len(errors) == len(rounds)
