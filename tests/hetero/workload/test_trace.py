from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ParameterError
from hetero.workload import Trace, lengths, readers, statistics


@pytest.fixture
def trace() -> Trace:
    return Trace(
        arrival_s=np.array([0.0, 1.0, 1.0, 4.0]),
        input_tokens=np.array([10, 20, 30, 40], dtype=np.int32),
        output_tokens=np.array([1, 0, 3, 4], dtype=np.int32),
        name="four",
        source="test",
        prefix_offsets=np.array([0, 2, 2, 3, 6]),
        prefix_ids=np.array([7, 8, 7, 7, 8, 9]),
        block_tokens=512,
        session_ids=np.array([1, 1, 2, 2]),
    )


def blocks(trace: Trace, request: int) -> list[int]:
    assert trace.prefix_offsets is not None
    assert trace.prefix_ids is not None
    return trace.prefix_ids[
        trace.prefix_offsets[request] : trace.prefix_offsets[request + 1]
    ].tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arrival_s": [0.0, 2.0, 1.0, 3.0]}, "arrival_s of request 3 is 1.0"),
        ({"arrival_s": [-1.0, 2.0, 3.0, 4.0]}, "arrival_s of request 1 is -1.0"),
        ({"arrival_s": [0.0, np.nan, 3.0, 4.0]}, "request 2 is nan"),
        ({"arrival_s": [0.0, 1.0, 2.0, np.inf]}, "request 4 is inf"),
        ({"arrival_s": [[0.0, 1.0], [2.0, 3.0]]}, "shape"),
        ({"input_tokens": [1, 2, 0, 4]}, "input_tokens of request 3 is 0"),
        ({"input_tokens": [1, 2, 2.5, 4]}, "a whole number"),
        ({"input_tokens": [1, 2, 2**31, 4]}, "at most 2147483647"),
        ({"input_tokens": [1, 2, 3]}, "3 values where 4"),
        ({"input_tokens": ["1", "2", "3", "4"]}, "needs numbers"),
        ({"output_tokens": [1, -1, 2, 3]}, "output_tokens of request 2 is -1"),
        ({"arrival_s": [], "input_tokens": [], "output_tokens": []}, "at least one request"),
        ({"session_ids": [1]}, "1 values where 4"),
        ({"prefix_ids": [1, 2]}, "1 of the three"),
        (
            {"prefix_offsets": [0, 1, 2, 3, 9], "prefix_ids": [1, 2], "block_tokens": 16},
            "rising from 0",
        ),
    ],
)
def test_bad_requests_are_refused_by_place(change: dict[str, object], says: str) -> None:
    good: dict[str, object] = {
        "arrival_s": [0.0, 1.0, 2.0, 3.0],
        "input_tokens": [1, 2, 3, 4],
        "output_tokens": [0, 0, 0, 0],
    }
    with pytest.raises(ParameterError, match="Resolve:") as caught:
        Trace(**(good | change))  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_arrays_are_own_typed_and_locked(trace: Trace) -> None:
    arrival = np.array([0.0, 1.0])
    copy = Trace(arrival, np.array([1, 2]), np.array([1, 2]))
    arrival[0] = 5.0
    assert copy.arrival_s[0] == 0.0
    assert copy.input_tokens.dtype == np.int32
    for array in (trace.arrival_s, trace.input_tokens, trace.prefix_ids, trace.session_ids):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_take_carries_prefixes_and_sessions(trace: Trace) -> None:
    part = trace.take([0, 3])
    assert part.input_tokens.tolist() == [10, 40]
    assert [blocks(part, 0), blocks(part, 1)] == [[7, 8], [7, 8, 9]]
    assert part.session_ids is not None
    assert part.session_ids.tolist() == [1, 2]
    assert blocks(trace.take(trace.input_tokens == 20), 0) == []


def test_filter_bounds_are_included(trace: Trace) -> None:
    assert trace.filter(input_tokens=(20, 30)).input_tokens.tolist() == [20, 30]
    assert trace.filter(output_tokens=(0, 1)).input_tokens.tolist() == [10, 20]
    with pytest.raises(ParameterError, match="inputs are 10 to 40"):
        trace.filter(input_tokens=(50, 60))


