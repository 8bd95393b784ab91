"""Groups of GPUs: how many of which machine, which of them are alike, and first guesses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from hetero.costs.cost import CostModel
from hetero.grouping import grouped, summed

Phase: TypeAlias = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
Group: TypeAlias = tuple[tuple[int, int], ...]
"""GPUs of a group: (machine, number) pairs, sorted by machine, numbers above 0."""

Design: TypeAlias = tuple[tuple[Group, Phase], ...]
"""Groups with their phases, sorted: a solution of the upper level."""

P = TypeVar("P")


def group(counts: Iterable[tuple[int, int]]) -> Group:
    """The group with these numbers of GPUs per machine; zeros are dropped."""
    return tuple(sorted((m, int(n)) for m, n in counts if n > 0))


def design(parts: Iterable[tuple[Group, Phase]]) -> Design:
    """The design with these groups, in the order that makes equal ones equal."""
    return tuple(sorted(parts))


def merged(a: Group, b: Group) -> Group:
    """The GPUs of two groups together.

    Examples
    --------
    >>> merged(((0, 2), (1, 1)), ((1, 3),))
    ((0, 2), (1, 4))
    """
    return group(summed((*a, *b)).items())


def without(one: Group, machine: int, gpus: int) -> Group:
    """The group without some GPUs of a machine."""
    return group((m, n - gpus if m == machine else n) for m, n in one)


def two_of(parts: list[P], rng: np.random.Generator) -> tuple[P, P, list[P]] | None:
    """Two parts drawn at random, and the rest; None where there are fewer."""
    if len(parts) < 2:
        return None
    i, j = (int(k) for k in rng.choice(len(parts), 2, replace=False))
    return parts[i], parts[j], [part for k, part in enumerate(parts) if k not in (i, j)]


def other(phase: Phase) -> Phase:
    """The phase a flip leads to."""
    return "decode" if phase == "prefill" else "prefill"


@dataclass(frozen=True, eq=False)
class Fleet:
    """What the search needs to know of a cluster beside costs.

    Attributes
    ----------
    held
        Groups that hold the model already, whatever the machines are now.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> fleet = Fleet(CostModel(cluster("thunderserve-cloud-32"), llm("LLaMA-1-30B")))
    >>> [fleet.fits(group([(0, n)])) for n in (1, 2)]
    [False, True]
    """

    model: CostModel
    held: frozenset[Group] = frozenset()

    @cached_property
    def inventory(self) -> tuple[int, ...]:
        """GPUs of each machine."""
        return tuple(machine.count for machine in self.model.machines)

    @cached_property
    def needed_bytes(self) -> float:
        """Weights of one copy of the model [bytes]."""
        return float(self.model.llm.weight_bytes(self.model.settings.engine.precision))

    @cached_property
    def gpu_bytes(self) -> tuple[float, ...]:
        """Memory that the engine may use on one GPU of each machine [bytes]."""
        return tuple(self.model.rates(m, 1).usable_bytes for m in range(len(self.inventory)))

    def fits(self, one: Group) -> bool:
        """The early checks: memory exceeds the weights, stages are few, the engine allows them.

        Source: ThunderServe, section 3.2: early checks of a neighbour.
        """
        if one in self.held:
            return True
        if sum(n * self.gpu_bytes[m] for m, n in one) <= self.needed_bytes:
            return False
        settings, gpus = self.model.settings, sum(n for _, n in one)
        if not self.model.joins(one) or gpus > (settings.max_gpus or gpus):
            return False
        if settings.one_degree:
            shared = math.gcd(*(n for _, n in one))
            return gpus // shared * self._fewest[shared] <= settings.max_stages
        return sum(self._fewest[n] for _, n in one) <= settings.max_stages

    def joined(self, parts: Group) -> list[Group]:
        """What is left of several machines as one group that fits or else as several.

        These take equal numbers of GPUs of as few machines of a type as fit; the rest is left out.
        Where none fits it is still one group, which others may take GPUs of, if the engine allows.
        """
        if self.fits(parts):
            return [parts]
        alike = grouped(((self.model.machines[m].gpu, n), (m, n)) for m, n in parts)
        found = []
        for some in alike.values():
            least = next((k for k in range(1, len(some) + 1) if self.fits(group(some[:k]))), None)
            if least is not None:
                last = len(some) - least + 1
                found += [group(some[k : k + least]) for k in range(0, last, least)]
        return found or [parts] * self.model.joins(parts)

    @cached_property
    def _fewest(self) -> tuple[int, ...]:
        """Fewest stages of 0, 1, ... GPUs of one machine."""
        return (
            0,
            *(
                min(n // t for t in range(1, n + 1) if n % t == 0 and self.model.divides(t))
                for n in range(1, max(self.inventory) + 1)
            ),
        )

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each machine, the first one with the same GPUs, links and price."""
        keys = [(m.gpu, m.link, m.count, m.usd_per_h) for m in self.model.machines]
        return tuple(
            next((k for k in range(m) if keys[k] == key and self._same_links(k, m)), m)
            for m, key in enumerate(keys)
        )

    def _same_links(self, a: int, b: int) -> bool:
        """Whether exchanging two machines leaves all links as they are."""
        order = np.arange(len(self.inventory))
        order[a], order[b] = b, a
        at = np.ix_(order, order)
        return all(
            bool(np.array_equal(matrix, matrix[at]))
            for matrix in (self.model.bandwidth_gbs, self.model.latency_s)
        )

    def canonical(self, one: Design) -> Design:
        """The same design with machines of a kind renamed, so that mirror images often coincide.

        Machines of a kind are sorted by what the groups take of them; designs that this does not
        bring together are told apart, which costs time and nothing else.
        """
        uses: dict[int, list[tuple[object, ...]]] = {m: [] for m in range(len(self.inventory))}
        for members, phase in one:
            shape = tuple(sorted((self.kinds[m], n) for m, n in members))
            for m, n in members:
                uses[m].append((n, phase, shape))
        renamed: dict[int, int] = {}
        for kind in set(self.kinds):
            alike = [m for m in range(len(self.kinds)) if self.kinds[m] == kind]
            ordered = sorted(alike, key=lambda m: (sorted(map(repr, uses[m])), m))
            renamed |= dict(zip(ordered, alike, strict=True))
        return design((group((renamed[m], n) for m, n in members), ph) for members, ph in one)

    def clusters(self, rng: np.random.Generator) -> Design:
        """First design: GPUs clustered by bandwidth, as many groups as fit; phases drawn.

        Hierarchical clustering (average linkage, distance 1 / bandwidth) of the GPU-to-GPU
        matrix; of all cuts of the tree the one with the most groups of which each can hold the
        model. GPUs inside one machine are equally far from each other, so a cluster that is a
        whole machine is divided evenly into as many groups as still fit. Where no
        cut gives two groups, as when a machine has lost GPUs and what is left of it does not
        serve, every machine gives as many GPUs as do; where no machine holds the model, alike ones
        are joined.

        Source: ThunderServe, section 3.2: first groups by hierarchical clustering of bandwidth.
        """
        where = np.repeat(np.arange(len(self.inventory)), self.inventory)
        distance = 1.0 / self.model.bandwidth_gbs[np.ix_(where, where)]
        np.fill_diagonal(distance, 0.0)
        parts: list[Group] = [group((m, int(n)) for m, n in enumerate(self.inventory))]
        if len(where) > 1:
            tree = linkage(squareform(distance, checks=False), method="average")
            # The tree from its leaves: after k merges there are k clusters less than GPUs.
            left = {k: group([(int(m), 1)]) for k, m in enumerate(where)}
            cuts = [list(left.values())]
            for k, (a, b, *_) in enumerate(tree):
                left[len(where) + k] = merged(left.pop(int(a)), left.pop(int(b)))
                cuts.append(list(left.values()))
            plain = next((cut for cut in cuts if all(self.fits(one) for one in cut)), parts)
            # One group of everything serves no two phases; then some GPUs stay idle at first.
            parts = (
                plain if len(plain) > 1 else self._by_machine() or self.joined(parts[0]) or plain
            )
        parts = [piece for one in parts for piece in self._divided(one)]
        drawn = rng.integers(0, 2, len(parts))
        if len(parts) > 1 and drawn.min() == drawn.max():
            drawn[0] = 1 - drawn[0]  # a design needs both phases
        return design((one, PHASES[int(k)]) for one, k in zip(parts, drawn, strict=True))

    def _by_machine(self) -> list[Group]:
        """Of every machine as many of the smallest groups that fit as it has GPUs for."""
        found: list[Group] = []
        for m, count in enumerate(self.inventory):
            sizes = [n for n in range(1, count + 1) if self.fits(((m, n),))]
            found += [((m, n),) for n in sizes[:1] for _ in range(count // n)]
        return found

    def _divided(self, one: Group) -> Iterator[Group]:
        if len(one) > 1:
            yield one
            return
        ((m, n),) = one
        pieces = max((k for k in range(1, n + 1) if self.fits(((m, n // k),))), default=1)
        for k in range(pieces):
            yield ((m, n // pieces + (k < n % pieces)),)
