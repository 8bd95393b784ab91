from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import paths, workload
from hetero.errors import DataError, ParameterError
from hetero.workload import Trace, Twin, statistics
from hetero.workload.synthetic import Exponential, Lognormal, synthetic
from hetero.workload.twin import LIMIT_BYTES, fit_arrivals
from hetero.workload.twin_check import BARS

NAMES = (
    *("azure2023_conv", "azure2023_code", "mooncake_conversation", "mooncake_synthetic"),
    *("sharegpt", "alpaca", "arxiv"),
)
NEEDS = {"sharegpt": "helix_lengths", "alpaca": "helix_lengths", "arxiv": "vidur_arxiv"}


def same(a: Trace, b: Trace) -> bool:
    return all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for field in ("arrival_s", "input_tokens", "output_tokens")
    )


def shipped_checks(name: str) -> pd.DataFrame:
    checks = pd.read_csv(paths.data("twins", "checks.csv"))
    return checks[checks["twin"] == name].set_index("measure")


# The shipped twins -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shipped_twins_are_small_and_attributed(name: str) -> None:
    file = paths.data("twins", f"{name}.json")
    assert file.stat().st_size <= LIMIT_BYTES
    source = json.loads(file.read_text())["source"]
    assert any(licence in source for licence in ("CC-BY-4.0", "Apache-2.0", "MIT"))


@pytest.mark.parametrize("name", NAMES)
def test_draws_keep_the_statistics_of_the_real_trace(name: str) -> None:
    # The real values were measured on the raw files and ship with the twins.
    real = shipped_checks(name)["real"]
    drawn = [workload.load(name, seed=seed) for seed in range(5)]

    def near(measure: str, of: Callable[[Trace], float], **tolerance: float) -> None:
        value = np.mean([of(trace) for trace in drawn])
        assert value == pytest.approx(real[measure], **tolerance), measure

    near(
        "rank correlation of input and output",
        lambda t: statistics.spearman(t.input_tokens, t.output_tokens),
        abs=0.01,
    )
    near("mean input", lambda t: float(t.input_tokens.mean()), rel=0.02)
    near("mean output", lambda t: float(t.output_tokens.mean()), rel=0.03)
    if "CV of the gaps" in real:
        near("CV of the gaps", lambda t: statistics.gap_cv(t.arrival_s), rel=0.03)
        near("Fano factor in 1 s", lambda t: statistics.fano(t.arrival_s, 1.0), rel=0.05)
    else:
        assert not drawn[0].arrival_s.any()


@pytest.mark.parametrize("name", NAMES)
def test_shipped_checks_keep_within_the_bars(name: str) -> None:
    checks = shipped_checks(name)
    judged = checks[checks["bar"].notna()]
    assert (judged["error"] <= judged["bar"]).all()
    assert (judged["holds"].astype(str) == "True").all()
    assert (judged["draws"] == 20).all()
    assert judged["bar"].to_dict() == {measure: BARS[measure] for measure in judged.index}


def test_medians_of_the_azure_traces_survive() -> None:
    for seed in range(3):
        conv, code = (workload.load(name, seed=seed) for name in NAMES[:2])
        assert np.median(conv.input_tokens) == pytest.approx(1020, abs=2)
        assert np.median(conv.output_tokens) == 129
        assert np.median(code.input_tokens) == pytest.approx(1469, abs=2)
        assert np.median(code.output_tokens) == 13


@pytest.mark.parametrize("name", NAMES)
def test_twins_hold_their_bars_on_the_raw_trace(name: str, need: Callable[[str], None]) -> None:
    need(NEEDS.get(name, name))
    real = workload.load(name, "real")
    found = workload.load_twin(name).check(real, draws=20)
    assert found.holds, f"\n{found}"
    judged = {measure.name for measure in found.measures if measure.bar is not None}
    assert judged == (set(list(BARS)[:3]) if name in NEEDS else set(BARS))
    shipped = shipped_checks(name)
    for measure in found.measures:
        # Another machine may round a quantile or a split differently.
        assert shipped.loc[measure.name, "error"] == pytest.approx(
            measure.error, rel=0.05, abs=1e-4
        ), measure.name


