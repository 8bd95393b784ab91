"""What is exported is read by vLLM's own parser and SkyPilot's own schemas.

Both are far too large for the environment of the tests; ``make tools`` makes one of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hetero import paths
from hetero.apps.export import skypilot, vllm
from hetero.errors import ExportError
from tests.hetero.apps.export.export_plans import EVERY
from tests.hetero.engine_plans import SEEDS, services

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
