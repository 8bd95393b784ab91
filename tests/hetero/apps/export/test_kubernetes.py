from __future__ import annotations

import jsonschema
import pytest
from ruamel.yaml import YAML

from hetero.apps.export import kubernetes, names, write
from hetero.errors import ExportError
from tests.hetero.apps.export.export_plans import (
    EVERY,
    closed,
    on,
    pipeline,
    split,
    whole,
    within_machines,
)

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="the dev extra is not installed"
)

VERSIONS = ("1.29", "1.37")
# Fields of leaderworkerset.x-k8s.io/v1 as its reference documents them; pods are checked by the
# schemas of Kubernetes.
GROUPS = closed(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata={"type": "object", "required": ["name"]},
    spec=closed(
        "leaderWorkerTemplate",
        replicas={"type": "integer", "minimum": 0},
        rolloutStrategy={"type": "object"},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig={"type": "object"},
        leaderWorkerTemplate=closed(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
)


def documents(service, folder):
    found = []
    for path in write(service, "k8s", folder):
        found += list(YAML(typ="safe", pure=True).load_all(path.read_text()))
    return found


@pytest.mark.parametrize("name", list(EVERY))
def test_every_manifest_fits_the_schemas_of_kubernetes(name, tmp_path):
    found = documents(EVERY[name], tmp_path / "out")
    assert found
    for one in found:
        checked = [one]
        if one["kind"] == "LeaderWorkerSet":
            jsonschema.validate(one, GROUPS)
            spec = one["spec"]["leaderWorkerTemplate"]
            checked = [
                {"apiVersion": "v1", "kind": "Pod", **spec[role]}
                for role in ("leaderTemplate", "workerTemplate")
            ]
        for manifest in checked:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_would_notice():
    service = whole()
    manifest = next(iter(kubernetes.manifests(service).values()))[1]
    manifest["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_equal_engines_form_one_set_that_selects_its_gpu():
    found = kubernetes.manifests(whole())
    sets = {name: pair[1]["spec"] for name, pair in found.items()}
    assert {name: spec["replicas"] for name, spec in sets.items()} == {
        "v100-sxm2-32gb-tp4": 1,
        "v100-sxm2-32gb-tp2": 2,
        "a100-sxm-80gb-tp1": 1,
    }
    for name, spec in sets.items():
        pod = spec["template"]["spec"]
        [term] = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        [wanted] = term["matchExpressions"]
        product = "Tesla-V100-SXM2-32GB" if "v100" in name else "NVIDIA-A100-SXM4-80GB"
        assert (wanted["key"], wanted["values"]) == ("nvidia.com/gpu.product", [product])
        [container] = pod["containers"]
        args = container["args"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == name[-1]
        assert args[args.index("--tensor-parallel-size") + 1] == name[-1]


def test_addresses_name_the_pods_of_the_sets():
    service = whole()
    found = kubernetes.addresses(service)
    assert len(set(found.values())) == len(service.servings) == len(found)
    assert found["v100 t=2/1"] == "http://v100-sxm2-32gb-tp2-1.v100-sxm2-32gb-tp2:8000"


def test_a_pipeline_over_machines_is_a_group():
    [one] = next(iter(kubernetes.manifests(pipeline(copies=3)).values()))
    spec = one["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    leader, worker = (
        spec["leaderWorkerTemplate"][role]["spec"]["containers"][0]
        for role in ("leaderTemplate", "workerTemplate")
    )
    assert ["--headless" in one["args"] for one in (leader, worker)] == [False, True]
    assert "ports" not in worker
    for container in (leader, worker):
        assert "$(LWS_LEADER_ADDRESS)" in container["args"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env["VLLM_PP_LAYER_PARTITION"] == "42,38"


def test_three_kinds_of_machines_fit_no_group():
    service = pipeline(("a", "H100-SXM", 2, 40), ("b", "L4", 2, 20), ("c", "L40S", 2, 20))
    with pytest.raises(ExportError, match="one template for all workers"):
        kubernetes.manifests(service)


def test_prefill_engines_are_apart_from_decode_engines():
    found = kubernetes.manifests(split())
    assert sorted(found) == [
        "a100-sxm-80gb-tp1-decode",
        "v100-sxm2-32gb-tp2-decode",
        "v100-sxm2-32gb-tp4-prefill",
    ]


def test_engines_that_exchange_caches_within_a_machine_share_a_node():
    found = kubernetes.manifests(within_machines())
    pods = {name: documents[1]["spec"]["template"] for name, documents in found.items()}
    assert {name: documents[1]["spec"]["replicas"] for name, documents in found.items()} == {
        "l4-tp2-prefill": 1,
        "l4-tp1-decode": 2,
        "l4-tp2-prefill-v2": 1,
        "l4-tp1-decode-v2": 2,
    }
    for name, pod in pods.items():
        [near] = pod["spec"]["affinity"]["podAffinity"][kubernetes._REQUIRED]
        assert near["topologyKey"] == "kubernetes.io/hostname"
        wanted = near["labelSelector"]["matchLabels"].items()
        # A pod is in its own term: else the first could never be placed.
        at_home = {other for other in pods if wanted <= pods[other]["metadata"]["labels"].items()}
        assert at_home == {other for other in pods if other.endswith("v2") == name.endswith("v2")}
    for documents in kubernetes.manifests(split()).values():
        assert "podAffinity" not in documents[1]["spec"]["template"]["spec"]["affinity"]


@pytest.mark.parametrize(
    ("gpu", "image", "resource", "label"),
    [
        ("H100-SXM", "vllm/vllm-openai:v", "nvidia.com/gpu", "nvidia.com/gpu.product"),
        ("MI300X", "vllm/vllm-openai-rocm:v", "amd.com/gpu", "amd.com/gpu.product-name"),
        ("MI355X", "vllm/vllm-openai-rocm:v", "amd.com/gpu", names.OWN_LABEL),
        ("Arc-Pro-B60", "vllm/vllm-openai-xpu:v", "gpu.intel.com/xe", names.OWN_LABEL),
        ("Gaudi2", "vault.habana.ai/", "habana.ai/gaudi", names.OWN_LABEL),
        ("X1", "vllm/vllm-openai:v", "nvidia.com/gpu", names.OWN_LABEL),
    ],
)
def test_the_vendor_of_the_gpu_says_image_resource_and_label(gpu, image, resource, label):
    (documents_of,) = kubernetes.manifests(on(gpu)).values()
    pod = documents_of[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].startswith(image)
    assert container["resources"] == {"limits": {resource: "2"}}
    assert [one["key"] for one in pod["tolerations"]] == [resource]
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"][0]["matchExpressions"][0]["key"] == label