@pytest.mark.parametrize("name", NAMES)
def test_shipped_twins_are_those_of_the_raw_trace(name: str, need: Callable[[str], None]) -> None:
    need(NEEDS.get(name, name))
    fitted, shipped = Twin.fit(workload.load(name, "real")), workload.load_twin(name)
    np.testing.assert_array_equal(fitted.input_quantiles, shipped.input_quantiles)
    np.testing.assert_array_equal(fitted.output_quantiles, shipped.output_quantiles)
    np.testing.assert_array_equal(fitted.bands, shipped.bands)
    if fitted.arrivals is not None and shipped.arrivals is not None:
        np.testing.assert_array_equal(fitted.arrivals.counts, shipped.arrivals.counts)
        np.testing.assert_allclose(fitted.arrivals.start_s, shipped.arrivals.start_s, atol=0.02)
        np.testing.assert_allclose(fitted.arrivals.rho, shipped.arrivals.rho, atol=2e-4)
        assert fitted.drift is not None
        assert shipped.drift is not None
        np.testing.assert_allclose(fitted.drift, shipped.drift, atol=0.011)


# Draws -----------------------------------------------------------------------------------------


def test_draws_are_deterministic_and_differ_between_seeds() -> None:
    for name in ("azure2023_code", "sharegpt"):
        first = workload.load(name, seed=4)
        assert same(first, workload.load(name, seed=4))
        assert not same(first, workload.load(name, seed=5))
        assert first.source == f"twin:{name}, seed 4"


def test_rate_multiplies_requests_and_keeps_the_bursts() -> None:
    twin = workload.load_twin("azure2023_code")
    once, thrice, third = twin.draw(0), twin.draw(0, rate=3.0), twin.draw(0, rate=1 / 3)
    assert len(thrice) == 3 * len(once)
    assert len(third) == pytest.approx(len(once) / 3, rel=0.03)
    assert "3 times its rate" in thrice.source
    # The longest silences stay.
    longest = [np.sort(np.diff(t.arrival_s))[-5:] for t in (once, thrice)]
    np.testing.assert_allclose(longest[0], longest[1], rtol=1e-9)
    assert statistics.ks_distance(once.input_tokens, thrice.input_tokens) < 0.02


def test_impossible_rates_are_refused() -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="rate is "):
            workload.load_twin("azure2023_code").draw(0, rate)
    with pytest.raises(ParameterError, match="no arrivals"):
        workload.load_twin("sharegpt").draw(0, 2.0)


def test_a_plain_replay_fails_the_check_of_the_code_trace() -> None:
    # Poisson arrivals with lognormal lengths are what a twin is there to beat.
    real = workload.load("azure2023_code", seed=99)
    replay = synthetic(
        len(real),
        Lognormal(float(np.median(real.input_tokens)), 1.2),
        Exponential(float(real.output_tokens.mean())),
        rate_rps=statistics.rate_rps(real.arrival_s),
    )
    found = Twin.fit(replay).check(real, draws=2)
    assert not found.holds
    failed = {m.name for m in found.measures if m.holds is False}
    assert {"KS distance of input lengths", "CV of the gaps", "arrivals per minute"} <= failed


def test_lengths_drift_over_time_as_in_the_trace() -> None:
    rng = np.random.default_rng(0)
    count = 6000
    arrival = np.sort(rng.uniform(0, 1800, count))
    late = arrival > 900
    real = Trace(
        arrival,
        np.where(late, rng.integers(900, 1100, count), rng.integers(100, 300, count)),
        np.where(late, rng.integers(10, 20, count), rng.integers(40, 90, count)),
    )
    drawn = Twin.fit(real).draw(1)
    half = drawn.arrival_s > 900
    # Without the drift each would be 0.5; so sharp a change is smoothed to about 0.9.
    assert np.mean(drawn.input_tokens[half] > 500) > 0.85
    assert np.mean(drawn.input_tokens[~half] > 500) < 0.15
    assert np.mean(drawn.output_tokens[half] < 30) > 0.85


