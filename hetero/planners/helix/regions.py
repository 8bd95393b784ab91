"""Search over regions: which of them hold a copy of the model together, and each line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy.sparse.csgraph import connected_components

from hetero.placement import Problem
from hetero.planners.helix.assemble import Layout, exchange, of_chain, of_line, place
from hetero.planners.helix.blocks import Pool, line
from hetero.planners.helix.bound import simple_bound
from hetero.planners.helix.groups import NodeGroup, groups
from hetero.streams import stream

_LINKED = 300  # nodes beyond which regions are planned apart, each as a line of its own
_REGIONS = 4  # regions up to which every set of them is considered
_NARROW = (0.75, 0.5, 0.25)  # quantiles of the links into a region that its entry is made for
_MANY = 60  # nodes beyond which less is tried per line, as every flow takes longer


@dataclass(frozen=True, slots=True)
class PlacementEffort:
    """How much is tried; counts only.

    Attributes
    ----------
    precision
        Relative precision of the flow that blocks are sought for.
    steps
        Steps that throughputs are rounded to in blocks.
    variety
        Rounds of further blocks for the integer program.
    exchanges
        Layouts evaluated by hill climbing.
    exact_nodes
        Nodes of the exact program's search tree.
    shallow
        Shares of the best flow for which shallower placements are sought as well.
    keep
        Placements that are kept.
    proof
        Whether a bound closer than that of work alone is sought, which takes most of the time.
    """

    precision: float = 1e-4
    steps: int = 2_000
    variety: int = 30
    exchanges: int = 1_000
    exact_nodes: int = 5_000
    shallow: tuple[float, ...] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    keep: int = 12
    proof: bool = True

    def chains_only(self) -> PlacementEffort:
        """Only the single chain."""
        return replace(self, precision=np.inf)


class LayoutPool:
    """Distinct layouts with the largest flow."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.layouts: dict[bytes, tuple[Layout, str]] = {}

    def add(self, layout: Layout, method: str) -> None:
        """Remember a layout that has a flow."""
        if layout.value > 0:
            self.layouts.setdefault(_shape(layout), (layout, method))

    @property
    def best(self) -> Layout:
        """The layout of the largest flow."""
        return max((layout for layout, _ in self.layouts.values()), key=lambda one: one.value)

    @property
    def value(self) -> float:
        """The largest flow [tokens/s], 0 where there is no layout."""
        return self.best.value if self.layouts else 0.0

    def sorted(self) -> list[tuple[Layout, str]]:
        """Layouts by falling flow."""
        return sorted(self.layouts.values(), key=lambda item: -item[0].value)[: self.keep]


def _shape(layout: Layout) -> bytes:
    """Equal for layouts that differ only in which of several equal nodes does what."""
    kinds = [(node.kind.name, node.region) for node in layout.problem.nodes]
    held = zip(layout.starts.tolist(), layout.stops.tolist(), strict=True)
    return repr((sorted(zip(kinds, held, strict=True)), round(layout.value, 3))).encode()


def too_small(problem: Problem) -> str:
    """Why a problem has no placement at all, empty where it may have one."""
    held = sum(node.max_layers for node in problem.nodes)
    if held >= problem.llm.layers:
        return ""
    largest = max(problem.nodes, key=lambda node: node.max_layers)
    return (
        f"The {len(problem.nodes)} nodes of {problem.name} hold at most {held} of the "
        f"{problem.llm.layers} layers of {problem.llm.name} together ('{largest.name}' with "
        f"{largest.max_layers} the most)."
    )


def regions(
    problem: Problem, found: LayoutPool, upper: float, effort: PlacementEffort, seed: int
) -> None:
    """Search all regions as one line and, where links between them bind, sets of regions.

    Many nodes in regions are also one line whose flow crosses over many links at once.
    """
    parts = _parts(problem, upper)
    count, together = len(problem.nodes), not all(_holds(problem, part) for part in parts)
    # Where every region holds parts of its own, lines over single links are not worth their time.
    if len(parts) == 1 or count <= (_LINKED if together else _MANY):
        _line_of(problem, parts, found, upper, effort, seed)
    if len(parts) > 1:
        _sets(problem, parts, found, upper, effort, seed)
        if _MANY < count <= _LINKED and np.isfinite(effort.precision):
            _crossed(problem, parts, found, upper, effort)


