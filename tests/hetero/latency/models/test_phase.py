"""Fits recover random truths within their stated intervals; models and reductions agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.catalog import gpu, llm
from hetero.latency import Affine, Measurements, Piece, StepModel
from hetero.latency.models.fitting import Term, identifiability
from hetero.latency.models.floor import fit_floor
from hetero.latency.models.phase import fit_phase
from hetero.latency.models.roofline import VALUES, Efficiency, Roofline
from hetero.latency.storage import from_json, to_json
from pipelines.studies.table_reduction import reduce_table

QUICK = settings(max_examples=40)
TRUTHS = 200
BATCH, LENGTH = (
    a.ravel() for a in np.meshgrid([1, 2, 4, 8, 16, 32.0], [128, 256, 512, 1024, 2048, 4096.0])
)


def truth(rng: np.random.Generator) -> np.ndarray:
    """Coefficients that all matter on this grid: each gives 5 to 50 ms in its middle."""
    scale = np.array([8 * 700.0, 8.0, 700.0, 1.0])
    return rng.uniform(0.005, 0.05, 4) / scale


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("weights", "noise"), [("relative", 0.03), ("none", 0.002)])
def test_confidence_and_prediction_intervals_cover_the_truth(decode, weights, noise):
    # 95 % intervals: 800 of them hold the truth 95 +- 0.8 % of the time.
    rng = np.random.default_rng(7)
    held, within = 0, 0
    for _ in range(TRUTHS):
        p = truth(rng)
        exact = np.column_stack([BATCH * LENGTH, BATCH, LENGTH, np.ones_like(BATCH)]) @ p
        sigma = noise * exact if weights == "relative" else noise
        seconds = np.maximum(exact + sigma * rng.standard_normal(len(exact)), 1e-4)
        fit = fit_phase(BATCH, LENGTH, seconds, decode=decode, weights=weights)
        held += int(((fit.linear.low <= p) & (p <= fit.linear.high)).sum())
        predicted = fit.predict(6.0, 900.0)
        new = float(np.array([5400.0, 6.0, 900.0, 1.0]) @ p)
        new += (noise * new if weights == "relative" else noise) * rng.standard_normal()
        within += int(predicted.low_s[0] <= new <= predicted.high_s[0])
    assert 0.90 <= held / (4 * TRUTHS) <= 0.99
    assert 0.90 <= within / TRUTHS <= 0.99


def test_non_negative_intervals_cover_truths_with_zeros():
    rng = np.random.default_rng(11)
    held = 0
    for k in range(TRUTHS):
        p = truth(rng)
        p[1 + k % 2] = 0.0  # p2 or p3, as engines that do not pad have it
        exact = np.column_stack([BATCH * LENGTH, BATCH, LENGTH, np.ones_like(BATCH)]) @ p
        seconds = exact * (1 + 0.03 * rng.standard_normal(len(exact)))
        fit = fit_phase(BATCH, LENGTH, seconds, decode=False, non_negative=True).linear
        assert (fit.coefficients >= 0).all()
        held += int(((fit.low <= p) & (p <= fit.high)).sum())
    assert 0.90 <= held / (4 * TRUTHS) <= 1.0


def test_floor_intervals_cover_the_truth():
    rng = np.random.default_rng(3)
    tokens = np.repeat(np.geomspace(64, 16384, 17), 3)
    held = 0
    for _ in range(TRUTHS):
        floor, slope, bend = rng.uniform(0.02, 0.1), rng.uniform(3e-5, 3e-4), rng.uniform(300, 1500)
        p = np.array([floor, slope, floor - slope * bend])
        exact = np.maximum(p[0], p[1] * tokens + p[2])
        seconds = exact * (1 + 0.02 * rng.standard_normal(len(tokens)))
        fit = fit_floor(np.ones_like(tokens), tokens, seconds)
        held += int(((fit.low <= p) & (p <= fit.high)).sum())
    assert 0.88 <= held / (3 * TRUTHS) <= 0.99


@QUICK
@given(
    st.integers(1, 64),
    st.integers(64, 4096),
    st.lists(st.integers(1, 128), min_size=1, max_size=6),
    st.lists(st.integers(1, 8192), min_size=1, max_size=6),
)
def test_a_cross_of_settings_never_determines_the_interaction(b0, i0, batches, lengths):
    b = np.array([b0, *batches, *([b0] * len(lengths))], dtype=float)
    i = np.array([i0, *([i0] * len(batches)), *lengths], dtype=float)
    design = np.column_stack([b * i, b, i, np.ones_like(b)])
    terms = tuple(Term(f"p{k}", c, "s") for k, c in enumerate(("b I", "b", "I", "1"), 1))
    check = identifiability(design, terms)
    assert not check.complete
    assert check.rank == np.linalg.matrix_rank(design / np.abs(design).max(axis=0))


positive = st.floats(1e-6, 1e-3)


@QUICK
@given(positive, positive, positive, positive, positive, positive, st.integers(1, 64))
def test_affine_decode_reduces_exactly_and_eq_4_is_the_sum_of_its_steps(p1, p4, p5, p6, p7, p8, b):
    model = Affine(p1, 0.0, 0.0, p4, p5, p6, p7, p8, max_batch=64, min_tokens=128)
    step = model.step_model()
    context = np.array([1.0, 500.0, 8000.0])
    np.testing.assert_allclose(
        step.seconds(b, b, b * context), model.decode_step_s(b, context), rtol=1e-12
    )
    steps = sum(p5 * b * (100 + k) + p6 * b + p7 * (100 + k) + p8 for k in range(1, 31))
    assert float(model.decode_batch_s(b, 100, 30)) == pytest.approx(steps, rel=1e-12)


efficiencies = st.builds(
    lambda shares, padding, layer, step, hop: Efficiency(
        **dict(zip(VALUES, [*shares, padding, layer, step, hop], strict=True))
    ),
    st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5),
    st.floats(0, 300),
    st.floats(0, 1e-4),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
)


@QUICK
@given(
    efficiencies,
    st.sampled_from(["Llama-2-70B", "Llama-3.1-8B", "BLOOM-176B"]),
    st.sampled_from(["T4", "V100-16GB", "H100-SXM"]),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 60_000),
    st.integers(0, 200),
    st.floats(0, 1e6),
    st.floats(0, 1e8),
)
def test_a_dense_roofline_is_its_step_model(efficiency, model, name, degree, n, b, cached, pairs):
    roofline = Roofline(
        gpu=gpu(name), llm=llm(model), efficiency=efficiency, tensor_parallel=degree
    )
    exact = float(roofline.seconds(n, b, cached, pairs))
    assert float(roofline.step_model().seconds(n, b, cached, pairs)) == pytest.approx(
        exact, rel=1e-9
    )
    # More work never takes less time.
    assert float(roofline.seconds(n + 64, b, cached, pairs)) >= exact
    assert float(roofline.seconds(n, b, cached + 1e4, pairs + 1e6)) >= exact


@QUICK
@given(
    st.lists(positive, min_size=3, max_size=3),
    st.lists(st.floats(1e-9, 1e-6), min_size=3, max_size=3),
    st.floats(0, 1e-8),
)
def test_reduction_of_a_table_made_by_a_step_model_gives_that_model_back(steps, rates, per_pair):
    knots = np.array([1.0, 8.0, 64.0, 128.0, 2048.0, 8192.0])
    times = np.cumsum([1e-2, *steps, 1e-1, 1.0])
    rates = np.interp(np.arange(1, 65), [1, 8, 64], rates)
    model = StepModel((Piece(knots, times, rates, per_pair),), source="given", provenance="assumed")
    b = np.repeat([1.0, 8.0, 64.0], 2)
    prompts = np.array([(1, 128), (1, 2048), (16, 128), (1, 8192), (16, 512), (64, 128)], float)
    shape = Measurements(
        decode=np.repeat([True, False], 6),
        batch=np.concatenate([b, prompts[:, 0]]),
        length_tokens=np.concatenate([np.tile([100.0, 4000.0], 3), prompts[:, 1]]),
        seconds=np.ones(12),
    )
    table = Measurements(
        decode=shape.decode,
        batch=shape.batch,
        length_tokens=shape.length_tokens,
        seconds=model.seconds(*shape.step_arguments),
    )
    reduction = reduce_table(table)
    assert max(a.max_percent for a in reduction.accuracy.values()) < 1e-6
    assert reduction.model.pieces[0].per_pair_s == pytest.approx(per_pair, rel=1e-6, abs=1e-15)


@QUICK
@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=8, unique=True),
    st.floats(0, 1e-3),
    st.one_of(st.just(np.inf), st.floats(1, 1e6)),
)
def test_step_models_survive_json_bit_for_bit(values, per_pair, limit):
    knots = np.cumsum(np.ones(len(values)))
    piece = Piece(knots, np.array(values), np.array(values[:2]), per_pair)
    model = StepModel((piece, piece), source="x", provenance="assumed", max_tokens=limit)
    read = from_json(to_json(model))
    for ours, theirs in zip(model.pieces, read.pieces, strict=True):
        assert ours.knots_s.tobytes() == theirs.knots_s.tobytes()
        assert ours.per_cached_token_s.tobytes() == theirs.per_cached_token_s.tobytes()
        assert ours.per_pair_s == theirs.per_pair_s
    assert (read.max_tokens, read.max_decoding, read.source) == (limit, np.inf, "x")
