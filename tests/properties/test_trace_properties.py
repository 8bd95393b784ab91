from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.workload import Trace, lengths, readers, statistics

QUICK = settings(max_examples=60)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 30))
    arrival = draw(st.lists(st.floats(0, 1e6), min_size=count, max_size=count))
    inputs = draw(st.lists(st.integers(1, 2**31 - 1), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    offsets = ids = None
    block_tokens = 0
    if draw(st.booleans()):
        parts = draw(
            st.lists(st.lists(st.integers(0, 2**60), max_size=4), min_size=count, max_size=count)
        )
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        ids = np.array([block for part in parts for block in part], dtype=np.int64)
        block_tokens = draw(st.integers(1, 4096))
    sessions = draw(st.none() | st.lists(st.integers(0, 2**60), min_size=count, max_size=count))
    classes = draw(st.none() | st.lists(st.integers(0, 2**15 - 1), min_size=count, max_size=count))
    return Trace(
        np.sort(arrival),
        np.array(inputs),
        np.array(outputs),
        prefix_offsets=offsets,
        prefix_ids=ids,
        block_tokens=block_tokens,
        session_ids=None if sessions is None else np.array(sessions),
        priorities=None if classes is None else np.array(classes),
    )


@QUICK
@given(traces(), st.sampled_from([".csv", ".csv.gz", ".parquet"]))
def test_files_lose_nothing(trace: Trace, ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{ending}"
        (trace.to_parquet if ending == ".parquet" else trace.to_csv)(path)
        again = readers.read(path, plausible_rps=(0.0, np.inf))
    pd.testing.assert_frame_equal(again.to_frame(), trace.to_frame(), check_exact=True)


@QUICK
@given(traces(), st.data())
def test_taking_twice_is_taking_once(trace: Trace, data: st.DataObject) -> None:
    size = len(trace)
    chosen = sorted(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size)))
    again = sorted(data.draw(st.lists(st.integers(0, len(chosen) - 1), min_size=1)))
    twice = trace.take(chosen).take(again)
    once = trace.take(np.array(chosen)[again])
    pd.testing.assert_frame_equal(twice.to_frame(), once.to_frame())


@QUICK
@given(traces(), st.integers(1, 5))
def test_copies_repeat_each_request_in_place(trace: Trace, copies: int) -> None:
    frame = trace.duplicate(copies).to_frame()
    expected = trace.to_frame().loc[np.repeat(np.arange(len(trace)), copies)]
    pd.testing.assert_frame_equal(frame, expected.reset_index(drop=True))


@QUICK
@given(traces(), st.floats(1e-3, 1e3))
def test_rescaling_changes_the_rate_and_nothing_else(trace: Trace, rate_rps: float) -> None:
    if not 1e-3 < statistics.rate_rps(trace.arrival_s) < np.inf:
        return
    scaled = trace.rescale(rate_rps=rate_rps)
    assert statistics.rate_rps(scaled.arrival_s) == pytest.approx(rate_rps, rel=1e-6)
    np.testing.assert_array_equal(scaled.input_tokens, trace.input_tokens)


@QUICK
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 6000))
def test_ranges_partition_the_lengths(found: list[int], width: int) -> None:
    ranges = lengths.ranges(found, width)
    assert ranges.share.sum() == pytest.approx(1.0)
    np.testing.assert_array_equal(ranges.end_tokens[:-1], ranges.start_tokens[1:])
    for k in range(len(ranges)):
        inside = sum(ranges.start_tokens[k] <= x < ranges.end_tokens[k] for x in found)
        assert ranges.share[k] == pytest.approx(inside / len(found))
