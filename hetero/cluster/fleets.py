"""Fleets for money: shipped clusters, homogeneous ones of the same price, parts within a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from hetero import catalog
from hetero.catalog import gpu
from hetero.cluster import Cluster, Machine, Network, find
from hetero.errors import InfeasibleError, ParameterError, require

AS = " as "
# Smaller machines are taken where larger ones would leave more of the money unspent than this.
_UNSPENT = 0.05
_MOST = 200


def fleet(name: str | Path) -> Cluster:
    """Cluster of a name or file, or a homogeneous one that costs the same; with a network.

    Machines of a cluster that states no network are linked by 100 Gbit/s Ethernet, and a note says
    so: planners of pipelines and phases need one, and the others do not mind.

    Parameters
    ----------
    name
        What :func:`hetero.cluster.find` takes, or a cluster, `` as `` and one of its GPU types
        or of the catalog, ``"heteroserve-8 as A100-SXM-80GB"``, or so many GPUs of some:
        ``"heteroserve-8 as 4 A100-SXM-80GB, 2 L40S"``.

    Raises
    ------
    CatalogError
        If there is no such cluster or GPU.
    InfeasibleError
        If the money buys no GPU of that type, or not so many.

    Examples
    --------
    >>> fleet("thunderserve-cloud-32 as A40").gpu_counts
    {'A40': 28}
    >>> fleet("current-small-12 as 5 H100-SXM, 5 L40S").gpu_counts
    {'H100-SXM': 5, 'L40S': 5}
    """
    if isinstance(name, str) and AS in name:
        mixed, kind = name.split(AS, 1)
        parts = [part.split(maxsplit=1) for part in kind.split(",")]
        if all(len(part) == 2 and part[0].isdecimal() for part in parts):
            return _mix(linked(find(mixed)), {one: int(count) for count, one in parts})
        return counterpart(linked(find(mixed)), kind)
    return linked(find(name))


def linked(unlinked: Cluster, link: str = "Ethernet-100G") -> Cluster:
    """A cluster whose machines are linked, by a link of the catalog where it states none.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> linked(cluster("heteroserve-8")).notes[-1]
    'The source states no network; Ethernet-100G between machines is assumed.'
    """
    if unlinked.network is not None or len(unlinked.machines) == 1:
        return unlinked
    between = catalog.link(link)
    return replace(
        unlinked,
        network=Network(within_region=between, between_regions=between),
        notes=(
            *unlinked.notes,
            f"The source states no network; {link} between machines is assumed.",
        ),
    )


def counterpart(
    mixed: Cluster, kind: str, *, usd_per_gpu_h: Mapping[str, float] | None = None
) -> Cluster:
    r"""As many GPUs of one type as the price of a cluster buys, in machines that are all alike.

    .. math:: n = s \lfloor \lfloor P / p \rfloor / s \rfloor

    with P the price of the cluster, p that of one GPU of the type, and s the GPUs of a machine:
    as many as machines of this type have in the cluster (of another type, as its largest have), or
    the largest power of two below that which leaves no more than 5 % of the GPUs unbought. Links
    between machines are those within a region of the cluster.

    Parameters
    ----------
    mixed
        The cluster whose price is spent.
    kind
        A GPU type of it or of the catalog.
    usd_per_gpu_h
        Prices of GPUs [$/h] that hold instead of those in the cluster.

    Raises
    ------
    CatalogError
        If the catalog has no such GPU.
    InfeasibleError
        If the money buys no GPU of that type.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> alike = counterpart(cluster("current-small-12"), "H100-SXM")
    >>> alike.gpu_counts, alike.usd_per_h <= cluster("current-small-12").usd_per_h
    ({'H100-SXM': 7}, True)
    """
    prices = gpu_prices(mixed) | dict(usd_per_gpu_h or {})
    own = {m.gpu.name: m for m in mixed.machines}
    chosen = own[kind].gpu if kind in own else gpu(kind)
    price = prices.get(chosen.name, chosen.usd_per_h)
    unknown = [n for n in mixed.gpu_counts if n not in prices]
    if unknown or price is None:
        raise ParameterError(
            f"{unknown[0] if unknown else kind} of {mixed.name} has no price, so that nothing can "
            "cost the same.",
            resolve="give usd_per_h in the cluster's file, or usd_per_gpu_h.",
        )
    money = sum(count * prices[name] for name, count in mixed.gpu_counts.items())
    # A sum of prices may fall a rounding error short of a whole number of GPUs.
    most = math.floor(money / price * (1.0 + 1e-9))
    if most < 1:
        raise InfeasibleError(
            f"{money:.3f} $/h, the price of {mixed.name}, buys no {kind} at {price:.3f} $/h.",
            resolve="choose a cheaper GPU.",
        )
    sizes = [m.count for m in mixed.machines if m.gpu.name == chosen.name]
    size = _machine_size(max(sizes or [m.count for m in mixed.machines]), most)
    machines = tuple(
        Machine(f"{chosen.name.lower()}-{k + 1}", chosen, size, usd_per_h=size * price)
        for k in range(most // size)
    )
    within = mixed.network.within_region if mixed.network is not None else None
    spent = sum(m.usd_per_h or 0.0 for m in machines)
    return Cluster(
        name=f"{mixed.name}{AS}{chosen.name}",
        machines=machines,
        network=None if within is None else Network(within_region=within),
        title=f"{len(machines) * size} {chosen.name} for the price of {mixed.name}",
        source=f"{mixed.source or mixed.name}, at equal price",
        preset=mixed.preset,
        notes=(f"{spent:.3f} of {money:.3f} $/h are spent, in machines that are all alike.",),
    )


def _mix(mixed: Cluster, counts: Mapping[str, int]) -> Cluster:
    """So many GPUs of each type for no more than the price of a cluster."""
    alone, largest = None, max(machine.count for machine in mixed.machines)
    own = {machine.gpu.name: machine.count for machine in mixed.machines}
    machines: list[Machine] = []
    for kind, count in counts.items():
        alone = counterpart(mixed, kind)
        one, size = alone.machines[0], own.get(kind, largest)
        each, whole = (one.usd_per_h or 0.0) / one.count, count // size
        for k, n in enumerate([size] * whole + [count % size] * (count % size > 0)):
            name = f"{kind.lower()}-{k + 1}"
            machines.append(replace(one, name=name, count=n, usd_per_h=n * each))
    assert alone is not None
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    spent, money = (sum(m.usd_per_h or 0.0 for m in of) for of in (machines, mixed.machines))
    if spent > money * (1.0 + 1e-9):
        raise InfeasibleError(
            f"{text} cost {spent:.3f} $/h, more than the {money:.3f} $/h of {mixed.name}.",
            resolve="take fewer of them.",
        )
    note = f"{spent:.3f} of {money:.3f} $/h are spent."
    name, title = f"{mixed.name}{AS}{text}", f"{text} for the price of {mixed.name}"
    return replace(alone, name=name, title=title, machines=tuple(machines), notes=(note,))


def gpu_prices(mixed: Cluster) -> dict[str, float]:
    """Price of one GPU of each type [$/h], by its machines; types without one are left out."""
    found: dict[str, float] = {}
    for machine in mixed.machines:
        if machine.usd_per_h is None:
            continue
        price = machine.usd_per_h / machine.count
        if not math.isclose(found.setdefault(machine.gpu.name, price), price, rel_tol=1e-9):
            raise ParameterError(
                f"{machine.gpu.name} of {mixed.name} costs {found[machine.gpu.name]:g} and "
                f"{price:g} $/h.",
                resolve="give one price per GPU type with usd_per_gpu_h.",
            )
    return found


def priced(unpriced: Cluster, usd_per_gpu_h: Mapping[str, float]) -> Cluster:
    """A cluster with prices of GPUs [$/h] set anew, machine by machine.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> priced(cluster("xiong-8xv100"), {"V100-SXM2-32GB": 0.5}).usd_per_h
    4.0
    """
    machines = tuple(
        replace(m, usd_per_h=m.count * usd_per_gpu_h[m.gpu.name])
        if m.gpu.name in usd_per_gpu_h
        else m
        for m in unpriced.machines
    )
    return replace(unpriced, machines=machines)


def _machine_size(largest: int, most: int) -> int:
    """GPUs of a machine, see :func:`counterpart`; 1 always loses nothing."""
    size = largest
    while size > 1 and (most // size) * size < (1.0 - _UNSPENT) * most:
        size = 1 << ((size - 1).bit_length() - 1)
    return size


def within(offer: Cluster, usd_per_h: float) -> list[Cluster]:
    """Parts of an offer that cost no more than a budget and to which no machine can be added.

    Machines with the same GPUs, region and price are alike; of these the first are taken.

    Raises
    ------
    InfeasibleError
        If the budget pays for no machine.

    Examples
    --------
    >>> from hetero.cluster import cluster
    >>> found = within(cluster("thunderserve-cloud-32"), 5.0)
    >>> len(found), max(round(one.usd_per_h, 3) for one in found)
    (6, 4.944)
    """
    alike: dict[tuple[object, ...], list[Machine]] = {}
    for machine in offer.machines:
        require(
            machine.usd_per_h is not None,
            f"Machine {machine.name} of {offer.name} has no price.",
            resolve="give its usd_per_h in the cluster file.",
        )
        key = (machine.gpu.name, machine.count, machine.region, machine.usd_per_h, machine.link)
        alike.setdefault(key, []).append(machine)
    prices = [float(some[0].usd_per_h or 0.0) for some in alike.values()]
    choices = []
    for counts in product(*(range(len(some) + 1) for some in alike.values())):
        cost = sum(n * price for n, price in zip(counts, prices, strict=True))
        spare = [
            price
            for n, price, some in zip(counts, prices, alike.values(), strict=True)
            if n < len(some)
        ]
        if any(counts) and cost <= usd_per_h and all(cost + price > usd_per_h for price in spare):
            choices.append(counts)
            require(
                len(choices) <= _MOST,
                f"A budget of {usd_per_h:g} $/h leaves more than {_MOST} choices among the "
                f"machines of {offer.name}.",
                resolve="offer fewer different machines.",
            )
    if not choices:
        raise InfeasibleError(
            f"{usd_per_h:g} $/h rent no machine of {offer.name}, whose cheapest costs "
            f"{min(prices):g} $/h.",
            resolve="raise the budget, or offer cheaper machines.",
        )
    return [
        offer.part(m for n, some in zip(c, alike.values(), strict=True) for m in some[:n])
        for c in choices
    ]
