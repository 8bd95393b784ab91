"""What can happen to a cluster in service: GPUs lost or gained, machines lost, links that slow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero.catalog import Link
from hetero.cluster import Cluster, Network
from hetero.errors import InfeasibleError, require
from hetero.grouping import summed
from hetero.planners.reschedule.service import PhaseService


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """A cluster after something has happened to it.

    Attributes
    ----------
    what
        In words.
    cluster
        What is there now.
    lost
        Names of the groups in service that can serve no longer.
    """

    what: str
    cluster: Cluster
    lost: frozenset[str] = frozenset()


def lose_gpu(service: PhaseService, group: str, machine: str | None = None) -> ClusterChange:
    """One GPU of a group fails; the group is lost with it.

    Parameters
    ----------
    machine
        Machine of the GPU, where the group spans several; by default its first.
    """
    members = service.group(group)
    where = machine or members.pipeline.machines[0].name
    require(
        where in members.machines,
        f"Group {group} has no GPU of machine '{where}'.",
        resolve=f"use {' or '.join(sorted(members.machines))}.",
    )
    return ClusterChange(
        f"a GPU of {where} in group {group} fails",
        fewer(service.cluster, {where: 1}),
        frozenset({group}),
    )


def lose_machine(service: PhaseService, machine: str) -> ClusterChange:
    """A whole machine fails, and every group that uses it."""
    gone = service.cluster.machine(machine)
    lost = frozenset(one.name for one in service.groups if machine in one.machines)
    return ClusterChange(
        f"machine {machine} fails", fewer(service.cluster, {machine: gone.count}), lost
    )


def lose_groups(service: PhaseService, names: frozenset[str]) -> ClusterChange:
    """All GPUs of some groups become unavailable."""
    lost = [service.group(name).pipeline for name in names]
    counts = summed(
        (machine.name, stage.gpus)
        for pipeline in lost
        for stage, machine in zip(pipeline.stages, pipeline.machines, strict=True)
    )
    what = f"{sum(counts.values())} GPUs of {', '.join(sorted(counts))} become unavailable"
    return ClusterChange(what, fewer(service.cluster, counts), names)


def slow_link(service: PhaseService, a: str, b: str, share: float = 0.1) -> ClusterChange:
    """The link between two machines drops to a share of its bandwidth."""
    cluster = service.cluster
    link = cluster.link(a, b)
    require(
        a != b and 0 < share <= 1,
        f"The link from '{a}' to '{b}' at {share} of its bandwidth.",
        resolve="name two machines, and a share above 0 and up to 1.",
    )
    slow = Link(
        name=f"{link.name} at {share:g}",
        bandwidth_gbs=share * link.bandwidth_gbs,
        latency_s=link.latency_s,
        kind=link.kind,
        source=link.source,
    )
    network = cluster.network or Network()
    pairs = {**network.machines, frozenset((a, b)): slow}
    return ClusterChange(
        f"the link between {a} and {b} drops to {share:g}",
        replace(cluster, network=replace(network, machines=pairs)),
    )


def fewer(cluster: Cluster, lost: dict[str, int]) -> Cluster:
    """The cluster without some GPUs of machines; those that have none left are gone.

    Raises
    ------
    InfeasibleError
        If nothing is left.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> left = fewer(cluster("thunderserve-cloud-32"), {"a40": 2, "a5000-1": 4})
    >>> left.gpus, len(left.machines)
    (26, 6)
    """
    machines = []
    for machine in cluster.machines:
        count = machine.count - lost.get(machine.name, 0)
        require(
            count >= 0,
            f"Machine '{machine.name}' has {machine.count} GPUs and cannot lose "
            f"{machine.count - count}.",
            resolve="lose no more than it has.",
        )
        # What is left is rented as before: a machine that lacks a GPU costs the same.
        if count:
            machines.append(replace(machine, count=count))
    for name in lost:
        cluster.machine(name)
    if not machines:
        raise InfeasibleError(
            f"Nothing is left of {cluster.name}.", resolve="wait for machines to come back."
        )
    network = None if cluster.network is None else cluster.network.among(machines)
    return replace(cluster, machines=tuple(machines), network=network)
