"""Replays against a server without a network, whose answers take turns of the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

pytest.importorskip("openai", reason="the serving extra is not installed")

from hetero.apps.profiling import Reply
from hetero.apps.serving.replay import Bounds, replay
from hetero.errors import EndpointError
from hetero.workload import Trace


class Server:
    """Answers after as many turns as tokens are asked for, but a request for ``fails`` never."""

    model = "m"

    def __init__(self, fails: int = 0) -> None:
        self.asked: list[int] = []  # tokens of each request
        self.flight = self.most = 0
        self.fails = fails

    @asynccontextmanager
    async def client(self):
        yield None

    async def complete(self, client, prompt, tokens, *, ignore_eos):
        sent_s = time.perf_counter()
        self.asked.append(tokens)
        self.flight += 1
        self.most = max(self.most, self.flight)
        for _ in range(5 * tokens):
            await asyncio.sleep(0)
        self.flight -= 1
        if tokens == self.fails:
            raise EndpointError("It does not answer.", resolve="ask later.")
        chunk_s = tuple(time.perf_counter() for _ in range(tokens))
        return Reply(len(prompt.split()), tokens, sent_s, chunk_s)


def loop(clients: int, think_s: float = 0.0) -> Trace:
    """Every request asks for another number of tokens, by which it is known."""
    outputs = np.arange(3, 23)
    return Trace(np.zeros(20), np.full(20, 4), outputs).closed_loop(clients, think_s)


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_clients_wait_for_their_answers_and_take_requests_in_order(clients) -> None:
    server = Server()
    run = replay(server, loop(clients))
    assert server.most == min(clients, 20)
    assert server.asked[2:] == list(range(3, 23))
    assert run.counts == {"finished": 20, "rejected": 0}
    assert run.trace.clients == 0
    start, end = run.trace.arrival_s, run.requests["finish_s"]
    assert (run.ttft_s > 0).all()
    # Every client waited: when a request was sent, fewer than so many others were in flight.
    assert max(int((end[:k] > start[k]).sum()) for k in range(20)) < clients


def test_a_replay_that_is_stopped_gives_what_has_come() -> None:
    class Stopped(Server):
        async def complete(self, client, prompt, tokens, *, ignore_eos):
            if tokens == 13:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60.0)
            return await super().complete(client, prompt, tokens, ignore_eos=ignore_eos)

    run = replay(Stopped(fails=3), loop(1))
    assert run.counts == {"finished": 9, "rejected": 1}
    assert run.requests["output_tokens"].tolist() == [*range(3, 13)]


def test_no_client_sends_after_the_end() -> None:
    run = replay(Server(), loop(4, think_s=1.2), bounds=Bounds(seconds=1.0))
    assert len(run.requests) == 4


def test_an_open_loop_keeps_the_arrivals_of_its_trace() -> None:
    trace = Trace(np.arange(5) * 1e-7 + 1 / 3, [4] * 5, [2] * 5)
    run = replay(Server(), trace, bounds=Bounds(in_flight=2))
    assert run.trace.arrival_s.tolist() == trace.arrival_s.tolist()
