"""Two processes on one port: their owner's books are those of one, whoever dies."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter

import psutil

from tests.live.test_serving_storm import LEFT
from tests.serving import Hostile, Paced, Served, running, wait_until

LIMITS = {"health_s": 0.2, "cooldown_s": 0.2, "health_timeout_s": 60.0, "token_s": 60.0}
SLOW = 100  # words, by which streams last until what they meet has happened


def test_books_are_empty_and_meters_add_up_whatever_dies(tmp_path):
    import aiohttp

    a, b = Hostile(), Hostile()
    served = Served(tmp_path, {"a": a.url, "b": b.url}, limits=LIMITS, workers=2, router="hetero")
    served.command[2] = LEFT
    served.command.append(str(tmp_path / "left.json"))

    async def ask(prompt, words, *, begun=None, stream=True, model="m"):
        """How a request ended for its client, each on a connection of its own; and its words."""
        body = {"model": model, "prompt": prompt, "max_tokens": words, "stream": stream}
        text = ""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{served.url}/v1/completions", json=body) as answer,
            ):
                async for line in answer.content:
                    if begun is not None and not text:
                        begun.append(1)
                    text += line.decode()
                if answer.status != 200:
                    return ("failed" if answer.status >= 500 else "refused"), 0
        except (aiohttp.ClientError, asyncio.CancelledError):
            return "cancelled", 0
        return ("failed" if '"error"' in text else "finished"), text.count(" word")

    async def slow(count):
        begun = []
        tasks = [asyncio.create_task(ask(f"{k} slow", SLOW, begun=begun)) for k in range(count)]
        while len(begun) < count:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.01)
        return tasks

    async def load():
        plain = [ask(f"{k}", 4, stream=k % 2 == 0) for k in range(20)]
        found = await asyncio.gather(*plain, *(ask("x", 4, model="none") for _ in range(3)))
        leaving = await slow(4)
        for task in leaving:
            task.cancel()
        by_worker = await slow(12)
        owner = psutil.Process(served.process.pid)
        killed = owner.children()[0]
        killed.kill()
        await asyncio.to_thread(killed.wait, 60)
        by_engine = await slow(8)  # the other worker goes on
        a.signal(signal.SIGKILL)
        found += await asyncio.gather(*leaving, *by_worker, *by_engine)
        await asyncio.to_thread(wait_until, lambda: len(owner.children()) == 2)
        return found + await asyncio.gather(*(ask(f"{k}", 4) for k in range(8)))

    with running(a, b, served):
        found = asyncio.run(load())
        wait_until(lambda: served.metrics()["hetero_in_house"] == 0)
        outcomes, metrics = served.outcomes(), served.metrics()
        served.signal(signal.SIGTERM)
        assert served.process.wait(60) in (0, -signal.SIGTERM)
    seen = Counter(kind for kind, _ in found)
    assert len(found) == 20 + 3 + 4 + 12 + 8 + 8
    assert min(seen[kind] for kind in outcomes) > 0
    assert {kind: seen[kind] for kind in outcomes} == outcomes
    words = sum(count for kind, count in found if kind == "finished")
    told = [v for k, v in metrics.items() if "tokens_total" in k and "output" in k]
    assert sum(told) == words
    left = json.loads((tmp_path / "left.json").read_text())
    assert not any(value for values in left.values() for value in values), left
    assert "Traceback" not in served.log.read_text()


def test_workers_end_with_their_owner(tmp_path):
    served = Served(tmp_path, {"a": "http://127.0.0.1:9"}, workers=2)
    with running(served):
        workers = psutil.Process(served.process.pid).children()
        assert len(workers) == 2
        served.signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive


def test_worker_that_hangs_is_started_anew(tmp_path):
    import aiohttp

    engine = Paced(step_ms=100.0)  # streams last until the worker is stopped
    served = Served(tmp_path, {"a": engine.url}, limits=LIMITS, workers=2)

    async def ask(session):
        body = {"model": "m", "prompt": "x", "max_tokens": SLOW, "stream": True}
        async with session.post(f"{served.url}/v1/completions", json=body) as answer:
            return (await answer.read()).count(b" word")

    async def stopped(owner):
        """What became of streams, half of them at a worker that was stopped amid them."""
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.create_task(ask(session)) for _ in range(16)]
            await asyncio.to_thread(wait_until, lambda: engine.counts()["begun"] == 16)
            hung = owner.children()[0]
            hung.suspend()
            await asyncio.to_thread(hung.wait, 600)
            return await asyncio.gather(*asked, return_exceptions=True)

    with running(engine, served):
        owner = psutil.Process(served.process.pid)
        found = asyncio.run(stopped(owner))
        wait_until(lambda: len(owner.children()) == 2)
        wait_until(lambda: served.metrics()["hetero_in_house"] == 0)
        metrics, outcomes = served.metrics(), served.outcomes()
    lost = [one for one in found if one != SLOW]
    assert lost
    assert all(isinstance(one, aiohttp.ClientError) for one in lost)
    assert metrics["hetero_worker_restarts_total"] == 1
    assert outcomes["finished"] == found.count(SLOW)
    assert outcomes["finished"] + outcomes["cancelled"] == 16
    assert "silent" in served.log.read_text()
