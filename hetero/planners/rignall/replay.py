"""A plan of islands as a deployment and a router, to be simulated against a trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from hetero.arrays import Floats
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.errors import InfeasibleError
from hetero.latency.models.moe_reduction import decode_group, prefill_group
from hetero.latency.step import StepModel
from hetero.planners.rignall.assignment import Assignment, IslandGroup
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import BATCH_MOST
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase
from hetero.routers.ranges import Among, RangeShares


def deployment(
    model: IslandModel,
    plan: Assignment,
    *,
    engine: Engine | None = None,
    link: KvLink | None = None,
    name: str = "islands",
) -> Deployment:
    """Replicas of a plan: one per prefill group and one per decode expert group of each island.

    A prefill group works on one prompt at a time, a decode group on one batch that all its GPUs
    advance together, each at the exact step model of the latency model. Groups that the plan
    gives nothing to are left out.

    Parameters
    ----------
    model
        What the rates of the plan were made with.
    engine
        How decode replicas admit requests; its batch limit is set to 1,024 per GPU or
        tensor-parallel group, the largest of the thesis.
    link
        Path of the KV cache; by default the network of one GPU of the slowest prefill group.

    Raises
    ------
    InfeasibleError
        If an island cannot hold the weights in the phase that the plan gives it, which readings
        without that check allow.
    """
    made: list[Replica] = []
    islands: Counter[tuple[str, IslandClass]] = Counter()
    for phase in PHASES:
        for group in plan.of(phase):
            if group.share.any():
                first = islands[phase, group.island]
                made += _replicas(model, group, engine or Engine(), first)
                islands[phase, group.island] += group.count
    if link is None:
        sources = {
            replica.gpu.name for replica in made if replica.role == "prefill" and replica.gpu
        }
        link = KvLink(min(model.device(gpu).network_gbs for gpu in sources))
    return Deployment(name, tuple(made), default_link=link)


def router(model: IslandModel, plan: Assignment, *, among: Among = "shares") -> RangeShares:
    """The routing rule of a plan: requests of a range to its islands as the plan shares them out.

    The weight of a group is the rate that the plan gives it, divided by the number of replicas it
    becomes; replicas stand in the order of :func:`deployment`.
    """
    weights: dict[Phase, list[Floats]] = {"prefill": [], "decode": []}
    for phase in PHASES:
        for group, flow in zip(plan.of(phase), plan.flow_rps(phase), strict=True):
            if group.share.any():
                count = group.count * _groups(model, group.island, phase)
                idle = np.zeros_like(flow)
                for other in PHASES:
                    weights[other] += [flow / count if other == phase else idle] * count
    return RangeShares(
        plan.rates.ranges.end_tokens,
        np.array(weights["prefill"]).T,
        np.array(weights["decode"]).T,
        among=among,
        name=f"islands, by {among}",
    )


def _groups(model: IslandModel, island: IslandClass, phase: Phase) -> int:
    found = model.benchmark(island.gpu, island.size, phase)
    return int(found.dp[found.chosen])


def replica(
    model: IslandModel, gpu: str, phase: Phase, *, tp: int, dp: int, size: int, engine: Engine
) -> Replica:
    """One of the ``dp`` groups of an island, whose attention has tensor parallelism ``tp``.

    Raises
    ------
    InfeasibleError
        If the GPUs cannot hold the weights.
    """
    latency, gpus = model.latency(gpu), size // dp
    free = float(latency.free_bytes(tp=tp, gpus=size if phase == "prefill" else gpus))
    per_token = float(latency.cached_bytes_per_token(tp))
    if free <= 0:
        raise InfeasibleError(
            f"{size} x {gpu} cannot {phase} with tp{tp} dp{dp}: the weights exceed the memory "
            f"of a GPU by {-free / 2**30:.1f} GiB.",
            resolve="plan with a reading whose weights must fit, such as 'fitting'.",
        )
    step: StepModel
    if phase == "prefill":
        step = prefill_group(latency, tp=tp, dp=dp).model
        # One prompt at a time, as the latency model has it.
        engine = Engine(max_step_tokens=1)
        tokens = free / (per_token / tp)
    else:
        whole = model.reading.decode_batch == "gpu" or not model.quirks.group_batch_mixed
        copies = gpus if whole else gpus // tp
        step = decode_group(latency, tp=tp, gpus=gpus, copies=copies, max_batch=BATCH_MOST).model
        engine = replace(engine, max_batch=BATCH_MOST * copies)
        tokens = copies * free / per_token
    device = latency.device.gpu
    return Replica(
        name=f"{phase} {size}x{device.name}",
        step=step,
        kv_tokens=int(tokens),
        kv_bytes_per_token=float(model.llm.kv_bytes_per_token("fp8")),
        engine=engine,
        role=phase,
        gpu=device,
        gpus=gpus,
        precision="fp8",
        kv_precision="fp8",
        usd_per_h=None if device.usd_per_h is None else device.usd_per_h * gpus,
    )


def _replicas(model: IslandModel, group: IslandGroup, engine: Engine, first: int) -> list[Replica]:
    island, phase = group.island, group.phase
    found = model.benchmark(island.gpu, island.size, phase)
    tp, dp = int(found.tp[found.chosen]), _groups(model, island, phase)
    one = replica(model, island.gpu, phase, tp=tp, dp=dp, size=island.size, engine=engine)
    return [
        replace(one, name=f"{one.name} {first + k + 1}.{g + 1}")
        for k in range(group.count)
        for g in range(dp)
    ]
