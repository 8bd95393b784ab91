r"""Parallel configuration of a group: degrees, route and layers (ThunderServe, Algorithm 2).

Tensor parallelism stays inside a machine, and so inside a type of GPU. For a group the degrees of
its machines are enumerated, the stages ordered by :func:`shortest`, and the layers
divided in proportion to speed, to memory and to mixtures of both, within what each stage holds.
Prefill takes the configuration of least latency, decode that of largest throughput. Configurations
whose memory cannot hold the model are dropped before they are costed.

ThunderServe gives a group one degree (``CostSettings.one_degree``), at most the smallest number of
GPUs of a type. Its algorithm bounds PP by GPUs / T_i, under which the paper's own plans of (1, 2)
on two GPUs and (2, 2) on four could not be; read as GPUs / TP, all GPUs of a group are in use.

Stages stand in the order of the path with the least communication, by dynamic programming.
Stages on one machine are alike, so a subset of stages is a number of stages per machine. With
``C(v, a)`` the least cost of a path that has visited the subset ``v`` and ends on machine ``a``

.. math:: C(v + e_b, b) = \min_a\; C(v, a) + \alpha_{ab} + n\, h\, 2 / \beta_{ab}

ThunderServe's Appendix B has this recursion for the path whose narrowest link is widest: ``C`` is
the largest :math:`-\beta_{ab}` on the path. Where coming back to a machine never pays,

.. math:: hop_{ab} + hop_{cc} \le hop_{ac} + hop_{cb}, \qquad hop_{cc} \le hop_{ac}

for all machines, the stages of each stand together and the subsets are those of the machines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from hetero.arrays import Floats
from hetero.costs.cost import CostModel, Pipeline, PipelineStage, Rates
from hetero.costs.demand import Demand
from hetero.costs.groups import Group, Phase

Configuration: TypeAlias = tuple[tuple[int, int, int], ...]
"""Place in the group, tensor-parallel degree and layers of every stage."""

_MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST_MIXED = 2  # machines up to which their degrees may differ


@dataclass(frozen=True, eq=False)
class Configurations:
    """The best configuration of any group of a cluster for a demand, each found once.

    Source: ThunderServe, Algorithm 2: parallel configuration of a group; TP, PP.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> model = CostModel(cluster("thunderserve-cloud-32"), llm("LLaMA-1-30B"))
    >>> demand = Demand.of(workload.load("azure2023_conv"), rate_rps=5.0)
    >>> best = Configurations(model, demand)
    >>> best.best(((4, 2),), "prefill").label
    '2xA40'
    >>> best.best(((4, 1),), "prefill") is None
    True
    """

    model: CostModel
    demand: Demand
    _known: dict[tuple[object, ...], Configuration | None] = field(default_factory=dict, repr=False)
    _pipelines: dict[tuple[Group, Phase], Pipeline | None] = field(default_factory=dict, repr=False)

    def best(self, group: Group, phase: Phase) -> Pipeline | None:
        """The best configuration for a phase, None where the model does not fit."""
        at = (group, phase)
        if at not in self._pipelines:
            key = (self._shape(group), phase)
            if key not in self._known:
                self._known[key] = self._search(group, phase)
            found = self._known[key]
            self._pipelines[at] = None if found is None else self.pipeline(group, found)
        return self._pipelines[at]

    def pipeline(self, group: Group, configuration: Configuration) -> Pipeline:
        """The pipeline of a group in a configuration."""
        stages = (PipelineStage(group[k][0], t, layers) for k, t, layers in configuration)
        return Pipeline(self.model, tuple(stages))

    def _shape(self, group: Group) -> tuple[object, ...]:
        """What of a group the answer depends on: GPUs, their number, and the links between."""
        machines = [m for m, _ in group]
        kinds = tuple(
            (self.model.machines[m].gpu.name, self.model.machines[m].link, n) for m, n in group
        )
        links = tuple(
            float(matrix[a, b])
            for matrix in (self.model.bandwidth_gbs, self.model.latency_s)
            for a in machines
            for b in machines
        )
        return kinds, links

    def configurations(self, group: Group, phase: str = "both") -> Iterator[Configuration]:
        """Every configuration that is costed: those that the engine can run in a phase."""
        for degrees in self._degrees(group):
            counts = [n // t for (_, n), t in zip(group, degrees, strict=True)]
            stages = sum(counts)
            if stages > min(self.model.llm.layers, self.model.settings.max_stages):
                continue
            path = self._route(group, counts)
            rates = [self.model.rates(group[k][0], degrees[k], len(path) > 1) for k in path]
            most = [
                self.model.most_layers(group[k][0], degrees[k], first=s == 0, last=s == stages - 1)
                for s, k in enumerate(path)
            ]
            if sum(most) < self.model.llm.layers or min(most) < 1:
                continue
            if self.model.misfit([PipelineStage(group[k][0], degrees[k], 1) for k in path], phase):
                continue
            for layers in self._partitions(rates, most):
                yield tuple((k, degrees[k], held) for k, held in zip(path, layers, strict=True))

    def _degrees(self, group: Group) -> Iterator[tuple[int, ...]]:
        options = [
            [t for t in range(1, n + 1) if n % t == 0 and self.model.divides(t)] for _, n in group
        ]
        for degrees in product(*options):
            mixed = len(group) <= _MOST_MIXED and not self.model.settings.one_degree
            if mixed or len(set(degrees)) == 1:
                yield degrees

    def _route(self, group: Group, counts: list[int]) -> tuple[int, ...]:
        machines = [m for m, _ in group]
        at = np.ix_(machines, machines)
        if self.model.settings.one_degree:
            return widest(counts, self.model.bandwidth_gbs[at])[0]
        size = self.model.llm.activation_bytes_per_token("fp16") * self.demand.mean_input
        hop = self.model.latency_s[at] + size / (1e9 * self.model.bandwidth_gbs[at])
        return shortest(counts, hop)[0]

    def _partitions(self, rates: list[Rates], most: list[int]) -> Iterator[tuple[int, ...]]:
        if len(rates) == 1:
            yield (self.model.llm.layers,)
            return
        n = self.demand.mean_input
        speed = np.array([1.0 / _layer_s(rate, n, 0.0, n * n / 2) for rate in rates])
        memory = np.array([rate.usable_bytes for rate in rates])
        seen = set()
        for mixture in _MIXTURES:
            weight = mixture * speed / speed.sum() + (1 - mixture) * memory / memory.sum()
            layers = _rounded(weight, most, self.model.llm.layers)
            if layers not in seen:
                seen.add(layers)
                yield layers

    def _search(self, group: Group, phase: Phase) -> Configuration | None:
        best, value = None, -np.inf
        for one in self.configurations(group, phase):
            found = self.value(group, one, phase)
            if found > value:
                best, value = one, found
        return best

    def value(self, group: Group, configuration: Configuration, phase: Phase) -> float:
        """What is maximised: minus the prefill latency [s], or decode throughput [tokens/s].

        The figures of :class:`Pipeline` in plain floats, because thousands are compared.
        """
        model, demand = self.model, self.demand
        rates = [model.rates(group[k][0], t, len(configuration) > 1) for k, t, _ in configuration]
        held = [layers for *_, layers in configuration]
        fixed = per_token = 0.0
        size = model.llm.activation_bytes_per_token("fp16")
        for (a, *_), (b, *_) in pairwise(configuration):
            pair = group[a][0], group[b][0]
            fixed += float(model.latency_s[pair])
            per_token += size / (1e9 * float(model.bandwidth_gbs[pair]))
        if phase == "prefill":
            n = demand.mean_input
            busy = sum(
                layers * _layer_s(rate, n, 0.0, n * n / 2)
                for rate, layers in zip(rates, held, strict=True)
            )
            return -(busy + (rates[0].step_s + rates[-1].logits_s) + fixed + per_token * n)
        count = len(rates)
        free = min(
            (
                rate.usable_bytes
                - layers * rate.layer_bytes
                - model.end_bytes(first=s == 0, last=s == count - 1)
            )
            / (layers * rate.kv_layer_bytes)
            for s, (rate, layers) in enumerate(zip(rates, held, strict=True))
        )
        batch = min(*(rate.max_batch for rate in rates), int(free / demand.context_tokens))
        if batch < 1:
            return -1.0 / max(free, 1e-9)  # even one mean request is too long
        part, cached = batch / count, batch * demand.context_tokens / count
        times = [
            layers * _layer_s(rate, part, cached, 0.0)
            for rate, layers in zip(rates, held, strict=True)
        ]
        times[0] += rates[0].step_s
        times[-1] += rates[-1].logits_s
        if count > 1:
            last, first = configuration[-1][0], configuration[0][0]
            fixed += float(model.latency_s[group[last][0], group[first][0]])
        return batch / max(sum(times) + fixed + per_token * part, count * max(times))


def _layer_s(rate: Rates, n: float, cached: float, pairs: float) -> float:
    products = max(rate.product_s * (n + rate.padding_tokens), rate.weights_s)
    products += 0.0 if rate.experts is None else float(rate.experts_s(np.asarray(n)))
    rest = rate.cached_s * cached + rate.pair_s * pairs + rate.reduce_s * n + rate.fixed_s
    return products + rest


def _rounded(weight: np.ndarray, most: list[int], layers: int) -> tuple[int, ...]:
    """Whole layers in proportion to weights, from 1 to what each stage holds, adding up.

    Source: ThunderServe, appendix B: layers divided unevenly between stages.
    """
    exact = weight / weight.sum() * layers
    held = [min(max(1, int(share)), limit) for share, limit in zip(exact, most, strict=True)]
    while sum(held) != layers:
        step = 1 if sum(held) < layers else -1
        open_ = [k for k in range(len(held)) if (held[k] < most[k] if step > 0 else held[k] > 1)]
        k = max(open_, key=lambda k: step * (exact[k] - held[k]))
        held[k] += step
    return tuple(held)


def shortest(counts: Sequence[int], hop_s: Floats) -> tuple[tuple[int, ...], float]:
    """Order of stages with the least total time of hops, and that time [s].

    Parameters
    ----------
    counts
        Stages on each machine, above 0, shape (M,).
    hop_s
        Time of a hop from machine to machine [s], shape (M, M); inside on the diagonal.

    Returns
    -------
    Indices of the machines along the path, one per stage; of equal paths the first in order.

    Examples
    --------
    >>> hop = np.array([[1.0, 9.0, 2.0], [9.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    >>> shortest([2, 1, 1], hop)
    ((0, 0, 2, 1), 5.0)
    """
    inside = float(sum((n - 1) * hop_s[m, m] for m, n in enumerate(counts)))
    if _never_back(hop_s):
        across = hop_s[~np.eye(len(hop_s), dtype=bool)]
        if len(across) == 0 or float(across.min()) == float(across.max()):
            order = tuple(range(len(counts)))
            cost = float(across[0]) * (len(counts) - 1) if len(across) else 0.0
        else:
            order, cost = _recursion([1] * len(counts), hop_s)
        return tuple(m for m in order for _ in range(counts[m])), cost + inside
    return _recursion(counts, hop_s)


def widest(counts: Sequence[int], bandwidth_gbs: Floats) -> tuple[tuple[int, ...], float]:
    """Order of stages whose narrowest link has the most bandwidth, and that bandwidth [GB/s].

    Source: ThunderServe, appendix B: pipeline route by dynamic programming over subsets.

    Parameters
    ----------
    counts
        Stages on each machine, above 0, shape (M,).
    bandwidth_gbs
        Bandwidth from machine to machine [GB/s], shape (M, M); inside on the diagonal.

    Returns
    -------
    As :func:`shortest`; the bandwidth of a single stage is infinite.

    Examples
    --------
    >>> link = np.array([[9.0, 1.0, 5.0], [1.0, 9.0, 4.0], [5.0, 4.0, 9.0]])
    >>> widest([2, 1, 1], link)
    ((0, 0, 2, 1), 4.0)
    """
    path, cost = _recursion(counts, -bandwidth_gbs, max, -np.inf)
    return path, -cost


def _never_back(hop_s: Floats) -> bool:
    """Whether leaving a machine and coming back to it never costs less than staying."""
    around = hop_s[:, :, None] + hop_s[None, :, :]  # a -> c -> b
    direct = hop_s[:, None, :] + np.diag(hop_s)[None, :, None]
    return bool(np.all(direct <= around) and np.all(np.diag(hop_s)[None, :] <= hop_s))


def _recursion(
    counts: Sequence[int],
    hops: Floats,
    join: Callable[[float, float], float] = operator.add,
    alone: float = 0.0,
) -> tuple[tuple[int, ...], float]:
    size = len(counts)
    hop = hops.tolist()
    full = tuple(int(count) for count in counts)
    best: dict[tuple[tuple[int, ...], int], tuple[float, tuple[int, ...]]] = {}
    for visited in sorted(product(*(range(count + 1) for count in full)), key=sum):
        for b in range(size):
            if visited[b] == 0:
                continue
            before = (*visited[:b], visited[b] - 1, *visited[b + 1 :])
            if not any(before):
                best[visited, b] = (alone, (b,))
                continue
            options = []
            for a in range(size):
                if before[a] > 0:
                    cost, path = best[before, a]
                    options.append((join(cost, hop[a][b]), (*path, b)))
            best[visited, b] = min(options)
    cost, path = min(best[full, b] for b in range(size) if full[b] > 0)
    return path, cost
