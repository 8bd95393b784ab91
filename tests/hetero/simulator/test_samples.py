"""What replicas hold over time."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import LeastTokens, PowerOfTwo, RoundRobin
from hetero.simulator import Event, simulate
from hetero.workload import Trace
from tests.hetero.routers.router_states import fleet, trace

STEP = StepModel.affine(floor_s=1.0, per_token_s=0.125, per_cached_token_s=0.0)


def test_one_request_by_hand() -> None:
    # A prefill of 8 tokens from 1 to 3, tokens at 4.125 and 5.25; 8 + 3 tokens reserved.
    server = Deployment("one", (Replica("a", STEP, 100),))
    run = simulate(server, Trace([1.0], [8], [3]), RoundRobin(), sample_s=1.0)
    line = run.timeline()
    assert line.time_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert line.waiting.tolist() == [1, 0, 0, 0, 0, 0]
    assert line.decoding.tolist() == [0, 0, 1, 1, 1, 0]
    assert line.kv_use.tolist() == [0.0, 0.11, 0.11, 0.11, 0.11, 0.0]
    assert line.busy_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 4.25]


def test_blocks_grow_as_tokens_come() -> None:
    engine = Engine(admission="paged", block_tokens=2)
    server = Deployment("one", (Replica("a", STEP, 20, engine=engine),))
    run = simulate(server, Trace([0.0], [8], [4]), RoundRobin(), sample_s=1.125)
    # Steps end at 2, 3.125, 4.25 and 5.375; each stores the token before: 8, 9, 10 of 20.
    line = run.timeline()
    assert line.time_s.tolist() == [0.0, 1.125, 2.25, 3.375, 4.5, 5.625]
    assert line.kv_use.tolist() == [0.0, 0.4, 0.4, 0.5, 0.5, 0.0]
    assert line.busy_s.tolist() == [0.0, 1.125, 2.25, 3.375, 4.5, 5.375]


@pytest.mark.parametrize("router", [LeastTokens(), PowerOfTwo()], ids=lambda r: r.name)
def test_sampling_changes_nothing(router) -> None:
    engine = Engine("chunked", "paged", max_batch=24, max_step_tokens=512)
    events = [Event(5.0, "0:H100-SXM"), Event(11.3, "0:H100-SXM", "recover")]
    plain = simulate(fleet(engine), trace(), router, events=events)
    sampled = simulate(fleet(engine), trace(), router, events=events, sample_s=0.1)
    assert plain.requests.tobytes() == sampled.requests.tobytes()
    assert plain.replicas.tobytes() == sampled.replicas.tobytes()
    samples = sampled.samples
    assert samples is not None
    assert ((samples.kv_use >= 0) & (samples.kv_use <= 1)).all()
    assert (np.diff(samples.busy_s, axis=0) >= 0).all()
    down = (samples.time_s > 5.0) & (samples.time_s < 11.0)
    assert (samples.kv_use[down, 0] == 0).all()
    assert (samples.kv_use[~down, 0] > 0).any()


def test_errors_are_clear() -> None:
    with pytest.raises(ParameterError, match=r"no samples.*sample_s"):
        simulate(fleet(), trace(20), RoundRobin()).timeline()
    with pytest.raises(ParameterError, match="sample_s is 0"):
        simulate(fleet(), trace(20), RoundRobin(), sample_s=0.0)
