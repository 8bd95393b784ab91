"""Records that the compiled simulator works on: requests, engines, and what replicas are doing.

Structured arrays keep what belongs together in one cache line and let kernels pass a replica as
one pointer. ``N`` requests, ``M`` replicas.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.engine import prefix
from hetero.errors import ParameterError
from hetero.latency.step import StepModel

Records = NDArray[np.void]

# What a replica is doing. AT_BOUNDARY: a step has ended and the next has not been chosen yet.
IDLE, AT_BOUNDARY, IN_DECODE, IN_PREFILL, DOWN = 0, 1, 2, 3, 4

# Batching of an engine.
PREFILL_FIRST, CHUNKED, STATIC = 0, 1, 2
# KV admission of an engine: reserve the final length, or grow by blocks.
RESERVE, PAGED = 0, 1
# What an engine does with a request that it takes out of the batch.
RECOMPUTE, SWAP = 0, 1
# What a replica serves.
BOTH, PREFILL_ONLY, DECODE_ONLY = 0, 1, 2

# What an engine reserves for the output of a request on admission.
EXPECT_KNOWN, EXPECT_PREDICTED, EXPECT_MAXIMUM = 0, 1, 2

# Life of a request.
NOT_ARRIVED, WAITING, RUNNING, IN_TRANSFER, FINISHED, REJECTED = 0, 1, 2, 3, 4, 5
# Waiting with the KV cache at hand: swapped out before, or transferred from a prefill replica.
SWAPPED, AT_HAND = 6, 7
# Waiting at the dispatcher, see hetero.engine.dispatcher_queue.
HELD = 8
# Why a request was rejected.
NO_REASON, TOO_LONG, NO_REPLICA, REFUSED_BY_ROUTER, DEFERRED_FOR_GOOD = 0, 1, 2, 3, 4
#: Only where a real server was measured.
NOT_ANSWERED = 5

#: What a router answers in place of a replica.
REJECT, DEFER = -1, -2

#: Inter-token times are counted between 2^-17 s and 2^10 s, see :mod:`hetero.engine.gaps`.
GAP_LOW_EXPONENT, GAP_OCTAVES, GAPS_PER_OCTAVE = -17, 27, 32
GAP_BINS = GAP_OCTAVES * GAPS_PER_OCTAVE

#: A heap entry is due step * 2^31 + 2^30 where a reservation ends there + request.
KEY_BITS = 31
KEY_ITEM = 2 ** (KEY_BITS - 1) - 1
#: Steps are counted anew from here, so that heap entries never overflow.
MOST_STEPS = 2**30

REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),  # time of its latest known token until it has finished
        ("transfer_s", "f8"),  # of its latest KV transfer
        ("credit", "f8"),  # what a router added to a replica's load for it
        ("input_tokens", "i4"),
        ("output_tokens", "i4"),
        ("predicted_tokens", "i4"),  # output that the dispatcher expects
        # Tokens generated: so far while it waits, by the end of its heap entry while it decodes.
        ("done_tokens", "i4"),
        ("reserved", "i4"),  # KV cache held, in tokens or blocks
        ("hit_tokens", "i4"),  # of its latest prefill, found in the prefix cache
        ("believed_tokens", "i4"),  # of its prompt, that the dispatcher believed to be there
        ("node", "i4"),  # replica of the prefill (or of everything)
        ("decode_node", "i4"),  # replica of the decode, -1 where it is the same
        ("at", "i4"),  # replica where it is now
        ("link", "i4"),  # next request in the list it stands in, -1 at the end
        ("preemptions", "i4"),
        ("retries", "i4"),
        ("priority", "i2"),  # the smaller, the earlier it is served
        ("status", "i1"),
        ("reason", "i1"),
    ],
    align=True,
)

ENGINE = np.dtype(
    [
        ("role", "i8"),
        ("batching", "i8"),
        ("admission", "i8"),
        ("eviction", "i8"),
        ("expects", "i8"),
        ("max_output", "i8"),
        ("max_batch", "i8"),
        ("max_step_tokens", "i8"),  # tokens of one prefill, or token budget of a chunked step
        ("ahead", "i8"),  # whether steps are composed while the one before runs
        ("kv_tokens", "i8"),  # capacity
        ("block_tokens", "i8"),
        ("poll_steps", "i8"),  # decode steps from one look for new requests to the next
        ("free_share", "f8"),  # of the cache, below which no prompt joins what decodes
        ("swap_s_per_token", "f8"),
        ("way_s", "f8"),  # of a request from the dispatcher and a token back, with the front end,
        ("way_s_per_token", "f8"),  # and per token of the prompt
        ("lag_s", "f8"),  # from the end of a prefill step to the first token,
        ("lag_s_per_token", "f8"),  # and per token of the prompt
        ("pieces", "i8"),  # 1 or 2
        ("knot_count", "i8", (2,)),
        ("rate_count", "i8", (2,)),
        ("bend_count", "i8", (2,)),  # 0: none
        ("pair_s", "f8", (2,)),
        ("index", "i8"),
        ("kind", "i8"),  # the same for replicas of equal engines and one step model,
        ("first", "i8"),  # of which this is the first
        ("split", "i8"),  # whether any replica of the fleet serves one phase only
        ("shared", "i8"),  # whether KV transfers wait for each other on any link
        # Where its parts of the two memories begin, see Memory.
        ("block", "i8"),  # where the earliest end of its block of replicas stands
        ("knots", "i8", (2,)),
        ("rates", "i8", (2,)),
        ("bends", "i8", (2,)),
        ("link_latency_s", "i8"),
        ("link_s_per_token", "i8"),
        ("media", "i8"),  # two per link: where it says from when each is free, -1 for none
        ("transfer_keys", "i8"),
        ("keys", "i8"),
        ("order", "i8"),
        ("residues", "i8"),
        ("transfer_items", "i8"),
        ("log", "i8"),  # 0 where nothing is logged
        # Prefix cache, see hetero.engine.prefix; 0 where there is none.
        ("prefix", "i8"),
        ("prefix_index", "i8"),  # the dispatcher's idea of it
        ("prefix_tokens", "i8"),  # of a block of the trace
        ("chains", "i8"),  # where the blocks of each request begin,
        ("chain_blocks", "i8"),  # and the blocks
        ("references", "i8"),  # named KV blocks to which each request refers
    ],
    align=True,
)

REPLICA = np.dtype(
    [
        ("mode", "i8"),
        ("draining", "i8"),  # whether it ends what it has and is sent nothing more
        ("clock_s", "f8"),  # start of what is going on
        ("steps", "i8"),  # decode steps done so far
        ("cached", "i8"),  # tokens that the next decode step reads
        ("running", "i8"),
        ("used", "i8"),  # KV tokens (reserve) or blocks (paged) held
        ("waiting", "i8"),
        ("waiting_tokens", "i8"),
        ("unseen", "i8"),  # of those that wait, come since it last looked,
        ("looked", "i8"),  # after so many decode steps
        ("head", "i8"),  # waiting list
        ("tail", "i8"),
        ("evicted", "i8"),  # whether the step in progress began with that
        ("leaving", "i8"),  # requests in transfer that still hold KV cache here, earliest first
        ("stall_s", "f8"),  # swapping to be done before the next step
        ("run_steps", "i8"),  # decode run in progress: number of steps,
        ("run_first_s", "f8"),  # time of its first step,
        ("run_slope_s", "f8"),  # and growth per step
        ("batch_head", "i8"),  # requests in the prefill in progress
        ("batch_tail", "i8"),
        ("partial", "i8"),  # request whose prompt is only partly prefilled, -1 for none
        ("partial_tokens", "i8"),
        ("chunk_tokens", "i8"),  # tokens of the partial request in the step in progress
        ("mixed", "i8"),  # whether the step in progress decodes as well
        ("step_tokens", "i8"),  # tokens that the step in progress prefills
        # Composed ahead, see hetero.engine.async_scheduling: requests, prefill tokens and pairs of
        # the step after the one in progress.
        ("staged_head", "i8"),
        ("staged_tail", "i8"),
        ("staged_count", "i8"),
        ("staged_tokens", "i8"),
        ("staged_pairs", "f8"),
        ("padded", "i8"),  # places of the static batch in progress
        ("last_emit_s", "f8"),  # end of the last decode step
        ("fresh_head", "i8"),  # requests that got their first token since then
        ("fresh", "i8"),
        ("busy_s", "f8"),  # time spent in steps
        ("prefill_s", "f8"),  # of it in steps with prefill
        ("prefill_tokens", "i8"),
        ("decode_tokens", "i8"),
        ("load", "f8"),  # what routers keep about a replica, see REQUEST.credit
        ("decoding_load", "f8"),  # of it that of the requests that decode
        ("outstanding", "i8"),  # requests dispatched and not finished
        ("outstanding_tokens", "i8"),  # their inputs and predicted outputs
    ],
    align=True,
)


#: Entries of the integer memory after the histogram: the number of KV transfers in progress, the
#: length of the log of first tokens (written ~request) and finishes (request), and a request
#: before which all have ended; of the requests held at the dispatcher the first, the last and the
#: number of those that a router deferred; how often a request got its first token or its last, and
#: up to which of these times held requests have been offered again; how often replicas may have
#: changed otherwise than by their steps and by what they were sent.
TRANSFERS, LOGGED, OLDEST = GAP_BINS, GAP_BINS + 1, GAP_BINS + 2
HELD_HEAD, HELD_TAIL, DEFERRED = GAP_BINS + 3, GAP_BINS + 4, GAP_BINS + 5
CHANGES, SEEN_CHANGES, EVENTS = GAP_BINS + 6, GAP_BINS + 7, GAP_BINS + 8
_COUNTERS = 9
#: Replicas of a block, of which one entry says when the first ends what it is doing.
BLOCK = 32


class Memory:
    """Lays out the two flat memories, floats ``FM`` and integers ``IM``, that kernels work on.

    ``FM``: M times when what a replica is doing ends (infinite while idle or down), then per block
    of replicas one that is not after the earliest of them; per step model and piece its knots
    (tokens, seconds, seconds per further token) and times per cached token, those of mixed steps
    and the levels of decode steps behind, then its bends (contexts, and per batch extra times and
    their slopes); per prefill engine the latency and seconds per token of its links; the heap of
    transfer times.
    ``IM``: the histogram of inter-token times; the counters :data:`TRANSFERS` to
    :data:`EVENTS`; the requests in transfer; the log; the prefix blocks of the requests, and
    to how many KV blocks with names each refers; per engine the heap of running requests, their
    order of admission, their count by position within a block, its prefix cache and the
    dispatcher's records of that. Two plain arrays, because compiled calls copy the description of
    every array they pass on.
    """

    def __init__(self) -> None:
        self.sizes = {"f8": 0, "i8": 0}
        self.parts: dict[str, list[tuple[int, Floats | NDArray[np.int64]]]] = {"f8": [], "i8": []}

    def add(self, kind: str, values: Floats | NDArray[np.int64]) -> int:
        """Append values to a memory and return where they begin."""
        start = self.sizes[kind]
        self.parts[kind].append((start, values.ravel()))
        self.sizes[kind] += values.size
        return start

    def array(self, kind: str) -> Any:
        """The finished memory."""
        memory = np.zeros(self.sizes[kind], kind)
        for start, values in self.parts[kind]:
            memory[start : start + len(values)] = values
        return memory


def requests(
    arrival_s: Floats,
    input_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    predicted_tokens: NDArray[np.int32],
    priorities: NDArray[np.int32] | None = None,
) -> Records:
    """Request records in order of arrival, nothing having happened yet; shape (N,)."""
    if len(arrival_s) > KEY_ITEM:
        raise ParameterError(
            f"A run takes at most {KEY_ITEM:,} requests; received {len(arrival_s):,}.",
            resolve="simulate the trace in parts.",
        )
    records = np.zeros(len(arrival_s), REQUEST)
    records["arrival_s"] = arrival_s
    records["input_tokens"] = input_tokens
    records["output_tokens"] = output_tokens
    records["predicted_tokens"] = predicted_tokens
    records["priority"] = 0 if priorities is None else priorities
    records["first_token_s"] = records["finish_s"] = np.nan
    for name in ("node", "decode_node", "at", "link"):
        records[name] = -1
    return records


_OF_STEP = ("pieces", "knots", "knot_count", "rates", "rate_count", "bends", "bend_count", "pair_s")


@lru_cache(maxsize=1024)  # searches start thousands of runs with the same replicas
def _tables(step: StepModel) -> list[tuple[Floats, Floats]]:
    """Knots with their slopes, and rates, of each piece."""
    found = []
    for piece in step.pieces:
        slope = np.diff(piece.knots_s) / np.diff(piece.knots_tokens)
        slope = np.append(slope, slope[-1] if len(slope) else 0.0)
        knots = np.column_stack([piece.knots_tokens, piece.knots_s, slope])
        found.append((knots, np.vstack([piece.per_cached_token_s, piece.mixed_rows, piece.levels])))
    return found


@lru_cache(maxsize=1024)
def _content(step: StepModel) -> tuple[object, ...]:
    """The same for step models of equal tables."""
    found: list[object] = []
    for piece, tables in zip(step.pieces, _tables(step), strict=True):
        bends = piece.bends and (piece.bends.context_tokens, piece.bends.extra_s)
        found += [piece.per_pair_s, *(one.tobytes() for one in (*tables, *(bends or ())))]
    return tuple(found)


def _write_step(engine: Any, memory: Memory, step: StepModel) -> None:
    """Lay out the tables of a step model, and say where in the record of an engine."""
    engine["pieces"] = len(step.pieces)
    for p, (piece, (table, rates)) in enumerate(zip(step.pieces, _tables(step), strict=True)):
        engine["knots"][p] = memory.add("f8", table)
        engine["knot_count"][p] = len(table)
        engine["rates"][p] = memory.add("f8", rates)
        engine["rate_count"][p] = len(piece.per_cached_token_s)
        if piece.bends is not None:
            bent = np.hstack([piece.bends.extra_s, piece.bends.slopes_s])
            engine["bends"][p] = memory.add("f8", piece.bends.context_tokens)
            memory.add("f8", bent)
            engine["bend_count"][p] = len(piece.bends.context_tokens)
        engine["pair_s"][p] = piece.per_pair_s


def build(
    steps: list[StepModel],
    limits: list[dict[str, Any]],
    *,
    link_latency_s: Floats,
    link_s_per_token: Floats,
    media: NDArray[np.int64] | None = None,
    request_count: int,
    chains: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    log: bool = False,
) -> tuple[Records, Records, Floats, NDArray[np.int64]]:
    """Engine records, idle replica records and the two memories of a deployment.

    Parameters
    ----------
    steps
        One step model per replica.
    limits
        The other fields of :data:`ENGINE` of each replica.
    link_latency_s, link_s_per_token
        Shape (M, M): KV transfer from replica to replica.
    media
        Shape (M, M, 2): numbers of what a transfer from replica to replica takes for itself, -1
        for none.
    request_count
        Number of requests of the run.
    chains
        Offsets, shape (N + 1,), and prefix blocks of the requests, numbered from 0.
    log
        Whether first tokens and finishes are logged.
    """
    if not steps:
        raise ParameterError(
            "The deployment has no replica.", resolve="add at least one replica to it."
        )
    count = len(steps)
    engines = np.zeros(count, ENGINE)
    engines["index"] = np.arange(count)
    for m, limit in enumerate(limits):
        for name, value in limit.items():
            engines[name][m] = value
    split = bool((engines["role"] == PREFILL_ONLY).any())
    engines["split"] = split
    memory = Memory()
    memory.add("f8", np.full(count, np.inf))
    engines["block"] = memory.add("f8", np.full(-(-count // BLOCK), np.inf))
    engines["block"] += engines["index"] // BLOCK
    taken = np.full((count, count, 2), -1) if media is None else media
    engines["shared"] = bool((taken >= 0).any())
    free = memory.add("f8", np.zeros(int(taken.max()) + 1))
    counters = np.zeros(GAP_BINS + _COUNTERS, np.int64)
    counters[[HELD_HEAD, HELD_TAIL]] = -1
    memory.add("i8", counters)
    engines["transfer_keys"] = memory.add("f8", np.zeros(request_count if split else 0))
    engines["transfer_items"] = memory.add("i8", np.zeros(request_count if split else 0, np.int64))
    if log:
        engines["log"] = memory.add("i8", np.zeros(2 * request_count, np.int64))
    if chains is not None:
        engines["chains"] = memory.add("i8", chains[0])
        engines["chain_blocks"] = memory.add("i8", chains[1])
        engines["references"] = memory.add("i8", np.zeros(request_count, np.int64))
    written: dict[object, int] = {}  # the first replica of each step model
    kinds: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []
    for m, step in enumerate(steps):
        first = written.setdefault(_content(step), m)
        if first == m:
            _write_step(engines[m], memory, step)
        for name in _OF_STEP:
            engines[name][m] = engines[name][first]
        batch = int(engines["max_batch"][m])
        paged = engines["admission"][m] == PAGED
        engines["keys"][m] = memory.add("i8", np.zeros(batch, np.int64))
        if paged:
            engines["order"][m] = memory.add("i8", np.zeros(batch, np.int64))
            positions = np.zeros(int(engines["block_tokens"][m]), np.int64)
            engines["residues"][m] = memory.add("i8", positions)
        size, block = int(engines["kv_tokens"][m]), int(engines["prefix_tokens"][m])
        if chains is not None and block > 0:
            pool = prefix.empty(size // int(engines["block_tokens"][m]))
            engines["prefix"][m] = memory.add("i8", pool)
            if size >= block:
                engines["prefix_index"][m] = memory.add("i8", prefix.empty(size // block))
        alone = m if engines["prefix_index"][m] else -1  # records differ
        kind = kinds.setdefault((first, alone, *limits[m].values()), len(kinds))
        firsts += [m] * (kind == len(firsts))
        engines["kind"][m], engines["first"][m] = kind, firsts[kind]
        if engines["role"][m] == PREFILL_ONLY:
            engines["link_latency_s"][m] = memory.add("f8", link_latency_s[m])
            engines["link_s_per_token"][m] = memory.add("f8", link_s_per_token[m])
            where = np.where(taken[m] >= 0, free + taken[m], -1)
            engines["media"][m] = memory.add("i8", where)
    replicas = np.zeros(count, REPLICA)
    for name in ("head", "tail", "batch_head", "batch_tail", "partial", "fresh_head", "leaving"):
        replicas[name] = -1
    replicas["staged_head"] = replicas["staged_tail"] = -1
    return engines, replicas, memory.array("f8"), memory.array("i8")
