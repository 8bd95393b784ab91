"""What the dispatcher adds: time and processor per request, paired against the engine itself.

The engine is one that streams words at a set pace (:mod:`pipelines.bench.paced`): a model would
take a hundred times what is measured. Every request goes out twice at the same moment, once
straight to an engine and once through the dispatcher to another of the same kind, in changing
order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np
import psutil

from hetero.arrays import Floats
from hetero.display import Column, Table
from hetero.errors import EndpointError
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.timings import Timing
from pipelines.bench.engines import free_port, started
from pipelines.bench.measured import Measured, Say, cpu_s, silent

T = TypeVar("T")
_STEP_MS = 10.0


@dataclass(frozen=True, slots=True, repr=False)
class ServeBench(Measured):
    """What was measured of the dispatcher.

    Attributes
    ----------
    rows
        What, its value and unit, and the number of requests behind it.
    times
        The times among them.
    notes
        Under which conditions.
    """

    rows: tuple[tuple[str, float, str, int], ...]
    times: tuple[Timing, ...]
    notes: tuple[str, ...]

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The times among them."""
        return self.times

    def table(self) -> Table:
        """One row per measurement."""
        return Table(
            "Dispatcher",
            (Column("what"), Column("value"), Column("unit"), Column("requests")),
            self.rows,
            self.notes,
        )

    def record(self) -> list[dict[str, object]]:
        """The rows as plain values."""
        return [
            dict(zip(("what", "value", "unit", "requests"), row, strict=True)) for row in self.rows
        ]


def bench(
    *,
    rate_rps: float = 100.0,
    seconds: float = 10.0,
    tokens: int = 32,
    streams: int = 1000,
) -> ServeBench:
    """Measure a dispatcher of two engines on this machine.

    Parameters
    ----------
    rate_rps, seconds, tokens
        Load of the paired run: requests per second each way, for how long, of how many words.
    streams
        Streams held at once.

    Raises
    ------
    EndpointError
        If a request fails or a process does not start.
    """
    rows: list[tuple[str, float, str, int]] = []
    times: list[Timing] = []

    def add(key: str, what: str, value_s: float, count: int, clock: str, statistic: str) -> None:
        rows.append((what, 1e6 * value_s, "us", count))
        times.append(
            Timing.here(
                f"serve.{key}",
                value_s,
                command="hetero bench serve --record",
                statistic=statistic,
                repeats=count,
                clock=clock,
            )
        )

    async def measure(traffic: _Traffic) -> None:
        await traffic.paired(rate_rps, min(seconds, 2.0), tokens)  # warm up
        before = traffic.cpu_s
        short = await asyncio.gather(
            *_paced(lambda _: traffic.ask(traffic.served, 1), rate_rps, seconds / 2)
        )
        short_s, before = (traffic.cpu_s - before) / len(short), traffic.cpu_s
        gaps, first, whole = await traffic.paired(rate_rps, seconds, tokens)
        count = len(whole)
        chunk_s = max((traffic.cpu_s - before) / count - short_s, 0.0) / (tokens - 1)
        add("cpu.request", "CPU per request of one token", short_s, len(short), "cpu", "single")
        add("cpu.chunk", "CPU per further token", chunk_s, count, "cpu", "single")
        for key, what, values in (
            ("first", "added time to first token", first),
            ("whole", "added time to the end", whole),
            ("gap", "added time between tokens", gaps),
        ):
            p99 = float(np.quantile(values, 0.99))
            add(f"{key}.p50", f"{what}, median", float(np.median(values)), count, "wall", "median")
            add(f"{key}.p99", f"{what}, P99", p99, count, "wall", "single")
        rows.append(("streams held at once", await traffic.held(streams), "streams", streams))

    cores = _with_traffic(measure)
    notes = (
        f"{rate_rps:g} requests/s each way, {tokens} tokens {_STEP_MS:g} ms apart; dispatcher on "
        f"core {cores[-1]}, engines and client on core {cores[0]}.",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(cores)} cores.",
    )
    return ServeBench(tuple(rows), tuple(times), notes)


