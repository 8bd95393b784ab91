"""Drive an endpoint with a trace, and keep what every request saw.

Requests are sent when the trace says, whatever the server does (an open loop), so waiting shows as
time to first token; or by clients that each wait for an answer (a closed loop). What is found is a
:class:`~hetero.simulator.run.Run` as the simulator makes it: real and simulated runs share tables,
metrics and figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hetero.apps.profiling import Endpoint, Prompts, Reply
from hetero.deployment import Deployment, Replica
from hetero.engine import state
from hetero.engine.gaps import count_gap
from hetero.errors import EndpointError, require
from hetero.latency.step import StepModel
from hetero.simulator.run import Run
from hetero.streams import stream
from hetero.workload import Trace

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PROBES = (8, 64)  # words of the prompts that show how many tokens a word has
_LEAD_S = 0.2  # from the start to the first request


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a replay may use.

    Attributes
    ----------
    in_flight
        Requests at once; later ones wait at the client, which counts as their time. In a closed
        loop its clients are the limit.
    seconds
        No request is sent later than this after the start [s].
    """

    in_flight: int = 1024
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        require(
            self.in_flight >= 1 and self.seconds > 0,
            f"{self.in_flight} requests at once for {self.seconds} s replay nothing.",
            resolve="give at least one request and a time above 0 s.",
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one request: its place in the trace, when it came [s], and the answer."""

    index: int
    arrival_s: float
    reply: Reply | None


def replay(
    endpoint: Endpoint,
    trace: Trace,
    *,
    bounds: Bounds | None = None,
    deployment: Deployment | None = None,
    router: str = "measured",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Send the requests of a trace to an endpoint, and return what they saw.

    In a closed loop every client sends the next request that nobody has sent when its last has been
    answered, or has failed, and it has thought. Ctrl-C ends it: what has ended by then is returned.

    Parameters
    ----------
    trace
        When to send how long a prompt, or which clients do, and how many tokens to ask for; at
        least one each.
    deployment
        Engines behind the endpoint, for names and prices; by default those that it tells of.
    seed
        Of the words of the prompts.
    progress
        Called with the number of requests that have just ended.

    Raises
    ------
    EndpointError
        If the server cannot be asked at all.
    """
    work = _Work(endpoint, trace, bounds or Bounds(), seed, progress)
    return to_run(asyncio.run(work.run()), trace, deployment, router, seed)


def to_run(
    sent: list[Sent], trace: Trace, deployment: Deployment | None, router: str, seed: int = 0
) -> Run:
    """What was measured as a run, with lengths as the server counted them.

    How busy engines were is not seen from outside: their use is NaN.
    """
    require(
        len(sent) > 0,
        "No request was sent.",
        resolve="allow more time, or replay more of the trace.",
    )
    sent = sorted(sent, key=lambda one: one.arrival_s)
    part = trace.take(np.array([one.index for one in sent]))
    arrival_s = np.array([one.arrival_s for one in sent])
    part = replace(part, arrival_s=arrival_s, clients=0, think_s=0.0)
    if deployment is None:
        told = {one.reply.engine or "server" for one in sent if one.reply}
        deployment = Deployment("endpoint", tuple(map(_unknown, sorted(told) or ["server"])))
    names = {replica.name: k for k, replica in enumerate(deployment.replicas)}
    lone = 0 if len(names) == 1 else -1
    outputs = np.maximum(part.output_tokens, 1)
    rows = state.requests(part.arrival_s, part.input_tokens, outputs, outputs)
    gaps = np.zeros(state.GAP_BINS, np.int64)
    replicas = np.zeros(len(names), state.REPLICA)
    replicas["busy_s"] = np.nan
    for row, one in zip(rows, sent, strict=True):
        reply = one.reply
        row["node"] = lone if reply is None else names.get(reply.engine, lone)
        row["status"] = state.REJECTED if reply is None else state.FINISHED
        row["reason"] = state.NOT_ANSWERED if reply is None else state.NO_REASON
        if reply is None:
            continue
        row["input_tokens"] = reply.input_tokens
        row["output_tokens"] = row["predicted_tokens"] = reply.output_tokens
        row["first_token_s"], row["finish_s"] = reply.chunk_s[0], reply.chunk_s[-1]
        for earlier, later in pairwise(reply.chunk_s):
            count_gap(gaps, max(later - earlier, 1e-9), 1)
        if row["node"] >= 0:
            replicas["prefill_tokens"][row["node"]] += reply.input_tokens
            replicas["decode_tokens"][row["node"]] += reply.output_tokens
    for records in (rows, replicas, gaps):
        records.setflags(write=False)
    return Run(deployment, part, router, rows, replicas, gaps, seed)


def _unknown(name: str) -> Replica:
    """An engine of which nothing but the name is known; a measured run reads no more of it."""
    step = StepModel.affine(
        floor_s=0.0,
        per_token_s=1e-9,
        per_cached_token_s=0.0,
        source="not known",
        provenance="assumed",
    )
    return Replica(name, step, kv_tokens=2**30)


@dataclass(eq=False)
class _Work:
    endpoint: Endpoint
    trace: Trace
    bounds: Bounds
    seed: int
    progress: Callable[[int], None] | None
    prompts: Prompts = field(default_factory=Prompts)
    ignore_eos: bool = True
    found: list[Sent] = field(default_factory=list)

    async def run(self) -> list[Sent]:
        """Send requests; what came of them, on the clock of the trace."""
        async with self.endpoint.client() as client:
            await self._learn(client)
            first_s = 0.0 if self.trace.clients else float(self.trace.arrival_s[0])
            self.zero_s = time.perf_counter() + _LEAD_S - first_s
            self.last_s = first_s + self.bounds.seconds
            with suppress(asyncio.CancelledError):  # by Ctrl-C
                await (self._closed if self.trace.clients else self._open)(client)
        return self.found

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.zero_s

    async def _open(self, client: AsyncOpenAI) -> None:
        room = asyncio.Semaphore(self.bounds.in_flight)
        async with asyncio.TaskGroup() as group:
            for k, due_s in enumerate(map(float, self.trace.arrival_s)):
                if due_s > self.last_s:
                    break
                prompt = self._prompt(k)  # made ahead, not while it is due
                await asyncio.sleep(due_s - self.now_s)
                await room.acquire()
                if self.now_s > self.last_s:
                    break
                task = group.create_task(self._one(client, k, prompt, due_s))
                task.add_done_callback(lambda _: room.release())

    async def _closed(self, client: AsyncOpenAI) -> None:
        ready: asyncio.Queue[tuple[int, str]] = asyncio.Queue(self.trace.clients)
        left = len(self.trace)

        async def write() -> None:
            for k in range(len(self.trace)):  # made ahead, not while a client waits for it
                await ready.put((k, self._prompt(k)))

        async def ask() -> None:
            nonlocal left
            while left > 0 and self.now_s <= self.last_s:
                left -= 1
                await self._one(client, *(await ready.get()), self.now_s)
                await asyncio.sleep(self.trace.think_s)

        writer = asyncio.create_task(write())
        await asyncio.sleep(_LEAD_S)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.trace.clients):
                    group.create_task(ask())
        finally:
            writer.cancel()

    async def _learn(self, client: AsyncOpenAI) -> None:
        counts = []
        for words in _PROBES:
            prompt = self.prompts.words(words, stream(self.seed, "probe"))
            try:
                reply = await self._ask(client, prompt, 2)
            except EndpointError as error:
                if error.status not in (400, 422):
                    raise
                self.ignore_eos = False  # the engine does not know it
                reply = await self._ask(client, prompt, 2)
            counts.append((words, reply.input_tokens))
        self.prompts.learn(counts)

    async def _ask(self, client: AsyncOpenAI, prompt: str, tokens: int) -> Reply:
        return await self.endpoint.complete(client, prompt, tokens, ignore_eos=self.ignore_eos)

    def _prompt(self, k: int) -> str:
        tokens = int(self.trace.input_tokens[k])
        return self.prompts.of_tokens(tokens, stream(self.seed, f"prompt/{k}"))

    async def _one(self, client: AsyncOpenAI, k: int, prompt: str, arrival_s: float) -> None:
        outputs = max(int(self.trace.output_tokens[k]), 1)
        try:
            reply = await self._ask(client, prompt, outputs)
        except EndpointError:
            found = Sent(k, arrival_s, None)
        else:
            times = tuple(at - self.zero_s for at in reply.chunk_s)
            found = Sent(k, arrival_s, replace(reply, chunk_s=times))
        self.found.append(found)
        if self.progress:
            self.progress(1)
