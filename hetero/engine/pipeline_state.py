"""Records of the compiled pipeline simulator: requests, nodes that hold layers, and their edges.

A deployment over layers is a graph: ``M`` nodes, and as number ``M`` the coordinator, which sends
prompts out and takes tokens in. An edge carries messages one after another. A node is cut into
segments at the layers where requests may enter it, so that everything between two cuts runs as
one batch; without partial inference a node is one segment.

``IM`` (integers) begins with the header below, ``FM`` (floats) with its own; heaps, tables, queues
and paths follow, see :func:`build`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats, Ints
from hetero.engine.state import GAP_BINS, REQUEST, Memory
from hetero.errors import ParameterError

Records = NDArray[np.void]

# What a node is doing.
IDLE, BUSY, DOWN = 0, 1, 2

# Kinds of events, in their order at one instant. Batches form after all of them.
BATCH_END, SEND_END, MESSAGE, LAUNCH = 0, 1, 2, 3
KIND_SHIFT = 40
ITEM = 2**KIND_SHIFT - 1

# A reason beside those of hetero.engine.state: no KV cache was free when it was offered.
NO_ROOM = 4

# How requests come: when the trace says, as KV cache allows, or a fixed number at a time.
FEED_TRACE, FEED_KV, FEED_COUNT = 0, 1, 2

# Header of IM after the histogram of inter-token times.
EVENTS = GAP_BINS  # number of events in the heap
NEXT = GAP_BINS + 1  # next request of the trace
DIRTY = GAP_BINS + 2  # number of nodes that may form a batch
WAIT_HEAD, WAIT_TAIL = GAP_BINS + 3, GAP_BINS + 4  # requests the router could not place yet
DRAWS = GAP_BINS + 5  # random numbers drawn so far
HANDLED = GAP_BINS + 6  # events handled
WINDOW_DECODES = GAP_BINS + 7
IN_FLIGHT = GAP_BINS + 8
HEADER = GAP_BINS + 9

# Header of FM.
CLOCK, WINDOW_FROM, WINDOW_UNTIL, DECODE_SUM_S = 0, 1, 2, 3

PIPELINE_REQUEST = np.dtype(
    [
        *((name, REQUEST[name]) for name in REQUEST.names or ()),
        ("issued_s", "f8"),  # start of the iteration in progress
        ("sent_s", "f8"),  # its latest message began to be sent
        ("due_s", "f8"),  # and reaches the end of its edge
        ("ready_s", "f8"),  # its latest message could have been sent
        ("prompt_tokens", "i4"),  # of its latest prefill: input and what it had streamed before
        ("tokens", "i4"),  # of the iteration in progress: the prompt's, or 1
        ("expected_tokens", "i4"),  # KV that the router counts on
        ("hop", "i4"),  # index in its path of the edge it is on or came by
        ("edge", "i4"),
        ("fixed", "i4"),  # edges of its path that are known
        ("is_prompt", "i1"),  # whether the iteration in progress is a prefill
        ("lost", "i1"),  # being taken out after a failure
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("mode", "i8"),
        ("layers", "i8"),
        ("out_first", "i8"),  # its outgoing edges stand in a row
        ("out_count", "i8"),
        ("segments", "i8"),
        ("queues", "i8"),  # in IM: per segment head, tail, layers
        ("prompt_table", "i8"),  # in FM: seconds per layer of 0, 1, ... prompt tokens
        ("prompt_last", "i8"),
        ("decode_table", "i8"),  # of 0, 1, ... decoding requests
        ("decode_last", "i8"),
        ("max_prompts", "i8"),
        ("max_prompt_tokens", "i8"),
        ("max_decodes", "i8"),
        ("max_context", "i8"),
        ("entry_s", "f8"),  # per token received, paid when the first layer next runs
        ("fresh_tokens", "i8"),  # received since it last ran
        ("segment", "i8"),  # that runs, or ran last
        ("batch_head", "i8"),
        ("batch_tail", "i8"),
        ("dirty", "i8"),
        ("pending_head", "i8"),  # messages that wait for a free edge (late binding only)
        ("pending_tail", "i8"),
        ("kv_entries", "i8"),  # capacity, in tokens times layers
        ("kv_reserved", "i8"),  # what the router counts on
        ("kv_used", "i8"),
        ("kv_peak", "i8"),
        ("queued", "i8"),  # messages waiting at its first layer
        ("outstanding", "i8"),  # requests whose path leads here
        ("batches", "i8"),
        ("busy_s", "f8"),
        ("window_busy_s", "f8"),
        ("prefill_tokens", "i8"),
        ("decode_tokens", "i8"),
    ],
    align=True,
)

EDGE = np.dtype(
    [
        ("source", "i8"),
        ("target", "i8"),
        ("segment", "i8"),  # of the target where messages enter
        ("layers", "i8"),  # that they run through there
        ("latency_s", "f8"),
        ("token_s", "f8"),  # time to send one token
        ("up", "i8"),  # whether it works and leads to the last layer
        ("broken", "i8"),  # whether the link itself has failed
        ("free_s", "f8"),  # when what was given to it has been sent
        ("head", "i8"),  # messages on their way, one after another; the first has an event
        ("tail", "i8"),
        ("weight", "f8"),
        ("load", "f8"),
        ("delay_s", "f8"),  # moving average (Swarm)
        ("priority", "f8"),
        ("messages", "i8"),
        ("tokens", "i8"),
        ("busy_s", "f8"),
        ("prompts", "i8"),  # prompts sent inside the window,
        ("prompt_wait_s", "f8"),  # and how long they waited for the edge
    ],
    align=True,
)

#: Layout of the memories: where heaps, path and dirty list begin, and what a run is told.
PLAN = np.dtype(
    [
        ("nodes", "i8"),
        ("requests", "i8"),
        ("model_layers", "i8"),
        ("heap_keys", "i8"),
        ("heap_items", "i8"),
        ("heap_size", "i8"),
        ("dirty", "i8"),
        ("paths", "i8"),
        ("depth", "i8"),
        ("layer_free", "i8"),  # in FM: room to add up KV per layer, free and total
        ("first_layers", "i8"),  # in IM: first layer of each node
        ("router", "i8"),
        ("reserves", "i8"),  # whether the router keeps account of KV cache
        ("degraded", "i8"),  # whether any node or link is down
        ("late", "i8"),  # whether a message takes an edge only when one is free
        ("waits", "i8"),  # whether a request that finds no room waits, or is turned away
        ("feed", "i8"),
        ("feed_delay_s", "f8"),
        ("feed_high_water", "f8"),
        ("high_water", "f8"),
        ("expected_output", "f8"),
        ("smoothing", "f8"),
        ("seed", "u8"),
    ],
    align=True,
)


def requests(arrival_s: Floats, input_tokens: Any, output_tokens: Any) -> Records:
    """Request records, nothing having happened yet; shape (N,)."""
    records = np.zeros(len(arrival_s), PIPELINE_REQUEST)
    records["arrival_s"] = arrival_s
    records["input_tokens"] = input_tokens
    records["output_tokens"] = output_tokens
    records["predicted_tokens"] = output_tokens
    records["first_token_s"] = records["finish_s"] = np.nan
    for name in ("node", "decode_node", "at", "link", "edge"):
        records[name] = -1
    return records


def build(
    nodes: Records,
    edges: Records,
    tables: list[tuple[Floats, Floats]],
    segment_layers: list[list[int]],
    first_layers: list[int],
    *,
    model_layers: int,
    request_count: int,
    depth: int,
) -> tuple[Records, Floats, Ints]:
    """The plan of the memories, and the memories.

    Parameters
    ----------
    nodes, edges
        Records of shape (M + 1,) and (E,); offsets are filled in here.
    tables
        Per node: seconds per layer of 0, 1, ... prompt tokens, and of 0, 1, ... decodes.
    segment_layers
        Per node: layers of each segment.
    depth
        Longest path, in edges.
    """
    count = len(nodes) - 1
    if not len(edges):
        raise ParameterError(
            "The deployment has no edge that leads from the coordinator through every layer.",
            resolve="place every layer on a node that a link reaches.",
        )
    plan = np.zeros(1, PLAN)
    memory = Memory()
    memory.add("f8", np.array([0.0, 0.0, np.inf, 0.0]))
    memory.add("i8", np.zeros(HEADER, np.int64))
    known: dict[int, tuple[int, int]] = {}
    for v in range(count):
        prompt, decode = tables[v]
        if id(prompt) not in known:
            known[id(prompt)] = (memory.add("f8", prompt), memory.add("f8", decode))
        nodes["prompt_table"][v], nodes["decode_table"][v] = known[id(prompt)]
        nodes["prompt_last"][v] = len(prompt) - 1
        nodes["decode_last"][v] = len(decode) - 1
        layers = np.array(segment_layers[v], np.int64)
        nodes["segments"][v] = len(layers)
        queues = np.column_stack([np.full_like(layers, -1), np.full_like(layers, -1), layers])
        nodes["queues"][v] = memory.add("i8", queues)
    for name in ("batch_head", "batch_tail", "pending_head", "pending_tail"):
        nodes[name] = -1
    edges["head"] = edges["tail"] = -1
    # A request has one event at most, a node one, an edge one.
    size = request_count + count + len(edges) + 1
    plan["nodes"] = count
    plan["requests"] = request_count
    plan["model_layers"] = model_layers
    plan["heap_size"] = size
    plan["heap_keys"] = memory.add("f8", np.zeros(size))
    plan["heap_items"] = memory.add("i8", np.zeros(size, np.int64))
    plan["dirty"] = memory.add("i8", np.zeros(count, np.int64))
    plan["depth"] = depth
    plan["paths"] = memory.add("i8", np.full(request_count * depth, -1, np.int64))
    plan["layer_free"] = memory.add("f8", np.zeros(2 * model_layers))
    plan["first_layers"] = memory.add("i8", np.array(first_layers, np.int64))
    integers = memory.array("i8")
    integers[WAIT_HEAD] = integers[WAIT_TAIL] = -1
    return plan, memory.array("f8"), integers
