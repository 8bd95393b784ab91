"""What operators use of `hetero serve`, against engines that note what they are sent."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.serving import Served, get, running, wait_until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


@contextmanager
def engine():
    """An engine that answers every path, and the requests it got."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
            found = {"path": self.path, "model": body.get("model"), "choices": [{"text": "x"}]}
            text = json.dumps(found | {"usage": USAGE})
            if body:
                seen.append((self.path, dict(self.headers.items()), body))
            self.send_response(200, "OK\r\nx-request-id: of the engine")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()


def post(url, path, body, headers=None):
    content = json.dumps(body).encode()
    asked = urllib.request.Request(url + path, content, headers or {}, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def test_requests_keep_their_names_and_leave_a_line_without_their_text(tmp_path):
    with engine() as (url, seen):
        served = Served(tmp_path, {"a": url}, request_log="requests.jsonl")
        log = tmp_path / "requests.jsonl"
        with running(served):
            wait_until(lambda: served.up()["a"])
            names = {"x-request-id": "mine-1", "traceparent": TRACE, "tracestate": "a=b"}
            secret = {"model": "m", "prompt": "a secret"}
            status, headers, _ = post(served.url, "/v1/completions", secret, names)
            assert status == 200
            assert headers.get_all("x-request-id") == ["mine-1"]
            sent = {name.lower(): value for name, value in seen[-1][1].items()}
            assert {name: sent[name] for name in names} == names
            odd = {"x-request-id": "b" * 200, "traceparent": "none"}
            _, headers, _ = post(served.url, "/v1/completions", secret, odd)
            assert len(headers["x-request-id"]) == 32
            assert "traceparent" not in {name.lower() for name in seen[-1][1]}
            log.rename(tmp_path / "older.jsonl")
            served.signal(signal.SIGHUP)
            wait_until(log.exists)
            status, headers, _ = post(served.url, "/v1/completions", {"model": "n"}, names)
            assert (status, headers["x-request-id"]) == (400, "mine-1")
            for path, body in (
                ("/v1/embeddings", {"model": "m", "input": ["a secret", "b"]}),
                ("/tokenize", {"model": "m", "prompt": "a secret"}),
            ):
                status, _, found = post(served.url, path, body)
                assert (status, found["path"], seen[-1][0]) == (200, path, path)
                assert seen[-1][2] == body
            wait_until(lambda: len(log.read_text().splitlines()) == 2)
        assert "secret" not in (tmp_path / "older.jsonl").read_text() + log.read_text()
        older = [json.loads(line) for line in (tmp_path / "older.jsonl").open()]
        assert (older[0]["id"], len(older[1]["id"])) == ("mine-1", 32)
        assert [one["trace_id"] for one in older] == [TRACE[3:35], None]
        first = older[0]
        assert (first["engine"], first["outcome"], first["attempts"]) == ("a", "finished", 1)
        assert (first["input_tokens"], first["output_tokens"]) == (7, 3)
        assert 0 < first["e2e_s"] < 60
        paths = [json.loads(line)["path"] for line in log.open()]
        assert paths == ["/v1/embeddings", "/tokenize"]


def test_without_an_engine_it_is_not_ready_and_refuses_at_once(tmp_path):
    served = Served(tmp_path, {"a": "http://127.0.0.1:9"}, limits={"down_s": 0})
    with running(served):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{served.url}/ready", timeout=60)
        assert refused.value.code == 503
        assert urllib.request.urlopen(f"{served.url}/live", timeout=60).status == 200
        body = {"model": "m", "prompt": "x"}  # queue_s is a minute
        status, headers, found = post(served.url, "/v1/completions", body)
        assert (status, found["error"]["code"]) == (503, "no_engine")
        assert headers["retry-after"] == "1"
    with engine() as (url, _):
        served = Served(tmp_path, {"a": url}, limits={"down_s": 0})
        with running(served):
            wait_until(lambda: served.up()["a"])
            assert json.loads(urllib.request.urlopen(f"{served.url}/ready").read())["ready"]


def test_several_models_and_adapters_behind_one_address(tmp_path):
    with engine() as (one, at_one), engine() as (two, at_two):
        models = {
            "a": {"llama": "meta/llama", "sql": "sql-lora"},
            "b": {"llama": "llama-b", "other": "other"},
        }
        served = Served(tmp_path, {"a": one, "b": two}, models=models)
        with running(served):
            wait_until(lambda: all(served.up().values()))
            listed = json.loads(get(f"{served.url}/v1/models"))["data"]
            assert [one["id"] for one in listed] == ["llama", "sql", "other"]
            for model, seen, own in (("sql", at_one, "sql-lora"), ("other", at_two, "other")):
                for _ in range(3):
                    body = {"model": model, "prompt": "x"}
                    status, _, found = post(served.url, "/v1/completions", body)
                    assert (status, found["model"]) == (200, model)
                    assert seen[-1][2]["model"] == own
            status, _, found = post(served.url, "/v1/completions", {"model": "m", "prompt": "x"})
            assert (status, found["error"]["code"]) == (404, "model_not_found")
            assert "'sql'" in found["error"]["message"]
            assert {body["model"] for _, _, body in at_one} == {"sql-lora"}
