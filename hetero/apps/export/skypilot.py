"""SkyPilot files: a SkyServe service of every family of equal engines, a task of each pipeline.

A SkyServe service is a load balancer before replicas that are all alike, so a mixed fleet becomes
one service per family, and what stands before them divides the requests by the routing table.
Engines that exchange KV caches, and those over several machines, become plain tasks (``sky
launch``): SkyServe's own balancer knows no pairs.

Schema: ``sky.utils.schemas`` of SkyPilot 0.14.
"""

from __future__ import annotations

import shlex
from typing import Any, TypeAlias

from hetero.apps.export import names, read_back, vllm
from hetero.apps.export.service import FIRST_PORT, ServedEngine, Service
from hetero.errors import ExportError, require
from hetero.naming import one_line, slug

Task: TypeAlias = dict[str, Any]

_START_S = 3600


def tasks(service: Service) -> dict[str, Task]:
    """SkyPilot tasks by name; those with a ``service`` section are for ``sky serve up``.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": 2})
    >>> task = tasks(Service.of_deployment(plan, llm))["v100-sxm2-32gb-tp2"]
    >>> task["service"]["replicas"], task["resources"]["accelerators"]
    (4, {'V100-32GB': 2})
    """
    found: dict[str, Task] = {}
    for name, family in service.families().items():
        one = family[0]
        vllm.check(service, one)
        if len(one.machines) == 1 and one.phase == "both":
            found[name] = _task(service, name, one) | {
                "service": {
                    "readiness_probe": {"path": "/health", "initial_delay_seconds": _START_S},
                    "replicas": len(family),
                    "load_balancing_policy": "least_load",
                }
            }
            continue
        for k in range(len(family)):
            label = name if len(family) == 1 else f"{name}-{k}"
            found[label] = _task(service, label, one)
    return found


def _task(service: Service, name: str, one: ServedEngine) -> Task:
    kinds = dict.fromkeys(part.gpu for part in one.parts)
    require(
        len(kinds) <= 1,
        f"{one.name} spans {' and '.join(kinds)}, and the nodes of a SkyPilot task are all alike.",
        resolve="plan with one GPU type per replica, or export to vllm or kubernetes.",
        error=ExportError,
    )
    where = one.parts[0].platform
    if where is None or where.vendor not in ("NVIDIA", "AMD"):
        raise ExportError(
            f"{one.name} stands on {one.parts[0].gpu}, which SkyPilot does not rent with vLLM.",
            resolve="export to vllm or kubernetes.",
        )
    nodes = len(one.machines)
    gpus = sum(part.gpus for part in one.on(one.machines[0]))
    task: Task = {
        "name": slug(name),
        "resources": {
            "accelerators": {names.skypilot(one.parts[0].gpu): gpus},
            "ports": FIRST_PORT,
            "disk_size": disk_gb(service),
        },
        "secrets": {"HF_TOKEN": "", vllm.KEY: ""},
        "run": _run(service, one, nodes),
    }
    if where.vendor == "NVIDIA":
        nixl = " nixl" if one.phase != "both" else ""
        task["setup"] = f"uv pip install --system vllm=={vllm.VERSION}{nixl}"
    else:  # packages of vLLM are built for CUDA; its image has what else is needed
        task["resources"]["image_id"] = f"docker:{where.image}"
    env = dict(vllm.environment(service, one))
    return task | ({"num_nodes": nodes} if nodes > 1 else {}) | ({"envs": env} if env else {})


def _run(service: Service, one: ServedEngine, nodes: int) -> str:
    command = shlex.join(["vllm", "serve", service.model, *vllm.arguments(service, one)])
    notes = "".join(f"# Note: {one_line(note)}\n" for note in vllm.notes(service, one))
    if one.phase != "both":
        notes += "export VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -I | cut -d' ' -f1)\n"
    listen = f"--host 0.0.0.0 --port {FIRST_PORT}"
    if nodes == 1:
        return read_back.script(f"{notes}{command} {listen}\n")
    joined = " ".join(vllm.together(nodes, '"$SKYPILOT_NODE_RANK"', '"$HEAD"'))
    return read_back.script(
        f'{notes}HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        f'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then ROLE="{listen}"; else ROLE=--headless; fi\n'
        f"{command} {joined} $ROLE\n"
    )


def disk_gb(service: Service) -> int:
    """Disk of a node: the checkpoint twice over, and the system [GB]."""
    return 256 + round(2 * service.llm.params * (32 if service.precision == "fp32" else 16) / 8e9)
