"""Conversations against sums over their turns, with and without a prefix cache."""

from __future__ import annotations

import numpy as np
import pytest

from hetero import workload
from hetero.apps.capacity.conversations import Conversations
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.step import StepModel
from hetero.routers import CacheAware, RoundRobin
from hetero.simulator import simulate
from hetero.workload.synthetic import Exponential, Fixed

STEP = StepModel.affine(floor_s=0.01, per_token_s=1e-5, per_cached_token_s=0.0)
USER, ANSWER, SYSTEM = 32, 48, 64  # whole blocks
CHATS = Conversations(
    rate_per_s=0.1,
    turns=5.0,
    user_tokens=Fixed(USER),
    answer_tokens=Fixed(ANSWER),
    system_tokens=SYSTEM,
    think_s=20.0,
    token_s=0.02,
)


def fleet(replicas: int, *, cache: bool = True, kv_tokens: int = 10**6) -> Deployment:
    engine = Engine(admission="paged", prefix_cache=cache, block_tokens=16)
    names = [f"r{k}" for k in range(replicas)]
    return Deployment("fleet", tuple(Replica(n, STEP, kv_tokens, engine=engine) for n in names))


def prompts(turns: np.ndarray) -> np.ndarray:
    """All prompt tokens of sessions of so many turns."""
    return turns * SYSTEM + USER * turns * (turns + 1) // 2 + ANSWER * turns * (turns - 1) // 2


def test_an_unlimited_cache_prefills_each_token_once_and_none_every_prompt() -> None:
    trace = CHATS.draw(200, seed=1)
    turns = np.bincount(trace.session_ids)
    assert trace.input_tokens.sum() == prompts(turns).sum()
    once = SYSTEM + (turns * USER + (turns - 1) * ANSWER).sum()
    for deployment, expected in (
        (fleet(1), once),
        (fleet(1, cache=False), prompts(turns).sum()),
        (fleet(3, cache=False), prompts(turns).sum()),
    ):
        run = simulate(deployment, trace, RoundRobin())
        assert run.replicas["prefill_tokens"].sum() == expected


def test_the_longest_prefix_keeps_a_session_where_it_is_and_rotation_does_not() -> None:
    trace = CHATS.draw(200, seed=2)
    turns = np.bincount(trace.session_ids)
    kept = simulate(fleet(3), trace, CacheAware(hit_weight=np.inf))
    blind = simulate(fleet(3), trace, RoundRobin())
    own = (turns * USER + (turns - 1) * ANSWER).sum()
    once = kept.replicas["prefill_tokens"].sum()
    assert own + SYSTEM <= once <= own + 3 * SYSTEM
    assert blind.replicas["prefill_tokens"].sum() > 1.2 * once
    for session in np.unique(trace.session_ids):
        assert len(set(kept.requests["node"][trace.session_ids == session])) == 1


def test_turns_and_their_times_are_those_asked_for() -> None:
    trace = CHATS.draw(4000, seed=3)
    turns = np.bincount(trace.session_ids)
    assert len(turns) == 4000
    assert turns.mean() == pytest.approx(5.0, rel=0.05)
    assert (turns == 1).mean() == pytest.approx(1 / 5, abs=0.02)
    gaps, begins = [], []
    for session in np.unique(trace.session_ids):
        inside = trace.session_ids == session
        begins.append(trace.arrival_s[inside][0])
        gaps += np.diff(trace.arrival_s[inside]).tolist()
        assert (np.diff(trace.input_tokens[inside]) == USER + ANSWER).all()
    assert np.mean(gaps) == pytest.approx(20.0 + 0.02 * ANSWER, rel=0.03)
    assert min(gaps) >= 0.02 * ANSWER
    assert np.mean(np.diff(np.sort(begins))) == pytest.approx(10.0, rel=0.05)


def test_sessions_share_no_more_than_the_system_prompt() -> None:
    uneven = Conversations(
        rate_per_s=1.0,
        turns=3.0,
        user_tokens=Exponential(40),
        answer_tokens=Exponential(90),
        system_tokens=50,
    ).draw(100)
    parts = np.split(uneven.prefix_ids, uneven.prefix_offsets[1:-1])
    for part, inputs in zip(parts, uneven.input_tokens, strict=True):
        assert len(part) == inputs // 16
        assert part[:3].tolist() == [0, 1, 2][: len(part)]
    seen: dict[int, set[int]] = {}
    for session, part in zip(uneven.session_ids.tolist(), parts, strict=True):
        for block in part[3:].tolist():
            seen.setdefault(block, set()).add(session)
    assert all(len(sessions) == 1 for sessions in seen.values())


def test_a_conversation_has_a_turn() -> None:
    with pytest.raises(ParameterError, match=r"0.5 turns"):
        Conversations(rate_per_s=1.0, turns=0.5, user_tokens=Fixed(1), answer_tokens=Fixed(1))


def test_the_command_writes_a_trace(tmp_path, said) -> None:
    for name in ("chats.csv", "chats.parquet"):
        said("trace", "sessions", "-o", tmp_path / name, "--count", "30")
        found = workload.open_trace(tmp_path / name)
        assert len(np.unique(found.session_ids)) == 30
        assert found.block_tokens == 16