def test_window_head_and_sample(trace: Trace) -> None:
    assert trace.window(1.0, 4.0).arrival_s.tolist() == [0.0, 0.0]
    assert len(trace.head(2)) == 2
    assert len(trace.head(9)) == 4
    sample = trace.sample(3, np.random.default_rng(0))
    assert len(set(sample.input_tokens.tolist())) == 3
    assert np.all(np.diff(sample.arrival_s) >= 0)
    for wrong in (lambda: trace.window(7.0, 9.0), lambda: trace.head(0)):
        with pytest.raises(ParameterError):
            wrong()
    with pytest.raises(ParameterError, match="5 requests cannot be drawn"):
        trace.sample(5, np.random.default_rng(0))


def test_duplicates_stand_side_by_side_so_that_rotation_gives_equal_work(trace: Trace) -> None:
    doubled = trace.duplicate(8)
    assert doubled.input_tokens[:9].tolist() == [10] * 8 + [20]
    # Xiong 5.1: dealt to 4 instances in rotation, each gets r1, r1, r2, r2, ...
    dealt = [doubled.input_tokens[k::4].tolist() for k in range(4)]
    assert dealt == [[10, 10, 20, 20, 30, 30, 40, 40]] * 4


def test_arrivals_can_be_rescaled_replaced_and_dropped(trace: Trace) -> None:
    rescaled = trace.rescale(rate_rps=3.0)
    assert statistics.rate_rps(rescaled.arrival_s) == pytest.approx(3.0)
    assert statistics.gap_cv(rescaled.arrival_s) == pytest.approx(
        statistics.gap_cv(trace.arrival_s)
    )
    assert not trace.all_at_once().arrival_s.any()
    with pytest.raises(ParameterError, match="poisson"):
        trace.all_at_once().rescale(rate_rps=1.0)
    many = trace.duplicate(10_000).poisson(20.0, np.random.default_rng(1))
    # 40,000 gaps: four standard errors of the mean are 2 %.
    assert statistics.rate_rps(many.arrival_s) == pytest.approx(20.0, rel=0.02)
    assert statistics.gap_cv(many.arrival_s) == pytest.approx(1.0, abs=0.03)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="rate_rps"):
            trace.rescale(rate_rps=rate)


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet"])
def test_written_files_read_back_the_same(trace: Trace, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"four{ending}"
    write = trace.to_parquet if ending == ".parquet" else trace.to_csv
    write(path)
    first = path.read_bytes()
    again = readers.read(path)
    pd.testing.assert_frame_equal(again.to_frame(), trace.to_frame())
    assert again.block_tokens == 512
    assert blocks(again, 1) == []
    with pytest.raises(ParameterError, match="exists already"):
        write(path)
    write(path, force=True)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_iteration_gives_plain_numbers(trace: Trace) -> None:
    assert list(trace)[3] == (4.0, 40, 4)


def test_lengths_only_description_has_no_rates(trace: Trace) -> None:
    text = str(trace.all_at_once())
    assert "lengths only" in text
    assert "rate" not in text
    assert "burstiness" in str(trace)


def test_a_closed_loop_ends_where_requests_get_arrivals(trace: Trace) -> None:
    loop = trace.closed_loop(3, think_s=0.5)
    assert (loop.clients, loop.think_s, loop.arrival_s.any()) == (3, 0.5, False)
    assert loop.head(2).clients == 3
    for other in (loop.all_at_once(), loop.poisson(1.0, np.random.default_rng(0))):
        assert (other.clients, other.think_s) == (0, 0.0)
    with pytest.raises(ParameterError, match="clients is 0"):
        trace.closed_loop(0)
    with pytest.raises(ParameterError, match="think_s is -1"):
        trace.closed_loop(1, -1.0)
    with pytest.raises(ParameterError, match="with its closed_loop"):
        Trace([0.0, 1.0], [1, 1], [1, 1], clients=2)
    with pytest.raises(ParameterError, match="with its closed_loop"):
        Trace([0.0, 1.0], [1, 1], [1, 1], think_s=2.0)


def test_a_shared_beginning_is_a_share_of_every_prompt() -> None:
    lengths = np.array([1600, 400, 15, 4000])
    trace = Trace(np.zeros(4), lengths, [1, 1, 1, 1]).with_prefix(0.25)
    assert trace.prefix_offsets is not None
    assert trace.prefix_ids is not None
    blocks = np.diff(trace.prefix_offsets)
    assert (blocks == 0.25 * lengths // 16).all()
    # Whoever has fewer blocks has the first of those that others have.
    for start, count in zip(trace.prefix_offsets, blocks, strict=False):
        assert trace.prefix_ids[start : start + count].tolist() == list(range(count))
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ParameterError, match="share"):
            trace.with_prefix(share)


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
