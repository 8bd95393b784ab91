"""Fleets as nvidia-smi, kubectl and SkyPilot tell them."""

from __future__ import annotations

import json
import os

import pytest

from hetero import cluster
from hetero.cluster import Cluster, found
from hetero.errors import CatalogError

H100 = "NVIDIA H100 80GB HBM3"


def smi(gpu: str, count: int, before: str = "") -> str:
    return "".join(f"{before}GPU {k}: {gpu} (UUID: GPU-{k}f0e)\n" for k in range(count))


def node(name: str, labels: dict[str, str] | None = None, *, ready: str = "True", **free: str):
    at_hand = {key.replace("__", "/").replace("_", "."): value for key, value in free.items()}
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"allocatable": {"cpu": "8", **at_hand}, "conditions": conditions},
    }


def product(gpu: str, count: int, gib: float = 0.0) -> dict[str, str]:
    memory = {"nvidia.com/gpu.memory": str(round(gib * 1024))} if gib else {}
    return {"nvidia.com/gpu.product": gpu, "nvidia.com/gpu.count": str(count), **memory}


def nodes(*items: object) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def rows(fleet: Cluster) -> list[tuple[str, str, int]]:
    return [(m.name, m.gpu.name, m.count) for m in fleet.machines]


TWO = [("a1", "H100-SXM", 8), ("b-2.lan", "L4", 2)]


@pytest.mark.parametrize(
    "text",
    [
        f"a1:\n{smi(H100, 8)}\nb-2.lan:\n{smi('NVIDIA L4', 2)}",
        f"==> a1.txt <==\n{smi(H100, 8)}\n==> b-2.lan.txt <==\n{smi('NVIDIA L4', 2)}",
        f"--------\na1\n--------\n{smi(H100, 8)}--------\nb-2.lan\n--------\n{smi('NVIDIA L4', 2)}",
        f"a1 | CHANGED | rc=0 >>\n{smi(H100, 8)}b-2.lan | CHANGED | rc=0 >>\n{smi('NVIDIA L4', 2)}",
        f"$ ssh a1 nvidia-smi -L\n{smi(H100, 8)}me@b-2.lan:~# nvidia-smi -L\n{smi('NVIDIA L4', 2)}",
        smi(H100, 8, "a1: ") + smi("NVIDIA L4", 2, "b-2.lan: "),
    ],
    ids=["headings", "tail", "clush", "ansible", "prompts", "pdsh"],
)
def test_one_file_of_several_hosts(tmp_path, text) -> None:
    (tmp_path / "gpus.txt").write_text(text)
    assert rows(cluster.find(str(tmp_path / "gpus.txt"))) == TWO


def test_a_file_per_host_and_gpus_of_two_types_in_one(tmp_path) -> None:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "a1.txt").write_text(smi(H100, 8))
    mixed = "GPU 0: NVIDIA L4 (UUID: x)\nGPU 1: NVIDIA L40S (UUID: y)\nGPU 2: NVIDIA L4 (UUID: z)\n"
    (tmp_path / "hosts" / "c.txt").write_text(mixed)
    names = ",".join(str(tmp_path / "hosts" / name) for name in ("a1.txt", "c.txt"))
    for fleet in (cluster.find(str(tmp_path / "hosts")), cluster.find(names)):
        assert rows(fleet) == [
            ("a1", "H100-SXM", 8),
            ("c-nvidia-l4", "L4", 2),
            ("c-nvidia-l40s", "L40S", 1),
        ]
    # What was understood is a cluster file.
    (tmp_path / "saved.yaml").write_text(found.text_of(fleet))
    assert rows(Cluster.load(tmp_path / "saved.yaml")) == rows(fleet)
    assert found.NOTE in fleet.notes
    assert found.NOTE not in Cluster.load(tmp_path / "saved.yaml").notes


def test_nodes_of_kubernetes(tmp_path) -> None:
    path = tmp_path / "nodes.json"
    eu, amd = {"topology.kubernetes.io/region": "eu-west-1"}, "amd.com/gpu.product-name"
    items = (
        node("control"),
        node("n1", product("NVIDIA-H100-80GB-HBM3", 8, 79.6) | eu),
        node("n2", product("Tesla-T4-SHARED", 4, 15)),
        node("n3", product("NVIDIA-L4", 4, 22.5), ready="False"),
        node("n4", {amd: "AMD_Instinct_MI300X_OAM"}, amd_com__gpu="8"),
        node("n5", {"node.kubernetes.io/instance-type": "g5.12xlarge"}, nvidia_com__gpu="4"),
        node("n6", product("NVIDIA-L4", 4), ready="Unknown"),
    )
    path.write_text("\ufeff" + nodes(*items))
    fleet = cluster.find(path)
    assert rows(fleet) == [
        ("n1", "H100-SXM", 8),
        ("n2", "T4", 4),
        ("n4", "MI300X", 8),
        ("n5", "A10G", 4),
    ]
    assert fleet.machines[0].region == "eu-west-1"
    assert "without n3, n6" in fleet.source
    assert found.lists_nodes(path)


