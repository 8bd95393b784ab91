from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ParameterError
from hetero.workload import Trace, Twin
from hetero.workload.twin import LIMIT_BYTES


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces of all shapes: tiny, equal lengths, all at once, bursts, batches, long."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 400))
    gaps = {
        "poisson": rng.exponential(1.0, count),
        "bursts": np.where(rng.random(count) < 0.03, rng.uniform(50, 500, count), 0.01),
        "batches": np.repeat(rng.exponential(5.0, count), 1) * (rng.random(count) < 0.3),
        "at once": np.zeros(count),
        "days": rng.exponential(2000.0, count),
    }[draw(st.sampled_from(["poisson", "bursts", "batches", "at once", "days"]))]
    longest = draw(st.sampled_from([1, 3, 100, 10**6]))
    inputs = rng.integers(1, longest, count, endpoint=True)
    outputs = np.minimum(inputs, rng.integers(0, longest, count, endpoint=True))
    return Trace(np.cumsum(gaps), inputs, outputs)


@settings(max_examples=60)
@given(traces(), st.integers(0, 5))
def test_a_draw_has_the_requests_span_and_lengths_of_its_trace(trace: Trace, seed: int) -> None:
    twin = Twin.fit(trace)
    assert len(twin.to_json()) <= LIMIT_BYTES
    drawn = twin.draw(seed)
    assert len(drawn) == len(trace)
    assert drawn.arrival_s[0] == 0.0
    span = trace.arrival_s[-1] - trace.arrival_s[0]
    # Bursts are kept to a hundredth of a second, coarse stamps to a step.
    step = twin.arrivals.stamp_s if twin.arrivals is not None else 0.0
    assert abs(drawn.arrival_s[-1] - span) <= 0.011 + step
    for side in ("input_tokens", "output_tokens"):
        real, made = getattr(trace, side), getattr(drawn, side)
        assert real.min() <= made.min() <= made.max() <= real.max()


@settings(max_examples=40)
@given(traces(), st.floats(0.2, 5.0))
def test_the_rate_multiplies_the_requests(trace: Trace, rate: float) -> None:
    twin = Twin.fit(trace)
    if twin.arrivals is None:
        return
    bins = len(twin.arrivals.counts)
    if rate * len(trace) <= bins:  # each bin is rounded up or down, so few requests may be none
        return
    assert abs(len(twin.draw(0, rate)) - rate * len(trace)) <= bins


@settings(max_examples=40)
@given(traces())
def test_fit_is_deterministic_and_survives_its_file(trace: Trace) -> None:
    twin = Twin.fit(trace)
    assert Twin.fit(trace).to_json() == twin.to_json()
    with tempfile.TemporaryDirectory() as folder:
        twin.save(Path(folder) / "twin.json")
        again = Twin.load(Path(folder) / "twin.json")
        with pytest.raises(ParameterError, match="exists already"):
            twin.save(Path(folder) / "twin.json")
    assert again.to_json() == twin.to_json()
    a, b = twin.draw(2), again.draw(2)
    np.testing.assert_array_equal(a.arrival_s, b.arrival_s)
    np.testing.assert_array_equal(a.output_tokens, b.output_tokens)
