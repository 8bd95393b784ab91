"""Drive an endpoint with a trace, and keep what every request saw.

Requests are sent when the trace says, whatever the server does (an open loop), so waiting shows as
time to first token; or by clients that each wait for an answer (a closed loop). What is found is a
:class:`~hetero.simulator.run.Run` as the simulator makes it: real and simulated runs share tables,
metrics and figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero.apps.profiling import Endpoint, Prompts, Reply
from hetero.deployment import Deployment, Replica
from hetero.engine import state
from hetero.engine.gaps import count_gap
from hetero.errors import DataError, EndpointError, require
from hetero.latency.step import StepModel
from hetero.simulator.run import Run
from hetero.streams import stream
from hetero.workload import Trace

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PROBES = (8, 64)  # words of the prompts that show how many tokens a word has
_FORMAT = "hetero replay 2"
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
    """What became of one request; times on the clock of the trace [s].

    Attributes
    ----------
    index
        Its place in the trace.
    arrival_s
        When the trace says that it comes or, in a closed loop, when its client sent it.
    engine
        Who served it, where the server tells.
    error
        Why it was not answered in full, empty where it was.
    chunk_s
        When each streamed piece came.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    engine: str
    error: str
    chunk_s: tuple[float, ...]

    @property
    def last_s(self) -> float:
        """When the last that is known of it happened."""
        return max((self.arrival_s, *self.chunk_s))

    def line(self) -> str:
        """The request as one line of the journal."""
        chunks = [round(x, 6) for x in self.chunk_s]
        tokens = (self.input_tokens, self.output_tokens)
        return json.dumps([self.index, self.arrival_s, *tokens, self.engine, self.error, chunks])

    @classmethod
    def read(cls, line: str) -> Sent:
        """The request of a line."""
        index, arrival_s, inputs, outputs, engine, error, chunks = json.loads(line)
        return cls(index, arrival_s, inputs, outputs, engine, error, tuple(chunks))