def test_a_task_of_skypilot(tmp_path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("name: serve\nnum_nodes: 2\nresources: {accelerators: 'A100-80GB:8'}\nrun: x\n")
    assert rows(cluster.find(path)) == [
        ("serve-1", "A100-SXM-80GB", 8),
        ("serve-2", "A100-SXM-80GB", 8),
    ]
    # SkyPilot's A100 is the one of 40 GB, and its H100 and V100 are those with NVLink.
    for name, gpu in (("A100", "A100-SXM-40GB"), ("h100", "H100-SXM"), ("V100", "V100-SXM2-16GB")):
        path.write_text(f"resources:\n  accelerators: {{{name}: 4}}\n")
        assert rows(cluster.find(path)) == [("task", gpu, 4)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", smi(H100, 2) * 2, "as if of two hosts. Resolve: write the name of each host"),
        ("a.txt", smi(H100, 1) + "  MIG 1g.10gb Device 0: (UUID: MIG-1)", "has divided GPUs"),
        ("a.txt", smi("NVIDIA A100-PCIE-20GB", 1), "No GPU is called 'NVIDIA A100-PCIE-20GB'"),
        ("n.json", nodes(node("c")), "no node is ready and has GPUs"),
        ("n.json", nodes({"metadata": {}}), "a node has no name"),
        ("n.json", nodes(node("c", nvidia_com__gpu="8")), "no label of c says which"),
        ("n.json", nodes(node("c", **{"nvidia_com__mig-1g.5gb": "7"})), "c has divided GPUs"),
        ("n.json", nodes(node("c", product("NVIDIA-H20", 8, 141))), "141 GiB by their label"),
        ("n.json", nodes(node("$(x)", product("NVIDIA-L4", 1))), "give a name"),
        ("t.yaml", "resources: {accelerators: [L4:1, T4:1]}", "several to choose"),
        ("t.yaml", "resources: {accelerators: {L4: 1}, any_of: [{region: x}]}", "to choose from"),
        ("t.yaml", "resources: {instance_type: g5.12xlarge}", "name no accelerators"),
        ("t.yaml", "resources: {accelerators: L4:half}", "no whole numbers"),
        ("t.yaml", "resources: {cpus: 8}", "name no accelerators"),
        ("t.yaml", "resources: {accelerators: {L4: 1.5}}", "no whole numbers"),
        ("t.yaml", "resources: {accelerators: {L4: true}}", "no whole numbers"),
        ("t.yaml", "resources: {accelerators: {L4: 0}}", "give a number above 0"),
        ("n.json", '{"kind": "List", "items": 3}', "no node is ready and has GPUs"),
        ("a.txt", "GPU " + "9" * 5000 + ": NVIDIA L4", "Not valid YAML"),
        ("c.json", '{"format": "hetero plan card", "plan": {}}', "this is a plan card, and no"),
    ],
)
def test_what_is_no_definite_fleet_is_told(tmp_path, name, text, says) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CatalogError) as told:
        cluster.find(tmp_path / name)
    assert says in str(told.value)
    assert "Resolve:" in str(told.value)


def test_a_mark_before_the_text_a_comma_after_the_name_and_a_pipe(tmp_path) -> None:
    path = tmp_path / "a1.txt"
    path.write_text("\ufeff" + smi(H100, 8))
    for given in (path, f"{path},"):
        assert rows(cluster.find(given)) == [("a1", "H100-SXM", 8)]
    os.mkfifo(tmp_path / "pipe.json")
    assert not found.lists_nodes(tmp_path / "pipe.json")
    with pytest.raises(CatalogError, match="no text file"):
        cluster.find(tmp_path / "pipe.json")


def test_cluster_files_of_several_are_not_joined(tmp_path) -> None:
    (tmp_path / "a.txt").write_text(smi(H100, 1))
    (tmp_path / "b.yaml").write_text("machines: [{name: b, gpu: L4}]\npreset: helix\n")
    with pytest.raises(CatalogError, match="no list of machines alone"):
        cluster.find(f"{tmp_path}/a.txt,{tmp_path}/b.yaml")
    with pytest.raises(CatalogError, match="no such file"):
        cluster.find(str(tmp_path / "c.txt"))


def test_commands_say_what_they_understood(tmp_path, capsys) -> None:
    from hetero.apps.cli import main

    (tmp_path / "host.txt").write_text(smi("NVIDIA L4", 1))
    asked = ["simulate", str(tmp_path / "host.txt"), "--model", "Llama-3.1-8B", "--requests", "3"]
    with pytest.raises(SystemExit) as end:
        main([*asked, "--router", "round-robin", "--json"])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["cluster"] == "host"
    assert '- {name: "host", gpu: "L4", count: 1, region: "local"}' in said.err