def soak(requests: int = 100_000, *, progress: Say = silent) -> ServeBench:
    """Memory of a dispatcher over many requests, 64 at once.

    Parameters
    ----------
    requests
        Requests after a tenth as many for warm-up.
    progress
        Called with a line after each tenth.

    Raises
    ------
    EndpointError
        If a request fails or a process does not start.
    """
    seen: list[float] = []  # resident memory after the warm-up and after each tenth [MiB]

    async def measure(traffic: _Traffic) -> None:
        for k in range(11):
            await traffic.many(max(requests // 10, 1))
            seen.append(traffic.memory_mib)
            what = "warm-up" if k == 0 else f"{k * (requests // 10):,} requests"
            progress(f"{what}: {seen[-1]:.1f} MiB")

    _with_traffic(measure)
    part = requests // 10
    half = np.arange(len(seen))[len(seen) // 2 :]
    slope = float(np.polyfit(half * part, np.array(seen)[half], 1)[0]) if len(half) > 1 else 0.0
    rows = (
        ("resident memory before", seen[0], "MiB", part),
        ("resident memory after", seen[-1], "MiB", part + 10 * part),
        ("memory grown", seen[-1] - seen[0], "MiB", 10 * part),
        ("growth over the second half", 1e4 * slope, "MiB per 10,000 requests", 5 * part),
    )
    return ServeBench(rows, (), (f"64 requests at once, one token each; {part:,} for warm-up.",))


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Requests straight to an engine, and through a dispatcher to another of the same kind."""

    session: aiohttp.ClientSession
    direct: str
    served: str
    dispatcher: psutil.Process

    @property
    def cpu_s(self) -> float:
        """CPU time of the dispatcher so far [s]."""
        return cpu_s(self.dispatcher)

    @property
    def memory_mib(self) -> float:
        """Resident memory of the dispatcher [MiB]."""
        return float(self.dispatcher.memory_info().rss / 2**20)

    async def ask(self, url: str, tokens: int, step_s: float = 0.0) -> list[float]:
        """When a streamed request was sent and each of its pieces came [s]."""
        body = {"model": "m", "prompt": "one two three", "max_tokens": tokens, "stream": True}
        body["step_s"] = step_s
        times = [time.perf_counter()]
        async with self.session.post(f"{url}/v1/completions", json=body) as answer:
            last = b""
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
                last = line.strip() or last
            if answer.status != 200 or last != b"data: [DONE]":
                raise EndpointError(
                    f"{url} did not answer in full: {last[:160]!r}.",
                    resolve="run again on an idle machine; if it stays, look at its log.",
                )
        return times

    async def paired(
        self, rate_rps: float, seconds: float, tokens: int
    ) -> tuple[Floats, Floats, Floats]:
        """Added time per gap, to the first token and to the end, one value per pair [s]."""

        async def pair(k: int) -> tuple[list[float], list[float]]:
            urls = (self.direct, self.served) if k % 2 else (self.served, self.direct)
            found = await asyncio.gather(*(self.ask(url, tokens) for url in urls))
            return (found[0], found[1]) if k % 2 else (found[1], found[0])

        pairs = await asyncio.gather(*_paced(pair, rate_rps, seconds))
        plain, passed = (
            np.array([one[: tokens + 1] for one in way]) for way in zip(*pairs, strict=True)
        )
        first = (passed[:, 1] - passed[:, 0]) - (plain[:, 1] - plain[:, 0])
        whole = (passed[:, -1] - passed[:, 0]) - (plain[:, -1] - plain[:, 0])
        gaps = np.diff(passed[:, 1:]) - np.diff(plain[:, 1:])
        return gaps.ravel(), first, whole

    async def held(self, streams: int) -> int:
        """Streams that ended well, all of them under way at once."""
        step_s = 0.5 + streams / 2000  # 2,000 words a second at most, which one core streams
        asked = (self.ask(self.served, 20, step_s) for _ in range(streams))
        found = await asyncio.gather(*asked)
        first_end_s = min(times[-1] for times in found)
        return sum(times[1] < first_end_s for times in found)

    async def many(self, requests: int) -> None:
        """So many short requests, 64 at once."""
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                await self.ask(self.served, 1)

        await asyncio.gather(*(worker() for _ in range(64)))


def _paced(
    one: Callable[[int], Awaitable[T]], rate_rps: float, seconds: float
) -> list[asyncio.Task[T]]:
    """Tasks of ``one(k)``, begun at a steady rate."""

    async def later(k: int) -> T:
        await asyncio.sleep(k / rate_rps)
        return await one(k)

    return [asyncio.create_task(later(k)) for k in range(max(2, round(rate_rps * seconds)))]


def _with_traffic(measure: Callable[[_Traffic], Awaitable[None]]) -> list[int]:
    """Measure between processes that are started for it; returns the cores there are."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]

    async def work(direct: str, served: str, dispatcher: psutil.Process) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(connector=connector) as session:
            await measure(_Traffic(session, direct, served, dispatcher))

    with _processes(cores) as served:
        asyncio.run(work(*served))
    return cores


@contextlib.contextmanager
def _processes(cores: Sequence[int]) -> Iterator[tuple[str, str, psutil.Process]]:
    """Two engines and a dispatcher, pinned; address of an engine and of the dispatcher."""
    mine = psutil.Process()
    before = mine.cpu_affinity() if hasattr(mine, "cpu_affinity") else None
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        ports = [free_port() for _ in range(3)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        step = StepModel.affine(floor_s=0.01, per_token_s=1e-6, per_cached_token_s=0.0)
        storage.save(step, folder / "step.json")
        backend = {
            "name": "paced",
            "url": urls[1],
            "step": "step.json",
            "kv_tokens": 10**7,
            "max_batch": 4096,
        }
        settings = {"model": "m", "router": "hetero", "backends": [backend]}
        # JSON is YAML.
        (folder / "deployment.yaml").write_text(json.dumps(settings), encoding="utf-8")
        paced = ["-m", "pipelines.bench.paced", "--step-ms", str(_STEP_MS), "--port"]
        serve = ["-c", "from hetero.apps.cli import main; main()", "serve"]
        serve += [str(folder / "deployment.yaml"), "--port", str(ports[2])]
        commands = ([*paced, str(ports[0])], [*paced, str(ports[1])], serve)
        for url, command, core in zip(urls, commands, (0, 0, -1), strict=True):
            log = folder / f"{url.rpartition(':')[2]}.log"
            run = started([sys.executable, *command], url, log, core=cores[core])
            process = ends.enter_context(run)
        if before is not None:
            mine.cpu_affinity([cores[0]])
            ends.callback(mine.cpu_affinity, before)
        yield urls[0], urls[2], psutil.Process(process.pid)
