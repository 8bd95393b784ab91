"""Kubernetes manifests: one StatefulSet or LeaderWorkerSet per family of equal engines.

A StatefulSet rather than a Deployment, because a dispatcher that weighs engines against each other
needs an address of each: ``NAME-0.NAME``, ``NAME-1.NAME`` through the headless Service. An engine
over several machines is one group of a LeaderWorkerSet (https://lws.sigs.k8s.io), whose controller
must be installed; it gives the leader the same kind of address. Engines that exchange KV caches
within a machine of the plan share a label, and pod affinity brings them onto one node.

Schemas: ``apps/v1`` and ``v1`` of Kubernetes 1.29 and later, ``leaderworkerset.x-k8s.io/v1``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from hetero.apps.export import names, vllm
from hetero.apps.export.service import FIRST_PORT, Part, ServedEngine, Service
from hetero.catalog.engines import EnginePlatform
from hetero.errors import ExportError, require
from hetero.naming import slug

Manifest: TypeAlias = dict[str, Any]

# Names of secrets and of their keys by variable; none of them has to exist.
_SECRETS = {"HF_TOKEN": ("hf-token", "token"), vllm.KEY: ("vllm-api-key", "key")}
_PART_OF = "app.kubernetes.io/part-of"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_TOGETHER = "hetero/machine"  # label of pods that have to share a node
_START_S, _START_TRIES = 15, 240  # an hour to load the weights


def manifests(service: Service) -> dict[str, list[Manifest]]:
    """Manifests by family of equal engines, each with the Service that names its engines.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": 2})
    >>> found = manifests(Service.of_deployment(plan, llm))
    >>> [(one["kind"], one["metadata"]["name"]) for one in found["v100-sxm2-32gb-tp2"]]
    [('Service', 'v100-sxm2-32gb-tp2'), ('StatefulSet', 'v100-sxm2-32gb-tp2')]
    """
    found: dict[str, list[Manifest]] = {}
    for name, family in service.families().items():
        vllm.check(service, family[0])
        found[name] = (
            [_headless(service, name), _set(service, name, family)]
            if len(family[0].machines) == 1
            else [_groups(service, name, family)]
        )
    return found


def addresses(service: Service) -> dict[str, str]:
    """Address of every engine, by its name, from within the namespace of the manifests."""
    return {
        one.name: f"http://{name}-{k}.{name}:{FIRST_PORT}"
        for name, family in service.families().items()
        for k, one in enumerate(family)
    }


def _labels(service: Service, name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "vllm",
        "app.kubernetes.io/instance": name,
        _PART_OF: slug(service.llm.name),
    }


def _meta(service: Service, name: str, family: tuple[ServedEngine, ...] = ()) -> Manifest:
    notes = vllm.notes(service, family[0]) if family else ()
    told = {"hetero/notes": " ".join(notes)} if notes else {}
    engines = {"hetero/engines": ", ".join(one.name for one in family)} if family else {}
    meta: Manifest = {"name": name, "labels": _labels(service, name)}
    return meta | ({"annotations": engines | told} if engines else {})


def _headless(service: Service, name: str) -> Manifest:
    spec = {
        "clusterIP": "None",
        "selector": _labels(service, name),
        "ports": [{"name": "http", "port": FIRST_PORT, "targetPort": "http"}],
    }
    return _manifest("v1", "Service", _meta(service, name), spec)


def _manifest(version: str, kind: str, meta: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}


def _set(service: Service, name: str, family: tuple[ServedEngine, ...]) -> Manifest:
    spec = {
        "serviceName": name,
        "replicas": len(family),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(service, name)},
        "template": _pod(service, name, family[0], family[0].parts, leads=True),
    }
    return _manifest("apps/v1", "StatefulSet", _meta(service, name, family), spec)


def _groups(service: Service, name: str, family: tuple[ServedEngine, ...]) -> Manifest:
    one = family[0]
    per_machine = [one.on(machine) for machine in one.machines]
    followers = {tuple(part.gpu for part in parts) for parts in per_machine[1:]}
    if len(followers) > 1:
        kinds = " and ".join(sorted({gpu for kinds in followers for gpu in kinds}))
        raise ExportError(
            f"{one.name} has {kinds} on machines after its first, and a LeaderWorkerSet has one "
            "template for all workers.",
            resolve="plan with one GPU type behind the first machine, or export to vllm.",
        )
    template = {
        "size": len(per_machine),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _pod(service, name, one, per_machine[0], leads=True),
        "workerTemplate": _pod(service, name, one, per_machine[1], leads=False),
    }
    spec = {"replicas": len(family), "leaderWorkerTemplate": template}
    version = "leaderworkerset.x-k8s.io/v1"
    return _manifest(version, "LeaderWorkerSet", _meta(service, name, family), spec)


def _pod(
    service: Service, name: str, one: ServedEngine, parts: tuple[Part, ...], *, leads: bool
) -> Manifest:
    kinds = dict.fromkeys(part.gpu for part in parts)
    require(
        len(kinds) <= 1,
        f"{one.name} takes {' and '.join(kinds)} of one machine, and a pod asks for GPUs of "
        "one type.",
        resolve="plan with one GPU type on each machine.",
        error=ExportError,
    )
    label, value = names.node_label(parts[0].gpu)
    resource = _platform(parts[0]).resource
    expression = {"key": label, "operator": "In", "values": [value]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity: Manifest = {"nodeAffinity": {_REQUIRED: terms}}
    shared = {_TOGETHER: slug(machine)} if (machine := service.bound_to(one)) else {}
    if shared:
        near = {
            "labelSelector": {"matchLabels": {_PART_OF: slug(service.llm.name), **shared}},
            "topologyKey": "kubernetes.io/hostname",
        }
        affinity["podAffinity"] = {_REQUIRED: [near]}
    spec = {
        "affinity": affinity,
        "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}],
        "terminationGracePeriodSeconds": 120,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(service, one, parts, leads=leads)],
        # Tensor parallelism passes data through shared memory.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
    }
    return {"metadata": {"labels": _labels(service, name) | shared}, "spec": spec}


def _platform(part: Part) -> EnginePlatform:
    """What vLLM is on a stage; every stage has been checked to have it."""
    assert part.platform is not None
    return part.platform


def _container(
    service: Service, one: ServedEngine, parts: tuple[Part, ...], *, leads: bool
) -> Manifest:
    where, gpus = _platform(parts[0]), sum(part.gpus for part in parts)
    # Kubernetes puts variables in for $(NAME) and takes $$ for a dollar sign.
    given = [service.model, *vllm.arguments(service, one)]
    words = ["vllm", "serve", *(word.replace("$", "$$") for word in given)]
    if leads:
        # Others reach a pod by its own address only.
        words += ["--host", "0.0.0.0", "--port", str(FIRST_PORT)]
    env: list[Manifest] = [
        {"name": name, "value": value} for name, value in vllm.environment(service, one)
    ]
    if len(one.machines) > 1:
        # Both are set by LeaderWorkerSet; Kubernetes puts them in for $(NAME).
        words += vllm.together(len(one.machines), "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)")
        words += [] if leads else ["--headless"]
    if one.phase != "both":
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": own})
    for variable, (secret, key) in _SECRETS.items():
        reference = {"name": secret, "key": key, "optional": True}
        env.append({"name": variable, "valueFrom": {"secretKeyRef": reference}})
    found: Manifest = {
        "name": "vllm",
        "image": where.image,
        "command": words[:2],
        "args": words[2:],
        "env": env,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"limits": {where.resource: str(gpus)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if leads:
        health = {"httpGet": {"path": "/health", "port": "http"}}
        found["ports"] = [{"name": "http", "containerPort": FIRST_PORT}]
        found["startupProbe"] = health | {
            "periodSeconds": _START_S,
            "failureThreshold": _START_TRIES,
        }
        found["readinessProbe"] = health | {"periodSeconds": 5}
        found["livenessProbe"] = health | {"periodSeconds": 15, "failureThreshold": 4}
    return found
