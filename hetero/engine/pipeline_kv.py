"""KV cache of the nodes of pipelines: what is held, what a router counts on, what is given back."""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled, inlined
from hetero.engine.pipeline_state import DOWN


@inlined
def fill(R, v, r, layers):
    """A node has passed a request through ``layers`` layers: its keys and values stay there."""
    v.kv_used += np.int64(R[r].tokens) * layers
    v.kv_peak = max(v.kv_peak, v.kv_used)


@compiled
def room(p, v, expected):
    """Whether a node may take a request, if it were to run all its layers.

    Source: Helix, section 5.2: estimated KV cache, the mask of nodes above the high water mark.
    """
    return v.kv_entries - v.kv_reserved - expected * v.layers >= (1.0 - p.high_water) * v.kv_entries


@compiled
def reserve(R, p, V, L, IM, r):
    """Count on the KV cache of a request on every node of its path."""
    path = p.paths + np.int64(r) * p.depth
    for k in range(R[r].fixed):
        edge = L[IM[path + k]]
        if edge.target < p.nodes:
            V[edge.target].kv_reserved += np.int64(R[r].expected_tokens) * edge.layers


@compiled
def give_back(R, p, V, L, IM, r, passed):
    """Free all KV cache of a request, of whose iteration in progress ``passed`` nodes are done."""
    path = p.paths + np.int64(r) * p.depth
    before = np.int64(0)
    if not R[r].is_prompt:
        before = np.int64(R[r].input_tokens) + R[r].done_tokens - 1
    for k in range(R[r].fixed):
        edge = L[IM[path + k]]
        if edge.target < p.nodes:
            held = before + (R[r].tokens if k < passed else 0)
            V[edge.target].kv_used -= held * edge.layers
            V[edge.target].outstanding -= 1
            if p.reserves:
                V[edge.target].kv_reserved -= np.int64(R[r].expected_tokens) * edge.layers


@compiled
def fullest_layer(p, V, FM, IM):
    """Largest share of the KV cache of a layer that the router counts on, over all layers."""
    free, total = p.layer_free, p.layer_free + p.model_layers
    FM[free : free + 2 * p.model_layers] = 0.0
    for i in range(p.nodes):
        v = V[i]
        if v.layers == 0 or v.mode == DOWN:
            continue
        first = IM[p.first_layers + i]
        for layer in range(first, first + v.layers):
            FM[free + layer] += (v.kv_entries - v.kv_reserved) / v.layers
            FM[total + layer] += v.kv_entries / v.layers
    most = 0.0
    for layer in range(p.model_layers):
        if FM[total + layer] > 0.0:
            most = max(most, 1.0 - FM[free + layer] / FM[total + layer])
    return most
