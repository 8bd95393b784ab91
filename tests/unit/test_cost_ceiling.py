"""The ceiling of a fleet: closed forms, and a program of every single step solved elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetero.costs.ceiling import StepKind, most_rps
from hetero.latency.step import Piece
from hetero.workload import Trace

CHATS = Trace([0.0, 0.0], [100, 400], [51, 201])


def kind(piece: Piece, kv_tokens: float = 1e9, *, chunked: bool = False) -> StepKind:
    return StepKind("gpu", 1, "pool", piece, kv_tokens, 32, 512.0, chunked, whole=True)


def every_step(one: StepKind, trace: Trace, goal: float, tpot_s: float | None) -> float:
    """All batches, prompts and contexts at the ends of their ranges, one column each."""
    x, y = trace.input_tokens.astype(float), trace.output_tokens - 1.0
    cached = y * x + y * (y - 1) / 2
    late = np.sort(y)[::-1][: int(np.ceil((1 - goal) * len(y) - 1e-9))].sum() / len(y)
    columns = []
    knots = [float(n) for n in one.piece.knots_tokens if n < 512] + [512.0]
    for b in range(33):
        for m in {0.0, *(n - b for n in knots if n > b)} if one.chunked or b == 0 else {0.0}:
            for c in {b * x.min(), min(b * (x + y).max(), one.kv_tokens)}:
                if b + m == 0 or not b * x.min() <= c <= one.kv_tokens:
                    continue
                t = float(one.piece.seconds(b + m, b, c, 0.0))
                columns.append((m, b, c, 0.0, t, b * (t - (tpot_s or np.inf)), 0.0))
                columns.append((m, b, c, 0.0, t, 0.0, b))
    columns.append((0.0, 0.0, 0.0, 1.0, one.piece.per_pair_s, 0.0, 0.0))
    each = np.array(columns).T
    if tpot_s is None:
        each[5:] = 0.0
    work = np.array([x.mean(), y.mean(), cached.mean(), (x**2).mean() / 2])
    less = np.vstack([np.c_[work, -each[:4]], np.r_[0.0, each[4]], np.r_[0.0, each[5]]])
    less = np.vstack([less, np.r_[-late, each[6]]])
    most = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    scale = np.abs(less).max(axis=1).clip(1e-12)
    found = linprog(np.eye(1, less.shape[1])[0] * -1, less / scale[:, None], most / scale)
    return float(found.x[0])


@settings(max_examples=40)
@given(
    bend=st.sampled_from((0.5, 8.0, 100.0, 600.0)),
    slope_s=st.sampled_from((1e-5, 1e-4, 1e-3)),
    cached_s=st.sampled_from((0.0, 1e-7, 1e-5)),
    pair_s=st.sampled_from((0.0, 1e-8)),
    kv_tokens=st.sampled_from((700.0, 3000.0, 1e9)),
    tpot_s=st.sampled_from((None, 0.011, 0.02, 0.05)),
    goal=st.sampled_from((0.5, 1.0)),
    chunked=st.booleans(),
)
def test_it_is_just_above_the_program_of_every_step(
    bend: float,
    slope_s: float,
    cached_s: float,
    pair_s: float,
    kv_tokens: float,
    tpot_s: float | None,
    goal: float,
    chunked: bool,
) -> None:
    knots = np.array([0.0, bend, 2.0 * bend])
    piece = Piece(knots, 0.01 + slope_s * np.maximum(knots - bend, 0.0), [cached_s], pair_s)
    one = kind(piece, kv_tokens, chunked=chunked)
    found = most_rps({"gpu": 1}, [one], CHATS, goal=goal, tpot_s=tpot_s)
    exact = every_step(one, CHATS, goal, tpot_s)
    assert exact * (1 - 1e-6) <= found <= exact * 1.1 + 1e-9


def test_phases_of_their_own_share_the_gpus() -> None:
    """250 prompt tokens of 1 ms and 125 steps of 10 ms that 32 share; pairs are prefill alone."""
    prompts = Piece([0.0, 512.0], [0.0, 0.512], [0.0], 1e-6)
    steps = Piece([0.0, 32.0], [0.01, 0.01], [0.0])
    kinds = [
        StepKind("gpu", 1, "prefill", prompts, 1e9, 0, 512.0, chunked=False, whole=True),
        StepKind("gpu", 1, "decode", steps, 1e9, 32, 0.0, chunked=False, whole=True),
    ]
    pairs_s = 1e-6 * (100**2 + 400**2) / 4
    found = most_rps({"gpu": 2}, kinds, CHATS)
    assert found == pytest.approx(2 / (0.25 + pairs_s + 125 * 0.01 / 32), rel=1e-6)


def test_a_small_cache_holds_few_requests() -> None:
    """10 ms a step whatever is in it: 250 cached tokens each, so that 1,000 hold four."""
    piece = Piece([0.0, 1.0], [0.01, 0.01], [0.0])
    even = Trace([0.0], [250], [2])
    free, tight = (most_rps({"gpu": 1}, [kind(piece, kv)], even) for kv in (1e9, 1000.0))
    assert free == pytest.approx(1.0 / (0.01 * 250 / 512 + 0.01 / 32))
    assert tight == pytest.approx(1.0 / (0.01 * 250 / 512 + 0.01 / 4), rel=0.01)


def test_the_late_wait_in_large_batches() -> None:
    """Half of the requests are late: they decode 32 at once, the others two, in 12 ms."""
    piece = Piece([0.0, 1.0], [0.01, 0.011], [0.0])
    even = Trace([0.0, 0.0], [1, 1], [101, 101])
    found = most_rps({"gpu": 1}, [kind(piece)], even, goal=0.5, tpot_s=0.012)
    prefill_s = (0.01 + 0.512) / 512
    busy_s = prefill_s + 50 * 0.012 / 2 + 50 * 0.042 / 32
    assert found == pytest.approx(1.0 / busy_s, rel=1e-6)
