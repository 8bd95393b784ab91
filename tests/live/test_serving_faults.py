"""`hetero serve` in front of engines that are slow, full, broken, killed, stopped and come back.

The engines are processes that stream words at a set pace: what matters here is how they fail.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import pytest

from pipelines.bench.engines import free_port
from tests.hostile import asked, request
from tests.serving import Paced, Served, running, wait_until

# Soon in what a test waits for, patient in what a busy machine may delay.
QUICK = {
    "health_s": 0.2,
    "health_timeout_s": 300.0,
    "token_s": 300.0,
    "cooldown_s": 0.2,
    "queue_s": 3.0,
    "connect_s": 300.0,
    "body_s": 2.0,
    "failures": 2,
}


async def ask(client, words=10, *, stream=True, begun=None):
    """How one request ended: 'whole', or the status or kind of its error; and its words.

    Streams are counted in ``begun`` when their first piece comes.
    """
    import openai

    try:
        if not stream:
            done = await client.completions.create(model="m", prompt="hi there", max_tokens=words)
            return "whole", done.choices[0].text.count("word")
        text, ended = "", False
        async for piece in await client.completions.create(
            model="m", prompt="hi there", max_tokens=words, stream=True
        ):
            if not text and begun is not None:
                begun.append(1)
            text += piece.choices[0].text
            ended = ended or piece.choices[0].finish_reason is not None
        return ("whole" if ended else "cut"), text.count("word")
    except openai.APIStatusError as error:
        return error.status_code, 0
    except openai.APIError as error:
        return error.code or type(error).__name__, text.count("word")


def client_of(served, **options):
    import openai

    return openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600, **options
    )


async def count(begun, wanted):
    while len(begun) < wanted:
        await asyncio.sleep(0.01)


async def together(served, count, **options):
    async with client_of(served) as client:
        return await asyncio.gather(*(ask(client, **options) for _ in range(count)))


def test_an_engine_killed_amid_its_answers_and_back_again(tmp_path):
    a, b = Paced(step_ms=1000), Paced()  # a is killed before it can have finished
    served = Served(tmp_path, {"a": a.url, "b": b.url}, limits=QUICK)

    async def storm():
        async with client_of(served) as client:
            begun = []
            tasks = [asyncio.create_task(ask(client, 150, begun=begun)) for _ in range(40)]
            await count(begun, 40)
            tasks += [asyncio.create_task(ask(client, 20, stream=False)) for _ in range(20)]
            while a.counts()["begun"] + b.counts()["begun"] < 60:
                await asyncio.sleep(0.01)
            a.signal(signal.SIGKILL)
            return await asyncio.gather(*tasks), await asyncio.gather(
                *(ask(client, 5) for _ in range(8))
            )

    with running(a, b, served):
        found, after = asyncio.run(storm())
        streamed, whole = found[:40], found[40:]
        kinds = Counter(kind for kind, _ in streamed)
        # Streams that had begun at the killed engine are told so; none is cut without a word.
        assert kinds == {"whole": 20, "engine_broke_off": 20}
        assert all(words == 150 for kind, words in streamed if kind == "whole")
        assert all(0 < words < 150 for kind, words in streamed if kind != "whole")
        # Nothing of these had been sent, so they went to the other engine.
        assert whole == [("whole", 20)] * 20
        assert after == [("whole", 5)] * 8
        assert served.up() == {"a": False, "b": True}
        assert served.outcomes() == {"finished": 48, "failed": 20, "cancelled": 0, "refused": 0}
        assert b.counts() == {"begun": 48, "finished": 48}  # no request was answered twice
        a.start()
        wait_until(lambda: served.up()["a"])
        assert asyncio.run(together(served, 8, words=3)) == [("whole", 3)] * 8
        assert a.counts()["finished"] == 4
        found = served.metrics()
        assert found["hetero_requests_received_total"] == 76
        assert found["hetero_in_flight"] == found["hetero_held"] == 0


def test_an_engine_that_stands_still(tmp_path):
    a, b = Paced(step_ms=500), Paced()
    limits = QUICK | {"health_timeout_s": 3.0, "token_s": 10.0, "queue_s": 300.0}
    served = Served(tmp_path, {"a": a.url, "b": b.url}, limits=limits)

    async def storm():
        async with client_of(served) as client:
            begun = []
            first = [asyncio.create_task(ask(client, 150, begun=begun)) for _ in range(4)]
            await count(begun, 4)
            a.signal(signal.SIGSTOP)
            late = [asyncio.create_task(ask(client, 5)) for _ in range(4)]
            return await asyncio.gather(*first), await asyncio.gather(*late)

    with running(a, b, served):
        try:
            begun, late = asyncio.run(storm())
            kinds = Counter(kind for kind, _ in begun)
            assert kinds == {"whole": 2, "engine_timeout": 2}
            assert late == [("whole", 5)] * 4  # taken from the engine that stood still
            wait_until(lambda: not served.up()["a"])
        finally:
            a.signal(signal.SIGCONT)
        wait_until(lambda: served.up()["a"])
        assert asyncio.run(together(served, 4, words=3)) == [("whole", 3)] * 4
        assert served.outcomes() == {"finished": 10, "failed": 2, "cancelled": 0, "refused": 0}


@pytest.mark.parametrize("status", [429, 500])
def test_an_engine_that_refuses_is_passed_over(tmp_path, status):
    bad, good = Paced(status=status), Paced(step_ms=5)
    served = Served(tmp_path, {"bad": bad.url, "good": good.url}, limits=QUICK)
    with running(bad, good, served):
        assert asyncio.run(together(served, 12, words=4)) == [("whole", 4)] * 12
        assert good.counts() == {"begun": 12, "finished": 12}
        good.signal(signal.SIGKILL)
        # One that is merely full stays in, and says so; one that is broken goes out.
        assert {kind for kind, _ in asyncio.run(together(served, 4))} <= {429, 502, 503}
        assert served.outcomes()["finished"] == 12
        assert sum(served.outcomes().values()) == 16


def test_a_full_dispatcher_says_429_and_a_client_that_leaves_frees_its_engine(tmp_path):
    a = Paced(step_ms=50)
    served = Served(tmp_path, {"a": a.url}, limits=QUICK | {"max_requests": 4})

    async def leave():
        async with client_of(served) as client:
            tasks = [asyncio.create_task(ask(client, 4000, stream=k % 2 == 0)) for k in range(4)]
            while a.counts()["begun"] < 4:
                await asyncio.sleep(0.01)
            crowd = await asyncio.gather(*(ask(client, 2) for _ in range(3)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return crowd

    with running(a, served):
        assert asyncio.run(leave()) == [(429, 0)] * 3
        wait_until(lambda: served.metrics()["hetero_in_flight"] == 0)
        assert served.outcomes() == {"finished": 0, "failed": 0, "cancelled": 4, "refused": 3}
        assert a.counts()["finished"] == 0
        assert asyncio.run(together(served, 1, words=3)) == [("whole", 3)]


def test_reload_adds_drains_and_removes_engines_under_way(tmp_path):
    a, b = Paced(), Paced(step_ms=5)
    served = Served(tmp_path, {"a": a.url}, limits=QUICK)

    async def change():
        async with client_of(served) as client:
            begun = []
            tasks = [asyncio.create_task(ask(client, 150, begun=begun)) for _ in range(6)]
            await count(begun, 6)
            served.file.write_text("backends: no")
            served.signal(signal.SIGHUP)  # of no use: the old deployment stays
            await asyncio.to_thread(
                wait_until, lambda: "The old deployment stays" in served.log.read_text()
            )
            served.write({"a": a.url, "b": b.url}, limits=QUICK, router="hetero", drained=("a",))
            served.signal(signal.SIGHUP)
            await asyncio.to_thread(wait_until, lambda: served.up() == {"a": False, "b": True})
            later = await asyncio.gather(*(ask(client, 5) for _ in range(6)))
            served.write({"b": b.url}, limits=QUICK, router="round-robin")
            served.signal(signal.SIGHUP)
            await asyncio.to_thread(wait_until, lambda: served.up() == {"b": True})
            return await asyncio.gather(*tasks), later

    with running(a, b, served):
        first, later = asyncio.run(change())
        assert first == [("whole", 150)] * 6
        assert later == [("whole", 5)] * 6
        assert (a.counts()["finished"], b.counts()["finished"]) == (6, 6)
        assert served.outcomes() == {"finished": 12, "failed": 0, "cancelled": 0, "refused": 0}
        served.signal(signal.SIGTERM)
        assert served.process.wait(600) in (0, -signal.SIGTERM)
    assert "The old deployment stays" in served.log.read_text()


def test_no_engine_at_all_bad_bodies_and_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_TEST_KEYS", "good-key, other-key")
    gone = f"http://127.0.0.1:{free_port()}"
    limits = QUICK | {"queue_s": 0.3, "max_body_bytes": 1000}
    served = Served(tmp_path, {"a": gone}, limits=limits, api_keys_env="HETERO_TEST_KEYS")
    served.key = "good-key"

    def post(body, key="good-key", length=None):
        head = f"\r\nAuthorization: Bearer {key}\r\n".encode()
        return asked(served.url, request(body, length=length).replace(b"\r\n", head, 1))

    body = {"model": "m", "prompt": "x"}
    with running(served):
        for status, (found, reply) in (
            (401, post(body, key="bad-key")),
            (503, post(body)),
            (400, post(b"{not json")),
            (400, post(b"[]")),
            (404, post(body | {"model": "other"})),
            (413, post(body | {"prompt": "x" * 2000})),
            (408, post(body, length=500)),
        ):
            assert (found, b'"error"' in reply) == (status, True), reply
        assert served.outcomes() == {"finished": 0, "failed": 0, "cancelled": 0, "refused": 7}
        assert served.metrics()["hetero_in_flight"] == 0
    log = served.log.read_text()
    assert "good-key" not in log
    assert "bad-key" not in log
