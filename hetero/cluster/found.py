"""Fleets as other tools tell them, in the form of a cluster file.

Read are what ``nvidia-smi -L`` prints, of one host or of several under headings or behind their
names; ``kubectl get nodes -o json``; and a SkyPilot task. :func:`hetero.cluster.find` takes such a
file in place of a cluster file, a folder of them, or several with commas between.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero import catalog
from hetero.catalog.gpus import skypilot_names
from hetero.errors import CatalogError
from hetero.files import parse_yaml
from hetero.files import text as text_in
from hetero.grouping import summed
from hetero.naming import good, one_line, slug

if TYPE_CHECKING:
    from hetero.cluster.topology import Cluster

NOTE = "Links between machines, and prices of their own, stand in no such list."
"""Note of a cluster that another tool told."""

_GPU = re.compile(r"(?:(\S+):\s+)?GPU (\d{1,9}): (.+?)(?: \(UUID: .*\))?")
# Labels that name the GPU of a node, the surest first, and the resource that counts them.
_PRODUCTS = {
    "nvidia.com/gpu.product": "nvidia.com/gpu",
    "amd.com/gpu.product-name": "amd.com/gpu",
    "cloud.google.com/gke-accelerator": "nvidia.com/gpu",
    "node.kubernetes.io/instance-type": "nvidia.com/gpu",
}
_LISTS = ("List", "NodeList", "Node")
_MARK = "\ufeff"  # with which some editors and shells begin a file
_REGION = "topology.kubernetes.io/region"
_SAME_SIZE = 0.08  # of the memory: labels count what the driver sees
_WHOLE = "describe the parts under gpus: in a cluster file, or give whole GPUs"
_NODES = (
    "give what `kubectl get nodes -o json` prints where NVIDIA's GPU feature discovery or AMD's "
    "node labeller runs"
)


def form(text: str, path: Path) -> Any:
    """The content of a file in the form of a cluster file, which it may have already."""
    text = text.removeprefix(_MARK)
    if any(_GPU.fullmatch(line.strip()) for line in text.splitlines()):
        return _told(f"nvidia-smi -L, {path.name}", _hosts(text, path))
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = parse_yaml(text, path)
    if not isinstance(raw, dict) or "machines" in raw:
        return raw
    if raw.get("kind") in _LISTS:
        rows, without = _nodes(raw, path)
        left_out = f", without {', '.join(without)} (not ready)" if without else ""
        return _told(f"kubectl get nodes, {path.name}{left_out}", rows)
    if "resources" in raw:
        return _told(f"SkyPilot task {path.name}", _task(raw, path))
    if raw.get("format") == "hetero plan card":
        what, fleet = "this is a plan card, and no fleet", "give the cluster file that it was of"
        raise _refused(path, what, f"{fleet}, or say `hetero simulate` or `hetero export` of it")
    return raw


def _told(source: str, machines: list[dict[str, Any]]) -> dict[str, Any]:
    return {"source": source, "machines": machines, "notes": [NOTE]}


def lists_nodes(path: Path | str) -> bool:
    """Whether a file is what kubectl prints of nodes, and no plan card."""
    try:
        raw = json.loads(text_in(path).removeprefix(_MARK))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("kind") in _LISTS


def together(forms: Iterable[Any], paths: Sequence[Path]) -> dict[str, Any]:
    """Several files as one: all their machines, without prices and links of their own."""
    each = [one if isinstance(one, dict) else {} for one in forms]
    for one, path in zip(each, paths, strict=True):
        if "machines" not in one or {"gpus", "network", "preset"} & one.keys():
            what = "it is no list of machines alone, and several files are one fleet"
            raise _refused(path, what, "write one cluster file, or give only lists of GPUs")
    return {
        "name": "+".join(slug(path.stem) for path in paths)[:100],
        "source": "; ".join(str(one["source"]) for one in each if one.get("source")),
        "machines": [row for one in each for row in one["machines"] or ()],
        "notes": [NOTE],
    }


def text_of(fleet: Cluster) -> str:
    """The machines of a cluster as a cluster file, under the catalog's names."""
    said = "name: {}\nsource: {}\nmachines:\n".format(*map(json.dumps, (fleet.name, fleet.source)))
    row = "  - {{name: {}, gpu: {}, count: {}, region: {}}}\n"
    each = ((m.name, m.gpu.name, m.count, m.region) for m in fleet.machines)
    return said + "".join(row.format(*map(json.dumps, values)) for values in each)


