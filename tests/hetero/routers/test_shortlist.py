"""Our own router chooses among many replicas what it chooses where it looks at every one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.deployment import Deployment, Engine, Replica
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.routers import Predictive
from hetero.routers.base import Floats
from hetero.routers.predictive import KINDS, MANY
from hetero.simulator import Event, simulate
from hetero.workload import Trace
from tests.hetero.routers.router_states import Wrong

ENGINES = {
    "known": Engine(max_batch=12),
    "predicted": Engine(admission="predicted", max_batch=6),
    "recompute": Engine(admission="paged", max_batch=16),
    "swap": Engine(admission="paged", eviction="swap", max_batch=16),
    "chunked": Engine(batching="chunked", admission="paged", max_batch=16, max_step_tokens=300),
    "ahead": Engine(batching="chunked", max_batch=16, max_step_tokens=96, schedule_ahead=True),
    "static": Engine(batching="static", max_batch=8),
}


class Seen(Predictive):
    """Keeps its memory in sight, and may be told to look at every replica."""

    many: bool
    kept: Floats

    def __init__(self, many: bool, **options: Any) -> None:
        super().__init__(**options)
        object.__setattr__(self, "many", many)

    def memory(self, deployment: Deployment) -> Floats:
        memory = super().memory(deployment)
        memory[MANY] *= self.many
        object.__setattr__(self, "kept", memory)
        return memory


def step(rng: np.random.Generator) -> StepModel:
    """One or two pieces; times that may fall for more tokens; mixed steps of their own."""
    pieces = []
    for _ in range(rng.integers(1, 3)):
        knots = np.cumsum(rng.integers(1, 400, rng.integers(2, 7))).astype(float)
        times = 0.01 + rng.uniform(2e-5, 2e-4) * knots * rng.uniform(0.7, 1.0, len(knots))
        times[-1] = times.max() * 1.1
        rates = rng.uniform(0, 3e-7, 4)
        mixed = Mixed(rates * 1.5, rng.uniform(0, 0.002, 4), rng.uniform(0, 1e-5, 4))
        pairs = float(rng.uniform(0, 3e-8))
        pieces.append(Piece(knots, times, rates, pairs, mixed if rng.random() < 0.5 else None))
    return StepModel(tuple(pieces), source="drawn", provenance="assumed")


def fleet(rng: np.random.Generator, engine: Engine, count: int, kinds: int) -> Deployment:
    """Replicas of so many kinds, shuffled; some kinds differ by their way or their cache alone."""
    steps = [step(rng) for _ in range(max(kinds // 2, 1))]
    drawn = [
        Replica(
            "",
            steps[k % len(steps)],
            int(rng.integers(3_000, 20_000)),
            kv_bytes_per_token=1e5,
            engine=engine,
            network_s=float(rng.choice([0.0, 0.03])),
        )
        for k in range(kinds)
    ]
    replicas = (
        dataclasses.replace(drawn[k], name=f"r{i}")
        for i, k in enumerate(rng.integers(kinds, size=count))
    )
    return Deployment("drawn", tuple(replicas))


def trace(rng: np.random.Generator, count: int, rate_rps: float) -> Trace:
    """Requests of which some come at the same instant and some are alike."""
    arrival_s = np.floor(np.cumsum(rng.exponential(1 / rate_rps, count)) * 200) / 200
    inputs = np.clip(rng.lognormal(5.5, 1.0, count), 1, 2_500).astype(np.int32)
    outputs = np.clip(rng.exponential(80, count), 1, 400).astype(np.int32)
    inputs[::5], outputs[::5] = 200, 50
    return Trace(arrival_s, inputs, outputs, name="drawn")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
@settings(max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(49, 300),
    kinds=st.integers(1, 6),
    load=st.sampled_from([0.3, 2.0, 20.0]),
    target_s=st.sampled_from([None, 0.1, 0.5]),
    price_s=st.sampled_from([2.0, 2.0, 0.0]),
    failing=st.booleans(),
    wrong=st.booleans(),
)
def test_a_short_list_decides_as_a_look_at_all(
    engine, seed, count, kinds, load, target_s, price_s, failing, wrong
):
    rng = np.random.default_rng(seed)
    deployment = fleet(rng, engine, count, kinds)
    served = trace(rng, 12 * count, load * count)
    events = []
    if failing:
        for k in rng.choice(count, count // 3, replace=False):
            replica = deployment.replicas[k]
            start = float(rng.uniform(0, 12 / load))
            events += [Event(start, replica.name), Event(start + 2.0, replica.name, "recover")]
    routers = tuple(Seen(many, target_s=target_s, price_s=price_s) for many in (True, False))
    short, full = (
        simulate(deployment, served, router, events=events, predictor=Wrong() if wrong else None)
        for router in routers
    )
    assert routers[0].kept[MANY] == 2.0
    assert routers[1].kept[MANY] == 0.0
    assert short.requests.tobytes() == full.requests.tobytes()
    assert len(np.unique(short.requests["node"])) > 2


def test_replicas_of_equal_models_are_one_kind_whoever_made_the_models() -> None:
    made = fleet(np.random.default_rng(3), ENGINES["chunked"], 60, 2)
    apart = tuple(dataclasses.replace(one, step=copy.deepcopy(one.step)) for one in made.replicas)
    served = trace(np.random.default_rng(4), 600, 60.0)
    routers = Seen(True), Seen(True)
    one, other = (
        simulate(deployment, served, router)
        for deployment, router in zip(
            (made, dataclasses.replace(made, replicas=apart)), routers, strict=True
        )
    )
    assert one.requests.tobytes() == other.requests.tobytes()
    assert routers[0].kept[KINDS] == routers[1].kept[KINDS] <= 2
