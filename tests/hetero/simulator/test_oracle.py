"""The closed form against every step simulated by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.engine import state
from hetero.engine.gaps import gap_edges
from hetero.latency.step import Bends, Mixed, Piece, StepModel
from hetero.routers import (
    DEFER,
    REJECT,
    Builtin,
    FleetState,
    LeastRequests,
    LeastTokens,
    Oracle,
    PairShares,
    Request,
    RoundRobin,
    Router,
    SingleInstance,
)
from hetero.simulator import Event, Run, simulate
from hetero.workload import Trace
from tests.hetero.fuzzing import EXAMPLES, drawn
from tests.hetero.simulator.oracle import (
    DEFERRED,
    NO_REPLICA,
    REFUSED,
    TOO_LONG,
    Fleet,
    step_seconds,
)


class AtMostTwo:
    """A router in plain Python: the fewest requests, held here while all have two or more."""

    name = "least requests below 2"

    def choose(self, request: Request, fleet: FleetState) -> int:
        load = np.where(fleet.eligible, fleet.outstanding, 10**9)
        if not fleet.eligible.any():
            return REJECT
        return int(load.argmin()) if load.min() < 2 else DEFER


ROUTERS: dict[str, Builtin | Router] = {
    "round robin": RoundRobin(),
    "least requests": LeastRequests(),
    "least tokens": LeastTokens(),
    "first": SingleInstance(0),
    "least requests below 2": AtMostTwo(),
}
REASONS = {
    state.NO_REASON: "",
    state.TOO_LONG: TOO_LONG,
    state.NO_REPLICA: NO_REPLICA,
    state.REFUSED_BY_ROUTER: REFUSED,
    state.DEFERRED_FOR_GOOD: DEFERRED,
}
BATCHING = ["prefill first", "chunked", "static"]
ADMISSION = ["known", "predicted", "maximum", "paged"]


class Guess:
    """Predicts given numbers."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def predict(self, trace: Trace, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(self.tokens, np.int32)


