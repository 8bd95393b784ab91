"""What is exported is read by vLLM's own parser and SkyPilot's own schemas, and run by vllm-router.

Both are far too large for the environment of the tests; ``make tools`` makes one of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hetero import paths
from hetero.apps.export import Part, ServedEngine, Service, skypilot, vllm
from hetero.errors import ExportError
from pipelines.bench.engines import free_port
from tests.hetero.apps.export.export_plans import EVERY, SMALL
from tests.hetero.engine_plans import SEEDS, services
from tests.serving import wait_until

TOOLS = Path(
    os.environ.get(
        "HETERO_TOOLS", paths.root() / "pipelines" / "build" / "tools" / "bin" / "python"
    )
)
pytestmark = pytest.mark.skipif(
    not TOOLS.is_file(), reason="no environment with vLLM and SkyPilot: `make tools` makes one"
)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    commands, tasks = [], []
    of_fleets = [service for seed in SEEDS for service in services(seed)]
    for service in (*EVERY.values(), *of_fleets):
        for serving in service.servings:
            commands += [(serving, one) for one in vllm.commands(service, serving)]
        try:
            tasks += skypilot.tasks(service).values()
        except ExportError:
            continue
    (folder / "vllm.json").write_text(json.dumps([one.argv for _, one in commands]))
    (folder / "skypilot.json").write_text(json.dumps(tasks))
    script = Path(__file__).with_name("export_tools.py")
    done = subprocess.run(
        [str(TOOLS), str(script), str(folder)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return commands, tasks, json.loads((folder / "read.json").read_text())


def test_vllm_reads_every_command(read):
    commands, _, found = read
    assert len(found["vllm"]) == len(commands) > 20
    for (serving, _), seen in zip(commands, found["vllm"], strict=True):
        assert (seen["tensor"], seen["copies"]) == serving.parts[0].degrees
        assert seen["pipeline"] == len(serving.parts)
        assert seen["nnodes"] == len(serving.machines)
        if serving.engine is not None:
            each = serving.parts[0].degrees[1] if serving.phase == "decode" else 1
            assert seen["max_num_seqs"] == serving.engine.max_batch // each


def test_skypilot_reads_every_task(read):
    _, tasks, found = read
    assert len(tasks) > 10
    for task, seen in zip(tasks, found["skypilot"], strict=True):
        assert seen["name"] == task["name"]
        assert seen["replicas"] == task.get("service", {}).get("replicas")


class Mock(BaseHTTPRequestHandler):
    """An engine without a model: it answers its name, and hands on the caches that it prefills."""

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, said = self.server.engine, body.get("kv_transfer_params") or {}
        caches = {"do_remote_prefill": True, "remote_engine_id": name, "remote_block_ids": [1]}
        caches |= {"remote_host": "h", "remote_port": 5600}
        came = f"{said.get('remote_engine_id')}>" if said.get("do_remote_prefill") else ""
        text = f"{came}{name} {self.headers['authorization']}"
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        found = {"id": "x", "object": "text_completion", "model": "m", "usage": usage}
        more = {"kv_transfer_params": caches} if said.get("do_remote_decode") else {}
        self.answer(found | {"choices": [choice]} | more)

    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Say nothing."""


def test_a_stock_router_splits_phases_and_outlives_an_engine_of_each(tmp_path):
    phases = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "b": "both"}
    parts = (Part("m", "L4", 1, 32),)
    service = Service("s", SMALL, tuple(ServedEngine(n, p, parts) for n, p in phases.items()))
    engines, urls = {}, {}
    for name in phases:
        engines[name] = ThreadingHTTPServer(("127.0.0.1", 0), Mock)
        engines[name].engine = name
        threading.Thread(target=engines[name].serve_forever, daemon=True).start()
        urls[name] = f"http://127.0.0.1:{engines[name].server_port}"
    text = vllm.router(service, urls)
    for port in ("30000", "30001", "29000", "29001"):
        text = text.replace(port, str(free_port()))
    front = re.search(r"--port (\d+)", text)[1]
    env = os.environ | {"PATH": f"{TOOLS.parent}:{os.environ['PATH']}", "VLLM_API_KEY": "mine"}
    run = subprocess.Popen(["sh", "-c", text], env=env, start_new_session=True)

    def ask():
        body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4}).encode()
        head = {"content-type": "application/json", "authorization": "Bearer mine"}
        asked = urllib.request.Request(f"http://127.0.0.1:{front}/v1/completions", body, head)
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return json.load(answer)["choices"][0]["text"]
        except OSError:
            return ""

    def settled(wanted):
        found = {ask() for _ in range(40)}
        return found == {f"{one} Bearer mine" for one in wanted}

    try:
        wait_until(lambda: settled(["p0>d0", "p0>d1", "p1>d0", "p1>d1", "b"]), 120)
        for name, left in (("p0", ["p1>d0", "p1>d1", "b"]), ("d1", ["p1>d0", "b"])):
            engines[name].shutdown()
            engines[name].server_close()
            wait_until(lambda left=left: settled(left), 60)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
