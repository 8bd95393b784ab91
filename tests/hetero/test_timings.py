from __future__ import annotations

import pytest

from hetero.errors import DataError
from hetero.timings import Timing, record, timing, timings


def test_a_recorded_time_replaces_the_one_of_its_key(tmp_path):
    file = tmp_path / "timings.csv"
    record([Timing.here("b", 2.0, command="x"), Timing.here("a", 1.0, command="x")], file)
    record([Timing.here("b", 3.0, command="y", repeats=5, statistic="median")], file)
    found = timings(file)
    assert list(found) == ["a", "b"]
    assert (found["b"].seconds, found["b"].command, found["b"].repeats) == (3.0, "y", 5)
    assert "median of 5 runs" in found["b"].note


def test_a_missing_key_and_a_broken_file_are_named(tmp_path):
    with pytest.raises(DataError, match="no such key"):
        timing("no such key")
    file = tmp_path / "timings.csv"
    record([Timing.here("a", 1.0, command="x")], file)
    file.write_text(file.read_text().replace("1,", "one,", 1))
    with pytest.raises(DataError, match="line 2, column 'seconds': 'one' does not fit"):
        timings(file)
    file.write_text("key,seconds\n")
    with pytest.raises(DataError, match="columns are key, seconds"):
        timings(file)


def test_shipped_times_are_sound():
    for one in timings().values():
        assert one.seconds > 0
        assert one.clock in ("cpu", "wall")
        assert one.command.startswith("hetero bench")