# The arrival process ---------------------------------------------------------------------------


def test_a_poisson_process_is_one_burst_without_clustering() -> None:
    arrival = np.cumsum(np.random.default_rng(0).exponential(0.1, 40_000))
    model = fit_arrivals(arrival)
    assert len(model.start_s) == 1
    assert np.all(model.rho[:8] < 0.02)
    drawn = model.draw(np.random.default_rng(1))
    assert statistics.gap_cv(drawn) == pytest.approx(1.0, abs=0.03)


def test_bursts_and_silences_keep_their_place() -> None:
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.uniform(50, 200, 30))
    arrival = np.sort(np.concatenate([s + rng.uniform(0, 4, 100) for s in starts]))
    model = fit_arrivals(arrival)
    assert len(model.start_s) > 25
    drawn = model.draw(rng)
    assert len(drawn) == len(arrival)
    assert statistics.count_error(arrival, drawn) < 0.02
    assert statistics.gap_cv(drawn) == pytest.approx(statistics.gap_cv(arrival), rel=0.02)


def test_coarse_stamps_stay_coarse() -> None:
    rng = np.random.default_rng(0)
    ticks = np.sort(rng.integers(0, 1000, 10_000)) * 3.0
    model = fit_arrivals(ticks)
    draws = [model.draw(np.random.default_rng(seed)) for seed in range(10)]
    for drawn in draws:
        np.testing.assert_allclose(drawn / 3.0, np.rint(drawn / 3.0), atol=1e-6)
    fano = np.mean([statistics.fano(drawn, 30.0) for drawn in draws])
    assert fano == pytest.approx(statistics.fano(ticks, 30.0), rel=0.15)


def test_batches_at_one_moment_are_clustered() -> None:
    arrival = np.repeat(np.cumsum(np.random.default_rng(0).exponential(2.0, 3000)), 3)
    drawn = fit_arrivals(arrival).draw(np.random.default_rng(1))
    assert statistics.fano(drawn, 1.0) == pytest.approx(3.0, rel=0.1)


# Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("bands"), "lacks 'bands'"),
        (lambda d: d.update(format="other"), "its format is 'other'"),
        (lambda d: d["counts"].append(3), "counts do not match"),
        (lambda d: d["input_quantiles_tokens"].pop(), "not 139 rising lengths"),
        (lambda d: d["input_quantiles_tokens"].reverse(), "rising"),
    ],
)
def test_a_file_that_is_no_twin_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], object], says: str
) -> None:
    fields = json.loads(paths.data("twins", "azure2023_conv.json").read_text())
    change(fields)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(DataError, match="this is no twin") as caught:
        Twin.load(path)
    assert says in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="no twin"):
        Twin.load(path)
    with pytest.raises(DataError, match="no such file"):
        Twin.load(tmp_path / "none.json")


def test_check_needs_draws_and_arrivals_on_both_sides() -> None:
    twin = workload.load_twin("sharegpt")
    with pytest.raises(ParameterError, match="draws"):
        twin.check(workload.load("sharegpt"), draws=0)
    with pytest.raises(ParameterError, match="only one has arrivals"):
        twin.check(workload.load("azure2023_code"), draws=1)


def test_names_and_sources() -> None:
    assert workload.names("twin") == NAMES
    assert set(NAMES) <= set(workload.names())
    for wrong, says in (
        (lambda: workload.load("azure"), "Resolve: use one of"),
        (lambda: workload.load("mine.csv"), r"workload.open_trace\('mine.csv'\), or use"),
        (lambda: workload.load("sharegpt", "fake"), "use"),  # type: ignore[arg-type]
        (lambda: workload.open_trace("no such file.csv"), "use"),
    ):
        with pytest.raises(ParameterError, match=says):
            wrong()


def test_a_real_trace_without_an_address_gives_way_to_its_twin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETERO_DATA_MIRROR", str(tmp_path))
    monkeypatch.setattr(paths, "raw", lambda: tmp_path / "raw")
    assert workload.attainable("sharegpt", "real") == "twin"
    assert workload.attainable("azure2023_conv", "real") == "real"


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
