"""Runs small enough to be worked out by hand, and what a dispatcher meets at the edges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.engine.gaps import gap_edges
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import (
    DEFER,
    LeastRequests,
    Normal,
    PowerOfTwo,
    Predictive,
    RoundRobin,
    SingleInstance,
)
from hetero.simulator import Event, simulate
from hetero.simulator.sustained import saturation
from hetero.workload import Trace

# A step costs 1 s, and 1/8 s per new token; nothing else.
STEP = StepModel.affine(floor_s=1.0, per_token_s=0.125, per_cached_token_s=0.0)
ENGINE = Engine(max_batch=8, max_step_tokens=16, block_tokens=4)


NONE_CAME_BACK = "every replica that could hold it was down, and none came back"


def one(engine: Engine = ENGINE, kv_tokens: int = 100, **fields) -> Deployment:
    return Deployment("one", (Replica("a", STEP, kv_tokens, engine=engine, **fields),))


def several(kv_tokens=(100, 100), engine: Engine = ENGINE) -> Deployment:
    names = "abcdefgh"
    return Deployment(
        "several",
        tuple(
            Replica(n, STEP, size, engine=engine) for n, size in zip(names, kv_tokens, strict=False)
        ),
    )


def served(deployment, arrivals, inputs, outputs, router=None, **options):
    return simulate(deployment, Trace(arrivals, inputs, outputs), router or RoundRobin(), **options)


def firsts(run) -> list[float]:
    return run.requests["first_token_s"].tolist()


def finishes(run) -> list[float]:
    return run.requests["finish_s"].tolist()


def test_prefill_first_by_hand() -> None:
    # Prefill of 8 tokens ends at 2, decode steps of 1.125 s follow; the second request arrives
    # in the second of them, waits for its end at 4.25, and its prefill ends at 5.75.
    run = served(one(), [0.0, 4.0], [8, 4], [4, 1])
    assert firsts(run) == [2.0, 5.75]
    assert finishes(run) == [5.75 + 1.125, 5.75]
    gaps = [1.125, 1.125, 5.75 + 1.125 - 4.25]
    counted = np.histogram(gaps, gap_edges())[0]
    assert run.gap_counts.tolist() == counted.tolist()


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_arrivals_are_seen_after_so_many_decode_steps(steps: int) -> None:
    """Those at their end too: of 1.125 s each, after a prefill to 2 s; the next takes 2 s more."""
    for came in (2.0, 2.5, 3.125, math.nextafter(3.125, 4), 5.375, 20.0):
        run = served(one(replace(ENGINE, poll_steps=steps)), [0.0, came], [8, 8], [40, 1])
        assert firsts(run)[1] == 4.0 + 1.125 * steps * math.ceil((came - 2.0) / 1.125 / steps)


def test_chunked_by_hand() -> None:
    # Chunks of 16 and 4 tokens; the second step also prefills the other prompt, and the third
    # decodes both.
    chunked = one(replace(ENGINE, batching="chunked"))
    run = served(chunked, [0.0, 0.0], [20, 4], [2, 2])
    assert firsts(run) == [3.0 + 2.0, 3.0 + 2.0]
    assert finishes(run) == [5.0 + 1.25, 5.0 + 1.25]
    assert run.replicas["prefill_tokens"][0] == 24


def test_static_by_hand() -> None:
    # Padded to 8 + 4 tokens: prefill 1 + 16/8 s, then three steps of two places; the first
    # request has its two tokens after one of them.
    static = one(replace(ENGINE, batching="static"))
    run = served(static, [0.0, 0.0, 1.0], [8, 4, 8], [2, 4, 1])
    assert firsts(run) == [3.0, 3.0, 3.0 + 3 * 1.25 + 2.0]
    assert finishes(run) == [4.25, 6.75, 8.75]


def test_eviction_by_recomputation_and_by_swapping() -> None:
    # Four blocks of four tokens. Both prompts take two blocks; at its first decode step the
    # older request needs a third one, so the younger is evicted.
    paged = replace(ENGINE, admission="paged")
    run = served(one(paged, 16), [0.0, 0.0], [8, 8], [3, 3])
    assert run.requests["preemptions"].tolist() == [0, 1]
    assert firsts(run) == [3.0, 3.0]
    assert finishes(run)[0] == 3.0 + 2 * 1.125
    # Its prompt and its first token are prefilled again and give the second; then one step.
    assert finishes(run)[1] == 5.25 + 1 + 9 / 8 + 1.125
    swapping = replace(paged, eviction="swap", swap_s_per_gb=1.0)
    swap = served(one(swapping, 16, kv_bytes_per_token=1e9), [0.0, 0.0], [8, 8], [3, 3])
    # Swapping 8 tokens takes 8 s before the first step of the other, and again before its own.
    assert finishes(swap) == [3.0 + 8 + 2 * 1.125, 13.25 + 8 + 2 * 1.125]
    assert swap.replicas["busy_s"][0] == finishes(swap)[1]


def split(link: KvLink, decode_tokens: int = 100, prefill_tokens: int = 100) -> Deployment:
    return Deployment(
        "split",
        (
            Replica("p", STEP, prefill_tokens, 1e9, engine=ENGINE, role="prefill"),
            Replica("d", STEP, decode_tokens, 1e9, engine=ENGINE, role="decode"),
        ),
        default_link=link,
    )


def test_smaller_priorities_go_first_and_are_evicted_last() -> None:
    # The first is being served when the others come; of those the smaller number goes first.
    trace = Trace([0, 0.5, 0.5, 0.5], [8] * 4, [1] * 4, priorities=[1, 1, 0, 2])
    run = simulate(one(replace(ENGINE, max_batch=1)), trace, RoundRobin())
    assert firsts(run) == [2, 6, 4, 8]
    # 9 blocks hold two requests of 17 tokens and more until both need a sixth block.
    engine = replace(ENGINE, admission="paged", max_step_tokens=64)
    trace = Trace([0, 0], [16, 16], [8, 8], priorities=[1, 0])
    run = simulate(one(engine, kv_tokens=40), trace, RoundRobin())
    assert run.requests["preemptions"].tolist() == [1, 0]
    run = simulate(one(engine, kv_tokens=40), replace(trace, priorities=[0, 0]), RoundRobin())
    assert run.requests["preemptions"].tolist() == [0, 1]


@pytest.mark.parametrize("router", [RoundRobin(), Predictive(target_s=None)])
def test_waits_of_two_classes_are_those_of_a_queue_with_priorities(router) -> None:
    # Cobham (1954): W_1 = W_0 / (1 - rho_1) behind a residual service W_0, W_2 = W_1 / (1 - rho).
    count, share, rho, service_s = 200_000, 0.4, 0.5, 2.0
    rng = np.random.default_rng(1)
    trace = Trace(np.zeros(count), np.full(count, 8), np.ones(count, int))
    trace = trace.poisson(rho / service_s, rng).with_priorities([share, 1 - share], rng)
    run = simulate(one(replace(ENGINE, max_batch=1)), trace, router)
    waits = run.ttft_s - service_s
    residual = rho * service_s / 2  # of a service of constant length
    first = residual / (1 - share * rho)
    for k, expected in enumerate([first, first / (1 - rho)]):
        assert waits[trace.priorities == k].mean() == pytest.approx(expected, rel=0.03)


def test_split_phases_by_hand() -> None:
    # 8 tokens of 10^9 bytes, halved, over 2 GB/s, and 0.5 s before: 2.5 s.
    link = KvLink(bandwidth_gbs=2.0, latency_s=0.5, compression=0.5)
    run = served(split(link), [0.0, 0.0], [8, 8], [3, 1])
    assert firsts(run) == [3.0, 3.0]
    assert finishes(run) == [3.0 + 2.5 + 2 * 1.125, 3.0]
    assert run.requests["transfer_s"].tolist() == [2.5, 0.0]
    frame = run.frame()
    assert frame.replica.tolist() == ["p", "p"]
    assert frame.decode_replica.tolist() == ["d", ""]
    assert (run.replicas["outstanding"] == 0).all()


def fan(link: KvLink, prefills: int = 2) -> Deployment:
    names = [f"p{k}" for k in range(prefills)]
    return Deployment(
        "fan",
        (
            *(Replica(n, STEP, 1000, 1e9, engine=ENGINE, role="prefill") for n in names),
            Replica("d", STEP, 1000, 1e9, engine=ENGINE, role="decode"),
        ),
        default_link=link,
    )


@pytest.mark.parametrize("media", [("line",), ("out", "line")])
def test_transfers_over_what_they_share_wait_for_each_other(media) -> None:
    # Two prompts of 8 tokens are ready at 2 on two replicas; each takes 4 s on a line of 2 GB/s.
    apart = served(fan(KvLink(2.0)), [0.0, 0.0], [8, 8], [2, 2])
    assert apart.requests["transfer_s"].tolist() == [4.0, 4.0]
    shared = served(fan(KvLink(2.0, latency_s=0.5, media=media)), [0.0, 0.0], [8, 8], [2, 2])
    assert shared.requests["transfer_s"].tolist() == [4.5, 8.5]


def test_what_is_ready_first_travels_first_whichever_replica_it_leaves() -> None:
    # The first replica has 16 tokens and is ready at 3, the second has 8 and is ready at 2.5.
    run = served(fan(KvLink(2.0, media=("line",))), [0.0, 0.5], [16, 8], [2, 2])
    ready = [3.0, 2.5]
    assert firsts(run) == ready
    assert run.requests["transfer_s"].tolist() == [2.5 + 4.0 - 3.0 + 8.0, 4.0]


@pytest.mark.parametrize("router", [RoundRobin(), LeastRequests(), PowerOfTwo()])
@pytest.mark.parametrize("prefills", [1, 3])
def test_a_line_is_never_used_twice_at_a_time(router, prefills) -> None:
    draw = np.random.default_rng(prefills)
    arrivals = np.cumsum(draw.exponential(3.0, 200))
    inputs, outputs = draw.integers(1, 16, 200), draw.integers(2, 9, 200)
    fleet = fan(KvLink(8.0, media=("line",)), prefills)
    run = served(fleet, arrivals, inputs, outputs, router)
    # From the first token on a transfer waits, then holds the line for its tokens.
    busy = inputs / 8.0
    end = run.requests["first_token_s"] + run.requests["transfer_s"]
    order = np.argsort(end)
    assert (end[order][1:] - busy[order][1:] >= end[order][:-1] - 1e-9).all()
    waited = run.requests["transfer_s"] - busy
    assert waited.min() > -1e-9
    assert waited.max() > 0


def test_more_caches_than_a_line_carries_are_not_sustained() -> None:
    # 8 tokens of 10^9 bytes over 8 GB/s: one request a second at most, whatever the replicas do.
    trace = Trace(np.zeros(400), [8] * 400, [2] * 400)
    quick = StepModel.affine(floor_s=1e-3, per_token_s=0.0, per_cached_token_s=0.0)

    def most(link: KvLink) -> float:
        nodes = tuple(replace(one, step=quick) for one in fan(link).replicas)
        fleet = Deployment("fan", nodes, default_link=link)
        return saturation(fleet, trace, RoundRobin())

    assert most(KvLink(8.0, media=("line",))) == pytest.approx(1.0, rel=0.05)
    assert most(KvLink(8.0)) > 5.0


def test_the_way_to_a_replica_and_back_is_in_every_latency_but_the_time_per_token() -> None:
    near = served(one(), [0.0, 4.0], [8, 4], [4, 1])
    far = served(one(network_s=0.25), [0.0, 4.0], [8, 4], [4, 1])
    assert far.ttft_s.tolist() == [first + 0.5 for first in near.ttft_s]
    assert far.e2e_s.tolist() == [end + 0.5 for end in near.e2e_s]
    assert far.tpot_s[0] == near.tpot_s[0]
    # A request of both phases pays the way to the first replica and the way from the second.
    p, d = split(KvLink(2.0, latency_s=1.0)).replicas
    apart = Deployment(
        "apart",
        (replace(p, network_s=0.25), replace(d, network_s=0.75)),
        default_link=KvLink(2.0, latency_s=1.0),
    )
    run, same = (
        served(fleet, [0.0], [8], [3]) for fleet in (apart, split(KvLink(2.0, latency_s=1.0)))
    )
    assert firsts(run) == [firsts(same)[0] + 0.5]
    assert finishes(run) == [finishes(same)[0] + 0.25 + 0.75]


def test_a_prefill_replica_keeps_a_cache_until_it_has_left() -> None:
    # Room for one prompt: the second prefill waits for the first transfer, not only its prefill.
    link = KvLink(bandwidth_gbs=1.0)
    run = served(split(link, prefill_tokens=10), [0.0, 0.0], [8, 8], [2, 2])
    assert firsts(run) == [2.0, 2.0 + 8.0 + 2.0]


def test_a_prefill_replica_that_waits_looks_again_when_its_queue_changes() -> None:
    # The first prompt stays in p's cache until 5.5, and the second finds no room beside it. When
    # e fails, the second fits no decode replica any more; the third one's prefill starts at once.
    p, d = split(KvLink(1.0), decode_tokens=6, prefill_tokens=10).replicas
    three = (p, d, replace(d, name="e", kv_tokens=100))
    fleet = Deployment("three", three, default_link=KvLink(1.0))
    run = served(fleet, [0.0, 0.0, 0.0], [4, 8, 1], [2, 2, 2], events=[Event(3.0, "e")])
    assert run.frame().reason.tolist() == ["", NONE_CAME_BACK, ""]
    assert firsts(run)[0] == 1.5
    assert firsts(run)[2] == 3.0 + 1.125


def prefixed(arrivals, inputs, chains, block_tokens=4) -> Trace:
    return Trace(
        arrivals,
        inputs,
        [1] * len(inputs),
        prefix_offsets=np.cumsum([0, *map(len, chains)]),
        prefix_ids=[block for chain in chains for block in chain],
        block_tokens=block_tokens,
    )


CACHING = replace(ENGINE, admission="paged", prefix_cache=True)


def hits(run) -> list[int]:
    return run.requests["hit_tokens"].tolist()


def test_prefix_hits_shorten_the_prefill() -> None:
    chains = [[7, 8, 9], [7, 8, 1], [7, 8, 9], [5, 6], [7, 8, 9]]
    trace = prefixed([0.0, 10.0, 20.0, 30.0, 40.0], [12, 12, 12, 8, 10], chains)
    run = simulate(one(CACHING), trace, RoundRobin())
    # The last token of a prompt is always computed, and with it the block that it ends.
    assert hits(run) == [0, 8, 8, 0, 8]
    new = np.array([12, 4, 4, 8, 2])
    assert run.ttft_s.tolist() == (1 + new / 8).tolist()
    assert run.replicas["prefill_tokens"][0] == new.sum()
    assert hits(simulate(one(replace(ENGINE, admission="paged")), trace, RoundRobin())) == [0] * 5


def test_prompts_that_are_sent_again_are_found() -> None:
    ids = {"prefix_offsets": range(6), "prefix_ids": [3, 0, 3, 0, 3], "block_tokens": 12}
    again = Trace(10.0 * np.arange(5), [12, 7, 12, 7, 12], [1] * 5, **ids)
    run = simulate(one(CACHING), again, RoundRobin())
    assert hits(run) == [0, 0, 8, 4, 8]
    # The dispatcher counts on the same.
    assert run.requests["believed_tokens"].tolist() == hits(run)


def test_a_failure_loses_the_step_in_progress_only() -> None:
    # Tokens at 2, 3.125 and 4.25 are out; the one due at 5.375 is lost. On b: 8 + 3 tokens.
    run = served(several(), [0.0], [8], [6], events=[Event(5.0, "a")])
    again = 5.0 + 1 + 11 / 8
    assert firsts(run) == [2.0]
    assert finishes(run) == [again + 2 * 1.125]
    assert run.frame().replica.tolist() == ["b"]
    assert run.requests["retries"].tolist() == [1]
    assert run.gap_counts.sum() == 5
    assert run.replicas["busy_s"].tolist() == [5.0, finishes(run)[0] - 5.0]


def test_reasons_of_rejections() -> None:
    # Too long for all; too long for the one that is up; fits where it is up.
    run = served(
        several((40, 100)),
        [0.0, 1.0, 2.0],
        [101, 80, 8],
        [1, 1, 1],
        events=[Event(0.5, "b")],
    )
    assert run.counts == {"finished": 1, "rejected": 2}
    assert run.frame().reason.tolist() == [
        "longer than the KV cache of every replica",
        NONE_CAME_BACK,
        "",
    ]
    refused = served(several((40, 100)), [0.0], [80], [1], SingleInstance(0))
    assert refused.frame().reason.tolist() == ["the router chose no replica that could take it"]
    assert math.isnan(refused.requests["finish_s"][0])
    assert refused.span_s == 0.0
    assert str(refused)


def test_a_request_too_long_for_every_decode_replica_is_not_refused_by_the_router() -> None:
    run = served(split(KvLink(1.0), decode_tokens=10), [0.0], [8], [8], LeastRequests())
    assert run.frame().reason.tolist() == ["longer than the KV cache of every replica"]
    down = served(split(KvLink(1.0)), [1.0], [8], [8], LeastRequests(), events=[Event(0.0, "d")])
    assert down.frame().reason.tolist() == [NONE_CAME_BACK]


def test_outputs_of_zero_and_one_token() -> None:
    run = served(one(), [0.0, 0.0], [8, 8], [0, 1])
    assert firsts(run) == finishes(run) == [3.0, 3.0]
    assert np.isnan(run.tpot_s).all()
    assert run.gap_counts.sum() == 0


def test_while_all_are_down_requests_wait_at_the_dispatcher() -> None:
    # The first loses its token due at 3.125 with both replicas; the oldest goes first.
    events = [Event(3.0, "a"), Event(3.0, "b"), Event(20.0, "b", "recover")]
    for router in (LeastRequests(), Chooses(1)):
        run = served(several(), [0.0, 4.0, 5.0], [8, 8, 8], [2, 1, 1], router, events=events)
        assert run.counts == {"finished": 3, "rejected": 0}
        assert run.frame().replica.tolist() == ["b", "b", "b"]
        # Both are down before anything is routed again.
        assert run.requests["retries"].tolist() == [1, 0, 0]
        # A prefill takes 16 tokens: the first with the token it has, then the others.
        assert finishes(run) == [20.0 + 1 + 9 / 8, *[22.125 + 1 + 16 / 8] * 2]
        assert firsts(run)[0] == 2.0


def test_a_replica_that_drains_ends_what_it_has() -> None:
    # The second goes to b; the third waits until a takes more, b having failed.
    events = [Event(1.0, "a", "drain"), Event(4.5, "b"), Event(9.0, "a", "recover")]
    for router in (LeastRequests(), Predictive()):
        run = served(several(), [0.0, 1.0, 5.0], [8, 8, 8], [3, 1, 1], router, events=events)
        assert run.frame().replica.tolist() == ["a", "b", "a"]
        assert finishes(run) == [2.0 + 2 * 1.125, 1.0 + 2.0, 9.0 + 2.0]
        assert run.requests["retries"].tolist() == [0, 0, 0]


def test_a_single_instance_that_is_down_is_waited_for() -> None:
    events = [Event(0.5, "a"), Event(9.0, "a", "recover")]
    run = served(several(), [1.0, 2.0], [8, 8], [1, 1], SingleInstance(0), events=events)
    assert firsts(run) == [9.0 + 1 + 16 / 8] * 2
    lost = served(several(), [1.0], [8], [1], SingleInstance(0), events=events[:1])
    held = "the router held it until nothing was left to wait for"
    assert lost.frame().reason.tolist() == [held]


class OneAtATime:
    """A router in plain Python that sends a request only to an empty replica."""

    name = "one at a time"

    def __init__(self) -> None:
        self.asked = []

    def choose(self, request, fleet):
        self.asked.append((request.index, fleet.now_s))
        free = np.flatnonzero(fleet.eligible & (fleet.outstanding == 0))
        return int(free[0]) if len(free) else DEFER


def test_a_deferred_request_is_offered_at_every_first_token_and_finish() -> None:
    # Steps of 1 + n / 8: tokens of the first at 2, 3.125 and 4.25; of the second at 6.25.
    router = OneAtATime()
    run = served(one(), [0.0, 0.5, 3.0], [8, 8, 8], [3, 1, 1], router)
    assert finishes(run) == [4.25, 6.25, 8.25]
    assert firsts(run) == [2.0, 6.25, 8.25]
    assert router.asked == [
        (0, 0.0),
        (1, 0.5),
        (1, 2.0),
        (2, 3.0),
        (1, 4.25),
        (2, 4.25),
        (2, 6.25),
    ]


def test_a_request_that_is_deferred_for_good_is_rejected() -> None:
    run = served(one(), [0.0, 1.0], [8, 8], [3, 1], Chooses(DEFER))
    assert run.counts == {"finished": 0, "rejected": 2}
    assert set(run.frame().reason) == {"the router held it until nothing was left to wait for"}
    too_long = served(one(), [0.0], [101], [1], Chooses(DEFER))
    assert too_long.frame().reason.tolist() == ["longer than the KV cache of every replica"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([Event(1.0, "z")], "names the replica 'z'.*Resolve: use one of a, b"),
        ([Event(math.nan, "a")], "time_s is nan.*Resolve: give a finite number"),
        ([Event(-1.0, "a")], "time_s is -1"),
        ([Event(1.0, "a", "Fail")], "is 'Fail'.*Resolve: use fail or recover"),
    ],
)
def test_events_that_cannot_be(events, words) -> None:
    with pytest.raises(ParameterError, match=words):
        served(several(), [0.0], [1], [1], events=events)


def looped(deployment, inputs, outputs, clients, think_s=0.0, router=None, **options):
    trace = Trace(np.zeros(len(inputs)), inputs, outputs).closed_loop(clients, think_s)
    return simulate(deployment, trace, router or RoundRobin(), **options)


def test_a_client_sends_its_next_request_when_its_last_is_answered() -> None:
    # Each prefill of 8 tokens takes 2 s; the second request decodes for a step of 1.125 s.
    run = looped(one(), [8, 8, 8, 8], [1, 2, 1, 1], clients=1)
    assert run.requests["arrival_s"].tolist() == [0.0, 2.0, 5.125, 7.125]
    assert run.ttft_s.tolist() == [2.0, 2.0, 2.0, 2.0]
    thinking = looped(one(), [8, 8, 8, 8], [1, 2, 1, 1], clients=1, think_s=10.0)
    assert thinking.requests["arrival_s"].tolist() == [0.0, 12.0, 25.125, 37.125]
    assert thinking.trace.arrival_s.tolist() == [0.0, 12.0, 25.125, 37.125]
    assert not thinking.trace.clients


def test_clients_wait_for_the_way_of_an_answer_too() -> None:
    run = looped(one(network_s=0.25), [8, 8], [1, 1], clients=1)
    assert finishes(run) == [2.5, 5.0]
    assert run.requests["arrival_s"].tolist() == [0.0, 2.5]


@pytest.mark.parametrize("router", [LeastRequests(), PowerOfTwo(), RoundRobin()])
@pytest.mark.parametrize("think_s", [0.0, 0.3])
def test_a_closed_loop_is_an_open_one_with_the_arrivals_that_it_made(router, think_s) -> None:
    rng = np.random.default_rng(3)
    inputs, outputs = rng.integers(1, 30, 400), rng.integers(0, 20, 400)
    events = [Event(90.0, "a"), Event(150.0, "a", "recover")]
    options = {"router": router, "events": events, "seed": 4}
    run = looped(several((60, 60, 90)), inputs, outputs, 12, think_s, **options)
    assert run.requests["retries"].sum() > 0
    again = simulate(several((60, 60, 90)), run.trace, router, events=events, seed=4)
    assert again.requests.tobytes() == run.requests.tobytes()
    sampled = looped(several((60, 60, 90)), inputs, outputs, 12, think_s, sample_s=0.7, **options)
    assert sampled.requests.tobytes() == run.requests.tobytes()
    assert sampled.samples.time_s[-1] >= np.nanmax(run.requests["finish_s"]) - 0.7


class Chooses:
    """A router in plain Python that always answers the same."""

    name = "plain"

    def __init__(self, answer) -> None:
        self.answer, self.seen, self.calls = answer, [], []

    def choose(self, request, fleet):
        self.seen.append((request.index, fleet.now_s, fleet.eligible.tolist()))
        return self.answer

    def on_first_token(self, index, now_s):
        self.calls.append(("first", index, now_s))

    def on_finish(self, index, now_s):
        self.calls.append(("finish", index, now_s))


def test_a_router_in_plain_python_sees_the_fleet_and_hears_of_tokens() -> None:
    router = Chooses(np.int64(1))
    run = served(several((4, 100)), [0.0, 9.0], [8, 2], [2, 0], router)
    assert router.seen == [(0, 0.0, [False, True]), (1, 9.0, [True, True])]
    assert finishes(run) == [3.125, 10.25]
    assert router.calls == [("first", 0, 2.0), ("finish", 0, 3.125), ("finish", 1, 10.25)]


def test_hooks_come_in_order_of_time_and_once() -> None:
    router = Chooses(0)
    rng = np.random.default_rng(1)
    inputs, outputs = rng.integers(1, 9, 60), rng.integers(1, 9, 60)
    run = served(several(), np.arange(60.0), inputs, outputs, router)
    for what, times in (("first", firsts(run)), ("finish", finishes(run))):
        heard = {index: when for kind, index, when in router.calls if kind == what}
        assert [heard[k] for k in range(60)] == times
    assert len(router.calls) == 120
    # Between two decisions they are sorted; a decision never comes before what preceded it.
    assert [when for *_, when in router.calls] == sorted(when for *_, when in router.calls)


@pytest.mark.parametrize("answer", [2, -3, None, "a", 0.5, [0]])
def test_a_router_that_answers_nonsense_is_named(answer) -> None:
    with pytest.raises(ParameterError, match=r"Router 'plain' chose .* for request 0"):
        served(several(), [0.0], [1], [1], Chooses(answer))


def test_the_same_seed_gives_the_same_bytes() -> None:
    rng = np.random.default_rng(2)
    trace = Trace(np.arange(500.0), rng.integers(1, 20, 500), rng.integers(1, 20, 500))

    def run(seed: int) -> bytes:
        options = {"predictor": Normal(), "seed": seed}
        return simulate(several(), trace, PowerOfTwo(), **options).requests.tobytes()

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_progress_counts_every_request() -> None:
    seen: list[int] = []
    count = 70_000
    served(several(), np.zeros(count), np.ones(count), np.ones(count), progress=seen.append)
    assert sum(seen) == count
    assert len(seen) == 2


def test_clocks_of_weeks_do_not_run_over() -> None:
    """Steps are counted anew after 2^30 of them; here nearly 2^32 in one busy period."""
    quick = StepModel.affine(floor_s=2.0**-10, per_token_s=0.0, per_cached_token_s=0.0)
    long = 2**31 - 100
    engine = Engine(admission="paged", max_batch=2, block_tokens=16)
    deployment = Deployment("one", (Replica("a", quick, 2**33, engine=engine),))
    run = served(deployment, [0.0, 2.0**20, 2.0**20], [2, 2, 2], [long, long, 9])
    assert run.counts["finished"] == 3
    assert run.gap_counts.sum() == 2 * (long - 1) + 8
    # The prefills of the other two hold the first up; the third waits for a place.
    assert finishes(run)[0] == (1 + long - 1 + 1) * 2.0**-10
