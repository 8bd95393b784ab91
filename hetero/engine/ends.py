"""When replicas end what they are doing, and which of them have changed.

A fleet is asked at every event what ends next, and a router at every decision what has changed:
neither looks at every replica. Ends have one entry per block of replicas that is never later than
the earliest of them; changes are written to a ring that every reader reads at its own place.
"""

from __future__ import annotations

import numpy as np

from hetero.engine.compiled import compiled
from hetero.engine.state import BLOCK, NOTED


@compiled
def set_end(e, FM, t):
    """What a replica is doing ends at ``t``."""
    FM[e.index] = t
    FM[e.block] = min(FM[e.block], t)


@compiled
def next_end_s(E, FM):
    """When the first replica ends what it is doing."""
    count = len(E)
    first = np.inf
    for b in range(0, count, BLOCK):
        if FM[E[b].block] < first:
            earliest = np.inf
            for i in range(b, min(b + BLOCK, count)):
                if FM[i] < earliest:
                    earliest = FM[i]
            FM[E[b].block] = earliest
            first = min(first, earliest)
    return first


@compiled
def note(e, IM):
    """Something about a replica has changed that a router may look at."""
    IM[e.notes + (IM[NOTED] & e.note_mask)] = e.index
    IM[NOTED] += 1


@compiled
def note_all(e, IM):
    """Anything may have changed: more than the ring tells."""
    IM[NOTED] += e.note_mask + 2