def _hosts(text: str, path: Path) -> list[dict[str, Any]]:
    host = path.stem if good(path.stem) else slug(path.stem)
    found: dict[tuple[str, int], str] = {}
    for line in (each.strip() for each in text.splitlines()):
        if line.startswith("MIG "):
            raise _refused(path, f"{host} has divided GPUs ({line.split(':')[0]})", _WHOLE)
        if gpu := _GPU.fullmatch(line):
            place = gpu[1] or host, int(gpu[2])
            if place in found:
                what = f"GPU {place[1]} of {place[0]} is there twice, as if of two hosts"
                raise _refused(path, what, "write the name of each host above its GPUs")
            found[place] = gpu[3]
        else:
            words = [one for one in re.sub(r"[^\w.-]", " ", line).split() if one.strip("-.")]
            # A prompt with the command that was typed, or a heading.
            at = words.index("nvidia-smi") - 1 if "nvidia-smi" in words else 0
            host = words[at].removesuffix(".txt") if words and at >= 0 else host
    counts = summed(((place[0], gpu), 1) for place, gpu in found.items())
    return _rows((of, gpu, count, "") for (of, gpu), count in counts.items())


def _rows(found: Iterable[tuple[str, str, int, str]]) -> list[dict[str, Any]]:
    """One row per host and GPU: a machine has GPUs of one type, so that of two is two machines."""
    listed = list(found)
    times = Counter(host for host, *_ in listed)
    names = (host if times[host] == 1 else f"{host}-{slug(gpu)}" for host, gpu, *_ in listed)
    keys = ("name", "gpu", "count", "region")
    return [
        dict(zip(keys, (name, gpu, count, region or "local"), strict=True))
        for name, (_, gpu, count, region) in zip(names, listed, strict=True)
    ]


def _nodes(content: Mapping[str, Any], path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    found, without = [], []
    items = content.get("items", [content])
    for node in items if isinstance(items, list) else ():
        try:
            name = one_line(str(node["metadata"]["name"]))
            labels, status = dict(node["metadata"].get("labels") or {}), node["status"]
            free = dict(status.get("allocatable") or status.get("capacity") or {})
            ready = {one["type"]: one["status"] for one in status.get("conditions") or ()}
            up = ready.get("Ready", "True") == "True"  # "Unknown" is a node that fell silent
            off = not up or (node.get("spec") or {}).get("unschedulable")
            label = next((one for one in _PRODUCTS if one in labels), "")
            counted = int(free.get(_PRODUCTS.get(label, "nvidia.com/gpu"), 0))
            count = int(labels.get("nvidia.com/gpu.count", counted))
            memory = float(labels.get("nvidia.com/gpu.memory", 0)) / 1024
            parts = [one_line(key) for key, n in free.items() if "/mig-" in key and int(n)]
        except (KeyError, TypeError, ValueError, AttributeError):
            what = "a node has no name, status or whole number of GPUs"
            raise _refused(path, what, _NODES) from None
        if off or not (count or parts):
            without += [name] if count else []
            continue
        if parts:
            raise _refused(path, f"{name} has divided GPUs ({parts[0]})", _WHOLE)
        if not label:
            raise _refused(path, f"no label of {name} says which GPUs it has", _NODES)
        gpu = one_line(str(labels[label]))
        with suppress(CatalogError):  # unknown names are told with all of the file
            known = catalog.gpu(gpu)
            if memory and abs(known.mem_gib / memory - 1) > _SAME_SIZE:
                what = f"GPUs of {name} have {memory:.0f} GiB by their label, and {gpu} is "
                what += f"{known.name} of {known.mem_gib:g} GiB"
                gpu = ""
        if not gpu:
            raise _refused(path, what, "describe that GPU under gpus: in a cluster file")
        found.append((name, gpu, count, one_line(str(labels.get(_REGION, "")))))
    if not found:
        raise _refused(path, "no node is ready and has GPUs", _NODES)
    return _rows(found), without


def _task(content: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    asked = content["resources"] if isinstance(content["resources"], dict) else {}
    given = asked.get("accelerators")
    (said, count), *more = given.items() if isinstance(given, dict) and given else [(given, None)]
    if not isinstance(said, str) or more or {"any_of", "ordered"} & asked.keys():
        what = "its resources name no accelerators, or several to choose from"
        raise _refused(path, what, "leave one, as in accelerators: {H100: 8}")
    name, _, number = (part.strip() for part in said.partition(":"))
    try:
        asked_for = number or 1 if count is None else count
        whole, copies = int(str(asked_for)), int(str(content.get("num_nodes", 1)))
    except ValueError:
        what = "its accelerators or num_nodes are no whole numbers"
        raise _refused(path, what, "write them as in accelerators: {H100: 8}") from None
    usual = {known.lower(): gpu for gpu, known in reversed(skypilot_names().items())}
    task = str(content.get("name") or path.stem)
    row = {
        "name": task if good(task) else slug(task),
        "gpu": usual.get(name.lower(), name),
        "count": whole,
        "region": str(asked.get("region") or "local"),
    }
    return [row | ({"copies": copies} if copies != 1 else {})]


def _refused(path: Path, what: str, resolve: str) -> CatalogError:
    return CatalogError(f"{path}: {what}.", resolve=f"{resolve}.")
