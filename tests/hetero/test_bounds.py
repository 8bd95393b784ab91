"""The bound of a fleet: closed forms, and schedules of every single step solved elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hetero import bounds
from hetero.bounds import StepKind, fleet_rps
from hetero.latency.step import Piece
from hetero.workload import Trace

CHATS = Trace([0.0, 0.0], [100, 400], [51, 201])
Entries = dict[object, float]


def kind(
    piece: Piece, kv_tokens: float = 1e9, *, chunked: bool = False, gpu: str = "gpu"
) -> StepKind:
    return StepKind(gpu, 1, gpu, piece, kv_tokens, 32, 512.0, chunked, whole=True)


def prompts_together(one: StepKind, x: np.ndarray) -> Iterator[tuple[int, ...]]:
    """How often each prompt is in a step: every set that fits, and long ones alone."""
    most = [max(1, int(one.max_tokens // n)) for n in x]
    for counts in product(*(range(n + 1) for n in most)):
        if sum(counts) == 1 or 0 < np.dot(counts, x) <= one.max_tokens:
            yield counts


def steps(one: StepKind, trace: Trace) -> Iterator[tuple[float, float, float]]:
    """All batches, prompt tokens beside them where they are cut, and contexts at their ends."""
    x, last = trace.input_tokens.min(), (trace.input_tokens + trace.output_tokens - 1.0).max()
    knots = [float(n) for n in one.piece.knots_tokens if n < 512] + [512.0]
    for b in range(33):
        for m in {0.0, *(n - b for n in knots if n > b)} if one.chunked else {0.0}:
            for c in {b * x, min(b * last, one.kv_tokens)}:
                if b + m > 0 and b * x <= c <= one.kv_tokens:
                    yield m, b, c


def every_schedule(
    gpus: Mapping[str, int],
    kinds: Sequence[StepKind],
    trace: Trace,
    goal: float,
    tpot_s: float | None,
) -> float:
    """Best rate where each request is prefilled and decoded by a kind, and each step is a column.

    A column holds its entries by row, all of them at most 0 in sum, and GPUs at most their number.
    """
    x, y = trace.input_tokens.astype(float), trace.output_tokens - 1.0
    who = range(len(x))
    rate: Entries = {(what, r): 1.0 / len(x) for what in ("prefill", "decode") for r in who}
    columns: list[Entries] = [rate | {"late": goal - 1.0}]
    for one in kinds:
        at = one.gpu
        for r in who:
            if one.chunked:
                busy_s = one.piece.per_pair_s * x[r] ** 2 / 2
                columns.append({("prefill", r): -1.0, (at, "prompts"): x[r], at: busy_s})
            cached = y[r] * x[r] + y[r] * (y[r] - 1) / 2
            for late in (False, True) if tpot_s else (True,):
                does = {(at, late, "tokens"): y[r], (at, late, "cached"): cached}
                counts = {"late": 1.0} if late and tpot_s else {}
                columns.append({("decode", r): -1.0, **does, **counts})
        for counts in () if one.chunked else prompts_together(one, x):
            busy_s = float(one.piece.seconds(counts @ x, 0, 0, counts @ x**2 / 2))
            columns.append({at: busy_s, **{("prefill", r): -float(counts[r]) for r in who}})
        for m, b, c in steps(one, trace):
            t = float(one.piece.seconds(b + m, b, c, 0.0))
            for late in (False, True) if tpot_s else (True,):
                does = {(at, late, "tokens"): -b, (at, late, "cached"): -c, (at, "prompts"): -m}
                wait = {} if late else {(at, "wait"): b * (t - (tpot_s or 0.0))}
                columns.append({at: t, **does, **wait})
    rows = {name: k for k, name in enumerate({name for one in columns for name in one})}
    less = np.zeros((len(rows), len(columns)))
    for k, one in enumerate(columns):
        for name, value in one.items():
            less[rows[name], k] = value
    most = np.array([gpus.get(name, 0.0) if isinstance(name, str) else 0.0 for name in rows])
    scale = np.abs(less).max(axis=1).clip(1e-12)
    found = linprog(np.eye(1, less.shape[1])[0] * -1, less / scale[:, None], most / scale)
    return float(found.x[0])


@settings(max_examples=60)
@given(
    bend=st.sampled_from((0.5, 8.0, 100.0, 600.0)),
    slope_s=st.sampled_from((1e-5, 1e-4, 1e-3)),
    cached_s=st.sampled_from((0.0, 1e-7, 1e-5)),
    pair_s=st.sampled_from((0.0, 1e-8)),
    kv_tokens=st.sampled_from((1000.0, 3000.0, 1e9)),
    tpot_s=st.sampled_from((None, 0.011, 0.02, 0.05)),
    goal=st.sampled_from((0.5, 1.0)),
    chunked=st.booleans(),
    two=st.booleans(),
    requests=st.sampled_from(
        (
            ((100, 51), (400, 201)),
            ((310, 11), (300, 201), (90, 2)),
            ((700, 31), (200, 101), (60, 1)),
        )
    ),
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
    two: bool,
    requests: tuple[tuple[int, int], ...],
) -> None:
    knots = np.array([0.0, bend, 2.0 * bend])
    piece = Piece(knots, 0.01 + slope_s * np.maximum(knots - bend, 0.0), [cached_s], pair_s)
    kinds, gpus = [kind(piece, kv_tokens, chunked=chunked)], {"gpu": 1}
    if two:  # reads cached tokens fast, and does the rest slowly
        other = Piece(knots, 3.0 * piece.knots_s, [cached_s / 5.0], 2.0 * pair_s)
        kinds, gpus = [*kinds, kind(other, 1e9, chunked=chunked, gpu="b")], {"gpu": 1, "b": 2}
    trace = Trace([0.0] * len(requests), *zip(*requests, strict=True))
    found = fleet_rps(gpus, kinds, trace, goal=goal, tpot_s=tpot_s)
    exact = every_schedule(gpus, kinds, trace, goal, tpot_s)
    assert exact * (1 - 1e-6) <= found
    if chunked or slope_s * bend <= 0.01:  # else small steps do most, and no prompt fits into them
        assert found <= exact * 1.02 + 1e-9


def test_phases_of_their_own_share_the_gpus() -> None:
    """250 prompt tokens of 1 ms and 125 steps of 10 ms that 32 share; pairs are prefill alone."""
    prompts = Piece([0.0, 512.0], [0.0, 0.512], [0.0], 1e-6)
    steps = Piece([0.0, 32.0], [0.01, 0.01], [0.0])
    kinds = [
        StepKind("gpu", 1, "prefill", prompts, 1e9, 0, 512.0, chunked=False, whole=True),
        StepKind("gpu", 1, "decode", steps, 1e9, 32, 0.0, chunked=False, whole=True),
    ]
    pairs_s = 1e-6 * (100**2 + 400**2) / 4
    found = fleet_rps({"gpu": 2}, kinds, CHATS)
    assert found == pytest.approx(2 / (0.25 + pairs_s + 125 * 0.01 / 32), rel=1e-6)


def test_a_small_cache_holds_few_requests() -> None:
    """10 ms a step whatever is in it, two prompts or 32 requests: of 250 cached tokens, four."""
    piece = Piece([0.0, 1.0], [0.01, 0.01], [0.0])
    even = Trace([0.0], [250], [2])
    free, tight = (fleet_rps({"gpu": 1}, [kind(piece, kv)], even) for kv in (1e9, 1000.0))
    assert free == pytest.approx(1.0 / (0.01 / 2 + 0.01 / 32))
    assert tight == pytest.approx(1.0 / (0.01 / 2 + 0.01 / 4), rel=0.01)


def test_the_late_wait_in_large_batches() -> None:
    """Half of the requests are late: they decode 32 at once, the others two, in 12 ms."""
    piece = Piece([0.0, 1.0], [0.01, 0.011], [0.0])
    even = Trace([0.0, 0.0], [1, 1], [101, 101])
    found = fleet_rps({"gpu": 1}, [kind(piece)], even, goal=0.5, tpot_s=0.012)
    prefill_s = (0.01 + 0.512) / 512
    busy_s = prefill_s + 50 * 0.012 / 2 + 50 * 0.042 / 32
    assert found == pytest.approx(1.0 / busy_s, rel=1e-6)


@pytest.mark.parametrize(("tokens", "together"), [(300, 1), (171, 2), (170, 3), (128, 4), (700, 1)])
def test_prompts_that_are_not_cut_share_steps_as_they_fit(tokens: int, together: int) -> None:
    """10 ms a step, and 1 ms per token beyond 512 of the long one, which goes alone."""
    piece = Piece([0.0, 512.0, 1024.0], [0.01, 0.01, 0.522], [0.0], 1e-8)
    found = fleet_rps({"gpu": 1}, [kind(piece)], Trace([0.0], [tokens], [1]))
    step_s = 0.01 + 1e-3 * max(0, tokens - 512)
    assert found == pytest.approx(1.0 / (step_s / together + 1e-8 * tokens**2 / 2), rel=1e-6)


def test_parts_of_a_long_prompt_take_the_least_time() -> None:
    """Beyond 512 tokens each takes 1 ms, and two parts of 500 take 20 ms together."""
    piece = Piece([0.0, 512.0, 1024.0], [0.01, 0.01, 0.522], [0.0])
    parts = StepKind("gpu", 1, "gpu", piece, 1e9, 32, 512.0, chunked=False, whole=False)
    found = fleet_rps({"gpu": 1}, [parts], Trace([0.0], [1000], [1]))
    assert found == pytest.approx(512 / 1000 / 0.01, rel=1e-6)


def test_who_prefills_and_who_decodes_does_so_for_whole_requests() -> None:
    """Tokens cost the one type, cached tokens the other: long and short contexts take turns."""
    trace = Trace([0.0, 0.0], [500, 1], [2, 501])
    reads, steps_s = Piece([0.0, 1.0], [0.0, 1e-3], [0.0]), Piece([0.0, 1.0], [0.0, 0.0], [1e-5])
    prompts = Piece([0.0, 512.0], [0.0, 0.0], [0.0])
    kinds = [
        StepKind("a", 1, "a", reads, 1e9, 32, 0.0, chunked=False, whole=True),
        StepKind("b", 1, "b", steps_s, 1e9, 32, 0.0, chunked=False, whole=True),
        StepKind("a", 1, "c", prompts, 1e9, 0, 512.0, chunked=False, whole=True),
    ]
    found = fleet_rps({"a": 1, "b": 1}, kinds, trace)
    # On a, 1 and 500 ms; on b 5 ms and 1.2525 s: a takes the first and 71.7 % of the second.
    share = (1.2525 - 0.001) / (0.5 + 1.2525)
    assert found == pytest.approx(2.0 / (0.001 + 0.5 * share), rel=1e-6)


def test_finer_classes_never_give_a_worse_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    inputs, outputs = draw.lognormal(5.0, 1.0, 300), draw.lognormal(4.0, 1.0, 300)
    trace = Trace(np.zeros(300), inputs.astype(int) + 1, outputs.astype(int) + 1)
    one = Piece([0.0, 100.0, 200.0], [0.01, 0.01, 0.02], [1e-6], 1e-8)
    other = Piece([0.0, 100.0, 200.0], [0.03, 0.03, 0.06], [2e-8], 2e-8)
    kinds = [kind(one), kind(other, gpu="b")]
    found = []
    for count in (1, 2, 4, 8, 16, 300):
        monkeypatch.setattr(bounds, "_QUANTILES", tuple(np.arange(1, count) / count))
        found.append(fleet_rps({"gpu": 1, "b": 2}, kinds, trace, goal=0.9, tpot_s=0.05))
    assert all(b <= a * 1.002 for a, b in pairwise(found))
    assert found[-1] < 0.99 * found[0]
