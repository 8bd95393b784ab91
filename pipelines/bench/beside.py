"""`hetero serve` beside the routers that people run: processor time, in one run.

The Rust routers of vLLM and SGLang are started as their own commands start them, from the
environment of `make tools`. All routers send to the same two engines without a model
(:mod:`pipelines.bench.paced`), take turns in rounds, and the median round counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import psutil

from hetero import paths
from hetero.errors import EndpointError
from hetero.latency import storage
from hetero.latency.step import StepModel
from pipelines.bench.engines import free_port, started
from pipelines.bench.measured import Say, cpu_s, silent
from pipelines.bench.serve import ServeBench

_LONG = "word " * 44_000
#: Bodies by name: prompt, words, whether they are streamed.
_CASES = {
    "plain": ("one two three", 1, False),
    "stream of 32 chunks": ("one two three", 32, True),
    "220 KB plain": (_LONG, 1, False),
    "220 KB stream": (_LONG, 32, True),
}
_RUST = """
import sys
from {name}.router import Router
from {name}.router_args import RouterArgs
urls = sys.argv[2:]
Router.from_args(RouterArgs(worker_urls=urls, host="127.0.0.1", port=int(sys.argv[1]),
    policy="round_robin", prometheus_port=int(sys.argv[1]) + 1)).start()
"""


def bench(*, requests: int = 400, rounds: int = 5, progress: Say = silent) -> ServeBench:
    """Measure all routers that are installed.

    Parameters
    ----------
    requests
        Requests of each kind, router and round, eight at once.
    rounds
        Rounds of which the median counts.
    """
    rows: list[tuple[str, float, str, int]] = []
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        urls = [_engine(ends, folder, k) for k in range(2)]
        routers: dict[str, tuple[str, psutil.Process]] = {}
        for name, command in _commands(folder, urls).items():
            port = free_port()
            url, began_s = f"http://127.0.0.1:{port}", time.monotonic()
            log = folder / f"{name}.log"
            run = started([part.replace("PORT", str(port)) for part in command], url, log)
            routers[name] = (url, psutil.Process(ends.enter_context(run).pid))
            rows.append((f"{name}: listens after", time.monotonic() - began_s, "s", 1))
        for case, (prompt, words, stream) in _CASES.items():
            body = {"model": "m", "prompt": prompt, "max_tokens": words, "stream": stream}
            spent: dict[str, list[float]] = {name: [] for name in routers}
            for turn in range(rounds + 1):
                for name, (url, process) in routers.items():
                    before_s = cpu_s(process)
                    asyncio.run(_ask(url, body, requests))
                    if turn:  # the first warms up
                        spent[name].append((cpu_s(process) - before_s) / requests)
            for name, found in spent.items():
                rows.append((f"{name}: {case}", 1e3 * statistics.median(found), "ms", requests))
                progress(f"{rows[-1][0]} {rows[-1][1]:.3f} ms")
        for name, (_, process) in routers.items():
            rows.append((f"{name}: memory", process.memory_info().rss / 2**20, "MiB", 1))
    values = {what: value for what, value, *_ in rows}
    for what, value, unit, count in rows if "vllm-router" in routers else ():
        name, _, kind = what.partition(": ")
        if name == "hetero serve" and unit == "ms":
            ratio = value / values[f"vllm-router: {kind}"]
            rows = [*rows, (f"hetero serve / vllm-router: {kind}", ratio, "", count)]
    load = f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    how = "Processor time of the router with eight requests at once."
    shares = "`hetero serve` divides requests by predicted cost, the others by turns."
    return ServeBench(tuple(rows), (), (how, shares, load))


def _engine(ends: contextlib.ExitStack, folder: Path, k: int) -> str:
    """Address of an engine that answers at once, started."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "pipelines.bench.paced", "--step-ms", "0", "--first-ms", "0"]
    command += ["--port", url.rpartition(":")[2]]
    ends.enter_context(started(command, url, folder / f"engine {k}.log"))
    return url


def _served(folder: Path, urls: list[str]) -> list[str]:
    """The command of `hetero serve` in front of engines, but for its port."""
    step = StepModel.affine(floor_s=0.01, per_token_s=1e-6, per_cached_token_s=0.0)
    storage.save(step, folder / "step.json")
    backend = {"step": "step.json", "kv_tokens": 10**7, "max_batch": 4096}
    named = [backend | {"name": f"engine {k}", "url": url} for k, url in enumerate(urls)]
    file = folder / "deployment.yaml"
    file.write_text(json.dumps({"model": "m", "backends": named}), encoding="utf-8")
    program = [sys.executable, "-c", "from hetero.apps.cli import main; main()"]
    return [*program, "serve", str(file), "--port"]


def _commands(folder: Path, urls: list[str]) -> Mapping[str, list[str]]:
    """Commands that start what is installed; their port is written PORT."""
    found = {"hetero serve": [*_served(folder, urls), "PORT"]}
    tools = paths.root() / "pipelines/build/tools"
    for name in ("vllm_router", "sglang_router"):
        if any(tools.glob(f"lib/python*/site-packages/{name}")):
            program = [str(tools / "bin/python"), "-c", _RUST.format(name=name), "PORT"]
            found[name.replace("_", "-")] = [*program, *urls]
    return found


async def _ask(url: str, body: Mapping[str, object], requests: int) -> None:
    """Send so many requests, eight at once."""
    left: Iterator[int] = iter(range(requests))
    content = json.dumps(body).encode()
    head = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(f"{url}/v1/completions", data=content, headers=head) as it:
                    answer = await it.read()
                if it.status != 200 or (body["stream"] and not answer.endswith(b"[DONE]\n\n")):
                    raise EndpointError(
                        f"{url} did not answer in full: {answer[-160:]!r}.",
                        resolve="look at its log.",
                    )

        await asyncio.gather(*(worker() for _ in range(8)))