def _parts(problem: Problem, upper: float) -> list[list[int]]:
    """Nodes by region; regions whose links all carry ``upper`` count as one."""
    region = {name: p for p, name in enumerate(problem.regions)}
    at = np.array([region[node.region] for node in problem.nodes])
    least = np.full((len(region), len(region)), np.inf)
    np.minimum.at(least, (at[:, None], at[None, :]), problem.link_tokens_per_s[:-1, :-1])
    _, label = connected_components(np.minimum(least, least.T) >= upper, directed=False)
    return [np.flatnonzero(label[at] == one).tolist() for one in dict.fromkeys(label.tolist())]


def _holds(problem: Problem, nodes: Sequence[int]) -> bool:
    return sum(problem.nodes[k].max_layers for k in nodes) >= problem.llm.layers


def _line_of(
    problem: Problem,
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    upper: float,
    effort: PlacementEffort,
    seed: int,
) -> None:
    """Best single line through all the nodes, in and around one order of the parts."""
    kinds, layers, count = groups(problem), problem.llm.layers, len(problem.nodes)
    draws = stream(seed, "exchange")
    if not np.isfinite(effort.precision):
        if (best_chain := chain(kinds, layers)) is not None:
            layout = of_chain(problem, kinds, best_chain[1])
            found.add(layout, "chain")
            if layout.value < best_chain[0] * (1 - 1e-9) and count <= _MANY:
                found.add(exchange(layout, effort.exchanges, draws), "chain, exchanged")
        return
    own = [[t for t, g in enumerate(kinds) if g.members[0] in set(part)] for part in parts]
    best = found.value
    many = count > _MANY
    rounds = int(effort.exchanges * min(1.0, (_MANY / count) ** 2))
    precision = max(effort.precision, 1e-3) if many or len(parts) > 1 else effort.precision
    variants: list[tuple[list[Pool], int]] = []
    if len(parts) == 1:
        variants.append(([Pool(tuple(own[0]))], 0))
    else:
        order = sorted(
            range(len(parts)),
            key=lambda p: -sum(problem.nodes[k].tokens_per_s.max() for k in parts[p]),
        )
        for quantile in (0.5,) if many else _NARROW:
            links = [_into(problem, part, parts, quantile) for part in parts]
            for first in order[:2] if many else order:
                pools = [Pool(tuple(t), int(p != first), links[p]) for p, t in enumerate(own)]
                variants.append((pools, first))
    top = min(upper, simple_bound(problem))
    for pools, first in variants:
        low, high = best, top
        flow = low * (1 + 10 * precision) if low > 0 else high / 2
        while high - low > precision * high and flow < high:
            made = line(pools, kinds, layers, flow, steps=effort.steps, variety=effort.variety)
            if made is None:
                high = flow
            else:
                layout = of_line(problem, kinds, made, first)
                if layout.value < flow * (1 - 1e-3):
                    layout = exchange(layout, rounds // 3, draws, target=flow)
                found.add(layout, "blocks")
                best, low = max(best, layout.value), max(flow, min(layout.value, high))
            flow = (low + high) / 2
    if best <= 0:
        return
    for share in effort.shallow:
        pools, first = variants[0]
        made = line(pools, kinds, layers, share * best, steps=effort.steps)
        if made is not None:
            found.add(of_line(problem, kinds, made, first), "shallower blocks")
    found.add(exchange(found.best, rounds, draws, target=upper), "exchange")


def _into(
    problem: Problem, part: Sequence[int], parts: Sequence[Sequence[int]], quantile: float
) -> float:
    """Capacity of a link into a part from another one."""
    others = [k for other in parts if other is not part for k in other]
    return float(np.quantile(problem.link_tokens_per_s[np.ix_(others, list(part))], quantile))


def _sets(
    problem: Problem,
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    upper: float,
    effort: PlacementEffort,
    seed: int,
) -> None:
    """Copies of the model side by side: every set of regions that holds one carries its own."""
    count = len(parts)
    if len(problem.nodes) > _MANY:
        # Regions that hold a copy stand alone, the others together.
        small = tuple(p for p in range(count) if not _holds(problem, parts[p]))
        sets = [(p,) for p in range(count) if p not in small] + ([small] if small else [])
    else:
        sizes = range(1, count) if count <= _REGIONS else (1, 2)
        sets = [chosen for size in sizes for chosen in combinations(range(count), size)]
    nodes = {s: [k for p in s for k in parts[p]] for s in sets}
    sets = [s for s in sets if _holds(problem, nodes[s])]
    tops = {s: simple_bound(problem.only(nodes[s])) for s in sets}
    done: dict[tuple[int, ...], Layout] = {}
    for cover in _covers(sets, tops):
        if sum(tops[s] for s in cover) <= found.value * (1 + 1e-3) or len(cover) < 2 <= len(sets):
            continue
        for s in cover:
            if s not in done:
                some, alone = LayoutPool(effort.keep), problem.only(nodes[s])
                ends = np.cumsum([len(parts[p]) for p in s])
                own = [range(end - len(parts[p]), end) for p, end in zip(s, ends, strict=True)]
                _line_of(alone, own, some, upper, effort.chains_only(), seed)
                if np.isfinite(effort.precision):
                    _line_of(alone, own, some, tops[s], replace(effort, shallow=()), seed)
                if some.layouts:
                    done[s] = some.best
        if all(s in done for s in cover):
            starts = np.full(len(problem.nodes), -1, dtype=np.int64)
            stops = starts.copy()
            for s in cover:
                starts[nodes[s]], stops[nodes[s]] = done[s].starts, done[s].stops
            found.add(Layout(problem, starts, stops), "copies by region")


def _covers(
    sets: Sequence[tuple[int, ...]], tops: dict[tuple[int, ...], float]
) -> list[tuple[tuple[int, ...], ...]]:
    """Disjoint sets that cannot be joined by a further one, the most promising first."""
    covers: list[tuple[tuple[int, ...], ...]] = []

    def grow(chosen: tuple[tuple[int, ...], ...], begin: int) -> None:
        used = {p for s in chosen for p in s}
        grown = False
        for k in range(begin, len(sets)):
            if not used & set(sets[k]):
                grow((*chosen, sets[k]), k + 1)
                grown = True
        if chosen and not grown and len(covers) < 2_000:
            covers.append(chosen)

    grow((), 0)
    return sorted(covers, key=lambda cover: -sum(tops[s] for s in cover))[:40]


def _crossed(
    problem: Problem,
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    upper: float,
    effort: PlacementEffort,
) -> None:
    """One line through all regions whose flow crosses between them over many links at once."""
    kinds, layers = groups(problem), problem.llm.layers
    # The smallest regions stand at the ends, where one narrow block is enough.
    order = sorted(parts, key=len)
    order = order[::2] + order[1::2][::-1]
    link = float(np.median([_into(problem, part, order, 0.5) for part in order]))
    low, high = found.value, min(upper, simple_bound(problem))
    while link > 0 and high - low > 1e-3 * high:
        flow = (low + high) / 2
        pools = [
            Pool(
                tuple(t for t, g in enumerate(kinds) if g.members[0] in set(part)),
                2 - (p in (0, len(order) - 1)),
                float(np.sqrt(link * flow)),
            )
            for p, part in enumerate(order)
        ]
        made = line(pools, kinds, layers, flow, steps=effort.steps, variety=effort.variety)
        if made is None:
            high = flow
            continue
        # An entry stands on each side of a crossing.
        own = [sorted(blocks, key=lambda block: block.entry) for blocks in made]
        turned = [one[-1:] + one[:-1] if p else one for p, one in enumerate(own)]
        layout = place(problem, kinds, [block for one in turned for block in one])
        found.add(layout, "blocks across regions")
        low = max(flow, min(layout.value, high))


def chain(found: Sequence[NodeGroup], layers: int) -> tuple[float, list[tuple[int, int]]] | None:
    r"""Largest flow of a single chain, and its nodes as pairs (group, layers held).

    The largest F with :math:`\sum_j \max\{k : T_j(k) \ge F\} \ge L`; nodes that hold most
    come first, and the last one is cut to what is left. None if the nodes hold too few layers.
    """
    values = np.unique(np.concatenate([g.tokens_per_s[1:] for g in found]))
    low, high = -1, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        reach = sum(g.count * _most(g, values[middle]) for g in found)
        low, high = (middle, high) if reach >= layers else (low, middle)
    if low < 0:
        return None
    flow = float(values[low])
    order = sorted(range(len(found)), key=lambda t: -_most(found[t], flow))
    left, nodes = layers, []
    for t in order:
        for _ in range(found[t].count):
            most = min(_most(found[t], flow), left)
            # Throughput need not fall with every layer: cut only to what still carries the flow.
            while most > 0 and found[t].tokens_per_s[most] < flow:
                most -= 1
            if most > 0:
                nodes.append((t, most))
                left -= most
    return (flow, nodes) if left == 0 else None


def _most(group: NodeGroup, flow: float) -> int:
    """Most layers with which one node of a group carries a flow."""
    fitting = np.flatnonzero(group.tokens_per_s >= flow)
    return int(fitting[-1]) if len(fitting) else 0
