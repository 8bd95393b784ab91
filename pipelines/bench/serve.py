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
import subprocess
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
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import EndpointError
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.timings import Timing
from pipelines.bench.engines import free_port, wait

Floats = NDArray[np.float64]
T = TypeVar("T")
_COMMAND = "hetero bench serve --record"
_STEP_MS = 10.0


@dataclass(frozen=True, slots=True, repr=False)
class ServeBench(Shown):
    """What was measured of the dispatcher.

    Attributes
    ----------
    rows
        What, its value and unit, and the number of requests behind it.
    timings
        The times among them.
    notes
        Under which conditions.
    """

    rows: tuple[tuple[str, float, str, int], ...]
    timings: tuple[Timing, ...]
    notes: tuple[str, ...]

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
    requests: int = 10_000,
) -> ServeBench:
    """Measure a dispatcher of two engines on this machine.

    Parameters
    ----------
    rate_rps, seconds, tokens
        Load of the paired run: requests per second each way, for how long, of how many words.
    streams
        Streams held at once.
    requests
        Requests after which its memory is compared.

    Raises
    ------
    EndpointError
        If a request fails or a process does not start.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with _processes(cores) as (direct, served, process):
        found = asyncio.run(
            _measure(direct, served, process, rate_rps, seconds, tokens, streams, requests)
        )
    load = os.getloadavg()[0]
    rows, timings = found
    notes = (
        f"{rate_rps:g} requests/s each way, {tokens} tokens {_STEP_MS:g} ms apart; dispatcher on "
        f"core {cores[-1]}, engines and client on core {cores[0]}.",
        f"Load of the machine at the end: {load:.1f} on {len(cores)} cores.",
    )
    return ServeBench(tuple(rows), tuple(timings), notes)


def soak(requests: int = 100_000, *, progress: Callable[[str], None] | None = None) -> ServeBench:
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
    say = progress or (lambda _: None)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with _processes(cores) as (_, served, process):
        seen = asyncio.run(_soak(served, process, requests, say))
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


async def _soak(
    url: str, process: psutil.Process, requests: int, say: Callable[[str], None]
) -> list[float]:
    """Resident memory of the dispatcher after the warm-up and after each tenth [MiB]."""
    seen: list[float] = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    ) as session:
        for k in range(11):
            await _many(session, url, max(requests // 10, 1))
            seen.append(process.memory_info().rss / 2**20)
            what = "warm-up" if k == 0 else f"{k * (requests // 10):,} requests"
            say(f"{what}: {seen[-1]:.1f} MiB")
    return seen


async def _measure(
    direct: str,
    served: str,
    process: psutil.Process,
    rate_rps: float,
    seconds: float,
    tokens: int,
    streams: int,
    requests: int,
) -> tuple[list[tuple[str, float, str, int]], list[Timing]]:
    rows: list[tuple[str, float, str, int]] = []
    timings: list[Timing] = []

    def add(key: str, what: str, value_s: float, count: int, clock: str, statistic: str) -> None:
        rows.append((what, 1e6 * value_s, "us", count))
        timings.append(
            Timing.here(
                f"serve.{key}",
                value_s,
                command=_COMMAND,
                statistic=statistic,
                repeats=count,
                clock=clock,
            )
        )

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    ) as session:
        await _paired(session, direct, served, rate_rps, min(seconds, 2.0), tokens)  # warm up
        short_s, n_short = await _cpu(session, served, process, rate_rps, seconds / 2, 1)
        before = _cpu_s(process)
        gaps, first, whole = await _paired(session, direct, served, rate_rps, seconds, tokens)
        long_s = (_cpu_s(process) - before) / len(whole)
        chunk_s = max(long_s - short_s, 0.0) / (tokens - 1)
        count = len(whole)
        add("cpu.request", "CPU per request of one token", short_s, n_short, "cpu", "single")
        add("cpu.chunk", "CPU per further token", chunk_s, count, "cpu", "single")
        for key, what, values in (
            ("first", "added time to first token", first),
            ("whole", "added time to the end", whole),
            ("gap", "added time between tokens", gaps),
        ):
            add(f"{key}.p50", f"{what}, median", float(np.median(values)), count, "wall", "median")
            p99 = float(np.quantile(values, 0.99))
            rows.append((f"{what}, P99", 1e6 * p99, "us", count))
            timings.append(
                Timing.here(
                    f"serve.{key}.p99", p99, command=_COMMAND, statistic="single", clock="wall"
                )
            )
        held = await _held(session, served, streams)
        rows.append(("streams held at once", float(held), "streams", streams))
        await _many(session, served, requests // 5)
        start = process.memory_info().rss
        await _many(session, served, requests)
        grown = (process.memory_info().rss - start) / 2**20
        rows.append(("memory grown", grown, "MiB", requests))
    return rows, timings


async def _ask(
    session: aiohttp.ClientSession, url: str, tokens: int, step_s: float = 0.0
) -> list[float]:
    """When a streamed request was sent and each of its pieces came [s]."""
    body = {"model": "m", "prompt": "one two three", "max_tokens": tokens, "stream": True}
    body["step_s"] = step_s
    times = [time.perf_counter()]
    async with session.post(f"{url}/v1/completions", json=body) as answer:
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


async def _paired(
    session: aiohttp.ClientSession,
    direct: str,
    served: str,
    rate_rps: float,
    seconds: float,
    tokens: int,
) -> tuple[Floats, Floats, Floats]:
    """Added time per gap, to the first token and to the end, one value per pair [s]."""

    async def pair(k: int) -> tuple[list[float], list[float]]:
        urls = (direct, served) if k % 2 else (served, direct)
        found = await asyncio.gather(*(_ask(session, url, tokens) for url in urls))
        return (found[0], found[1]) if k % 2 else (found[1], found[0])

    pairs = await asyncio.gather(*_paced(pair, rate_rps, seconds))
    plain = np.array([one[: tokens + 1] for one, _ in pairs])
    passed = np.array([one[: tokens + 1] for _, one in pairs])
    first = (passed[:, 1] - passed[:, 0]) - (plain[:, 1] - plain[:, 0])
    whole = (passed[:, -1] - passed[:, 0]) - (plain[:, -1] - plain[:, 0])
    gaps = np.diff(passed[:, 1:]) - np.diff(plain[:, 1:])
    return gaps.ravel(), first, whole


def _paced(
    one: Callable[[int], Awaitable[T]], rate_rps: float, seconds: float
) -> list[asyncio.Task[T]]:
    """Tasks of ``one(k)``, begun at a steady rate."""

    async def later(k: int) -> T:
        await asyncio.sleep(k / rate_rps)
        return await one(k)

    return [asyncio.create_task(later(k)) for k in range(max(2, round(rate_rps * seconds)))]


async def _cpu(
    session: aiohttp.ClientSession,
    url: str,
    process: psutil.Process,
    rate_rps: float,
    seconds: float,
    tokens: int,
) -> tuple[float, int]:
    """CPU time of the dispatcher per request [s], and the number of requests."""
    before = _cpu_s(process)
    done = await asyncio.gather(*_paced(lambda _: _ask(session, url, tokens), rate_rps, seconds))
    return (_cpu_s(process) - before) / len(done), len(done)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _held(session: aiohttp.ClientSession, url: str, streams: int) -> int:
    """Streams that ended well, all of them under way at once."""
    step_s = 0.5 + streams / 2000  # 2,000 words a second at most, which one core streams
    found = await asyncio.gather(*(_ask(session, url, 20, step_s) for _ in range(streams)))
    first_end_s = min(times[-1] for times in found)
    return sum(times[1] < first_end_s for times in found)


async def _many(session: aiohttp.ClientSession, url: str, requests: int) -> None:
    """So many short requests, 64 at once."""
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await _ask(session, url, 1)

    await asyncio.gather(*(worker() for _ in range(64)))


@contextlib.contextmanager
def _processes(cores: Sequence[int]) -> Iterator[tuple[str, str, psutil.Process]]:
    """Two engines and a dispatcher, pinned; address of an engine and of the dispatcher."""
    mine = psutil.Process()
    before = mine.cpu_affinity() if hasattr(mine, "cpu_affinity") else None
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        ports = [free_port() for _ in range(3)]
        step = StepModel.affine(floor_s=0.01, per_token_s=1e-6, per_cached_token_s=0.0)
        storage.save(step, folder / "step.json")
        backend = {
            "name": "paced",
            "url": f"http://127.0.0.1:{ports[1]}",
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
        started = []
        for k, command in enumerate(([*paced, str(ports[0])], [*paced, str(ports[1])], serve)):
            child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
            ends.callback(child.wait)
            ends.callback(child.kill)
            started.append(psutil.Process(child.pid))
            if before is not None:
                started[-1].cpu_affinity([cores[-1] if k == 2 else cores[0]])
            wait(f"http://127.0.0.1:{ports[k]}", child)
        if before is not None:
            mine.cpu_affinity([cores[0]])
            ends.callback(mine.cpu_affinity, before)
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[2]}", started[2]
