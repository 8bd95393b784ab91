"""What is exported is read by vLLM's own parser and SkyPilot's own schemas, and run by vllm-router.

Both are far too large for the environment of the tests; ``make tools`` makes one of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from hetero import paths
from hetero.apps.export import Part, ServedEngine, Service, skypilot, vllm
from hetero.errors import ExportError
from pipelines.bench.engines import free_port
from tests.hetero.apps.export.export_plans import EVERY, SMALL
from tests.hetero.engine_plans import SEEDS, services
from tests.serving import Paced, running, wait_until

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


def test_a_stock_router_splits_phases_and_outlives_an_engine_of_each():
    phases = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "b": "both"}
    parts = (Part("m", "L4", 1, 32),)
    service = Service("s", SMALL, tuple(ServedEngine(n, p, parts) for n, p in phases.items()))
    engines = {name: Paced(0.0) for name in phases}
    text = vllm.router(service, {name: one.url for name, one in engines.items()})
    for port in ("30000", "30001", "29000", "29001"):
        text = text.replace(port, str(free_port()))
    url = f"http://127.0.0.1:{re.search(r'--port ([0-9]+)', text)[1]}/v1/completions"
    env = os.environ | {"PATH": f"{TOOLS.parent}:{os.environ['PATH']}", "VLLM_API_KEY": "mine"}
    body = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4}).encode()

    def served(alive):
        """Whether 40 requests are answered, by all that are alive, those of one phase by two."""
        before = {name: engines[name].counts()["begun"] for name in alive}
        for _ in range(40):
            head = {"content-type": "application/json", "authorization": "Bearer mine"}
            with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
        own = {name: engines[name].counts()["begun"] - count for name, count in before.items()}
        first, second = (sum(own.get(f"{one}{k}", 0) for k in range(2)) for one in "pd")
        return first == second == 40 - own["b"] and all(own.values())

    with running(*engines.values()):
        run = subprocess.Popen(["sh", "-c", text], env=env, start_new_session=True)
        try:
            alive = list(phases)
            for killed in ("", "p0", "d1"):
                if killed:
                    engines[killed].signal(signal.SIGKILL)
                    alive.remove(killed)
                wait_until(lambda alive=tuple(alive): served(alive), 120)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
