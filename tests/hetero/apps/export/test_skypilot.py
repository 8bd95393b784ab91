from __future__ import annotations

import re

import jsonschema
import pytest
from ruamel.yaml import YAML

from hetero import catalog
from hetero.apps.export import names, skypilot, write
from hetero.catalog.gpus import skypilot_names
from hetero.errors import ExportError
from tests.hetero.apps.export.export_plans import EVERY, closed, on, pipeline, split, whole

REFUSED = ("mixed pipeline", "AMD, fp8", "Gaudi", "Intel")

# Fields of task and service files as SkyPilot 0.14 documents them; `make tools` gives its own
# schemas, which tests/hetero/apps/export/test_tools.py uses.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
TASK = closed(
    *("name", "resources", "run"),
    name={"type": "string", "pattern": "^[a-zA-Z][a-zA-Z0-9-]*$"},
    num_nodes={"type": "integer", "minimum": 2},
    setup={"type": "string"},
    run={"type": "string"},
    envs=TEXTS,
    secrets=TEXTS,
    resources=closed(
        accelerators={
            "type": "object",
            "maxProperties": 1,
            "additionalProperties": {"type": "number"},
        },
        ports={"type": "integer"},
        disk_size={"type": "integer"},
        image_id={"type": "string"},
    ),
    service=closed(
        "readiness_probe",
        readiness_probe=closed(
            "path", path={"type": "string"}, initial_delay_seconds={"type": "number"}
        ),
        replicas={"type": "integer", "minimum": 1},
        load_balancing_policy={"enum": ["round_robin", "least_load", "instance_aware_least_load"]},
    ),
)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in REFUSED])
def test_every_task_has_documented_fields_only(name, tmp_path):
    for path in write(EVERY[name], "skypilot", tmp_path / "out"):
        task = YAML(typ="safe", pure=True).load(path.read_text())
        jsonschema.validate(task, TASK)
        assert task["name"] == path.stem


def test_each_family_is_a_service_with_its_own_accelerators():
    found = skypilot.tasks(whole())
    seen = {
        name: (task["service"]["replicas"], task["resources"]["accelerators"])
        for name, task in found.items()
    }
    assert seen == {
        "v100-sxm2-32gb-tp4": (1, {"V100-32GB": 4}),
        "v100-sxm2-32gb-tp2": (2, {"V100-32GB": 2}),
        "a100-sxm-80gb-tp1": (1, {"A100-80GB": 1}),
    }


def test_pipelines_are_tasks_of_several_nodes():
    service = pipeline(copies=2)
    found = skypilot.tasks(service)
    assert ["service" in task for task in found.values()] == [False, False]
    for task in found.values():
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, {"H100": 8})
        assert task["resources"]["disk_size"] > 2 * 2 * service.llm.params / 1e9
        assert task["envs"] == {"VLLM_PP_LAYER_PARTITION": "42,38"}
        assert re.search(r"--node-rank \"\$SKYPILOT_NODE_RANK\"", task["run"])


def test_engines_that_exchange_caches_stand_behind_no_balancer():
    found = skypilot.tasks(split())
    assert len(found) == 4
    assert not any("service" in task for task in found.values())
    assert all("nixl" in task["setup"] for task in found.values())


def test_what_skypilot_cannot_say_is_said():
    with pytest.raises(ExportError, match="are all alike"):
        skypilot.tasks(EVERY["mixed pipeline"])
    with pytest.raises(ExportError, match="no A800-PCIE-80GB"):
        names.skypilot("A800-PCIE-80GB")
    assert {*skypilot_names()} <= {gpu.name for gpu in catalog.gpus()}


def test_amd_machines_run_an_image_and_others_are_refused():
    (task,) = skypilot.tasks(on("MI300X")).values()
    assert task["resources"]["accelerators"] == {"MI300X": 2}
    assert task["resources"]["image_id"].startswith("docker:vllm/vllm-openai-rocm:v")
    assert "setup" not in task
    for gpu in ("Gaudi3", "Arc-Pro-B60"):
        with pytest.raises(ExportError, match=f"stands on {gpu}, which SkyPilot does not rent"):
            skypilot.tasks(on(gpu))
