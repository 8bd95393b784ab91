"""`hetero serve` between clients and engines that mean no good: none takes the service down."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import time

import psutil
import pytest

from tests.hostile import FAULTS, asked, completion, connect, ended, request
from tests.live.test_serving_faults import QUICK, ask, client_of
from tests.serving import Hostile, Paced, Served, get, running, wait_until

LIMITS = QUICK | {"request_s": 20.0, "head_s": 1.0, "send_s": 1.5}
# Health checks do not interfere here, and a busy machine is no fault.
CALM = {
    "health_s": 0.5,
    "health_timeout_s": 20.0,
    "token_s": 20.0,
    "connect_s": 10.0,
    "body_s": 20.0,
}


@pytest.fixture(scope="module")
def engines():
    found = Hostile(), Hostile()
    with running(*found):
        yield dict(zip("ab", found, strict=True))


@pytest.fixture(scope="module")
def served(engines, tmp_path_factory):
    urls = {name: one.url for name, one in engines.items()}
    one = Served(tmp_path_factory.mktemp("hostile"), urls, limits=LIMITS | CALM, router="hetero")
    with running(one):
        yield one


def empty(served):
    """Whether nothing is in flight any more, by all that counts it."""
    found = served.metrics()
    busy = sum(v for k, v in found.items() if k.startswith("hetero_engine_requests"))
    return found["hetero_in_flight"] == found["hetero_held"] == busy == 0


def whole(served, number="0"):
    status, reply = asked(served.url, completion(f"{number}"))
    return status == 200 and b" word word word word" in reply


def test_a_stream_that_is_neither_true_nor_false_is_refused(served):
    for k, value in enumerate((1, "true", "yes", [1], 0)):
        status, reply = asked(served.url, completion(f"{k}", stream=value))
        assert status == 400, value
        assert b"has to be true, false or null" in reply
    assert "is out" not in served.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_engines_fail_do_not_take_the_service_down(served, stream):
    for k, mode in enumerate(FAULTS):
        for copy in range(4):
            status, _ = asked(served.url, completion(f"{k}.{copy} {mode}", stream=stream))
            assert status in (200, 502), mode
        # Of a stream that breaks off no second engine can be asked, so one may go out for it.
        assert any(served.up().values()) if stream else all(served.up().values()), mode
        assert whole(served), mode
    assert served.health()["status"] == "ok"
    assert empty(served)
    log = served.log.read_text()
    assert "Traceback" not in log


def test_a_broken_engine_goes_out_but_not_for_one_request_repeated(tmp_path):
    bad, good = Paced(status=500), Paced(step_ms=5)
    limits = QUICK | CALM | {"cooldown_s": 60.0}
    served = Served(tmp_path, {"bad": bad.url, "good": good.url}, limits=limits)

    async def several(prompts):
        async with client_of(served) as client:
            for prompt in prompts:
                await client.completions.create(model="m", prompt=prompt, max_tokens=2)

    with running(bad, good, served):
        asyncio.run(several(["the same"] * 6))
        assert served.up() == {"bad": True, "good": True}
        asyncio.run(several([f"number {k}" for k in range(12)]))
        assert served.up() == {"bad": False, "good": True}
        good.process.kill()
        wait_until(lambda: not served.up()["good"])


def test_the_last_engine_stays_in_whatever_requests_do(tmp_path):
    engine = Hostile()
    served = Served(tmp_path, {"a": engine.url}, limits=LIMITS | CALM)
    with running(engine, served):
        for k in range(8):
            stream = k % 2 == 0
            asked(served.url, completion(f"{k} {'crash' if stream else '500'}", stream=stream))
        assert served.up() == {"a": True}
        assert whole(served)


def test_clients_that_do_not_read_are_cancelled_and_no_engine_is_blamed(served):
    log = served.log.read_text()
    before = served.metrics()["hetero_requests_received_total"], served.outcomes()["cancelled"]
    lines = [connect(served.url, receive=4096) for _ in range(12)]
    for k, line in enumerate(lines):
        line.sendall(completion(f"{k} flood", stream=True, max_tokens=2000))
    wait_until(lambda: served.metrics()["hetero_requests_received_total"] == before[0] + 12)
    wait_until(lambda: empty(served), 60.0)
    assert served.outcomes()["cancelled"] == before[1] + 12
    assert "is out" not in served.log.read_text()[len(log) :]
    assert whole(served)
    for line in lines:
        line.close()


def test_a_client_that_reads_slowly_gets_all_of_its_answer(served):
    with connect(served.url, receive=4096) as line:
        line.sendall(completion("1 flood", stream=True, max_tokens=20))
        found = b""
        while b"[DONE]" not in found:
            time.sleep(0.002)
            more = line.recv(8192)
            assert more
            found += more
    assert found.count(b'"choices"') == 20


def test_heads_without_end_are_ended(served):
    short = [connect(served.url) for _ in range(20)]
    for line in short:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    for line in short:
        assert ended(line) == b""
        line.close()
    long = {
        "url": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        "value": b"GET /health HTTP/1.1\r\nA: " + b"a" * (1 << 20) + b"\r\n\r\n",
        "count": b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
    }
    for name, content in long.items():
        with connect(served.url) as line:
            try:
                line.sendall(content)
            except ConnectionError:
                continue
            reply = ended(line)
            assert not reply or reply.split()[1] == b"431", name
    with connect(served.url) as line:  # headers after a body in parts
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        )
        with pytest.raises(ConnectionError):
            line.sendall(b"A: b\r\n" * 10_000_000)
    assert whole(served)


def test_bodies_are_bounded_one_by_one_and_together(engines, tmp_path):
    limits = LIMITS | CALM | {"max_body_bytes": 2 << 20, "bodies_bytes": 4 << 20, "body_s": 5.0}
    served = Served(tmp_path, {"a": engines["a"].url}, limits=limits)
    with running(served):
        with connect(served.url) as line:  # refused before it has come
            line.sendall(request(b"", length=3 << 20))
            assert line.recv(65536).split()[1] == b"413"
        lines = [connect(served.url) for _ in range(8)]
        for line in lines:
            line.sendall(request(b'{"model":"m","prompt":"' + b"x" * (1 << 20), length=2 << 20))
        refused = sum(_status(line, 2.0) == 503 for line in lines)
        assert 4 <= refused < 8
        assert whole(served)  # small ones have their place
        for line in lines:
            line.close()
        wait_until(lambda: asked(served.url, completion("1 " + "x" * (1 << 20)))[0] == 200)
        parts = b'{"model":"m","prompt":"x","foo":[' + b"[]," * 100_000 + b"[]]}"
        assert asked(served.url, request(parts))[0] == 400
        text = completion('["{' * 100_000)
        assert asked(served.url, text)[0] == 200


def _status(line, limit_s):
    line.settimeout(limit_s)
    try:
        reply = line.recv(65536)
    except TimeoutError:
        return None
    return int(reply.split()[1]) if reply else 0


def test_counts_that_no_engine_can_hold_are_cut(served):
    def tokens():
        found = served.metrics().items()
        return sum(v for k, v in found if k.startswith("hetero_tokens_total"))

    before = tokens()
    for k in range(6):
        for stream in (False, True):
            assert asked(served.url, completion(f"{k} huge", stream=stream))[0] == 200
            assert asked(served.url, completion(f"{k} beyond", stream=stream))[0] in (200, 502)
            assert asked(served.url, completion(f"{k} bool", stream=stream))[0] == 200
    assert 0 < tokens() - before <= 36 * 2 * 20_000
    assert "Traceback" not in served.log.read_text()
    assert empty(served)


def test_an_answer_that_nobody_asked_for_is_given_to_nobody(served):
    for k in range(4):
        assert whole(served, f"{k} twice")
        time.sleep(0.2)
        status, reply = asked(served.url, completion(f"{k}"))
        assert (status, b"unasked" in reply) == (200, False)


def test_a_page_in_place_of_a_stream_is_not_passed_on(served):
    status, reply = asked(served.url, completion("1 html", stream=True))
    assert (status, b"<html>" in reply) == (502, False)


def test_an_event_without_end_is_cut_short(served):
    process = psutil.Process(served.process.pid)
    before = process.cpu_times().user
    status, reply = asked(served.url, completion("1 endless", stream=True))
    assert status == 200
    assert b"sent an event of more than 8,388,608 bytes" in reply
    # Searched from the beginning with each piece, its 8 MiB take a hundred times as long.
    assert process.cpu_times().user - before < 5.0


def test_a_stream_that_ends_without_an_empty_line_is_read(served):
    status, reply = asked(served.url, completion("1 unended", stream=True))
    assert (status, b"data: [DONE]\n\n" in reply) == (200, True)


def test_pages_that_are_not_there_answer_as_openai_does(served):
    for content, status in (
        (request(b"{}", "/v1/images/generations"), 404),
        (request(b"{}", "/v1/completions/"), 404),
        (request(b"", "/v1/completions", method="GET"), 405),
        (b"NONSENSE\r\n\r\n", 400),
    ):
        found, reply = asked(served.url, content)
        assert found == status
        assert "error" in json.loads(reply.partition(b"\r\n\r\n")[2])


def test_health_checks_follow_no_redirection(tmp_path, engines):
    led = Hostile(f"{engines['a'].url}/inner")
    served = Served(tmp_path, {"a": led.url}, limits=LIMITS | CALM)
    with running(led, served):
        assert whole(served)
        wait_until(lambda: served.up() == {"a": True})
    # Once by this test, which follows it when it waits for the engine to start.
    assert json.loads(get(f"{engines['a'].url}/counts"))["pages"]["/inner"] == 1


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def test_more_streams_than_descriptors_are_all_answered(tmp_path):
    a, b = Paced(step_ms=20), Paced(step_ms=20)
    served = Served(tmp_path, {"a": a.url, "b": b.url}, limits=QUICK | CALM | {"queue_s": 60.0})
    served.before = few_files

    async def many():
        async with client_of(served) as client:
            return await asyncio.gather(*(ask(client, 5) for _ in range(150)))

    with running(a, b, served):
        idle = [connect(served.url) for _ in range(300)]
        assert asyncio.run(many()) == [("whole", 5)] * 150
        assert served.up() == {"a": True, "b": True}
        for line in idle:
            line.close()
    log = served.log.read_text()
    assert "only 256 files may be open" in log
    assert "is out" not in log
    assert os.path.getsize(served.log) < 4000  # noqa: PTH202


def test_a_name_of_a_model_is_cut_and_strings_are_no_marks(served):
    process = psutil.Process(served.process.pid)
    status, reply = asked(served.url, request({"model": "m" * 5000, "prompt": "x"}))
    assert (status, len(reply) < 1000) == (404, True)
    before = process.memory_info().rss
    secret = reply.partition(b"'")[2].partition(b"'")[0].decode()
    for k in range(4):
        body = completion(f"{k} " + "x" * 400_000, x=[f"{secret}{k}" for k in range(3000)])
        assert asked(served.url, body)[0] == 200
    assert process.memory_info().rss - before < 100 << 20


def test_pipelined_pages_do_not_hold_up_others(served):
    page = request(b"", "/metrics", method="GET")
    with connect(served.url) as line:
        line.settimeout(0.0)
        sent = line.send(page * 10_000)
        assert whole(served)
        line.settimeout(60.0)
        # Who asks for more than the server takes, ahead of the answers, is hung up on.
        assert ended(line).count(b"HTTP/1.1 200") < sent // len(page)


def test_answers_are_made_one_by_one_as_they_are_read(served, engines):
    def begun():
        return sum(one.counts()[0]["unread"] for one in engines.values())

    with connect(served.url, receive=4096) as line:
        line.sendall(completion("unread", max_tokens=2_000_000) * 20)  # 10 MB each
        wait_until(lambda: begun() == 1)
        wait_until(lambda: empty(served))
        assert whole(served)
        assert begun() == 1
    wait_until(lambda: empty(served))


@pytest.mark.parametrize("ahead", [0, 1, 40])
@pytest.mark.parametrize("sent", [0.2, 0.99, 1.0])
def test_clients_that_leave_in_any_phase_are_forgotten_at_once(served, engines, sent, ahead):
    page = request(b"", "/live", method="GET")
    asks = completion("1 slow", stream=True, max_tokens=10_000)
    before = served.outcomes()["finished"]
    for line in [connect(served.url) for _ in range(6)]:
        line.sendall(asks[: int(sent * len(asks))] if sent < 1.0 else asks + page * ahead)
        if sent == 1.0 and ahead < 40:  # the others are cut off before, or get this
            assert line.recv(10)
        line.close()
    wait_until(lambda: empty(served))  # minutes before the answers would have ended
    assert served.outcomes()["finished"] == before
    assert whole(served)


BODY = b'{"model":"m","prompt":"1"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
COUNT = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "content",
    [
        POST + COUNT + CHUNKED + b"\r\n" + CHUNKS + b"\r\n",
        POST + CHUNKED + COUNT + b"\r\n" + CHUNKS + b"\r\n",
        POST + COUNT + b"Content-Length: 3\r\n\r\n" + BODY,
        *(POST + b"Content-Length: %b\r\n\r\n" % x + BODY for x in (b"+26", b"-26", b"0x1a", b"")),
        POST + b"Content-Length: 26, 26\r\n\r\n" + BODY,
        POST + b"Content-Length : 26\r\n\r\n" + BODY,
        POST + b"A: b\r\n c\r\n" + COUNT + b"\r\n" + BODY,
        POST + b"A: b\rc\r\n" + COUNT + b"\r\n" + BODY,
        POST + b"A: \x00\r\n" + COUNT + b"\r\n" + BODY,
        POST + b"Host: y\r\n" + COUNT + b"\r\n" + BODY,
        (POST + COUNT).replace(b"\r\n", b"\n") + b"\n" + BODY,
        POST.replace(b"Host: x\r\n", b"") + COUNT + b"\r\n" + BODY,
        POST.replace(b"1.1", b"2.0") + COUNT + b"\r\n" + BODY,
        *(
            POST + b"Transfer-Encoding: %b\r\n\r\n" % x + CHUNKS + b"\r\n"
            for x in (b"xchunked", b"chunked, chunked", b"chunked, gzip")
        ),
        *(POST + CHUNKED + b"\r\n%b\r\n{" % x for x in (b"-1", b"0x5", b"f" * 17, b"1 1")),
    ],
)
def test_what_two_readers_could_take_for_two_things_is_refused(served, engines, content):
    before = [one.counts()[0] for one in engines.values()]
    with connect(served.url) as line:
        line.sendall(content + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = ended(line)
    assert reply.split()[1] in (b"400", b"505")
    assert reply.count(b"HTTP/1.") == 1
    assert [one.counts()[0] for one in engines.values()] == before


def test_unusual_requests_are_answered(served):
    # A head that comes with a body larger than a head may be.
    assert asked(served.url, completion("2 " + "x" * 300_000))[0] == 200
    assert asked(served.url, completion(""))[0] == 200
    with connect(served.url) as line:
        line.sendall(completion("1") * 20 + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        found = b""
        while b'"live"' not in found:
            found += line.recv(65536)
    assert found.count(b"HTTP/1.1 200 OK") == 21
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    live = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    for content in (
        POST + upgrade + COUNT + b"\r\n" + BODY,
        POST + CHUNKED + b"\r\n" + CHUNKS + b"A: b\r\n\r\n",
        POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1) + b"\r\n",
        POST + b"Expect: 100-continue\r\n" + COUNT + b"\r\n" + BODY,
    ):
        with connect(served.url) as line:
            line.sendall(content)
            found = b""
            while b'"usage"' not in found:
                found += line.recv(65536)
            line.sendall(live)
            assert b"200 OK" in found + ended(line)
    if shutil.which("curl"):
        command = ["curl", "-s", "--http2", "-d", BODY, f"{served.url}/v1/completions"]
        assert b'"usage"' in subprocess.run(command, capture_output=True, check=True).stdout
    old = POST.replace(b"1.1", b"1.0") + COUNT + b"\r\n" + BODY
    assert asked(served.url, old)[0] == 200


def test_refused_clients_make_room_and_no_key_comes_behind_a_body(tmp_path, engines, monkeypatch):
    monkeypatch.setenv("HETERO_TEST_KEYS", "first-key, good-key")
    urls = {"a": engines["a"].url}
    served = Served(tmp_path, urls, api_keys_env="HETERO_TEST_KEYS", request_log="log")
    served.before = few_files
    keyed = b"Authorization: Bearer good-key\r\n"
    with running(served):
        lines = [connect(served.url) for _ in range(300)]
        for line in lines:
            line.sendall(request(b"", length=1000))
        pages = (request(b"", f"/{x}", method="GET") for x in ("metrics", "v1/models"))
        for content in (completion("1"), *pages):
            assert asked(served.url, content)[0] == 401
            good = content.replace(b"\r\n", b"\r\n" + keyed, 1)
            assert asked(served.url, good)[0] == 200
        assert served.health() == {"status": "ok"}
        for line in lines:
            line.close()
        for head, tail in (
            (b"", keyed),
            (b"Authorization: Bearer \xc2\xa0good-key\r\n", b""),
            (b"Authorization: Bearer \xa0good-key\r\n", b""),
        ):
            content = POST + head + CHUNKED + b"\r\n" + CHUNKS + tail + b"\r\n"
            assert asked(served.url, content)[0] == 401
        twice = POST + 2 * keyed + COUNT + b"\r\n" + BODY
        assert asked(served.url, twice)[0] == 401
    assert [json.loads(line)["client"] for line in (tmp_path / "log").open()] == ["key 2"]
