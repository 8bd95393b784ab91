"""`hetero serve` with several processes beside one: processor of each, and what they could carry.

The machine that measures has no cores to spare for engines and clients, so that throughput is not
measured but bounded: W workers that take w seconds of processor per request, and an owner that
takes o, carry min(W / w, 1 / o) where one process that takes s carries 1 / s. What one worker takes
is that of a worker alone beside its owner, as loaded as the one process: of several that share the
cores with all else each wakes for fewer pieces at a time, which a busy one does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from pipelines.bench.beside import CASES, ask, engine, served
from pipelines.bench.engines import free_port, started
from pipelines.bench.measured import Say, cpu_s, silent
from pipelines.bench.serve import ServeBench

# As `hetero serve`, but with an owner for a single worker as well.
_OWNED = """
import asyncio, sys
from hetero.engine.compiled import interpret
interpret()
from hetero.apps.serving.dispatcher import Dispatcher, Prepared
from hetero.apps.serving.owner import Owner
from hetero.apps.serving.server import fastest_loop
from hetero.apps.serving.settings import load
async def run(file, port, count):
    dispatcher = Dispatcher(Prepared.of(load(file)))
    owner = Owner(dispatcher, ("127.0.0.1", int(port)), int(count))
    await dispatcher.start()
    await owner.open()
    await asyncio.Event().wait()
with asyncio.Runner(loop_factory=fastest_loop()) as runner:
    runner.run(run(*sys.argv[1:]))
"""
_FIRST = {"model": "m", "prompt": "one two three", "max_tokens": 1, "stream": True}


def bench(
    workers: int = 2,
    *,
    requests: int = 400,
    rounds: int = 5,
    alone: int = 1000,
    progress: Say = silent,
) -> ServeBench:
    """Measure one process and several in turns, on the same two engines.

    Parameters
    ----------
    requests
        Requests of each kind and round, eight at once, times the workers.
    rounds
        Rounds of which the median counts.
    alone
        Requests of one client alone, each way, of which the first byte is timed.

    Raises
    ------
    EndpointError
        If a request fails or a process does not start.
    """
    rows: list[tuple[str, float, str, int]] = []
    bounds: list[tuple[float, float]] = []  # by a worker alone, and by those that share the cores
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        command = served(folder, [engine(ends, folder, k) for k in range(2)])
        # By the number of workers; 0 is the process without an owner.
        ways: dict[int, tuple[str, psutil.Process]] = {}
        for count in (0, 1, workers):
            port = free_port()
            url, log = f"http://127.0.0.1:{port}", folder / f"{count}.log"
            owned = [sys.executable, "-c", _OWNED, str(folder / "deployment.yaml"), str(port)]
            program = [*owned, str(count)] if count else [*command, str(port)]
            run = started(program, url, log)
            ways[count] = url, psutil.Process(ends.enter_context(run).pid)
        for case, (prompt, words, stream) in CASES.items():
            body = {"model": "m", "prompt": prompt, "max_tokens": words, "stream": stream}
            spent: dict[int, list[tuple[float, float]]] = {count: [] for count in ways}
            for turn in range(rounds + 1):
                for count, (url, process) in ways.items():
                    before = _spent_s(process)
                    asyncio.run(ask(url, body, requests, 8 * max(count, 1)))
                    if turn:  # the first warms up
                        after = _spent_s(process)
                        taken = zip(before, after, strict=True)
                        owner, worker = ((b - a) / requests for a, b in taken)
                        spent[count].append((owner, worker))
            single, alone_s, owner, worker = (
                statistics.median(one[part] for one in spent[count])
                for count, part in ((0, 0), (1, 1), (workers, 0), (workers, 1))
            )
            loaded, shared = (single * min(workers / w, 1.0 / owner) for w in (alone_s, worker))
            bounds.append((loaded, shared))
            rows += [
                (f"{case}: one process", 1e3 * single, "ms", requests),
                (f"{case}: worker, alone", 1e3 * alone_s, "ms", requests),
                (f"{case}: worker, of {workers}", 1e3 * worker, "ms", requests),
                (f"{case}: owner", 1e3 * owner, "ms", requests),
                (f"{case}: bound of throughput", loaded, "of one process", requests),
                (f"{case}: the same by workers of {workers}", shared, "of one process", requests),
                (f"{case}: workers that an owner feeds", alone_s / owner, "", requests),
            ]
            progress(f"{case}: {loaded:.2f} times the throughput")
        for what, found in zip(
            ("least bound", "the same shared"), zip(*bounds, strict=True), strict=True
        ):
            rows.append((f"throughput of {workers}, {what}", min(found), "of one process", 0))
        first: dict[str, list[float]] = {"one process": [], f"{workers} workers": []}
        for _ in range(rounds):
            for found_s, count in zip(first.values(), (0, workers), strict=True):
                found_s += asyncio.run(ask(ways[count][0], _FIRST, alone // rounds + 1, 1))
        for name, found_s in first.items():
            value_us = 1e6 * statistics.median(found_s)
            rows.append((f"first byte, {name}, P50", value_us, "us", len(found_s)))
        for name, process in (("one process", ways[0][1]), ("owner", ways[workers][1])):
            rows.append((f"memory: {name}", _memory_mib(process), "MiB", 1))
        rows += [
            (f"memory: worker {k + 1}", _memory_mib(one), "MiB", 1)
            for k, one in enumerate(ways[workers][1].children())
        ]
    load = f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    return ServeBench(
        tuple(rows), (), ("Processor time per request; eight at once for each that listens.", load)
    )


def _spent_s(process: psutil.Process) -> tuple[float, float]:
    """Processor time of a process, and of its children together [s]."""
    return cpu_s(process), cpu_s(*process.children())


def _memory_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 2**20)
