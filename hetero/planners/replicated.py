"""Deployments of whole replicas: every machine of a cluster divided into instances of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero.catalog import Gpu, KvFormula, Link, Llm
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment, Engine, Replica, replicas
from hetero.errors import require
from hetero.latency import for_gpu
from hetero.latency.resolve import resolved_steps
from hetero.latency.step import StepModel
from hetero.memory import Room, RoomSource

StepSource = Callable[[Gpu, Llm, int], StepModel]
"""Step times of an instance of a model on some GPUs of one type: ``(gpu, llm, degree)``."""


def roofline_steps(*, link: Link | None = None, **efficiency: Any) -> StepSource:
    """Step times from the calibrated roofline, or a variation of it.

    Parameters
    ----------
    link
        Link between the GPUs of a machine instead of the one it has.
    efficiency
        Values of :class:`hetero.latency.models.roofline.Efficiency` to set instead of the
        calibrated ones, such as ``step_overhead_s=5e-3``.
    """

    def steps(gpu: Gpu, llm: Llm, tensor_parallel: int) -> StepModel:
        if link is not None:
            gpu = gpu.linked(link)
        model = for_gpu(gpu, llm, tensor_parallel)
        if efficiency:
            model = replace(model, efficiency=replace(model.efficiency, **efficiency))
        return model.step_model()

    return steps


def replicated(
    cluster: Cluster,
    llm: Llm,
    degrees: Mapping[str, int | Sequence[int]],
    *,
    steps: StepSource | None = None,
    engine: Engine | Callable[[Gpu], Engine] | None = None,
    memory_fraction: float = 0.9,
    overhead_gib: float = 2.0,
    room: RoomSource | None = None,
    kv_formula: KvFormula = "model",
    weight_precision: str = "fp16",
    kv_precision: str = "fp16",
    ranks: int = 1,
) -> Deployment:
    """Whole replicas on the machines of a cluster; no instance spans machines.

    Parameters
    ----------
    degrees
        By machine: the tensor-parallel degree of all its instances, which must divide its GPUs,
        or the degrees of its instances one by one, such as ``(4, 1)``. Machines not named stay
        unused.
    steps
        Where step times come from; by default what is known best under vLLM, see
        :mod:`hetero.latency.resolve`.
    engine
        Engine of every replica, or by its GPU; with ranks, that of each of them.
    room
        Share of the memory and overhead by GPU, model and degree, in place of the two above, such
        as :func:`hetero.memory.engine_room` has them.
    ranks
        Ranks of each instance that share out the experts, each of its tensor-parallel degree.

    Raises
    ------
    CatalogError
        If the cluster has no machine of a name.
    InfeasibleError
        If the model leaves an instance no room for a KV cache.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> found = replicated(cluster("xiong-8xv100"), llm("Llama-3-8B"), {"v100": (4, 1)})
    >>> [(replica.name, replica.gpus) for replica in found.replicas]
    [('v100 t=4', 4), ('v100 t=1', 1)]
    """
    require(
        bool(degrees),
        f"No machine of {cluster.name} is to serve {llm.name}.",
        resolve="give the degree of at least one machine.",
    )
    steps = steps or resolved_steps(precision=weight_precision, kv_precision=kv_precision)
    found: list[Replica] = []
    for name, wanted in degrees.items():
        machine = cluster.machine(name)
        gpu = machine.linked_gpu
        whole = wanted * ranks if isinstance(wanted, int) else [t * ranks for t in wanted]
        chosen = [size // ranks for size in _instances(machine, whole)]
        limits = (engine(gpu) if callable(engine) else engine) or Engine()
        batch, tokens = ranks * limits.max_batch, ranks * limits.max_step_tokens
        limits = replace(limits, max_batch=batch, max_step_tokens=tokens)
        price = None if machine.usd_per_h is None else machine.usd_per_h / machine.count
        for t in dict.fromkeys(chosen):
            require(
                llm.heads % t == 0,
                f"{llm.name} has {llm.heads} attention heads, which {t} GPUs of machine "
                f"{name} cannot share equally.",
                resolve="choose a degree that divides the heads.",
            )
            own = room(gpu, llm, t) if room else Room(memory_fraction, overhead_gib)
            made = replicas(
                gpu,
                llm,
                steps(gpu, llm, t),
                count=chosen.count(t),
                tensor_parallel=t,
                engine=limits,
                name=f"{name} t={t}",
                memory_fraction=own.memory_fraction,
                overhead_gib=own.overhead_gib,
                usd_per_gpu_h=price,
                kv_formula=kv_formula,
                weight_precision=weight_precision,
                kv_precision=kv_precision,
                ranks=ranks,
            )
            found += [replace(one, network_s=cluster.reach_s(name)) for one in made]
    return Deployment(cluster.name, tuple(found))


def _instances(machine: Machine, wanted: int | Sequence[int]) -> list[int]:
    if isinstance(wanted, int):
        require(
            wanted >= 1 and machine.count % wanted == 0,
            f"Machine {machine.name} has {machine.count} GPUs, which instances of {wanted} "
            "cannot share out.",
            resolve=f"choose a degree that divides {machine.count}.",
        )
        return [wanted] * (machine.count // wanted)
    chosen = list(wanted)
    require(
        bool(chosen) and min(chosen) >= 1 and sum(chosen) <= machine.count,
        f"Instances of {chosen} GPUs do not fit machine {machine.name} of {machine.count}.",
        resolve="give degrees of 1 or more that add up to no more than its GPUs.",
    )
    return chosen
