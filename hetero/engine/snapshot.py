"""What replicas hold at a time between their events."""

from __future__ import annotations

from hetero.engine.compiled import compiled
from hetero.engine.kv import growth
from hetero.engine.state import IN_DECODE, IN_PREFILL, PAGED
from hetero.engine.steps import run_s, steps_to_reach


@compiled
def snapshot(E, S, IM, t, used, busy_s):
    """Fill in what each replica holds of its KV cache and how long it was busy; shapes (M,).

    The records of a run of decode steps stand as they were when it began.
    """
    for i in range(len(E)):
        e, s = E[i], S[i]
        used[i], busy_s[i] = s.used, s.busy_s
        if s.mode == IN_DECODE or s.mode == IN_PREFILL:
            busy_s[i] += max(t - s.clock_s, 0.0)
        if s.mode == IN_DECODE and e.admission == PAGED:
            first, slope, start = s.run_first_s, s.run_slope_s, s.clock_s + s.stall_s
            n = steps_to_reach(first, slope, start, t, s.run_steps)
            n -= 1 if start + run_s(first, slope, n) > t else 0
            used[i] += growth(e, s, IM, n)
