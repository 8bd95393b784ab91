"""A planned deployment as the file that ``hetero serve`` reads, with its step models beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from hetero import catalog
from hetero.apps.serving.settings import DeploymentFile, load
from hetero.catalog import Gpu
from hetero.deployment import Deployment, Replica
from hetero.errors import CatalogError, HeteroError, ParameterError
from hetero.files import check_new, writing
from hetero.latency import storage
from hetero.routers import factories
from hetero.routers.base import Builtin

_FIRST_PORT = 8001
_LIMITS = ("max_batch", "max_step_tokens", "batching", "block_tokens")


def write(
    deployment: Deployment,
    path: Path | str,
    *,
    model: str,
    router: Builtin | str | Mapping[str, Any] = "hetero",
    urls: Mapping[str, str] = {},
    models: Mapping[str, str] = {},
    keys: Mapping[str, str] = {},
    port: int = 8000,
    force: bool = False,
    **more: Any,
) -> DeploymentFile:
    """Write a deployment of whole replicas for ``hetero serve``, and read it back.

    The step models go into a folder beside the file, called as the file with ``-steps``.

    Parameters
    ----------
    model, router
        Name that clients ask for, and a built-in router, or its name or mapping as the file has it.
    urls, models, keys
        By replica, address of its engine (by default ports of this machine from 8001 on), its own
        name for the model, and the environment variable with its key.
    more
        Further fields of :class:`~hetero.apps.serving.settings.DeploymentFile`.
    """
    path = Path(path)
    check_new(path, force=force)
    if apart := [one.name for one in deployment.replicas if one.role != "both"]:
        raise ParameterError(
            f"'{apart[0]}' serves only one phase, and the dispatcher moves no KV caches.",
            resolve="plan without --split, or use `hetero export --to vllm`: its engines pass "
            "caches on, behind a router that splits phases.",
        )
    steps = _step_files(deployment, f"{path.stem}-steps")
    backends = []
    for k, one in enumerate(deployment.replicas):
        url = urls.get(one.name, f"http://127.0.0.1:{_FIRST_PORT + k}")
        found = _backend(one, url, steps[one.name])
        if one.name in models:
            found["model"] = models[one.name]
        if one.name in keys:
            found["api_key_env"] = keys[one.name]
        backends.append(found)
    text: dict[str, Any] = {"model": model, "port": port}
    text["router"] = named(router, deployment) if isinstance(router, Builtin) else router
    text |= more | {"backends": backends}
    (path.parent / f"{path.stem}-steps").mkdir(exist_ok=True)
    for one in deployment.replicas:
        storage.save(one.step, path.parent / steps[one.name], force=True)
    yaml = YAML()
    yaml.width = 100
    with writing(path, force=force) as part, part.open("w", encoding="utf-8") as out:
        yaml.dump(text, out)
    return load(path)


def named(router: Builtin, deployment: Deployment) -> str | dict[str, Any]:
    """The router as a deployment file names it, with the parameters that are not its defaults.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> from hetero.routers import WeightedRoundRobin
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> pair = Deployment("pair", tuple(Replica(n, step, kv_tokens=50_000) for n in "ab"))
    >>> named(WeightedRoundRobin([3, 1]), pair)
    {'name': 'weighted-round-robin', 'weights': [3, 1]}
    """
    name = router.name.lower().replace(" ", "-")
    options: dict[str, Any] = {}
    for one in fields(router):  # type: ignore[arg-type]  # built-in routers are dataclasses
        value = getattr(router, one.name)
        plain = isinstance(value, str | float | int)
        if one.name in ("name", "memory_based") or not (plain or isinstance(value, Sequence)):
            continue
        if value != one.default:
            options[one.name] = value if plain else list(value)
    try:
        again = factories()[name](**options)
        same = np.array_equal(again.memory(deployment), router.memory(deployment), equal_nan=True)
    except (KeyError, TypeError, HeteroError):
        same = False
    if not same:
        raise ParameterError(
            f"Router '{router.name}' cannot be written into a deployment file.",
            resolve=f"use one of {', '.join(factories())}, or serve it from Python.",
        )
    return {"name": name} | options if options else name


def _step_files(deployment: Deployment, folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in deployment.replicas:
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", one.name).strip("-") or "replica"
        while f"{folder}/{stem}.json" in found.values():
            stem += "-"
        found[one.name] = f"{folder}/{stem}.json"
    return found


def _backend(replica: Replica, url: str, step: str) -> dict[str, Any]:
    engine = replica.engine
    found: dict[str, Any] = {
        "name": replica.name,
        "url": url,
        "step": step,
        "kv_tokens": int(replica.kv_tokens),
    } | {name: getattr(engine, name) for name in _LIMITS}
    if replica.kv_bytes_per_token:
        found["kv_bytes_per_token"] = float(replica.kv_bytes_per_token)
    if replica.gpu is not None and replica.gpu.fp16_tflops is not None:
        found |= {"gpu": _gpu(replica.gpu), "gpus": int(replica.gpus)}
    if replica.usd_per_h is not None:
        found["usd_per_h"] = float(replica.usd_per_h)
    return found


def _gpu(gpu: Gpu) -> str | dict[str, Any]:
    """Its name where the catalog knows it with the same figures, else its figures."""
    figures = ("fp16_tflops", "mem_gib", "mem_bw_gbs")
    with suppress(CatalogError):
        if all(getattr(catalog.gpu(gpu.name), f) == getattr(gpu, f) for f in figures):
            return gpu.name
    return {"name": gpu.name} | {f: float(getattr(gpu, f)) for f in figures}