def with_prefixes(trace: Trace, block_tokens: int, rng: np.random.Generator) -> Trace:
    """Prompts that branch off from each other, as conversations and shared instructions do."""
    chains: list[list[int]] = []
    fresh = 0
    for tokens in trace.input_tokens.tolist():
        length = -(-tokens // block_tokens)
        old = chains[rng.integers(len(chains))] if chains and rng.random() < 0.8 else []
        shared = old[: rng.integers(0, min(len(old), length), endpoint=True)]
        chains.append([*shared, *range(fresh, fresh + length - len(shared))])
        fresh += length
    return replace(
        trace,
        prefix_offsets=np.cumsum([0, *map(len, chains)]),
        prefix_ids=np.array([7 * block for chain in chains for block in chain]),
        block_tokens=block_tokens,
    )


@st.composite
def settings_of_a_run(
    draw: st.DrawFn, *, split: bool = False, dyadic: bool = True, cached: bool = False
):
    """A deployment, a trace, predictions, events and a router.

    Where prefixes are cached, all engines do and prompts begin alike.
    Dyadic times are sums of multiples of a power of two, so that nothing is rounded and step
    ends, arrivals, transfers and failures meet exactly.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # A coarse clock makes nearly everything a tie.
    tick = draw(st.sampled_from([2.0**-3, 2.0**-10])) if dyadic else 1e-3 * rng.uniform(0.5, 2)

    def times(most: int, size: int | tuple[int, int] | None = None) -> np.ndarray:
        if dyadic:
            return rng.integers(0, most + 1, size) * tick
        return rng.uniform(0, most, size) * tick

    def piece() -> Piece:
        knots = draw(st.integers(1, 4))
        x = np.cumsum(2.0 ** rng.integers(0, 5, knots)) - rng.integers(0, 2)
        y = tick + times(8) + np.cumsum(times(4, knots) * np.diff(x, prepend=x[0]))
        rates = times(4, draw(st.integers(1, 5))) * draw(st.sampled_from([0.0, 2.0**-6, 1.0]))
        pairs = float(times(4)) * draw(st.sampled_from([0.0, 2.0**-5]))
        mixed = Mixed(*times(3, (3, len(rates)))) if draw(st.booleans()) else None
        # Levels may be negative where the knots leave room for it.
        level = times(3, len(rates)) - tick / 2 if draw(st.booleans()) else None
        bends = None
        if draw(st.booleans()):
            # Slopes per cached token, not steeper down than the rate goes up.
            contexts = np.cumsum(rng.integers(1, 12, draw(st.integers(2, 4))))
            slopes = times(4, (len(rates), len(contexts) - 1)) * 2.0**-3
            slopes = np.maximum(slopes - rates.max(), -rates[:, None])
            sizes = np.arange(1.0, len(rates) + 1.0)[:, None]
            extra = np.cumsum(np.hstack([0 * sizes, slopes * sizes * np.diff(contexts)]), axis=1)
            bends = Bends(contexts, extra - extra.min(axis=1, keepdims=True))
        return Piece(x, y, rates, pairs, mixed, level, bends)

    longest = draw(st.sampled_from([1, 3, 12, 40]))
    paged_block = draw(st.sampled_from([1, 2, 4, 16]))

    def engine(role: str) -> Engine:
        whole = role == "both" and not cached
        batching = draw(st.sampled_from(BATCHING if whole else BATCHING[:2]))
        admission = "known" if batching == "static" else draw(st.sampled_from(ADMISSION))
        admission = "paged" if cached else admission
        ahead = batching == "chunked" and draw(st.booleans())
        return Engine(
            batching=batching,
            admission=admission,
            eviction=draw(st.sampled_from(["recompute", "swap"])),
            max_batch=draw(st.sampled_from([1, 3, 8, 64])),
            max_step_tokens=draw(st.sampled_from([1, 4, 32, 1000])),
            max_output_tokens=draw(st.sampled_from([1, 8, 50])),
            block_tokens=paged_block,
            swap_s_per_gb=draw(st.sampled_from([0.0, 1.0])),
            prefix_cache=cached,
            schedule_ahead=ahead,
            free_share=0.0 if ahead else draw(st.sampled_from([0.0, 0.25, 0.5])),
            poll_steps=1 if ahead else draw(st.sampled_from([1, 1, 2, 5])),
        )

    def replica(name: str, role: str) -> Replica:
        pieces = tuple(piece() for _ in range(draw(st.integers(1, 2))))
        return Replica(
            name=name,
            step=StepModel(pieces, source="drawn", provenance="assumed"),
            kv_tokens=paged_block + draw(st.sampled_from([1, 2, 3, 6])) * longest,
            kv_bytes_per_token=1e9 * (tick if dyadic else 1e-3),
            engine=engine(role),
            role=role,
            lag_s=float(times(4)) if role == "prefill" else 0.0,
            lag_s_per_token=float(times(2)) if role == "prefill" else 0.0,
        )

    both = draw(st.integers(0, 1) if split else st.integers(1, 3))
    roles = ["both"] * both
    if split:
        roles += ["prefill"] * draw(st.integers(1, 2)) + ["decode"] * draw(st.integers(1, 2))
    replicas = tuple(replica(f"r{k}", role) for k, role in enumerate(roles))
    link = KvLink(bandwidth_gbs=1.0, latency_s=float(times(16)), compression=0.5)
    other = KvLink(bandwidth_gbs=2.0**-3, latency_s=float(times(2)))
    links = ((f"r{roles.index('prefill')}", f"r{roles.index('decode')}", other),) if split else ()
    deployment = Deployment("drawn", replicas, links, link if split else None)

    count = draw(st.integers(1, 40))
    gap = draw(st.sampled_from([0, 1, 4, 32]))
    trace = Trace(
        np.cumsum(times(gap, count)),
        rng.integers(1, longest, count, endpoint=True),
        rng.integers(0, longest, count, endpoint=True),
    )
    span = float(trace.arrival_s[-1]) + 50 * tick
    if draw(st.integers(0, 3)) == 0:
        trace = trace.closed_loop(draw(st.sampled_from([1, 2, 7, 50])), float(times(gap)))
    if draw(st.booleans()):
        classes = rng.integers(0, draw(st.sampled_from([1, 2, 5])), count)
        trace = replace(trace, priorities=classes)
    if cached:
        trace = with_prefixes(trace, draw(st.sampled_from([1, 2, 5])), rng)
    predicted = None
    if draw(st.booleans()):
        predicted = rng.integers(1, draw(st.sampled_from([2, longest + 1])), count).tolist()
    events = [
        Event(
            float(times(int(span / tick))),
            f"r{rng.integers(len(replicas))}",
            draw(st.sampled_from(["fail", "recover", "drain"])),
        )
        for _ in range(draw(st.sampled_from([0, 0, 1, 4])))
    ]
    router = draw(st.sampled_from([*sorted(ROUTERS), "pairs"]))
    return deployment, trace, predicted, sorted(events, key=lambda e: e.time_s), router


def pair_weights(deployment: Deployment, seed: int) -> list[tuple[int, int, float]]:
    """Small whole weights for some of the pairs that can serve; at least one of them."""
    roles = [replica.role for replica in deployment.replicas]
    found = [
        (i, j)
        for i in range(len(roles))
        for j in range(len(roles))
        if (roles[i], roles[j]) == ("prefill", "decode") or (i == j and roles[i] == "both")
    ]
    weights = np.random.default_rng(seed).integers(0, 4, len(found))
    weights[0] = max(weights[0], 1)
    return [(i, j, float(w)) for (i, j), w in zip(found, weights, strict=True) if w > 0]


def both(deployment, trace, predicted, events, router) -> tuple[Run, Fleet]:
    guess = Oracle() if predicted is None else Guess(predicted)
    pairs, chosen = (), ROUTERS.get(router)
    if chosen is None:
        pairs = pair_weights(deployment, len(trace))
        names = [replica.name for replica in deployment.replicas]
        chosen = PairShares({(names[i], names[j]): w for i, j, w in pairs})
    run = simulate(deployment, trace, chosen, events=events, predictor=guess)
    oracle = Fleet(deployment, trace, router, predicted=predicted, events=events, pairs=pairs)
    return run, oracle.run()


def compare(run: Run, oracle: Fleet, *, tolerance: float) -> None:
    """Every request, every replica, and the inter-token times."""
    r = run.requests
    assert [REASONS[int(k)] for k in r["reason"]] == [job.reason for job in oracle.jobs]
    for name, expected in {
        "node": [-1 if job.node is None else job.node.index for job in oracle.jobs],
        "decode_node": [-1 if job.target is None else job.target.index for job in oracle.jobs],
        "preemptions": [job.preemptions for job in oracle.jobs],
        "retries": [job.retries for job in oracle.jobs],
        "hit_tokens": [job.hit for job in oracle.jobs],
    }.items():
        np.testing.assert_array_equal(r[name], expected, err_msg=name)
    for name, times in {
        "arrival_s": [job.arrival for job in oracle.jobs],
        "first_token_s": [job.first for job in oracle.jobs],
        "finish_s": [job.finish for job in oracle.jobs],
        "transfer_s": [job.transfer for job in oracle.jobs],
    }.items():
        np.testing.assert_allclose(r[name], times, rtol=tolerance, atol=0, err_msg=name)
    for name, totals in {
        "busy_s": [node.busy for node in oracle.nodes],
        "prefill_tokens": [node.prefilled for node in oracle.nodes],
        "decode_tokens": [node.decoded for node in oracle.nodes],
        "outstanding": [node.outstanding for node in oracle.nodes],
    }.items():
        np.testing.assert_allclose(run.replicas[name], totals, rtol=tolerance, err_msg=name)
    assert run.gap_counts.sum() == len(oracle.gaps)
    edges = gap_edges()[1:-1]
    if tolerance == 0.0:
        bins = np.searchsorted(edges, oracle.gaps, side="right")
        counted = np.bincount(bins, minlength=len(edges) + 1)
        np.testing.assert_array_equal(run.gap_counts, counted)
    else:
        # A gap beside an edge may be rounded to either side of it.
        below = np.cumsum(run.gap_counts)[:-1]
        ordered = np.sort(oracle.gaps)
        assert (below >= np.searchsorted(ordered, edges * (1 - tolerance))).all()
        assert (below <= np.searchsorted(ordered, edges * (1 + tolerance), side="right")).all()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("split", [False, True], ids=("whole", "split phases"))
@pytest.mark.parametrize("kind", ["dyadic", "shared blocks", "without ties"])
def test_both_agree(kind: str, split: bool, examples: int) -> None:
    """Bit for bit where times are dyadic and tie, to rounding where they do not."""
    dyadic = kind != "without ties"

    @drawn(examples)
    @given(settings_of_a_run(split=split, dyadic=dyadic, cached=kind == "shared blocks"))
    def agree(settings_drawn) -> None:
        compare(*both(*settings_drawn), tolerance=0.0 if dyadic else 1e-9)

    agree()


@settings(max_examples=50)
@given(settings_of_a_run(dyadic=False), st.integers(0, 2**32))
def test_the_oracle_takes_its_step_times_from_the_definition(drawn, seed) -> None:
    step = drawn[0].replicas[0].step
    n, b, cached = np.random.default_rng(seed).integers(0, 100, (3, 20))
    own = [step_seconds(step, *sizes, 0.5 * sizes[0]) for sizes in zip(n, b, cached, strict=True)]
    np.testing.assert_allclose(own, step.seconds(n, b, cached, 0.5 * n), rtol=1e-12)


def test_thousands_at_time_0() -> None:
    rng = np.random.default_rng(0)
    step = StepModel.affine(floor_s=2.0**-5, per_token_s=2.0**-12, per_cached_token_s=2.0**-20)
    engine = Engine(admission="paged", max_batch=32, max_step_tokens=256)
    deployment = Deployment(
        "two",
        (
            Replica("a", step, kv_tokens=3000, engine=engine),
            Replica("b", step, kv_tokens=1000, engine=replace(engine, batching="chunked")),
        ),
    )
    trace = Trace(np.zeros(4000), rng.integers(1, 120, 4000), rng.integers(0, 60, 4000))
    run, oracle = both(deployment, trace, None, [], "least tokens")
    compare(run, oracle, tolerance=0.0)
    assert run.requests["preemptions"].sum() > 100
