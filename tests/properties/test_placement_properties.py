"""What holds for every placement and every small cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import InfeasibleError
from hetero.placement import FlowNetwork, Placement
from hetero.planners.helix.bound import flow_bound

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from small_placements import random_problem

SETTINGS = settings(max_examples=8)


@SETTINGS
@given(seed=st.integers(0, 10_000), nodes=st.integers(3, 7), slow=st.booleans())
def test_no_placement_exceeds_the_bound(seed: int, nodes: int, slow: bool) -> None:
    small = random_problem(seed, nodes, 6, 4, slow=slow)
    draws = np.random.default_rng(seed)
    bound = flow_bound(small).tokens_per_s
    for _ in range(20):
        ranges = []
        for node in small.nodes:
            held = int(draws.integers(1, node.max_layers + 1))
            start = int(draws.integers(0, 6 - held + 1))
            ranges.append((start, start + held))
        placement = Placement(small, tuple(ranges))
        for partial in (False, True):
            try:
                flow = FlowNetwork(placement, partial).max_flow()
            except InfeasibleError:
                continue
            assert flow.tokens_per_s <= bound * (1 + 1e-9)
            # Flow is conserved, and its pipelines add up to it.
            moved = flow.link_tokens_per_s
            assert moved[:, :-1].sum(axis=0) == pytest.approx(moved[:-1].sum(axis=1), abs=1e-6)
            assert sum(p.tokens_per_s for p in flow.paths()) == pytest.approx(
                flow.tokens_per_s, rel=1e-6
            )
