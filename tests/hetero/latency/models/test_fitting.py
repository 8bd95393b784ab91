from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero.errors import FitError, ParameterError
from hetero.latency import Affine, Measurements, fit
from hetero.latency.accuracy import Accuracy
from hetero.latency.models.fitting import Term, fit_linear, identifiability
from hetero.latency.models.floor import fit_floor
from hetero.latency.models.phase import check_phase, fit_phase

CROSS_B = np.array([1, 1, 1, 2, 4, 8.0])
CROSS_I = np.array([128, 512, 2048, 512, 512, 512.0])


def test_accuracy_by_hand():
    accuracy = Accuracy.of([11.0, 18.0, 30.0], [10.0, 20.0, 30.0])
    assert accuracy.mape_percent == pytest.approx(20 / 3)
    assert accuracy.bias_percent == pytest.approx(0.0)
    assert accuracy.max_percent == pytest.approx(10.0)
    assert accuracy.r2 == pytest.approx(1 - 5 / 200)
    assert np.isnan(Accuracy.of([1.0], [1.0]).r2)
    with pytest.raises(ParameterError, match="positive measured values"):
        Accuracy.of([1.0], [0.0])


def test_weighted_fit_of_one_constant_has_the_closed_form():
    # min sum (1 - c/y)^2 gives c = sum(1/y) / sum(1/y^2).
    y = np.array([1.0, 2.0, 4.0])
    terms = (Term("c", "1", "s"),)
    fitted = fit_linear(np.ones((3, 1)), y, terms, title="constant")
    assert fitted["c"] == pytest.approx((1 / y).sum() / (1 / y**2).sum())
    assert fit_linear(np.ones((3, 1)), y, terms, title="c", weights="none")["c"] == pytest.approx(
        7 / 3
    )
    with pytest.raises(KeyError):
        fitted["d"]


def test_confidence_interval_of_a_mean_is_students():
    y = np.array([9.0, 10.0, 11.0, 10.0])
    fitted = fit_linear(np.ones((4, 1)), y, (Term("c", "1", "s"),), title="m", weights="none")
    half = 3.182446 * y.std(ddof=1) / 2  # t of 3 degrees of freedom, 97.5 %
    assert fitted.low[0] == pytest.approx(10 - half, rel=1e-6)
    predicted = fitted.predict([[1.0]])
    assert predicted.high_s[0] == pytest.approx(10 + half * np.sqrt(5), rel=1e-6)


def test_prediction_scatter_grows_with_the_time_when_weights_are_relative():
    rng = np.random.default_rng(0)
    b, i = np.meshgrid([1, 2, 4, 8.0], [128, 1024, 4096.0])
    y = (0.01 + 1e-4 * b * i).ravel() * (1 + 0.05 * rng.standard_normal(12))
    fitted = fit_phase(b.ravel(), i.ravel(), y, decode=False, form="tokens")
    near, far = (fitted.predict(1, n) for n in (128, 32768))
    half = [float((p.high_s - p.low_s)[0] / p.seconds[0]) for p in (near, far)]
    assert half[0] == pytest.approx(half[1], rel=0.25)


def test_a_cross_is_refused_and_says_what_it_determines():
    with pytest.raises(FitError) as refusal:
        fit_phase(CROSS_B, CROSS_I, np.ones(6), decode=False)
    assert "do not determine p1, p2, p3, p4" in str(refusal.value)
    assert "b I = 512 b + I - 512" in str(refusal.value)
    assert "form='cross'" in str(refusal.value)
    check = check_phase(CROSS_B, CROSS_I, decode=False)
    assert (check.rank, check.complete, check.determined) == (3, False, ())


def test_one_batch_size_leaves_the_batch_terms_open_only():
    i = np.array([128, 512, 1024, 2048, 4096.0])
    check = check_phase(np.full(5, 2.0), i, decode=True)
    assert check.rank == 2
    assert check.relations == ("b L = 2 L", "b = 2")
    full = check_phase(*map(np.ravel, np.meshgrid([1, 2.0], i)), decode=True)
    assert full.complete
    assert full.determined == ("p5", "p6", "p7", "p8")
    assert "determined" in str(full)


def test_the_identifiable_form_of_a_cross_recovers_its_slopes():
    y = 0.1 + 2e-4 * (CROSS_I - 512) + 0.05 * (CROSS_B - 1)
    fitted = fit_phase(CROSS_B, CROSS_I, y, decode=False, form="cross")
    assert fitted.reference == (1.0, 512.0)
    assert fitted.linear.coefficients == pytest.approx([0.1, 2e-4, 0.05])
    # Reading: p3 = 0, so that p1 I b + p2 b + p4 gives both slopes.
    p1, p2, p3, p4 = fitted.four()
    assert p3 == 0.0
    assert p1 * CROSS_B * CROSS_I + p2 * CROSS_B + p4 == pytest.approx(y)


def test_non_negative_holds_the_sign_and_keeps_an_upper_end():
    rng = np.random.default_rng(5)
    b, i = map(np.ravel, np.meshgrid([1, 2, 4, 8.0], [128, 512, 1024, 2048.0]))
    y = 0.05 + 1e-4 * b * i - 1e-3 * b
    free = fit_phase(b, i, y, decode=False)
    held = fit_phase(
        b, i, y * (1 + 0.01 * rng.standard_normal(16)), decode=False, non_negative=True
    )
    assert free.linear["p2"] == pytest.approx(-1e-3)
    assert held.linear["p2"] == 0.0
    assert held.linear.low.min() >= 0.0
    assert held.linear.high.min() >= 0.0
    assert "coefficients >= 0" in str(held)