def replay(
    endpoint: Endpoint,
    trace: Trace,
    journal: Path | str,
    *,
    bounds: Bounds | None = None,
    deployment: Deployment | None = None,
    router: str = "measured",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Send the requests of a trace to an endpoint, and return what they saw.

    Every request is kept in the journal as it ends. Where the journal of the same trace is there
    already, only what it lacks is sent, the first of that at once; what was answered is never
    asked again. In a closed loop every client sends the next request that nobody has sent when its
    last has been answered, or has failed, and it has thought.

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
    DataError
        If the journal is of another trace.
    """
    bounds = bounds or Bounds()
    path = Path(journal)
    known = _open(path, trace, endpoint)
    missing = [k for k in range(len(trace)) if k not in known]
    if missing:
        if progress:
            progress(len(known))
        with path.open("a", encoding="utf-8") as out:
            work = _Work(endpoint, trace, bounds, seed, out, progress)
            first_s = float(trace.arrival_s[missing[0]])
            if trace.clients:
                first_s = max((one.last_s for one in known.values()), default=0.0)
            known |= asyncio.run(work.run(missing, first_s))
    return to_run([known[k] for k in sorted(known)], trace, deployment, router, seed)


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
    # In a closed loop a request that had failed may have been sent again after later ones.
    sent = sorted(sent, key=lambda one: one.arrival_s)
    part = trace.take(np.array([one.index for one in sent]))
    arrival_s = np.array([one.arrival_s for one in sent])
    part = replace(part, arrival_s=arrival_s, clients=0, think_s=0.0)
    told = list(dict.fromkeys(one.engine or "server" for one in sent if not one.error))
    if deployment is None:
        deployment = Deployment("endpoint", tuple(map(_unknown, sorted(told) or ["server"])))
    names = {replica.name: k for k, replica in enumerate(deployment.replicas)}
    lone = 0 if len(names) == 1 else -1
    outputs = np.array([one.output_tokens for one in sent], np.int32)
    inputs = np.array([one.input_tokens for one in sent], np.int32)
    rows = state.requests(part.arrival_s, inputs, outputs, outputs)
    gaps = np.zeros(state.GAP_BINS, np.int64)
    replicas = np.zeros(len(names), state.REPLICA)
    replicas["busy_s"] = np.nan
    for row, one in zip(rows, sent, strict=True):
        row["node"] = names.get(one.engine, lone)
        row["status"] = state.REJECTED if one.error else state.FINISHED
        row["reason"] = state.NOT_ANSWERED if one.error else state.NO_REASON
        if one.error:
            continue
        row["first_token_s"], row["finish_s"] = one.chunk_s[0], one.chunk_s[-1]
        for earlier, later in zip(one.chunk_s, one.chunk_s[1:], strict=False):
            count_gap(gaps, max(later - earlier, 1e-9), 1)
        if row["node"] >= 0:
            replicas["prefill_tokens"][row["node"]] += one.input_tokens
            replicas["decode_tokens"][row["node"]] += one.output_tokens
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
    out: Any
    progress: Callable[[int], None] | None
    prompts: Prompts = field(default_factory=Prompts)
    ignore_eos: bool = True
    found: dict[int, Sent] = field(default_factory=dict)

    async def run(self, missing: list[int], first_s: float) -> dict[int, Sent]:
        """Send requests; the clock of the trace reads ``first_s`` when it begins to."""
        async with self.endpoint.client() as client:
            await self._learn(client)
            self.zero_s = time.perf_counter() + _LEAD_S - first_s
            self.last_s = first_s + self.bounds.seconds
            await (self._closed if self.trace.clients else self._open)(client, missing)
        return self.found

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.zero_s

    async def _open(self, client: AsyncOpenAI, missing: list[int]) -> None:
        room = asyncio.Semaphore(self.bounds.in_flight)
        async with asyncio.TaskGroup() as group:
            for k in missing:
                due_s = float(self.trace.arrival_s[k])
                if due_s > self.last_s:
                    break
                prompt = self._prompt(k)  # made ahead, not while it is due
                await asyncio.sleep(due_s - self.now_s)
                await room.acquire()
                if self.now_s > self.last_s:
                    room.release()
                    break
                task = group.create_task(self._one(client, k, prompt, due_s))
                task.add_done_callback(lambda _: room.release())

    async def _closed(self, client: AsyncOpenAI, missing: list[int]) -> None:
        count = min(self.trace.clients, len(missing))
        ready: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue(count)

        async def write() -> None:
            for k in missing:  # made ahead, not while a client waits for it
                await ready.put((k, self._prompt(k)))
            for _ in range(count):
                await ready.put(None)

        async def ask() -> None:
            while (item := await ready.get()) is not None and self.now_s <= self.last_s:
                await self._one(client, *item, self.now_s)
                await asyncio.sleep(self.trace.think_s)

        writer = asyncio.create_task(write())
        await asyncio.sleep(_LEAD_S)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
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
        except EndpointError as error:
            inputs = int(self.trace.input_tokens[k])
            found = Sent(k, arrival_s, inputs, outputs, "", error.what, ())
        else:
            times = tuple(at - self.zero_s for at in reply.chunk_s)
            tokens = (reply.input_tokens, reply.output_tokens)
            found = Sent(k, arrival_s, *tokens, reply.engine, "", times)
        self.found[k] = found
        self.out.write(found.line() + "\n")
        self.out.flush()
        if self.progress:
            self.progress(1)


def _open(path: Path, trace: Trace, endpoint: Endpoint) -> dict[int, Sent]:
    """What a journal holds already; a new one gets its first line.

    Requests that failed are asked again.
    """
    about = {
        "format": _FORMAT,
        "model": endpoint.model,
        "requests": len(trace),
        "last_s": round(float(trace.arrival_s[-1]), 6),
        "clients": trace.clients,
        "think_s": trace.think_s,
        "tokens": int(trace.input_tokens.sum()) + int(trace.output_tokens.sum()),
    }
    if not path.parent.is_dir():
        raise DataError("The folder does not exist.", path=path, resolve="create it first.")
    if not path.exists():
        path.write_text(json.dumps(about) + "\n", encoding="utf-8")
        return {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        same = json.loads(lines[0]) == about
    except (ValueError, IndexError):
        same = False
    if not same:
        raise DataError(
            "This is no journal of the same replay.",
            path=path,
            line=1,
            resolve="choose another output, or delete the journal to begin anew.",
        )
    known: dict[int, Sent] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.endswith("\n"):  # a crash amid a line
            os.truncate(path, sum(len(one.encode()) for one in lines[: number - 1]))
            break
        try:
            one = Sent.read(line)
        except ValueError:
            raise DataError(
                "This is no request of a replay.",
                path=path,
                line=number,
                resolve="delete the line.",
            ) from None
        if not one.error:
            known[one.index] = one
    return known
