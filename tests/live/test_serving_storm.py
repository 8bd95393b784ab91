"""Many requests at once, some of them with every fault: nothing is lost, doubled or left behind.

``HETERO_STORM=50000`` and ``HETERO_STREAMS=3000`` say how many; by default there are few.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import time

import psutil
import pytest

from tests.hostile import FAULTS, completion, connect, request
from tests.live.test_serving_faults import QUICK
from tests.serving import Hostile, Served, running, wait_until

REQUESTS = int(os.environ.get("HETERO_STORM", "500"))
STREAMS = int(os.environ.get("HETERO_STREAMS", "300"))
CLIENTS = ("one", "surrogate", "large", "unread", "silent", "head", "half", "leaves")
LIMITS = QUICK | {
    "health_s": 0.5,
    "health_timeout_s": 20.0,
    "token_s": 30.0,
    "connect_s": 10.0,
    "queue_s": 60.0,
    "head_s": 3.0,
    "send_s": 3.0,
    "body_s": 30.0,
    "max_body_bytes": 1 << 20,
}
# Writes down what is left of requests when the dispatcher stops.
LEFT = """
import json, sys
from hetero.engine.compiled import interpret
interpret()
from hetero.engine import state
from hetero.apps.serving.dispatcher import Dispatcher
stop = Dispatcher.stop
async def stopped(self):
    await stop(self)
    names = ("outstanding", "outstanding_tokens", "load", "decoding_load")
    records = self.records
    left = {name: [getattr(one, name) for one in records.replicas] for name in names}
    left |= {name: getattr(records, name) for name in ("_cached", "_decoding", "_pending_tokens")}
    left["pending"] = [len(one) for one in records._pending]
    left["flight"] = [len(self.tickets), len(self.held), self.away, self.bodies["bytes"]]
    left["deferred"] = [int(records.integers[state.DEFERRED])]
    with open(sys.argv.pop(), "w") as out:
        json.dump(left, out)
Dispatcher.stop = stopped
from hetero.apps.cli import main
main(sys.argv[1:-1])
"""


def test_a_storm_with_every_fault_leaves_nothing_behind(tmp_path):
    import aiohttp

    engines = Hostile(), Hostile()
    urls = {name: one.url for name, one in zip("ab", engines, strict=True)}
    served = Served(tmp_path, urls, limits=LIMITS, router="hetero")
    served.command[2] = LEFT
    served.command.append(str(tmp_path / "left.json"))
    rng = random.Random(0)
    share = 0.01
    modes = [*FAULTS, *(f"client-{kind}" for kind in CLIENTS)]
    plan = []
    for k in range(REQUESTS):
        at = rng.random() / share
        plan.append((k, modes[int(at)] if at < len(modes) else ""))
    statuses: dict[int, int] = {}
    memory: list[float] = []

    async def ordinary(session, k, mode):
        stream = k % 2 == 0
        body = {"model": "m", "prompt": f"{k} {mode}".strip(), "max_tokens": 4, "stream": stream}
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{served.url}/v1/completions", json=body) as answer:
                text = await answer.text()
                statuses[k] = answer.status
                if not mode:
                    assert text.count(" word") == 4, (k, answer.status, text[:300])

    async def one(session, k, mode):
        if mode.startswith("client-"):
            await asyncio.to_thread(misbehave, served.url, k, mode.removeprefix("client-"))
        else:
            await ordinary(session, k, mode)

    async def storm():
        left = iter(plan)
        process = psutil.Process(served.process.pid)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def worker():
                for k, mode in left:
                    await one(session, k, mode)
                    if k % max(REQUESTS // 10, 1) == 0:
                        memory.append(process.memory_info().rss / 2**20)
                        print(f"{k} requests: {memory[-1]:.0f} MiB")

            await asyncio.gather(*(worker() for _ in range(48)))

    with running(*engines, served):
        asyncio.run(storm())
        wait_until(lambda: served.metrics()["hetero_in_flight"] == 0, 60.0)
        memory.append(psutil.Process(served.process.pid).memory_info().rss / 2**20)
        found = served.metrics()
        outcomes = served.outcomes()
        counts = [one.counts() for one in engines]
        wait_until(lambda: all(served.up().values()), 60.0)
        served.signal(signal.SIGTERM)
        assert served.process.wait(60) in (0, -signal.SIGTERM)
    print(f"outcomes {outcomes}, memory {[round(x) for x in memory]} MiB")
    assert sum(outcomes.values()) == found["hetero_requests_received_total"]
    answered = counts[0][1] + counts[1][1]
    for k, mode in plan:
        if not mode:
            assert statuses[k] == 200
            assert answered[str(k)] == 1
        elif mode in FAULTS:
            assert answered[str(k)] <= 1, (k, mode)
    left = json.loads((tmp_path / "left.json").read_text())
    assert not any(value for values in left.values() for value in values), left
    assert memory[-1] - memory[len(memory) // 2] < 100
    assert "Traceback" not in served.log.read_text()


def misbehave(url, k, kind):
    """A client that does what none should."""
    content = {
        "one": completion(str(k), stream=1),
        "surrogate": request(b'{"model":"m","prompt":"a\\ud800b"}'),
        "large": request(b"x" * 1000, length=1 << 30),
        "unread": completion(f"{k} flood", stream=True, max_tokens=200),
        "silent": b"",
        "head": b"GET /health HTTP/1.1\r\nA: " + b"a" * 200_000 + b"\r\n\r\n",
        "half": b"POST /v1/completions HTTP/1.1\r\nHost",
        "leaves": completion(f"{k} slow", stream=True),
    }[kind]
    with contextlib.suppress(ConnectionError), connect(url, receive=4096) as line:
        line.sendall(content)
        if kind == "unread":
            time.sleep(2 * LIMITS["send_s"])
        elif kind == "half":
            assert line.recv(1000) == b""
        elif kind == "leaves":
            line.recv(10)
        elif kind == "silent":
            time.sleep(1.0)
        else:
            assert line.recv(1000).split()[1] in (b"400", b"413", b"431")


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


@pytest.mark.parametrize("few", [False, True])
def test_many_streams_at_once_are_all_answered_and_no_engine_is_blamed(tmp_path, few):
    import aiohttp

    streams = min(STREAMS, 800) if few else STREAMS
    engines = Hostile(), Hostile()
    urls = {name: one.url for name, one in zip("ab", engines, strict=True)}
    limits = {"queue_s": 300.0, "max_queue": 4096}
    served = Served(tmp_path, urls, limits=limits, router="hetero")
    served.before = few_files if few else None
    body = {"model": "m", "max_tokens": 20, "stream": True}

    async def one(session, k):
        async with session.post(
            f"{served.url}/v1/completions", json=body | {"prompt": f"{k} slow"}
        ) as answer:
            text = await answer.text()
            return answer.status, text.count(" word"), "[DONE]" in text

    async def all_of_them():
        wait = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=wait) as session:
            return await asyncio.gather(*(one(session, k) for k in range(streams)))

    with running(*engines, served):
        assert asyncio.run(all_of_them()) == [(200, 20, True)] * streams
        assert served.up() == {"a": True, "b": True}
        spent = psutil.Process(served.process.pid).cpu_times()
        # Not later: a dispatcher that ends after its engines sees them gone.
        assert "is out" not in served.log.read_text()
    print(f"{streams} streams: {spent.user + spent.system:.1f} CPU s of the dispatcher")