def test_too_few_rows_and_impossible_times_are_refused():
    with pytest.raises(FitError, match="4 rows cannot determine 4 coefficients"):
        fit_phase([1, 2, 1, 2], [1, 1, 2, 2], np.ones(4), decode=False)
    with pytest.raises(FitError, match="1 of 5 times are not positive"):
        fit_phase([1, 2, 1, 2, 4], [1, 1, 2, 2, 4], [1, 1, 0, 1, 1], decode=False)


def test_floor_fit_finds_floor_and_bend():
    b = np.array([1, 1, 1, 1, 1, 2, 4, 8.0])
    i = np.array([64, 128, 256, 1024, 4096, 2048, 2048, 2048.0])
    fitted = fit_floor(b, i, np.maximum(0.05, 1e-4 * b * i))
    assert fitted.coefficients == pytest.approx([0.05, 1e-4, 0.0], abs=1e-9)
    assert fitted.bend_tokens == pytest.approx(500)
    assert fitted.predict(1, [64, 1024]).seconds == pytest.approx([0.05, 0.1024])
    with_requests = fit_floor(b, i, np.maximum(0.05, 1e-4 * b * i + 2e-3 * b), per_request=True)
    assert with_requests.coefficients == pytest.approx([0.05, 1e-4, 0.0, 2e-3], abs=1e-9)
    assert "floor up to" in str(fitted)


def test_floor_fit_refuses_tables_without_a_floor():
    i = np.array([64, 128, 256, 512, 1024.0])
    with pytest.raises(FitError, match="lie on the floor"):
        fit_floor(np.ones(5), i, 1e-4 * i)
    with pytest.raises(FitError, match="cannot"):
        fit_floor([1, 1], [1, 2], [1.0, 2.0])


def test_affine_times_by_hand():
    # p1..p8 with round values; eq. 4 summed term by term.
    model = Affine(1e-3, 2e-2, 3e-4, 5e-2, 1e-5, 2e-3, 3e-5, 4e-2, max_batch=8)
    assert float(model.prefill_batch_s(2, 100)) == pytest.approx(0.2 + 0.04 + 0.03 + 0.05)
    steps = [1e-5 * 2 * (100 + k) + 4e-3 + 3e-5 * (100 + k) + 4e-2 for k in (1, 2, 3)]
    assert float(model.decode_batch_s(2, 100, 3)) == pytest.approx(sum(steps))
    floored = Affine(1e-3, 0, 0, 0, 0, 0, 0, 1e-2, floor_s=0.1)
    assert floored.prefill_batch_s([1, 1], [10, 1000]).tolist() == [0.1, 1.0]


def test_affine_prefill_reduces_exactly_without_batch_terms():
    model = Affine(1e-4, 0, 0, 0.02, 1e-7, 1e-3, 0, 0.01, floor_s=0.08, max_batch=16, min_tokens=64)
    reduction = model.reduce()
    assert reduction.accuracy["prefill"].max_percent < 1e-9
    step = model.step_model()
    # Linear from the largest decode step (16 requests) to the floor at 64 tokens, bend at 600.
    assert step.seconds([64, 600, 1600]) == pytest.approx([0.08, 0.08, 0.18])
    assert float(step.seconds(16, 16)) == pytest.approx(0.026)
    assert "not its batch size" in str(reduction)


def test_affine_reduction_states_the_cost_of_batch_terms():
    model = Affine(1e-4, 1e-2, 0, 0.02, 1e-7, 1e-3, 0, 0.01, max_batch=16, min_tokens=64)
    accuracy = model.reduce().accuracy
    assert accuracy["prefill"].mape_percent > 1.0
    assert accuracy["decode"].max_percent < 1e-9


def test_a_larger_step_never_takes_less_time_than_the_largest_decode():
    model = Affine(1e-4, 0, 0, 0.0, 0, 1e-2, 0, 0.01, max_batch=32, min_tokens=64)
    n = np.arange(1, 4096)
    assert (np.diff(model.step_model().seconds(n)) >= -1e-12).all()


def test_fit_takes_each_phase_that_has_rows():
    b, i = map(np.ravel, np.meshgrid([1, 2, 4.0], [128, 512, 1024.0]))
    table = Measurements(np.zeros(9, bool), b, i, 0.01 + 1e-4 * b * i)
    prefill, decode = fit(table)
    assert decode is None
    assert prefill is not None
    assert prefill.linear["p1"] == pytest.approx(1e-4)


def test_identifiability_of_an_empty_column():
    check = identifiability(
        np.array([[1.0, 0.0], [2.0, 0.0]]), (Term("a", "x", "s"), Term("c", "y", "s"))
    )
    assert check.determined == ("a",)
    assert check.relations == ("y = 0",)
    assert np.isinf(check.condition) or check.condition > 1e12


def test_an_unbounded_fit_that_predicts_no_time_still_reduces():
    """Eq. 3 may go through 0 for the smallest prompts; the step model rests on the others."""
    model = Affine(
        per_batch_token_s=1e-4, per_request_s=-1e-4, per_longest_token_s=0.0, prefill_s=0.0,
        per_cached_token_s=1e-8, per_decoding_s=1e-4, per_context_token_s=0.0, decode_s=0.01,
        prefills=(np.array([1.0, 1.0, 2.0]), np.array([1.0, 100.0, 1000.0])),
    )  # fmt: skip
    assert float(model.prefill_batch_s(1, 1)) == 0.0
    reduced = model.reduce()
    assert reduced.accuracy["prefill"].rows == 2
    assert np.isfinite(float(reduced.model.prefill_seconds([1000])))
    none = replace(model, prefills=(np.array([1.0]), np.array([1.0])))
    with pytest.raises(FitError, match="no prefill takes more than 0 s"):
        none.reduce()
